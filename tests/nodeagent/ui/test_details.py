"""Single objects are read when they have changed, and not with each look at a page."""

import pytest
from msgspec.structs import replace

from core.kube.errors import NotFoundError
from core.models.phases import Phase
from nodeagent.cli.serve import parse_serve
from nodeagent.operations.status.kinds import TRANSFER_KINDS, Target
from nodeagent.operations.status.records import TransferRecord
from nodeagent.ui.details import Details
from tests.nodeagent.support.hand_clock import NOON, HandClock
from tests.nodeagent.support.status_scene import StatusScene

_TARGET = Target(TRANSFER_KINDS[0], "moving")
_RECORD = TransferRecord(kind="DataUpload", namespace="velero", name="moving", phase=Phase.IN_PROGRESS)


class _Reads:
    """Details of the scene, and how often the transfer was read."""

    def __init__(self) -> None:
        self.scene, self.clock = StatusScene(), HandClock()
        self.scene.put_transfers()
        self.details = Details(self.scene.client, "velero", parse_serve=parse_serve, now=lambda: NOON, clock=self.clock)

    def count(self, text: str) -> int:
        return sum(text in str(request.path) for request in self.scene.kube.requests)

    async def read(self, record: TransferRecord) -> int:
        """Return how many requests for the transfer a look at it costs."""
        before = self.count("/datauploads/moving")
        assert (await self.details.transfer(_TARGET, record)).name == "moving"
        return self.count("/datauploads/moving") - before


async def test_a_transfer_is_read_again_once_it_has_changed_or_after_a_while() -> None:
    reads = _Reads()
    assert await reads.read(_RECORD) == 1
    assert await reads.read(_RECORD) == 0
    changed = replace(_RECORD, bytes_done=7)
    assert await reads.read(changed) == 0, "twice within two seconds"
    reads.clock.seconds += 3
    assert await reads.read(changed) == 1
    reads.clock.seconds += 10
    assert await reads.read(changed) == 0
    reads.clock.seconds += 10
    assert await reads.read(changed) == 1, "its Events may have changed"


async def test_one_that_has_ended_is_read_seldom() -> None:
    reads = _Reads()
    ended = replace(_RECORD, phase=Phase.COMPLETED)
    assert await reads.read(ended) == 1
    reads.clock.seconds += 20
    assert await reads.read(ended) == 0


async def test_a_repository_is_read_and_kept() -> None:
    reads = _Reads()
    for _ in range(3):
        assert (await reads.details.repository("app-default-kopia")).volume_namespace == "app"
    assert reads.count("/backuprepositories/app-default-kopia") == 1
    with pytest.raises(NotFoundError, match="does not exist"):
        await reads.details.repository("app-defaut-kopia")
