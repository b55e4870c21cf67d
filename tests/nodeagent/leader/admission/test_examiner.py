"""New loads that are odd: deleted while they wait, faults of ours that they bring out, clocks that disagree."""

import asyncio
from dataclasses import dataclass
from datetime import timedelta

import pytest

from core.kube.client import KubeClient
from core.kube.resources import DATA_UPLOADS
from core.kube.retry import Retry
from core.models.names import (
    CANCEL_REQUESTED_ANNOTATION,
    DATA_MOVER_FINALIZER,
    MOVER_LOST_ANNOTATION,
    NODE_LABEL,
    OUTCOME_ANNOTATION,
)
from core.models.transfers import DataDownload, PodVolumeBackup, PodVolumeRestore, Transfer
from exposer.model import Reader
from nodeagent.transfers.kinds.base import Admission, AdmissionState
from tests.nodeagent.support.dispatching import RESOURCES, Scene, ScriptedKind, open_scene
from tests.nodeagent.support.transfers import NAMESPACE
from tests.support.clock import LoopClock

__all__: list[str] = []

pytestmark = pytest.mark.looptime

NOT_READY = Admission(AdmissionState.PENDING, "SnapshotNotReady", "the snapshot is not ready yet", indefinite=True)
LONG_AGO = "2026-11-21T09:00:00Z"


async def delete(scene: Scene, name: str) -> None:
    await KubeClient(scene.kube, Retry(LoopClock())).delete(DATA_UPLOADS, NAMESPACE, name)


@pytest.mark.parametrize("why", ["the queue is full", "its snapshot is not ready"])
async def test_a_load_that_is_deleted_while_it_waits_leaves_nothing_behind(why: str) -> None:
    """Its source snapshot was made for it alone, so it must not vanish before that is removed."""
    scene = open_scene("node-a", limit=1)
    scene.add("first")
    scene.add("second")
    if why != "the queue is full":
        scene.kind.answers["second"] = NOT_READY
    async with scene.dispatching():
        await scene.until(lambda: scene.message("second") != "", seconds=10)
        assert scene.load("second")["metadata"]["finalizers"] == [DATA_MOVER_FINALIZER]
        await delete(scene, "second")
        await scene.until(lambda: scene.kind.cleaned == ["second"], seconds=10)
        await scene.until(lambda: scene.phases() == {"first": "Accepted"}, seconds=10)
    assert scene.reasons("second")[-1] == "Canceled"


async def test_a_load_that_is_deleted_before_it_could_be_marked_is_cleaned_up_all_the_same() -> None:
    scene = open_scene("node-a")
    scene.add("du", deletionTimestamp=LONG_AGO, finalizers=["somebody/elses"])
    async with scene.dispatching():
        await scene.until(lambda: scene.phase("du") == "Canceled", seconds=5)
        await scene.until(lambda: scene.kind.cleaned == ["du"], seconds=1)
        await asyncio.sleep(60)
    assert scene.kind.cleaned == ["du"]
    assert scene.load("du")["metadata"]["finalizers"] == ["somebody/elses"]


@pytest.mark.parametrize("model", [DataDownload, PodVolumeBackup, PodVolumeRestore])
async def test_a_cancel_is_heeded_at_once_however_long_its_load_was_put_off_for(model: type[Transfer]) -> None:
    scene = open_scene("node-a")
    scene.kind = ScriptedKind(model)
    # Whoever waits for a pod that is watched is looked at once a minute.
    scene.kind.answers["odd"] = Admission(
        AdmissionState.PENDING, "Waits", "it waits", indefinite=True, pod=("app", "writer")
    )
    scene.add_kind(model, "odd")
    async with scene.dispatching():
        await scene.until(lambda: scene.message("odd") == "it waits", seconds=10)
        await asyncio.sleep(30)
        client = KubeClient(scene.kube, Retry(LoopClock()))
        await client.patch(RESOURCES[model], NAMESPACE, "odd", {"spec": {"cancel": True}})
        await scene.until(lambda: scene.phase("odd") == "Canceled", seconds=2)


async def test_an_accepted_load_has_nothing_of_the_load_whose_manifest_it_was_made_from() -> None:
    """A backup of the agent's namespace brings loads back without their status, and with all else."""
    scene = open_scene("node-a")
    marks = {
        OUTCOME_ANNOTATION: '{"phase":"Completed","result":{"snapshotID":"of-another"}}',
        CANCEL_REQUESTED_ANNOTATION: LONG_AGO,
        MOVER_LOST_ANNOTATION: f'{{"since":"{LONG_AGO}","last":"{LONG_AGO}","times":19}}',
    }
    scene.add("du", labels={NODE_LABEL: "long-gone"}, annotations=marks | {"theirs": "stays"})
    async with scene.dispatching():
        await scene.until(lambda: scene.phase("du") == "Accepted", seconds=10)
    meta = scene.load("du")["metadata"]
    assert (meta["annotations"], meta["labels"][NODE_LABEL]) == ({"theirs": "stays"}, "node-a")


@dataclass(frozen=True)
class Faulty(ScriptedKind):
    """A kind that has a fault, which the load `odd` brings out."""

    async def check_admission(self, cr: Transfer, reader: Reader) -> Admission:
        if cr.name == "odd":
            raise KeyError("metadata")
        return await super().check_admission(cr, reader)


async def test_a_fault_that_one_load_brings_out_holds_up_no_other(caplog: pytest.LogCaptureFixture) -> None:
    scene = open_scene("node-a")
    scene.kind = Faulty()
    scene.add("odd", queue="a")
    scene.add("sound", queue="b")
    async with scene.dispatching() as dispatcher:
        await scene.until(lambda: scene.phase("sound") == "Accepted", seconds=30)
        scene.add("later", queue="c")
        await scene.until(lambda: scene.phase("later") == "Accepted", seconds=30)
        assert dispatcher.report() != {}
    assert scene.phase("odd") == ""
    assert any(record.exc_info and record.__dict__.get("name") for record in caplog.records)


async def test_a_short_wait_is_measured_by_our_own_clock_alone() -> None:
    """A server makes a DataDownload seconds before its claim, and its machine's clock may be hours behind."""
    scene = open_scene("node-a")
    scene.add("du", creationTimestamp=LONG_AGO)
    message = "PersistentVolumeClaim app/data to restore into does not exist"
    scene.kind.answers["du"] = Admission(
        AdmissionState.PENDING, "TargetClaimMissing", message, limit=timedelta(minutes=2)
    )
    async with scene.dispatching():
        await asyncio.sleep(118)
        assert scene.phase("du") == ""
        await scene.until(lambda: scene.phase("du") == "Failed", seconds=10)
    assert scene.message("du") == f"could not start within 2m0s: {message}"
