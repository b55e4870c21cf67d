"""The guard of an expose: objects of a finished transfer are not left behind."""

import pytest

from exposer.model import NotOwnerError
from tests.exposer.support.scenes import BackupScene
from tests.exposer.test_csi_snapshot import (
    EXPOSE_OBJECTS,
    assert_exposed,
    expose,
)


class Guard:
    """A guard that raises at its `at`-th call."""

    def __init__(self, at: int, *, ended: bool) -> None:
        self._at = at
        self._ended = ended
        self.calls: list[str] = []

    async def __call__(self, *, sure: bool) -> None:
        self.calls.append("with a read" if sure else "from the cache")
        if len(self.calls) >= self._at:
            raise NotOwnerError("no longer this agent's", ended=self._ended)


GUARDED = [*["from the cache"] * 2, *["with a read"] * 2, *["from the cache"] * 2, "with a read"]
"""Content and snapshot, handover in two runs; PVC and pod."""


@pytest.mark.parametrize("at", range(1, len(GUARDED) + 1))
async def test_objects_of_a_finished_transfer_are_deleted(at: int) -> None:
    scene = BackupScene()
    guard = Guard(at, ended=True)

    with pytest.raises(NotOwnerError):
        await scene.world.until_exposed(lambda: scene.exposer().ensure(scene.request, guard))
    await scene.world.settle()

    assert EXPOSE_OBJECTS.isdisjoint(scene.world.names())


@pytest.mark.parametrize("at", range(1, len(GUARDED) + 1))
async def test_another_agent_continues_with_the_objects(at: int) -> None:
    scene = BackupScene()
    guard = Guard(at, ended=False)
    with pytest.raises(NotOwnerError):
        await scene.world.until_exposed(lambda: scene.exposer().ensure(scene.request, guard))

    await expose(scene)

    assert_exposed(scene)


async def test_the_guard_is_called_before_each_write_and_with_a_read_before_each_deletion() -> None:
    scene = BackupScene()
    guard = Guard(99, ended=True)

    await scene.world.until_exposed(lambda: scene.exposer().ensure(scene.request, guard))

    assert guard.calls == GUARDED
