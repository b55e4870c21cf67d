"""A transfer completes once its mover has left its result, although the kubelet still reports its pod as running."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from core.kube.resources import PODS
from core.models.base import JsonDict
from core.models.names import DATA_UPLOAD_LABEL
from tests.nodeagent.node.test_progress import event
from tests.nodeagent.support.harness import World, accepted, open_world
from tests.nodeagent.support.simulation import BACKUP_DONE, RESTORE_DONE, Mover
from tests.nodeagent.support.transfers import data_download, data_upload, pod_volume_backup, pod_volume_restore

pytestmark = pytest.mark.looptime

_LOOKS_SECONDS = 30.0
"""Longer than any check of a running transfer."""


def _mover_pod(world: World) -> JsonDict:
    return next(each for each in world.kube.objects(PODS) if each["metadata"].get("ownerReferences"))


def _leave(host_pods: Path, pod: JsonDict, message: str) -> None:
    Mover(host_pods=host_pods).leave(pod, message)


@asynccontextmanager
async def _running(transfer: JsonDict, host_pods: str | Path) -> AsyncIterator[tuple[World, JsonDict]]:
    """Run an agent whose transfer has a mover that never ends; yield its pod, whose container runs."""
    async with open_world(transfer, mover=Mover(stubborn=True)) as world, world.agent(host_pods=host_pods):
        await world.until(lambda: world.phase(transfer["kind"]) == "InProgress")
        yield world, _mover_pod(world)


@pytest.mark.parametrize(
    ("transfer", "message"),
    [
        pytest.param(data_upload(), BACKUP_DONE, id="DataUpload"),
        pytest.param(data_download(), RESTORE_DONE, id="DataDownload"),
        pytest.param(pod_volume_backup(), BACKUP_DONE, id="PodVolumeBackup"),
        pytest.param(pod_volume_restore(), RESTORE_DONE, id="PodVolumeRestore"),
    ],
)
async def test_a_result_that_was_left_completes_its_transfer(transfer: JsonDict, message: str, tmp_path: Path) -> None:
    async with _running(accepted(transfer), tmp_path) as (world, pod):
        _leave(tmp_path, pod, message)
        world.kube.put(event(transfer, "Completed", message))
        await world.until(lambda: world.done(transfer["kind"]), seconds=60)
        final = world.transfer(transfer["kind"])
        assert final["status"]["phase"] == "Completed"
        assert final["status"]["progress"] == {"totalBytes": 1000, "bytesDone": 1000}
        assert PODS.plural not in world.left() or transfer["kind"].startswith("PodVolume")


async def test_the_event_may_come_before_the_result_is_looked_for(tmp_path: Path) -> None:
    """An agent that starts lists the Events of movers that run."""
    transfer = accepted(data_upload())
    async with open_world(transfer, mover=Mover(stubborn=True)) as world:
        async with world.agent():
            await world.until(lambda: world.phase() == "InProgress")
        _leave(tmp_path, _mover_pod(world), BACKUP_DONE)
        world.kube.put(event(transfer, "Completed", BACKUP_DONE))
        async with world.agent(host_pods=tmp_path):
            await world.until(world.done, seconds=60)
        assert world.phase() == "Completed"


async def _stays(world: World) -> bool:
    """Return whether the transfer is InProgress after all checks that time alone brings."""
    await asyncio.sleep(_LOOKS_SECONDS)
    return world.phase() == "InProgress" and not (world.transfer()["metadata"].get("annotations") or {}).get(
        "nodeagent.io/outcome"
    )


_DELETED = {"deletionTimestamp": "2026-11-21T12:00:00Z", "finalizers": ["example.com/held"]}


@pytest.mark.parametrize(
    ("message", "left", "changed"),
    [
        # A process that may create Events in the namespace cannot have a transfer pass for complete.
        pytest.param(None, {}, {}, id="an Event alone"),
        pytest.param("", {}, {}, id="nothing"),
        pytest.param(BACKUP_DONE[:40], {}, {}, id="half"),
        pytest.param("cannot connect to the repository", {}, {}, id="a failure"),
        pytest.param("data path is canceled", {}, {}, id="canceled"),
        pytest.param("{}", {}, {}, id="no result"),
        pytest.param(BACKUP_DONE, {"uid": "another"}, {}, id="of another pod"),
        # It may have more to do after its last Event.
        pytest.param(BACKUP_DONE, {}, {"labels": {DATA_UPLOAD_LABEL: "du-1"}}, id="of a mover of Velero"),
        pytest.param(BACKUP_DONE, {}, _DELETED, id="of a pod that is being deleted"),
    ],
)
async def test_what_is_no_result_is_left_to_the_kubelet(
    message: str | None, left: JsonDict, changed: JsonDict, tmp_path: Path
) -> None:
    """A mover in a pod whose metadata was `changed` has left a `message`, or the one in a pod with other metadata."""
    transfer = accepted(data_upload())
    async with _running(transfer, tmp_path) as (world, pod):
        if changed:
            world.kube.put(pod | {"metadata": pod["metadata"] | changed})
        if message is not None:
            _leave(tmp_path, pod | {"metadata": pod["metadata"] | left}, message)
        world.kube.put(event(transfer, "Completed", BACKUP_DONE))
        assert await _stays(world)


@pytest.mark.parametrize("left", [False, True])
async def test_a_result_that_the_kubelet_has_cut_is_read_as_a_whole(left: bool, tmp_path: Path) -> None:
    transfer = accepted(data_upload())
    async with _running(transfer, tmp_path) as (world, pod):
        if left:
            _leave(tmp_path, pod, BACKUP_DONE)
        terminated = {"exitCode": 0, "reason": "Completed", "message": BACKUP_DONE[:40]}
        (running,) = _mover_pod(world)["status"]["containerStatuses"]
        world.kube.put(pod | {"status": {"containerStatuses": [running | {"state": {"terminated": terminated}}]}})
        await world.until(world.done)
        assert world.phase() == ("Completed" if left else "Failed")


async def test_without_the_directory_the_kubelet_reports_the_end(tmp_path: Path) -> None:
    transfer = accepted(data_upload())
    async with _running(transfer, "") as (world, pod):
        _leave(tmp_path, pod, BACKUP_DONE)
        world.kube.put(event(transfer, "Completed", BACKUP_DONE))
        assert await _stays(world)
        world.cluster.mover.stubborn = False
        await world.until(world.done)
        assert world.phase() == "Completed"
