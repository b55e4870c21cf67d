"""The state of a mover pod, and why one was lost."""

import pytest

from nodeagent.transfers.mover_pod import (
    PodState,
    explain_loss,
    may_take_over,
    pod_node,
    pod_state,
    rejection_reason,
    trim_pod,
    was_killed,
)
from tests.nodeagent.support.transfers import NODE, data_upload, mover_pod
from tests.support.objects import JsonDict

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
        pytest.param(
            ended(128, reason="StartError", message="exec: python: no such file"), PodState.ENDED, id="no program"
        ),
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
def test_only_a_mover_that_has_started_may_take_a_transfer_over(
    status: JsonDict, *, labels: bool, expected: bool
) -> None:
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
