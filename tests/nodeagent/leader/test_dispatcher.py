"""The dispatcher: which transfers are admitted, which are pending and why, and which are ended."""

import asyncio
from functools import partial

import pytest

from core.models.base import JsonDict
from core.models.names import DATA_MOVER_FINALIZER, EXPOSE_ON_GOING_LABEL, NODE_LABEL
from core.models.reasons import FailureReason
from core.models.transfers import DataDownload
from nodeagent.leader.admission import admission_pass
from nodeagent.transfers.kinds.base import Admission, AdmissionState
from tests.nodeagent.support.dispatching import ScriptedKind, agent_pod, open_scene

pytestmark = pytest.mark.looptime

NOON = "2026-11-21T12:00:00Z"


def pending(reason: str = "SnapshotNotReady", *, indefinite: bool = False) -> Admission:
    return Admission(AdmissionState.PENDING, reason, f"pending: {reason}", indefinite=indefinite)


async def test_one_write_accepts_a_transfer() -> None:
    scene = open_scene("node-a")
    scene.add("du", status={"message": "pending for something"}, finalizers=["other/finalizer"])
    async with scene.dispatching():
        await scene.until(lambda: scene.reasons("du") != [])
    cr = scene.transfer("du")
    assert cr["status"] == {"phase": "Accepted", "acceptedByNode": "node-a", "acceptedTimestamp": NOON}
    assert cr["metadata"]["finalizers"] == ["other/finalizer", DATA_MOVER_FINALIZER]
    assert cr["metadata"]["labels"][NODE_LABEL] == "node-a"
    assert cr["metadata"]["labels"][EXPOSE_ON_GOING_LABEL] == "true"
    assert scene.ledger() == {"uid-of-du"}
    assert scene.accepted == ["du"]
    assert scene.reasons("du") == ["Accepted"]


async def test_the_namespace_served_last_is_known_to_the_next_leader() -> None:
    scene = open_scene("node-a", limit=1)
    scene.add("a1", queue="a")
    scene.add("a2", queue="a")
    scene.add("b1", queue="b")
    async with scene.dispatching():
        await scene.until(lambda: scene.accepted == ["a1"])
    scene.set_status("a1", phase="Completed")
    async with scene.dispatching():
        await scene.until(lambda: len(scene.accepted) == 2)
    assert scene.accepted == ["a1", "b1"]


@pytest.mark.cause("queue-full")
async def test_a_queued_transfer_is_reported_once_although_that_failed_before() -> None:
    scene = open_scene("node-a", limit=1)
    for name in ("du-1", "du-2", "du-3"):
        scene.add(name)
    scene.kube.fail_next("PATCH", "datauploads/du-3", 409)
    async with scene.dispatching():
        await scene.until(lambda: scene.message("du-3") != "")
        assert scene.message("du-2") == "queued at position 1: prepareQueueLength (1) reached"
        assert scene.message("du-3") == "queued at position 2: prepareQueueLength (1) reached"
        version = scene.transfer("du-3")["metadata"]["resourceVersion"]
        scene.set_status("du-1", phase="InProgress")
        await scene.until(lambda: scene.phase("du-2") == "Accepted")
    async with scene.dispatching():
        await scene.until(lambda: scene.ledger() == {"uid-of-du-2"})
    assert scene.message("du-2") == ""
    assert scene.transfer("du-3")["metadata"]["resourceVersion"] == version


async def test_restores_go_first_only_where_that_is_configured() -> None:
    scene = open_scene("node-a", limit=1)
    scene.restores_first = True
    scene.others.append(ScriptedKind(DataDownload))
    scene.add("a1")
    for name in ("b-restore", "c-restore"):
        scene.add_kind(DataDownload, name)
    async with scene.dispatching():
        await scene.until(lambda: scene.accepted == ["b-restore"])
        scene.restores_first = False
        scene.set_status("b-restore", phase="InProgress")
        await scene.until(lambda: len(scene.accepted) == 2)
    # All were created in the same second: by name.
    assert scene.accepted == ["b-restore", "a1"]


async def test_a_pending_transfer_uses_no_quota_and_is_reported_once() -> None:
    scene = open_scene("node-a", limit=1)
    scene.add("du-1")
    scene.add("du-2")
    scene.kind.answers["du-1"] = pending()
    async with scene.dispatching():
        await scene.until(lambda: scene.phase("du-2") == "Accepted" and len(scene.kind.checked) > 5)
        assert (scene.phase("du-1"), scene.message("du-1")) == ("", "pending: SnapshotNotReady")
        assert scene.reasons("du-1") == ["SnapshotNotReady"]
        scene.set_status("du-2", phase="InProgress")
        del scene.kind.answers["du-1"]
        await scene.until(lambda: scene.phase("du-1") == "Accepted", seconds=8)
    assert scene.message("du-1") == ""


async def test_none_is_admitted_before_one_ahead_of_it_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission_pass, "Pass", partial(admission_pass.Pass, checks_left=4))
    scene = open_scene("node-a", limit=4)
    for name in ("a1", "b1", "a2", "b2", "a3"):
        scene.add(name, queue=name[0])
    scene.kind.answers.update(a1=pending(), a2=pending())
    async with scene.dispatching():
        await scene.until(lambda: len(scene.accepted) == 3)
    assert scene.accepted == ["a3", "b1", "b2"]


async def test_a_transfer_that_can_never_start_fails_with_the_cause_and_is_cleaned_up() -> None:
    """Its source snapshot was created for it, and nothing else deletes that."""
    scene = open_scene("node-a", limit=1)
    scene.add("du-1")
    scene.add("du-2", finalizers=["other/one"])
    scene.kind.answers["du-2"] = Admission(
        AdmissionState.FAILED, FailureReason.SOURCE_MISSING, "VolumeSnapshot x does not exist"
    )
    async with scene.dispatching():
        await scene.until(lambda: scene.reasons("du-2") == ["Failed"], seconds=5)
        await scene.until(lambda: scene.kind.cleaned == ["du-2"], seconds=10)
        await scene.until(lambda: scene.transfer("du-2")["metadata"]["finalizers"] == ["other/one"], seconds=1)
    # Although no quota is left.
    assert scene.phases() == {"du-1": "Accepted", "du-2": "Failed"}
    assert scene.transfer("du-2")["status"]["completionTimestamp"] == NOON
    assert scene.message("du-2") == "VolumeSnapshot x does not exist"


async def test_a_queued_transfer_is_canceled_without_a_reservation() -> None:
    scene = open_scene("node-a", limit=1)
    scene.add("du-1")
    cr = scene.add("du-2")
    scene.kube.put(cr | {"spec": cr["spec"] | {"cancel": True}})
    async with scene.dispatching():
        await scene.until(lambda: scene.phase("du-2") == "Canceled", seconds=3)
    assert scene.message("du-2") == "canceled before admission: spec.cancel is set"
    assert "uid-of-du-2" not in scene.ledger()


@pytest.mark.cause("could-not-start")
async def test_a_transfer_that_cannot_start_within_the_prepare_timeout_fails_with_the_cause() -> None:
    scene = open_scene("node-a")
    scene.add("du", creationTimestamp=NOON)
    scene.kind.answers["du"] = pending("LocationUnavailable")
    async with scene.dispatching():
        await scene.until(lambda: scene.phase("du") == "Failed", seconds=1900)
    assert scene.message("du") == "could not start within 30m0s: pending: LocationUnavailable"
    assert "2026-11-21T12:30:00Z" <= scene.transfer("du")["status"]["completionTimestamp"] <= "2026-11-21T12:30:06Z"


async def test_without_a_live_agent_transfers_are_pending_for_one() -> None:
    scene = open_scene("node-a")
    scene.kube.put(agent_pod("node-a", ready=False))
    scene.add("du-1")
    scene.add("du-2")
    scene.kind.answers["du-2"] = Admission(AdmissionState.READY, node="node-b")
    async with scene.dispatching():
        await scene.until(lambda: scene.message("du-1") == "no node agent is ready in namespace velero")
        assert scene.message("du-2") == "no node agent is ready on node node-b"
        scene.kube.put(agent_pod("node-a"))
        await scene.until(lambda: scene.phase("du-1") == "Accepted", seconds=8)
        assert scene.phase("du-2") == ""
        scene.kube.put(agent_pod("node-b"))
        await scene.until(lambda: scene.phase("du-2") == "Accepted", seconds=8)
    assert scene.transfer("du-2")["status"]["acceptedByNode"] == "node-b"


@pytest.mark.cause("left-to-velero")
async def test_a_volume_on_a_node_of_veleros_agent_is_left_to_it_without_limit() -> None:
    scene = open_scene("node-a")
    scene.kube.put(agent_pod("win", annotations={}))
    scene.add("du-1")
    scene.kind.answers["du-1"] = Admission(AdmissionState.READY, node="win")
    async with scene.dispatching():
        await scene.until(lambda: scene.reason("du-1") == "LeftToVelero")
        await asyncio.sleep(7200)
    assert (scene.phase("du-1"), scene.message("du-1")) == ("", "left to Velero's node agent on node win")


async def test_the_metrics_and_the_status_page_show_the_queue_as_it_is() -> None:
    scene = open_scene("node-a", limit=1)
    for name, queue in (("a1", "a"), ("a2", "a"), ("b1", "b"), ("c1", "c")):
        scene.add(name, queue=queue)
    scene.kind.answers["c1"] = pending(indefinite=True)
    dispatcher = scene.dispatcher()
    metrics = dispatcher.cluster.metrics

    def sample(metric: str, **labels: str) -> float | None:
        return metrics._registry.get_sample_value(f"nodeagent_{metric}", {"node": "node-a"} | labels)

    def position(name: str) -> float | None:
        return sample("queue_position", kind="DataUpload", name=name)

    async with scene.dispatching(dispatcher):
        await scene.until(lambda: scene.message("a2") != "" and scene.message("c1") != "")
        await asyncio.sleep(2)
        assert [position(name) for name in ("a1", "a2", "b1", "c1")] == [None, 2, 1, None]
        report = dispatcher.report()
        assert [(one["name"], one["position"]) for one in report["queue"]] == [("b1", 1), ("a2", 2)]
        assert [(one["name"], one["reason"]) for one in report["pending"]] == [("c1", "SnapshotNotReady")]
        assert (report["queued"], report["phases"]) == (2, {"Accepted": 1, "New": 3})
        assert sample("queue_length", kind="DataUpload", state="New") == 3
        reported = scene.message("a2")
        scene.set_status("b1", phase="Canceled")
        # No pass has a reason to run now; the metrics follow all the same.
        await asyncio.sleep(1.5)
        assert [position("b1"), position("a2")] == [None, 1]
        assert sample("queue_length", kind="DataUpload", state="New") == 2
        # The message stays: it was true when it was written.
        assert scene.message("a2") == reported
    assert [position("a2"), sample("queue_length", kind="DataUpload", state="New")] == [None, 0]


async def test_a_transfer_of_another_data_mover_is_ignored() -> None:
    scene = open_scene("node-a", limit=1)
    cr = scene.add("theirs")
    theirs = scene.kube.put(cr | {"spec": cr["spec"] | {"datamover": "acme", "cancel": True}})
    scene.add("ours")
    async with scene.dispatching():
        await scene.until(lambda: scene.phase("ours") == "Accepted")
    assert scene.transfer("theirs") == theirs


async def test_an_idle_dispatcher_sends_no_requests() -> None:
    """For as long as the shortest watch lasts: a watch that ends is opened again, which is a request."""
    scene = open_scene("node-a")
    scene.add("du", status={"phase": "Completed"})
    async with scene.dispatching():
        await asyncio.sleep(5)
        sent = len(scene.kube.requests)
        await asyncio.sleep(200)
    assert len(scene.kube.requests) == sent


async def test_many_transfers_cost_a_fixed_number_of_requests_each() -> None:
    scene = open_scene("node-a", "node-b", limit=None)
    for number in range(400):
        scene.add(f"du-{number:03}", queue=f"ns-{number % 7}")
    async with scene.dispatching() as dispatcher:
        await scene.until(lambda: len(scene.accepted) == 400, seconds=60)
        assert dispatcher.report()["reservations"] == 400
    # One read, one accept, one Event each, and a few that they share.
    assert len(scene.kube.requests) < 3 * 400 + 30


@pytest.mark.parametrize(
    ("spec", "fault"),
    [
        ({"operationTimeout": "100000000000h"}, "duration longer than 292 years"),
        ({"operationTimeout": "100000000000h", "datamover": "another"}, ""),
        ({"cancel": ["?"]}, "spec.cancel: Expected `bool`"),
    ],
    ids=["duration", "of another data mover", "type"],
)
async def test_a_transfer_that_cannot_be_read_stops_no_other(spec: JsonDict, fault: str) -> None:
    scene = open_scene("node-a")
    wrong = scene.add("wrong")
    scene.kube.put(wrong | {"spec": wrong["spec"] | spec})
    async with scene.dispatching() as dispatcher:
        await asyncio.sleep(1)
        scene.add("du")
        await scene.until(lambda: scene.phase("du") == "Accepted", seconds=5)
        scene.kube.put(scene.add("edited") | {"spec": wrong["spec"] | spec})
        scene.add("next")
        await scene.until(lambda: scene.phase("next") == "Accepted", seconds=5)
        assert dispatcher._term is not None
        (entry,) = [entry for entry in dispatcher._term.index.entries() if entry.name == "wrong"]
        assert fault in (entry.fault or "")
        assert bool(entry.fault) is bool(fault)


@pytest.mark.parametrize("status", [403, 500])
async def test_a_rejected_write_of_the_ledger_costs_no_list_and_is_retried(status: int) -> None:
    scene = open_scene("node-a")
    async with scene.dispatching() as dispatcher:
        await asyncio.sleep(5)
        scene.kube.fail_next("PATCH", "/configmaps/node-agent-admissions", status, times=1000)
        before = len(scene.kube.requests)
        scene.add("du")
        await asyncio.sleep(300)
        sent = [request for request in scene.kube.requests[before:] if request.path.endswith("/datauploads")]
        assert [request.method for request in sent if "watch" not in request.query] == []
        assert f": {status} " in dispatcher.report()["lastError"]
        writes = [request for request in scene.kube.requests[before:] if request.path.endswith("-admissions")]
        assert len(writes) < 100
        scene.kube.fulfill()
        await scene.until(lambda: scene.phase("du") == "Accepted", seconds=70)
        assert dispatcher.report()["lastError"] == ""


async def test_a_list_answered_by_a_proxy_is_read_again() -> None:
    scene = open_scene("node-a")
    scene.add("du")
    for path in ("/datauploads", "/pods", "/nodes", "/configmaps"):
        scene.kube.fail_next("GET", path, b"<html>Service Unavailable</html>")
    async with scene.dispatching():
        await scene.until(lambda: scene.phase("du") == "Accepted", seconds=10)
