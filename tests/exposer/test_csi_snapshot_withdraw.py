"""What is deleted of an interrupted backup before its next attempt."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from core.kube.resources import PERSISTENT_VOLUME_CLAIMS, PODS
from core.kube.transport import Request, Response, Transport
from core.models.base import parse_time
from core.models.phases import Interruption, InterruptionCause
from tests.exposer.support.scenes import BackupScene
from tests.exposer.test_csi_snapshot import assert_exposed, expose

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager

_AT = parse_time("2026-11-21T12:00:00Z")


@dataclass
class Recorder(Transport):
    """Passes requests on, and keeps the options of deletions of pods."""

    inner: Transport
    options: list[dict[str, object]] = field(default_factory=list)

    async def request(self, request: Request) -> Response:
        if request.method == "DELETE" and "/pods/" in request.path:
            self.options.append(json.loads(request.body or b""))
        return await self.inner.request(request)

    def stream(self, request: Request) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        return self.inner.stream(request)

    async def close(self) -> None:
        await self.inner.close()


@pytest.mark.parametrize(
    ("cause", "terminated", "forced", "same"),
    [
        pytest.param(InterruptionCause.KILLED, True, False, True, id="only the mover ended"),
        pytest.param(InterruptionCause.EVICTED, True, False, False, id="it was evicted"),
        pytest.param(InterruptionCause.NODE_LOST, False, True, False, id="its node is lost"),
    ],
)
async def test_a_backup_is_withdrawn_and_exposed_again(
    cause: InterruptionCause,
    terminated: bool,
    forced: bool,
    same: bool,
) -> None:
    scene = BackupScene()
    await expose(scene)
    owner = scene.request.owner
    claim = await scene.world.client.get(PERSISTENT_VOLUME_CLAIMS, owner.namespace, owner.name)
    recorder = Recorder(scene.world.kube)
    exposer = scene.exposer(recorder)

    interruption = Interruption(at=_AT, cause=cause, terminated=terminated)
    await scene.world.until_none(lambda: exposer.withdraw(scene.request, interruption))

    assert await scene.world.client.read(PODS, owner.namespace, owner.name) is None
    assert [options.get("gracePeriodSeconds") for options in recorder.options] == [0 if forced else None]
    left = await scene.world.client.read(PERSISTENT_VOLUME_CLAIMS, owner.namespace, owner.name)
    assert (left is not None and left["metadata"]["uid"] == claim["metadata"]["uid"]) is same
    await expose(scene)
    await scene.world.settle()
    assert_exposed(scene)
