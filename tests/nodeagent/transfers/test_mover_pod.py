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
from tests.nodeagent.support.transfers import NAMESPACE, NODE, TRANSFERS, data_upload, disrupted, ended, mover_pod
from tests.support.clock import LoopClock
from tests.support.fakekube import FakeKube
from tests.support.objects import JsonDict

pytestmark = pytest.mark.looptime

STOPPED = "stopped by SIGTERM: data path is canceled"
DELETED = "2026-11-21T12:00:00Z"
PREEMPTED = disrupted("PreemptionByScheduler", "for another pod")
_FAILED = {"phase": "Failed"}
_EVICTED = {"reason": "Evicted"}
_NOT_ENDED = {"phase": "Running"}
_MESH = [{"name": "mesh", "state": {"terminated": {"exitCode": 1}}}]
_KILLED_EARLY = ended(128, "failed to start shim: start failed: : signal: killed: unknown", "StartError")
_NO_PROGRAM = ended(128, "no such file", "StartError")
_UNKNOWN = ended(137, "", "ContainerStatusUnknown")
_BY_NINE, _BY_PREEMPTION = "killed by signal 9 (exit code 137)", "PreemptionByScheduler: for another pod"

_STATUSES: dict[str, tuple[JsonDict, PodState, str | None]] = {
    "pending": ({"phase": "Pending"}, PodState.PENDING, None),
    "no disruption": ({"conditions": [PREEMPTED["conditions"][0] | {"status": "False"}]}, PodState.PENDING, None),
    "running": (_NOT_ENDED, PodState.RUNNING, None),
    "to be preempted": (_NOT_ENDED | PREEMPTED, PodState.RUNNING, _BY_PREEMPTION),
    "container ended": (ended(0) | _NOT_ENDED, PodState.ENDED, "Error (exit code 0)"),
    "succeeded": (ended(0), PodState.ENDED, "Error (exit code 0)"),
    "succeeded, no container known": ({"phase": "Succeeded"}, PodState.ENDED, None),
    "failed": (ended(12, "wrong password"), PodState.ENDED, "Error (exit code 12)"),
    "out of its own memory": (ended(137, "", "OOMKilled"), PodState.ENDED, "OOMKilled (exit code 137)"),
    "no program": (_NO_PROGRAM, PodState.ENDED, "StartError (exit code 128)"),
    "killed while it was started": (_KILLED_EARLY, PodState.LOST, "StartError (exit code 128)"),
    "stopped without the kubelet": (ended(14, STOPPED), PodState.LOST, "stopped by SIGTERM"),
    "stopped before it had started": (ended(143), PodState.LOST, "killed by signal 15 (exit code 143)"),
    "evicted": (ended(137) | _EVICTED | {"message": "low"}, PodState.LOST, "Evicted: low"),
    "preempted": (ended(14) | PREEMPTED, PodState.LOST, _BY_PREEMPTION),
    "killed when preempted": (ended(137) | PREEMPTED, PodState.LOST, _BY_PREEMPTION),
    "evicted with a condition": (_FAILED | _EVICTED | PREEMPTED, PodState.LOST, "Evicted: for another pod"),
    "container lost": (_UNKNOWN, PodState.LOST, "ContainerStatusUnknown (exit code 137)"),
    "container lost after its eviction": (_UNKNOWN | _EVICTED, PodState.LOST, "Evicted"),
    "node rebooted": (ended(255, "", "Unknown"), PodState.LOST, "Unknown (exit code 255)"),
    "killed": (ended(137), PodState.LOST, _BY_NINE),
    "killed without a reason": (ended(137, "", ""), PodState.LOST, _BY_NINE),
    "failed without a container": (_FAILED, PodState.LOST, None),
    "init container": (
        _FAILED | {"initContainerStatuses": _MESH},
        PodState.LOST,
        "init container mesh failed: Error (exit code 1)",
    ),
    "evicted before it started": (_FAILED | _EVICTED, PodState.LOST, "Evicted"),
    "rejected by the kubelet": (_FAILED | {"reason": "NodeAffinity"}, PodState.LOST, "NodeAffinity"),
    "no room": (_FAILED | {"reason": "OutOfcpu", "message": "no cpu"}, PodState.LOST, "OutOfcpu: no cpu"),
}
_KILLED = {"killed", "killed without a reason"}
_REJECTED = {"evicted before it started": "Evicted", "rejected by the kubelet": "NodeAffinity", "no room": "OutOfcpu"}


@pytest.mark.parametrize("name", _STATUSES)
def test_state_and_cause_follow_from_the_status_also_of_a_trimmed_pod(name: str) -> None:
    status, state, cause = _STATUSES[name]
    whole = mover_pod(data_upload(), **status)
    for pod in (whole, trim_pod(whole)):
        assert (pod_state(pod), explain_loss(pod), pod_node(pod)) == (state, cause, NODE)
        assert (was_killed(pod), rejection_reason(pod)) == (name in _KILLED, _REJECTED.get(name))
        # Whichever agent created it; only one that has started may be taken over.
        pod["metadata"]["labels"] = {"velero.io/data-upload": "du-1"}
        assert may_take_over(pod) is (state in {PodState.RUNNING, PodState.ENDED})
        pod["metadata"] |= {"labels": {"app": "x"}, "deletionTimestamp": DELETED}
        assert not may_take_over(pod)
        not_ended = state in {PodState.PENDING, PodState.RUNNING}
        assert pod_state(pod) is (PodState.TERMINATING if not_ended else PodState.LOST)
        assert not was_killed(pod)
    assert pod_state(None) is PodState.ABSENT


def test_the_memory_limit_of_a_killed_pod_is_reported_trimmed_or_not() -> None:
    pod = mover_pod(data_upload(), **ended(137))
    limits = {"limits": {"memory": "64Mi", "cpu": "1"}}
    pod["spec"]["containers"][0] |= {"resources": limits, "image": "x" * 1000}
    text = "killed by signal 9 (exit code 137), probably out of memory (limit 64Mi)"
    assert [explain_loss(each) for each in (pod, trim_pod(pod))] == [text, text]
    assert "image" not in trim_pod(pod)["spec"]["containers"][0]


def read(text: str) -> MoverLoss | None:
    return MoverLoss.from_annotations({MOVER_LOST_ANNOTATION: text})


EVICTED = {"reason": "Evicted", "message": "why"} | PREEMPTED


def count_lost(times: int, **status: Any) -> MoverLoss:
    """Return the record of so many lost pods."""
    loss = None
    for number in range(times):
        pod = mover_pod(data_upload(uid=str(number)), phase="Failed", **status)
        loss = count_loss(loss, pod, NOON)
    assert loss is not None
    return loss


def test_recorded_loss_is_read_as_it_was_counted() -> None:
    loss = count_lost(1, **EVICTED)
    assert read(loss.to_json()) == loss
    of_an_earlier_version = read('{"since":"2026-11-21T12:00:00Z","last":"2026-11-21T12:00:00Z","times":3,"killed":1}')
    assert of_an_earlier_version is not None
    assert (of_an_earlier_version.times, of_an_earlier_version.rejected) == (3, 0)


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
    loss = count_lost(20, **status)
    text = "was lost 20 times before its data path started: Evicted: why"
    assert (loss.times, loss.failure) == (20, text if fails else None)


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


async def test_kubelets_that_do_not_answer_delay_each_transfer_once_and_hold_two_requests() -> None:
    kube = FakeKube()
    gate = Gate(kube, holds=lambda request: request.path.endswith("/log"))
    logs = MoverLogs(KubeClient(gate, Retry(LoopClock(), attempts=1)))
    raws = [data_upload(f"du-{number}") for number in range(20)]
    pairs = [(DataUpload.parse(raw), mover_pod(raw, **ended(1))) for raw in raws]
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
    kube.put(pod)
    kube.logs[NAMESPACE, cr.name] = "it says why"
    assert await logs.copy(cr, pod | {"metadata": pod["metadata"] | {"uid": "another"}}) == "it says why"


async def test_the_log_of_a_pod_that_never_ran_is_not_read(caplog: pytest.LogCaptureFixture) -> None:
    mover = Mover(rejected="OutOfcpu", rejections=1, seconds=100)
    async with open_world(accepted(data_upload()), mover=mover) as world, world.agent():
        await world.until(lambda: "OutOfcpu" in world.reasons())
        await world.until(lambda: world.phase() == "InProgress")
        assert [request.path for request in world.kube.requests if request.path.endswith("/log")] == []
    assert "cannot copy the log" not in caplog.text
