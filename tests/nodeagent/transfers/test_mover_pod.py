"""The state of a mover pod, why one was lost, the record of losses, and its log."""

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from core.kube.client import KubeClient
from core.kube.resources import PODS
from core.kube.transport import Retry
from core.models.names import MOVER_LOST_ANNOTATION
from core.models.transfers import DataUpload
from nodeagent.transfers.mover_pod import (
    MoverLogs,
    MoverLoss,
    PodState,
    add_log_end,
    count_loss,
    explain_loss,
    may_take_over,
    pod_node,
    pod_state,
    rejection_reason,
    trim_pod,
    was_killed,
)
from tests.nodeagent.support.dispatching import Gate
from tests.nodeagent.support.hand_clock import NOON
from tests.nodeagent.support.harness import accepted, open_world
from tests.nodeagent.support.simulation import Mover
from tests.nodeagent.support.transfers import NAMESPACE, NODE, TRANSFERS, data_upload, mover_pod
from tests.support.clock import LoopClock
from tests.support.fakekube import FakeKube
from tests.support.objects import JsonDict

pytestmark = pytest.mark.looptime

STOPPED = "stopped by SIGTERM: data path is canceled"
DELETED = "2026-11-21T12:00:00Z"
DISRUPTION = {
    "type": "DisruptionTarget",
    "status": "True",
    "reason": "PreemptionByScheduler",
    "message": "default-scheduler: preempting to accommodate a higher priority pod",
}


def ended(exit_code: int, **terminated: object) -> JsonDict:
    """Return the status of a pod whose container ended."""
    phase = "Failed" if exit_code else "Succeeded"
    return {"phase": phase, "containerStatuses": [{"state": {"terminated": {"exitCode": exit_code} | terminated}}]}


@pytest.mark.parametrize(
    ("status", "state"),
    [
        pytest.param({"phase": "Pending"}, PodState.PENDING, id="pending"),
        pytest.param({"phase": "Running"}, PodState.RUNNING, id="running"),
        pytest.param(ended(0) | {"phase": "Running"}, PodState.ENDED, id="container ended"),
        pytest.param(ended(0), PodState.ENDED, id="succeeded"),
        pytest.param(ended(12, message="wrong password"), PodState.ENDED, id="failed"),
        pytest.param(ended(14, message=STOPPED), PodState.LOST, id="stopped without the kubelet"),
        pytest.param(ended(143, reason="Error"), PodState.LOST, id="stopped before it had started"),
        pytest.param(ended(137, reason="OOMKilled"), PodState.ENDED, id="out of its own memory"),
        pytest.param({"phase": "Succeeded"}, PodState.ENDED, id="succeeded, no container known"),
        pytest.param({"phase": "Failed", "reason": "Evicted"}, PodState.LOST, id="evicted before it started"),
        pytest.param(ended(137) | {"reason": "Evicted"}, PodState.LOST, id="evicted"),
        pytest.param({"phase": "Failed", "reason": "NodeAffinity"}, PodState.LOST, id="rejected by the kubelet"),
        pytest.param(ended(14) | {"conditions": [DISRUPTION]}, PodState.LOST, id="preempted"),
        pytest.param(ended(137, reason="ContainerStatusUnknown"), PodState.LOST, id="container lost"),
        pytest.param(ended(255, reason="Unknown"), PodState.LOST, id="node rebooted"),
        pytest.param(ended(137, reason="Error"), PodState.LOST, id="killed"),
        pytest.param(
            ended(128, reason="StartError", message="failed to start shim: start failed: : signal: killed: unknown"),
            PodState.LOST,
            id="killed while it was started",
        ),
        pytest.param(ended(128, reason="StartError", message="no such file"), PodState.ENDED, id="no program"),
        pytest.param({"phase": "Failed"}, PodState.LOST, id="failed without a container"),
    ],
)
def test_the_state_of_a_pod_follows_from_its_status(status: JsonDict, state: PodState) -> None:
    assert pod_state(mover_pod(data_upload(), **status)) is state


@pytest.mark.parametrize(
    ("status", "state"),
    [
        pytest.param({"phase": "Pending"}, PodState.TERMINATING, id="pending"),
        pytest.param({"phase": "Running"}, PodState.TERMINATING, id="running"),
        pytest.param(ended(14), PodState.LOST, id="ended"),
    ],
)
def test_a_pod_that_is_being_deleted_is_terminating_until_it_ended(status: JsonDict, state: PodState) -> None:
    pod = mover_pod(data_upload(), **status)
    pod["metadata"]["deletionTimestamp"] = DELETED
    assert pod_state(pod) is state


def test_no_pod_is_absent() -> None:
    assert pod_state(None) is PodState.ABSENT


@pytest.mark.parametrize(
    ("status", "text"),
    [
        pytest.param({"reason": "Evicted", "message": "low on memory"}, "Evicted: low on memory", id="evicted"),
        pytest.param({"reason": "NodeAffinity"}, "NodeAffinity", id="no message"),
        pytest.param({"conditions": [DISRUPTION]}, f"PreemptionByScheduler: {DISRUPTION['message']}", id="preempted"),
        pytest.param({"conditions": [DISRUPTION | {"status": "False"}]}, None, id="no disruption"),
        pytest.param({"phase": "Running"}, None, id="unknown"),
        pytest.param(ended(137, reason="Error"), "killed by signal 9 (exit code 137)", id="killed"),
        pytest.param(ended(14, reason="Error", message=STOPPED), "stopped by SIGTERM", id="stopped"),
        pytest.param(
            {"phase": "Failed", "initContainerStatuses": [{"name": "mesh", "state": {"terminated": {"exitCode": 1}}}]},
            "init container mesh failed: Error (exit code 1)",
            id="init container",
        ),
    ],
)
def test_the_cause_of_a_loss_is_taken_from_the_status(status: JsonDict, text: str | None) -> None:
    pod = mover_pod(data_upload(), **status)
    assert [explain_loss(each) for each in (pod, trim_pod(pod))] == [text, text]


def test_a_trimmed_pod_has_the_state_of_the_whole_one() -> None:
    pod = mover_pod(data_upload(), **(ended(14) | {"conditions": [DISRUPTION]}))
    pod["spec"]["containers"][0]["image"] = "x" * 1000
    small = trim_pod(pod)
    assert (pod_state(small), explain_loss(small), pod_node(small)) == (PodState.LOST, explain_loss(pod), NODE)
    assert "containers" not in small["spec"]


@pytest.mark.parametrize(
    ("status", "labels", "expected"),
    [
        pytest.param({"phase": "Running"}, True, True, id="running"),
        pytest.param(ended(0), True, True, id="ended"),
        pytest.param({"phase": "Pending"}, True, False, id="pending"),
        pytest.param(ended(14) | {"conditions": [DISRUPTION]}, True, False, id="lost"),
        pytest.param({"phase": "Running"}, False, False, id="another pod"),
    ],
)
def test_only_a_mover_that_has_started_may_take_over(status: JsonDict, *, labels: bool, expected: bool) -> None:
    pod = mover_pod(data_upload(), **status)
    pod["metadata"]["labels"] = {"velero.io/data-upload": "du-1"} if labels else {"app": "x"}
    assert [may_take_over(each) for each in (pod, trim_pod(pod))] == [expected, expected]


def test_the_memory_limit_of_a_killed_pod_is_reported_trimmed_or_not() -> None:
    pod = mover_pod(data_upload(), **ended(137, reason="Error"))
    pod["spec"]["containers"][0]["resources"] = {"limits": {"memory": "64Mi", "cpu": "1"}}
    text = "killed by signal 9 (exit code 137), probably out of memory (limit 64Mi)"
    assert [explain_loss(each) for each in (pod, trim_pod(pod))] == [text, text]


@pytest.mark.parametrize(
    ("status", "meta", "killed"),
    [
        pytest.param(ended(137, reason="Error"), {}, True, id="unknown reason"),
        pytest.param(ended(137), {}, True, id="no reason"),
        pytest.param(ended(137, reason="Error"), {"deletionTimestamp": DELETED}, False, id="deleted"),
        pytest.param(ended(137, reason="Error") | {"reason": "Evicted"}, {}, False, id="evicted"),
        pytest.param(ended(137, reason="Error") | {"conditions": [DISRUPTION]}, {}, False, id="preempted"),
        pytest.param(ended(137, reason="ContainerStatusUnknown"), {}, False, id="container lost"),
        pytest.param(ended(143, reason="Error"), {}, False, id="another signal"),
        pytest.param({"phase": "Running"}, {}, False, id="running"),
    ],
)
def test_only_a_kill_for_an_unknown_reason_counts(status: JsonDict, meta: JsonDict, *, killed: bool) -> None:
    pod = mover_pod(data_upload(), **status)
    pod["metadata"] |= meta
    assert was_killed(pod) is killed


OUT_OF_CPU = {"phase": "Failed", "reason": "OutOfcpu", "message": "Pod was rejected: Node didn't have enough resource"}


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        pytest.param(OUT_OF_CPU, "OutOfcpu", id="no room"),
        pytest.param({"phase": "Failed", "reason": "NodeAffinity"}, "NodeAffinity", id="other labels"),
        pytest.param({"phase": "Failed", "reason": "Evicted"}, "Evicted", id="node under pressure"),
        pytest.param({"phase": "Failed", "reason": "Evicted", "conditions": [DISRUPTION]}, None, id="evicted"),
        pytest.param(ended(137, reason="ContainerStatusUnknown") | {"reason": "Evicted"}, None, id="had run"),
        pytest.param({"phase": "Failed"}, None, id="no reason"),
        pytest.param({"phase": "Running"}, None, id="running"),
    ],
)
def test_a_pod_that_its_kubelet_did_not_admit_has_the_reason(status: JsonDict, reason: str | None) -> None:
    pod = mover_pod(data_upload(), **status)
    assert [rejection_reason(each) for each in (pod, trim_pod(pod))] == [reason, reason]


def read(text: str) -> MoverLoss | None:
    return MoverLoss.from_annotations({MOVER_LOST_ANNOTATION: text})


EVICTED = {"reason": "Evicted", "message": "why", "conditions": [DISRUPTION]}


def lost_pod(number: int, **status: Any) -> JsonDict:
    pod = mover_pod(data_upload(), phase="Failed", **status)
    return pod | {"metadata": pod["metadata"] | {"uid": f"pod-{number}"}}


def test_recorded_loss_is_read_as_it_was_counted() -> None:
    loss = count_loss(None, lost_pod(1, **EVICTED), NOON)
    assert read(loss.to_json()) == loss


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "[" * 2000 + "]" * 2000,
        '{"since":"2026-11-21T12:00:00","last":"2026-11-21T12:00:00"}',
        '{"since":"2026-11-21T12:00:00Z","last":"2026-11-21T12:00:00Z","times":-5}',
        '{"since":"2026-11-21T12:00:00Z","last":"2026-11-21T12:00:00Z","times":1e400}',
        '{"since":"2026-11-21T12:00:00Z","last":"2026-11-21T12:00:00Z","killed":99999999999999999999}',
    ],
    ids=["absent", "no object", "deep", "no zone", "negative", "infinite", "huge"],
)
def test_an_invalid_loss_counts_as_absent(text: str) -> None:
    assert read(text) is None


@pytest.mark.parametrize(("times", "seconds"), [(1, 5), (2, 10), (7, 300), (2**31, 300)])
def test_pause_before_the_next_pod_doubles_up_to_a_limit(times: int, seconds: int) -> None:
    assert MoverLoss(since=NOON, last=NOON, times=times).pause == timedelta(seconds=seconds)


@pytest.mark.parametrize(
    ("status", "fails"), [(EVICTED, True), ({"reason": "OutOfcpu"}, False)], ids=["evicted", "rejected"]
)
def test_only_pods_that_were_admitted_are_limited(status: JsonDict, *, fails: bool) -> None:
    loss = None
    for number in range(20):
        loss = count_loss(loss, lost_pod(number, **status), NOON)
    assert loss is not None
    text = "was lost 20 times before its data path started: Evicted: why"
    assert (loss.times, loss.failure) == (20, text if fails else None)


def test_a_loss_that_a_previous_version_recorded_is_read() -> None:
    found = read('{"since":"2026-11-21T12:00:00Z","last":"2026-11-21T12:00:00Z","times":3,"killed":1}')
    assert found is not None
    assert (found.times, found.rejected) == (3, 0)


LOG_LIMIT_BYTES = 4 * 1024 * 1024


@pytest.mark.parametrize(
    ("message", "tail", "together"),
    [
        pytest.param("OOMKilled", "", "OOMKilled", id="no log"),
        pytest.param("OOMKilled", "one\ntwo\n", "OOMKilled; its log ends: one\ntwo", id="a log with more"),
        pytest.param("wrong password for it", "E wrong password for it", "wrong password for it", id="repeated"),
        pytest.param(
            "the pod is gone; cannot read /x/y",
            "I begin\nE cannot read /x/y at all",
            "the pod is gone; cannot read /x/y; its log ends: I begin",
            id="partly repeated",
        ),
        pytest.param("a: line one", "line one", "a: line one", id="the line is in the message"),
        pytest.param("Error", "an Error came\n\n", "Error; its log ends: an Error came", id="too short to compare"),
    ],
)
def test_the_lines_that_the_message_lacks_are_added(message: str, tail: str, together: str) -> None:
    assert add_log_end(message, tail) == together


def copied(caplog: pytest.LogCaptureFixture) -> list[tuple[str, dict[str, Any]]]:
    """Return the mover's lines in the agent's log, each with its fields."""
    found = [record for record in caplog.records if record.getMessage().startswith("mover: ")]
    return [(record.getMessage().removeprefix("mover: "), record.__dict__["fields"]) for record in found]


@pytest.mark.parametrize("exit_code", [0, 11, 137], ids=["completed", "failed", "killed"])
@pytest.mark.parametrize("kind", TRANSFERS)
async def test_the_log_is_copied_before_cleanup(kind: str, exit_code: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    transfer = accepted(TRANSFERS[kind]())
    name = transfer["metadata"]["name"]
    message = "no space left on device" if exit_code else None
    async with open_world(transfer, mover=Mover(exit_code=exit_code, message=message)) as world:
        world.kube.logs[NAMESPACE, name] = "first line\nE no space left on device\nlast line"
        async with world.agent():
            await world.until(lambda: world.done(kind))
    lines = copied(caplog)
    assert [line for line, _ in lines] == ["first line", "E no space left on device", "last line"]
    assert {(extra["kind"], extra["name"], extra["uid"]) for _, extra in lines} == {
        (kind, name, transfer["metadata"]["uid"])
    }
    status = world.transfer(kind)["status"]
    assert (
        status.get("message")
        == {
            0: None,
            11: "no space left on device",
            137: "data mover pod ended: killed by signal 9 (exit code 137): no space left on device; "
            "its log ends: first line\nE no space left on device\nlast line",
        }[exit_code]
    )


async def test_the_end_of_a_long_log_is_copied(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    text = [f"{number:07d} {'x' * 200}" for number in range(40_000)]
    async with open_world(accepted(data_upload()), mover=Mover(exit_code=11, message="")) as world:
        world.kube.logs[NAMESPACE, "du-1"] = "\n".join(text) + "\n"
        async with world.agent():
            await world.until(world.done)
    lines = [line for line, _ in copied(caplog)]
    assert lines == text[-len(lines) :]
    assert LOG_LIMIT_BYTES / 2 < sum(map(len, lines)) <= LOG_LIMIT_BYTES
    assert text[-1] in world.transfer()["status"]["message"]
    assert len(world.transfer()["status"]["message"]) < 2000


async def test_the_end_of_the_log_is_kept_if_the_outcome_is_written_twice() -> None:
    async with open_world(accepted(data_upload()), mover=Mover(exit_code=11, message="")) as world:
        world.kube.logs[NAMESPACE, "du-1"] = "kopia said why\n"
        async with world.agent():
            await world.until(lambda: world.phase() == "InProgress")
            await world.until(lambda: world.kube.objects(PODS)[0]["status"]["phase"] == "Running")
            world.kube.fail_next("PATCH", "/datauploads/", 409, times=2)
            await world.until(world.done)
    assert "its log ends: kopia said why" in world.transfer()["status"]["message"]


async def test_a_log_that_cannot_be_read_delays_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with open_world(accepted(data_upload()), mover=Mover(exit_code=11, message="")) as world:
        world.kube.fail_next("GET", "/pods/du-1/log", 500, times=1000)
        async with world.agent():
            await world.until(lambda: world.phase() == "Failed", seconds=200)
            await asyncio.sleep(0)
    assert "cannot copy the log" in caplog.text


def ended_pods(count: int) -> list[tuple[DataUpload, JsonDict]]:
    """Return transfers, each with its mover pod, which has ended."""
    status = {"phase": "Failed", "containerStatuses": [{"state": {"terminated": {"exitCode": 1}}}]}
    crs = [DataUpload.parse(data_upload(f"du-{number}")) for number in range(count)]
    metas = [{"name": cr.name, "namespace": NAMESPACE, "uid": f"uid-of-pod-{cr.name}"} for cr in crs]
    return [(cr, {"metadata": meta, "status": status}) for cr, meta in zip(crs, metas, strict=True)]


async def test_kubelets_that_do_not_answer_delay_each_transfer_once_and_hold_two_requests() -> None:
    kube = FakeKube()
    gate = Gate(kube, holds=lambda request: request.path.endswith("/log"))
    logs = MoverLogs(KubeClient(gate, Retry(LoopClock(), attempts=1)))
    pairs = ended_pods(20)
    loop = asyncio.get_running_loop()
    for expected_seconds in (30.0, 0.0):
        began = loop.time()
        reads = [asyncio.create_task(logs.copy(cr, pod), name=cr.name) for cr, pod in pairs]
        await asyncio.sleep(0)
        assert set(await asyncio.gather(*reads)) == {""}
        assert loop.time() - began == pytest.approx(expected_seconds, abs=0.1)
        assert gate.waiting == 2
    # Another pod of the transfer has a log of its own.
    gate.open.set()
    cr, pod = pairs[0]
    kube.put({"apiVersion": "v1", "kind": "Pod"} | pod)
    kube.logs[NAMESPACE, cr.name] = "it says why"
    assert await logs.copy(cr, pod | {"metadata": pod["metadata"] | {"uid": "another"}}) == "it says why"


async def test_the_log_of_a_pod_that_never_ran_is_not_read(caplog: pytest.LogCaptureFixture) -> None:
    mover = Mover(rejected="OutOfcpu", rejections=1, seconds=100)
    async with open_world(accepted(data_upload()), mover=mover) as world, world.agent():
        await world.until(lambda: "OutOfcpu" in world.reasons())
        await world.until(lambda: world.phase() == "InProgress")
        assert [request.path for request in world.kube.requests if request.path.endswith("/log")] == []
    assert "cannot copy the log" not in caplog.text
