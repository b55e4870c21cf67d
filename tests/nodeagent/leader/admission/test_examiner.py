"""Unusual New transfers: deleted, copied, raising an unexpected exception; reads that many checks have in common."""

import asyncio
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from core.kube.client import Selection
from core.kube.errors import MalformedObjectError, UnreachableError
from core.kube.resources import (
    BACKUP_STORAGE_LOCATIONS,
    DATA_UPLOADS,
    PERSISTENT_VOLUME_CLAIMS,
    PERSISTENT_VOLUMES,
    PODS,
    SECRETS,
    VOLUME_SNAPSHOTS,
    Resource,
)
from core.kube.transport import Request, Response
from core.models import names
from core.models.transfers import DataDownload, Transfer
from exposer.model import Pending, Reader
from nodeagent.leader.admission.examiner import SharedReader
from nodeagent.transfers.kinds.base import Admission, AdmissionState
from tests.nodeagent.support.dispatching import Scene, ScriptedKind, agent_pod, open_scene
from tests.nodeagent.support.transfers import NAMESPACE
from tests.support.clock import LoopClock
from tests.support.fakekube import FakeKube
from tests.support.objects import JsonDict
from tests.support.scripted import stored
from tests.support.versions import built

pytestmark = pytest.mark.looptime


NOT_READY = Admission(AdmissionState.PENDING, "SnapshotNotReady", "the snapshot is not ready yet", indefinite=True)
LONG_AGO = "2026-11-21T09:00:00Z"


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
        assert scene.transfer("second")["metadata"]["finalizers"] == [names.DATA_MOVER_FINALIZER]
        await scene.client.delete(DATA_UPLOADS, NAMESPACE, "second")
        await scene.until(lambda: scene.kind.cleaned == ["second"], seconds=10)
        await scene.until(lambda: scene.phases() == {"first": "Accepted"}, seconds=10)
    assert scene.reasons("second")[-1] == "Canceled"


async def test_a_transfer_that_is_deleted_before_it_has_our_finalizer_is_cleaned_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once it is final, no leader looks at it again; a clean-up that fails is repeated before."""
    scene = open_scene("node-a")
    clean_up, failures = scene.kind.clean_up, [UnreachableError("no answer")]

    async def try_to_clean_up(cr: Transfer) -> Pending | None:
        if failures:
            raise failures.pop()
        return await clean_up(cr)

    monkeypatch.setattr(scene.kind, "clean_up", try_to_clean_up)
    scene.add("du", deletionTimestamp=LONG_AGO, finalizers=["another/finalizer"])
    async with scene.dispatching():
        await scene.until(lambda: scene.phase("du") == "Canceled", seconds=10)
        assert scene.kind.cleaned == ["du"]
        await asyncio.sleep(60)
    assert scene.kind.cleaned == ["du"]
    assert scene.transfer("du")["metadata"]["finalizers"] == ["another/finalizer"]


async def test_a_cancel_is_honored_at_once_however_long_the_transfer_was_postponed() -> None:
    scene = open_scene("node-a")
    # A transfer that is woken by its pod is checked once a minute.
    scene.kind.answers["odd"] = replace(NOT_READY, pod=("app", "writer"))
    scene.add("odd")
    async with scene.dispatching():
        await scene.until(lambda: scene.message("odd") != "", seconds=10)
        await asyncio.sleep(30)
        await scene.client.patch(DATA_UPLOADS, NAMESPACE, "odd", {"spec": {"cancel": True}})
        await scene.until(lambda: scene.phase("odd") == "Canceled", seconds=2)


async def test_an_accepted_transfer_has_no_annotations_of_the_one_it_was_copied_from() -> None:
    """A restore of the agent's namespace recreates transfers without their status, but with their metadata."""
    scene = open_scene("node-a")
    marks = {
        names.OUTCOME_ANNOTATION: '{"phase":"Completed","result":{"snapshotID":"of-another"}}',
        names.COPIES_ANNOTATION: "Secret/token",
        names.MOVER_LOST_ANNOTATION: f'{{"since":"{LONG_AGO}","last":"{LONG_AGO}","times":19}}',
    }
    scene.add("du", labels={names.NODE_LABEL: "long-gone"}, annotations=marks | {"theirs": "stays"})
    async with scene.dispatching():
        await scene.until(lambda: scene.phase("du") == "Accepted", seconds=10)
    meta = scene.transfer("du")["metadata"]
    assert (meta["annotations"], meta["labels"][names.NODE_LABEL]) == ({"theirs": "stays"}, "node-a")


class Faulty(ScriptedKind):
    """A kind whose check of the transfer `odd` raises an exception."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    async def check_admission(self, cr: Transfer, reader: Reader) -> Admission:
        if cr.name == "odd":
            raise self.error
        return await super().check_admission(cr, reader)


async def test_an_unexpected_exception_in_one_check_delays_no_other_transfer(caplog: pytest.LogCaptureFixture) -> None:
    scene = open_scene("node-a")
    scene.kind = Faulty(KeyError("metadata"))
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


async def test_a_transfer_with_a_malformed_object_is_pending_for_it_until_the_timeout() -> None:
    scene = open_scene("node-a")
    scene.kind = Faulty(MalformedObjectError("malformed PersistentVolumeClaim app/data: spec: Expected `object`"))
    scene.add("odd")
    async with scene.dispatching():
        await scene.until(lambda: "malformed PersistentVolumeClaim app/data" in scene.message("odd"), seconds=10)
        assert scene.reason("odd") == "ObjectMalformed"
        await scene.until(lambda: scene.phase("odd") == "Failed", seconds=1900)


def put_in_place(scene: Scene, name: str, **meta: Any) -> None:
    raw = scene.add_kind(DataDownload, name, **meta)
    scene.kube.put(raw | {"spec": raw["spec"] | built("datadownload")["spec"]})


@pytest.mark.cause("agent-outdated")
async def test_a_restore_in_place_goes_to_an_agent_that_announces_it_alone() -> None:
    """An agent of an earlier version would restore into a new volume, and report success."""
    scene = open_scene("node-a")
    scene.kind = ScriptedKind(DataDownload)
    scene.kube.put(agent_pod("node-a", annotations={names.CONFIG_ANNOTATION: "abc"}))
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
    scene.kube.put(agent_pod("node-a", annotations={names.CONFIG_ANNOTATION: "abc"}))
    put_in_place(scene, "dd", status={"phase": "Accepted"}, labels={names.NODE_LABEL: "node-gone"})
    async with scene.dispatching():
        await scene.until(lambda: scene.label("dd") == "node-b", seconds=60)


@pytest.mark.parametrize("able", [True, False], ids=["agents can", "earlier agents"])
async def test_a_preferred_data_mover_is_written_with_the_accept_if_an_agent_has_it(*, able: bool) -> None:
    """From then on the transfer names the format of its data; without such an agent, nothing is preferred."""
    scene = open_scene("node-a")
    features = {names.FEATURES_ANNOTATION: names.BLOCK_DATA_MOVER} if able else {}
    scene.kube.put(agent_pod("node-a", annotations={names.CONFIG_ANNOTATION: "abc", **features}))
    scene.add("du", annotations={names.BLOCK_PREFERRED_ANNOTATION: "copied from another transfer"})
    scene.kind.answers["du"] = Admission(AdmissionState.READY, datamover=names.BLOCK_DATA_MOVER)
    async with scene.dispatching():
        await scene.until(lambda: scene.phase("du") == "Accepted", seconds=10)
    stored = scene.transfer("du")
    assert stored["spec"].get("datamover") == (names.BLOCK_DATA_MOVER if able else None)
    marks = stored["metadata"].get("annotations") or {}
    assert marks.get(names.BLOCK_PREFERRED_ANNOTATION) == ("true" if able else None)


_ANSWER_SECONDS = 0.1


class Slow(FakeKube):
    """Answers after a moment."""

    async def request(self, request: Request) -> Response:
        await asyncio.sleep(_ANSWER_SECONDS)
        return await super().request(request)

    def put_named(self, resource: Resource, namespace: str, name: str) -> None:
        self.put(stored(resource, spec={}, metadata={"namespace": namespace, "name": name}))

    @property
    def asked(self) -> list[str]:
        return [request.path for request in self.requests]


@pytest.fixture
def kube() -> Slow:
    found = Slow()
    found.put_named(BACKUP_STORAGE_LOCATIONS, "velero", "default")
    return found


@pytest.fixture
def reader(kube: Slow) -> SharedReader:
    clock = LoopClock()
    return SharedReader(kube.client, clock)


async def _read(reader: SharedReader) -> JsonDict | None:
    return await reader.read(BACKUP_STORAGE_LOCATIONS, "velero", "default")


async def test_an_answer_is_shared_for_a_second_by_all_that_ask(kube: Slow, reader: SharedReader) -> None:
    found = await asyncio.gather(*(_read(reader) for _ in range(20)))
    assert found == [kube.objects(BACKUP_STORAGE_LOCATIONS)[0]] * 20
    asked = [len(kube.asked)]
    for pause_seconds in (0.5, 0.6):
        await asyncio.sleep(pause_seconds)
        await _read(reader)
        asked.append(len(kube.asked))
    assert asked == [1, 1, 2]


async def test_other_objects_pods_snapshots_and_what_was_not_found_are_read(kube: Slow, reader: SharedReader) -> None:
    keys = [(SECRETS, "a", "x"), (SECRETS, "b", "x"), (PERSISTENT_VOLUME_CLAIMS, "a", "x"), (SECRETS, "a", "y")]
    keys += [(resource, "apps", "web") for resource in (PODS, VOLUME_SNAPSHOTS) for _ in range(2)]
    assert await reader.read(*keys[0]) is None
    for key in keys:
        kube.put_named(*key)
        assert await reader.read(*key) is not None
    assert kube.asked == [resource.path(namespace, name) for resource, namespace, name in [keys[0], *keys]]


async def test_a_waiting_caller_reads_when_the_first_read_is_canceled(reader: SharedReader) -> None:
    async with asyncio.TaskGroup() as group:
        first = group.create_task(_read(reader), name="first")
        second = group.create_task(_read(reader), name="second")
        await asyncio.sleep(_ANSWER_SECONDS / 2)
        first.cancel()
    assert second.result() is not None


async def test_lists_of_the_cluster_are_shared_for_seconds_with_what_is_needed(
    kube: Slow, reader: SharedReader
) -> None:
    claim = {"namespace": "app", "name": "data"}
    volume = {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "pv-1", "labels": {"a": "b"}}}
    kube.put(volume | {"spec": {"nfs": {"server": "s", "path": "/"}, "claimRef": claim, "capacity": {}}})
    everything = Selection(PERSISTENT_VOLUMES)
    first, second = await asyncio.gather(reader.list(everything), reader.list(everything))
    await asyncio.sleep(4)
    kube.put(volume | {"metadata": {"name": "pv-2"}, "spec": {}})
    assert first is second is await reader.list(everything)
    reduced = {"metadata": {"name": "pv-1"}, "spec": {"nfs": {"server": "s", "path": "/"}, "claimRef": claim}}
    assert first == [reduced]
    assert len(await reader.list(Selection(PERSISTENT_VOLUMES, label_selector="a=b"))) == 1
    await asyncio.sleep(1)
    assert len(await reader.list(everything)) == 2
