"""Diagnosis of pod statuses, as real kubelets and schedulers write them."""

from datetime import timedelta
from typing import Any

import pytest

from core.errors import ExposeError
from exposer.model import Pending
from exposer.pod_status import PodEnd, diagnose_pod, parse_pod_end
from tests.support.golden import recorded
from tests.support.objects import JsonDict


def pod(*, node: str = "node-a", **status: Any) -> JsonDict:
    spec = {"nodeName": node} if node else {}
    meta = {"namespace": "velero", "name": "b1", "uid": "uid-1"}
    return {"metadata": meta, "spec": spec, "status": {"phase": "Pending"} | status}


def waiting(reason: str, message: str = "") -> JsonDict:
    state = {"waiting": {"reason": reason, "message": message}}
    return pod(containerStatuses=[{"name": "c", "state": state}])


def terminated(exit_code: int, reason: str, message: str = "") -> list[JsonDict]:
    state = {"exitCode": exit_code, "reason": reason, "message": message}
    return [{"name": "c", "state": {"terminated": state}}]


UNSCHEDULABLE = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/1 nodes are available: 1 node(s) had untolerated taint {dedicated: db}.",
}
GATED = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}


SECRET_TEXT = 'secret "cloud-credentials" not found'


@pytest.mark.parametrize(
    ("pending", "blocked", "reason", "message"),
    [
        pytest.param(pod(node="", conditions=[UNSCHEDULABLE]), True, "Unschedulable", "untolerated taint", id="taint"),
        pytest.param(pod(node="", conditions=[GATED]), True, "SchedulingGated", "gives no reason", id="gated"),
        pytest.param(pod(node=""), False, "Scheduling", "is not scheduled yet", id="unseen"),
        pytest.param(pod(), False, "ContainerCreating", "is starting on node node-a", id="no container status"),
        pytest.param(waiting("ContainerCreating"), False, "ContainerCreating", "node-a", id="creating"),
        pytest.param(
            waiting("ImagePullBackOff", 'Back-off pulling image "x"'),
            True,
            "ImagePullBackOff",
            'image of Pod velero/b1 is not available on node node-a: ImagePullBackOff: Back-off pulling image "x"',
            id="image pull",
        ),
        pytest.param(
            waiting("CreateContainerConfigError", SECRET_TEXT),
            True,
            "CreateContainerConfigError",
            SECRET_TEXT,
            id="missing secret",
        ),
        pytest.param(waiting("RunContainerError"), True, "RunContainerError", "cannot start", id="no message"),
    ],
)
def test_a_pending_pod_has_a_reason_that_is_blocked_if_no_healthy_one_has_it(
    pending: JsonDict, reason: str, message: str, *, blocked: bool
) -> None:
    found = diagnose_pod(pending)
    assert found is not None
    assert (found.reason, found.blocked) == (reason, blocked)
    assert message in found.message
    assert "velero/b1" in found.message


UNBOUND = "0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims. not found"
PRE_BIND = 'running PreBind plugin "VolumeBinding": binding volumes: context deadline exceeded'
UNSEEN_CLAIM = '0/1 nodes are available: persistentvolumeclaim "b1" not found.'


@pytest.mark.parametrize("message", [UNBOUND, PRE_BIND, UNSEEN_CLAIM], ids=["unbound", "binding", "not seen yet"])
def test_the_scheduler_does_not_report_why_a_pvc_is_unbound(message: str) -> None:
    condition = UNSCHEDULABLE | {"message": message}
    assert diagnose_pod(pod(node="", conditions=[condition])) == Pending(
        "ClaimUnbound", f"Pod velero/b1 cannot be scheduled: {message}"
    )


@pytest.mark.parametrize(
    "reason",
    ["ErrImagePull", "ImagePullBackOff", "ImageInspectError", "RegistryUnavailable", "SignatureValidationFailed"],
)
def test_an_image_may_be_unavailable_for_five_minutes(reason: str) -> None:
    """Each attempt to pull it has the same reason."""
    found = diagnose_pod(waiting(reason, "no"))
    assert found is not None
    assert (found.reason, found.blocked) == (reason.replace("ErrImagePull", "ImagePullBackOff"), True)
    assert (found.operation, found.timeout) == ("image of Pod uid-1", timedelta(minutes=5))


@pytest.mark.parametrize("reason", ["ErrImageNeverPull", "InvalidImageName"])
def test_a_pod_that_can_never_start_is_an_error(reason: str) -> None:
    with pytest.raises(ExposeError, match=f"velero/b1 cannot start on node node-a: {reason}: message"):
        diagnose_pod(waiting(reason, "message"))


@pytest.mark.parametrize("phase", ["Running", "Succeeded", "Failed"])
def test_a_pod_past_pending_has_no_reason(phase: str) -> None:
    assert diagnose_pod(pod(phase=phase)) is None


@pytest.mark.parametrize("recording", ["pod-of-dataupload", "block-pod-of-datadownload"])
def test_a_recorded_pod_runs_and_succeeds(recording: str) -> None:
    began, ended = (parse_pod_end(recorded(recording, index)) for index in (0, -1))
    assert diagnose_pod(recorded(recording, 0)) is not None
    assert began is None
    assert ended is not None
    assert (ended.exit_code, ended.message[0]) == (0, "{")


PREEMPTED = {
    "type": "DisruptionTarget",
    "status": "True",
    "reason": "PreemptionByScheduler",
    "message": "default-scheduler: preempting to accommodate a higher priority pod",
}


@pytest.mark.parametrize(
    ("ended", "end"),
    [
        pytest.param(pod(phase="Running"), None, id="running"),
        pytest.param(
            pod(phase="Failed", containerStatuses=terminated(12, "Error", "repository is locked")),
            PodEnd(12, "repository is locked", "Error"),
            id="failed",
        ),
        pytest.param(
            pod(phase="Failed", containerStatuses=terminated(137, "OOMKilled")),
            PodEnd(137, "", "OOMKilled"),
            id="out of memory",
        ),
        pytest.param(
            pod(
                phase="Failed",
                reason="Evicted",
                message="The node was low on resource: memory.",
                containerStatuses=terminated(137, "ContainerStatusUnknown", "could not be located"),
            ),
            PodEnd(137, "The node was low on resource: memory.; could not be located", "Evicted"),
            id="evicted while it ran",
        ),
        pytest.param(
            pod(phase="Failed", reason="UnexpectedAdmissionError", message="Pod was rejected"),
            PodEnd(None, "Pod was rejected", "UnexpectedAdmissionError"),
            id="rejected by the kubelet",
        ),
        pytest.param(
            pod(phase="Failed", conditions=[PREEMPTED], containerStatuses=terminated(143, "Error", "stopped")),
            PodEnd(143, f"{PREEMPTED['message']}; stopped", "PreemptionByScheduler"),
            id="preempted",
        ),
        pytest.param(
            pod(phase="Running", conditions=[PREEMPTED], containerStatuses=terminated(0, "Completed", "{}")),
            PodEnd(0, "{}", "Completed"),
            id="finished before it was preempted",
        ),
        pytest.param(pod(phase="Failed"), PodEnd(None, "", "Failed"), id="no reason"),
        pytest.param(
            pod(
                phase="Failed",
                # The sidecar was stopped because the one after it had failed.
                initContainerStatuses=[*terminated(143, "Error"), *terminated(126, "Error", "no CNI")],
                containerStatuses=[{"name": "c", "state": {"waiting": {"reason": "PodInitializing"}}}],
            ),
            PodEnd(None, "init container c failed: Error (exit code 126): no CNI", "Failed"),
            id="init container",
        ),
    ],
)
def test_the_termination_of_a_pod_is_parsed(ended: JsonDict, end: PodEnd | None) -> None:
    assert parse_pod_end(ended) == end


UID = "uid-of-upload"
BY_LABEL = {"labels": {"nodeagent.io/owner-uid": UID}}
BY_REFERENCE = {"ownerReferences": [{"kind": "DataUpload", "name": "du-1", "uid": UID}]}


def with_sidecar(meta: JsonDict, mover: JsonDict, *, phase: str = "Running") -> JsonDict:
    """Return a mover pod to which a webhook has added a container, which crashed."""
    proxy = {"name": "proxy", "state": {"terminated": {"exitCode": 1, "reason": "Error"}}}
    containers = [{"name": "proxy"}, {"name": UID, "resources": {"limits": {"memory": "1Gi"}}}]
    statuses = [proxy, {"name": UID, "state": mover}]
    status = {"phase": phase, "containerStatuses": statuses}
    return {"metadata": {"name": "b1"} | meta, "spec": {"containers": containers}, "status": status}


@pytest.mark.parametrize("meta", [BY_LABEL, BY_REFERENCE], ids=["ours", "of Velero"])
def test_only_the_movers_container_decides_how_it_ended(meta: JsonDict) -> None:
    killed: JsonDict = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
    assert parse_pod_end(with_sidecar(meta, {"running": {}})) is None
    assert parse_pod_end(with_sidecar(meta, {"terminated": {"exitCode": 0, "message": "{}"}})) == PodEnd(0, "{}", "")
    assert parse_pod_end(with_sidecar(meta, killed)) == PodEnd(137, "", "OOMKilled", "1Gi")


def test_an_unknown_container_among_several_ends_with_its_pod() -> None:
    assert parse_pod_end(with_sidecar({}, {"running": {}})) is None
    assert parse_pod_end(with_sidecar({}, {"running": {}}, phase="Failed")) == PodEnd(None, "", "Failed")
