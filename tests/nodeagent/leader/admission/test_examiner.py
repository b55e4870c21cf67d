"""Unusual New transfers: deleted while pending, copied, raising an unexpected exception, with other clocks."""

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from core.kube.errors import MalformedObjectError
from core.kube.resources import DATA_UPLOADS
from core.models.names import (
    BLOCK_DATA_MOVER,
    BLOCK_PREFERRED_ANNOTATION,
    CONFIG_ANNOTATION,
    COPIES_ANNOTATION,
    DATA_MOVER_FINALIZER,
    FEATURES_ANNOTATION,
    MOVER_LOST_ANNOTATION,
    NODE_LABEL,
    OUTCOME_ANNOTATION,
)
from core.models.transfers import DataDownload, PodVolumeBackup, PodVolumeRestore, Transfer
from exposer.model import Reader
from nodeagent.transfers.kinds.base import Admission, AdmissionState
from tests.nodeagent.support.dispatching import RESOURCES, Scene, ScriptedKind, agent_pod, open_scene
from tests.nodeagent.support.transfers import NAMESPACE
from tests.support.versions import built

pytestmark = pytest.mark.looptime

NOT_READY = Admission(AdmissionState.PENDING, "SnapshotNotReady", "the snapshot is not ready yet", indefinite=True)
LONG_AGO = "2026-11-21T09:00:00Z"


async def delete(scene: Scene, name: str) -> None:
    await scene.client.delete(DATA_UPLOADS, NAMESPACE, name)


@pytest.mark.parametrize("why", ["the queue is full", "its snapshot is not ready"])
async def test_a_pending_transfer_that_is_deleted_leaves_nothing_behind(why: str) -> None:
    """Its source snapshot was created for it alone and must be deleted first."""
    scene = open_scene("node-a", limit=1)
    scene.add("first")
    scene.add("second")
    if why != "the queue is full":
        scene.kind.answers["second"] = NOT_READY
    async with scene.dispatching():
        await scene.until(lambda: scene.message("second") != "", seconds=10)
        assert scene.transfer("second")["metadata"]["finalizers"] == [DATA_MOVER_FINALIZER]
        await delete(scene, "second")
        await scene.until(lambda: scene.kind.cleaned == ["second"], seconds=10)
        await scene.until(lambda: scene.phases() == {"first": "Accepted"}, seconds=10)
    assert scene.reasons("second")[-1] == "Canceled"


async def test_a_transfer_that_is_deleted_before_it_has_our_finalizer_is_cleaned_up() -> None:
    scene = open_scene("node-a")
    scene.add("du", deletionTimestamp=LONG_AGO, finalizers=["another/finalizer"])
    async with scene.dispatching():
        await scene.until(lambda: scene.phase("du") == "Canceled", seconds=5)
        await scene.until(lambda: scene.kind.cleaned == ["du"], seconds=1)
        await asyncio.sleep(60)
    assert scene.kind.cleaned == ["du"]
    assert scene.transfer("du")["metadata"]["finalizers"] == ["another/finalizer"]


@pytest.mark.parametrize("model", [DataDownload, PodVolumeBackup, PodVolumeRestore])
async def test_a_cancel_request_is_honored_at_once_however_long_the_transfer_was_postponed(
    model: type[Transfer],
) -> None:
    scene = open_scene("node-a")
    scene.kind = ScriptedKind(model)
    # A transfer that is woken by its pod is checked once a minute.
    scene.kind.answers["odd"] = Admission(
        AdmissionState.PENDING, "Pending", "it is pending", indefinite=True, pod=("app", "writer")
    )
    scene.add_kind(model, "odd")
    async with scene.dispatching():
        await scene.until(lambda: scene.message("odd") == "it is pending", seconds=10)
        await asyncio.sleep(30)
        await scene.client.patch(RESOURCES[model], NAMESPACE, "odd", {"spec": {"cancel": True}})
        await scene.until(lambda: scene.phase("odd") == "Canceled", seconds=2)


async def test_an_accepted_transfer_has_no_annotations_of_the_one_it_was_copied_from() -> None:
    """A restore of the agent's namespace recreates transfers without their status, but with their metadata."""
    scene = open_scene("node-a")
    marks = {
        OUTCOME_ANNOTATION: '{"phase":"Completed","result":{"snapshotID":"of-another"}}',
        COPIES_ANNOTATION: "Secret/token",
        MOVER_LOST_ANNOTATION: f'{{"since":"{LONG_AGO}","last":"{LONG_AGO}","times":19}}',
    }
    scene.add("du", labels={NODE_LABEL: "long-gone"}, annotations=marks | {"theirs": "stays"})
    async with scene.dispatching():
        await scene.until(lambda: scene.phase("du") == "Accepted", seconds=10)
    meta = scene.transfer("du")["metadata"]
    assert (meta["annotations"], meta["labels"][NODE_LABEL]) == ({"theirs": "stays"}, "node-a")


class Faulty(ScriptedKind):
    """A kind whose check of the transfer `odd` raises an unexpected exception."""

    async def check_admission(self, cr: Transfer, reader: Reader) -> Admission:
        if cr.name == "odd":
            raise KeyError("metadata")
        return await super().check_admission(cr, reader)


async def test_an_unexpected_exception_in_one_check_delays_no_other_transfer(caplog: pytest.LogCaptureFixture) -> None:
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


async def test_a_limit_of_a_reason_is_measured_on_the_clock_of_the_leader() -> None:
    """Velero creates a DataDownload seconds before its PVC, and the clock of its machine may be hours behind."""
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


class MalformedKind(ScriptedKind):
    """Finds a malformed object at each check."""

    async def check_admission(self, cr: Transfer, reader: Reader) -> Admission:
        raise MalformedObjectError("malformed PersistentVolumeClaim app/data: spec: Expected `object`, got `str`")


async def test_a_transfer_with_a_malformed_object_is_pending_for_it_until_the_timeout() -> None:
    scene = open_scene("node-a")
    scene.kind = MalformedKind()
    scene.add("du")
    async with scene.dispatching():
        await scene.until(lambda: "malformed PersistentVolumeClaim app/data" in scene.message("du"), seconds=10)
        assert scene.reason("du") == "ObjectMalformed"
        await scene.until(lambda: scene.phase("du") == "Failed", seconds=1900)


def put_in_place(scene: Scene, name: str, **meta: Any) -> None:
    raw = scene.add_kind(DataDownload, name, **meta)
    scene.kube.put(raw | {"spec": raw["spec"] | built("datadownload")["spec"]})


@pytest.mark.cause("agent-outdated")
async def test_a_restore_in_place_goes_to_an_agent_that_announces_it_alone() -> None:
    """An agent of an earlier version would restore into a new volume, and report success."""
    scene = open_scene("node-a")
    scene.kind = ScriptedKind(DataDownload)
    scene.kube.put(agent_pod("node-a", annotations={CONFIG_ANNOTATION: "abc"}))
    put_in_place(scene, "in-place")
    async with scene.dispatching():
        await scene.until(lambda: scene.message("in-place") != "", seconds=10)
        assert scene.message("in-place") == (
            "no node agent in namespace velero has restore-in-place: earlier versions cannot carry it out"
        )
        assert scene.reason("in-place") == "AgentOutdated"
        scene.add_kind(DataDownload, "plain")
        await scene.until(lambda: scene.phase("plain") == "Accepted", seconds=10)
        scene.kube.put(agent_pod("node-b"))
        await scene.until(lambda: scene.phase("in-place") == "Accepted", seconds=60)
    assert scene.label("in-place") == "node-b"


async def test_a_restore_in_place_is_reassigned_to_such_an_agent_alone() -> None:
    scene = open_scene("node-b")
    scene.kind = ScriptedKind(DataDownload)
    scene.kube.put(agent_pod("node-a", annotations={CONFIG_ANNOTATION: "abc"}))
    put_in_place(scene, "dd", status={"phase": "Accepted"}, labels={NODE_LABEL: "node-gone"})
    async with scene.dispatching():
        await scene.until(lambda: scene.label("dd") == "node-b", seconds=60)


@pytest.mark.parametrize("able", [True, False], ids=["agents can", "earlier agents"])
async def test_a_preferred_data_mover_is_written_with_the_accept_if_an_agent_has_it(*, able: bool) -> None:
    """From then on the transfer names the format of its data; without such an agent, nothing is preferred."""
    scene = open_scene("node-a")
    features = {FEATURES_ANNOTATION: BLOCK_DATA_MOVER} if able else {}
    scene.kube.put(agent_pod("node-a", annotations={CONFIG_ANNOTATION: "abc", **features}))
    scene.add("du", annotations={BLOCK_PREFERRED_ANNOTATION: "copied from another transfer"})
    scene.kind.answers["du"] = Admission(AdmissionState.READY, datamover=BLOCK_DATA_MOVER)
    async with scene.dispatching():
        await scene.until(lambda: scene.phase("du") == "Accepted", seconds=10)
    stored = scene.transfer("du")
    assert stored["spec"].get("datamover") == (BLOCK_DATA_MOVER if able else None)
    marks = stored["metadata"].get("annotations") or {}
    assert marks.get(BLOCK_PREFERRED_ANNOTATION) == ("true" if able else None)
