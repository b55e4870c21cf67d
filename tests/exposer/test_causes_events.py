"""Causes in Events, also those that the test bed cannot produce, in the components' formats.

Source of the recorded ones: Kubernetes v1.34 (kubelet, attach-detach controller, persistent
volume controller) and kubernetes-csi/external-provisioner v5, which the test bed's provisioner does not imitate.
"""

from datetime import timedelta

import pytest

from core.models.base import format_time
from exposer.causes import find_pod_cause, find_pvc_cause
from exposer.model import Pending
from tests.support.clock import NOON
from tests.support.objects import JsonDict


def blocked(reason: str, message: str) -> Pending:
    return Pending(reason, message, blocked=True)


def event(reason: str, message: str, second: int, *, warning: bool = True, by: str = "kubelet") -> JsonDict:
    """Return an Event of the older format, last seen at that second."""
    return {
        "type": "Warning" if warning else "Normal",
        "reason": reason,
        "message": message,
        "lastTimestamp": f"2026-11-21T12:00:{second:02}Z",
        "source": {"component": by},
    }


SCHEDULED: JsonDict = {
    "type": "Normal",
    "reason": "Scheduled",
    "message": "Successfully assigned velero/b1 to node-a",
    "eventTime": "2026-11-21T12:00:01.812345Z",
    "lastTimestamp": None,
    "reportingComponent": "default-scheduler",
}
UNSCHEDULED = event("FailedScheduling", "0/1 nodes are available", 0, by="default-scheduler")
NO_SECRET = 'MountVolume.SetUp failed for volume "keys" : secret "keys" not found'
MOUNT = event("FailedMount", NO_SECRET, 2)
ATTACH = event("FailedAttachVolume", "Multi-Attach error for volume\n  is used by another node", 3, by="attachdetach")
MAP = event("FailedMapVolume", "MapVolume.SetUpDevice failed: volume mode not supported", 3)
SANDBOX = event("FailedCreatePodSandBox", "failed to setup network for sandbox", 4)
CHANGED = event("SandboxChanged", "Pod sandbox changed, it will be killed and re-created.", 5, warning=False)
PULLING = event("Pulling", 'Pulling image "mover:1"', 6, warning=False)
PULLED = event("Pulled", "Successfully pulled image", 7, warning=False)


@pytest.mark.parametrize(
    ("events", "cause"),
    [
        pytest.param([], None, id="none"),
        pytest.param([UNSCHEDULED, SCHEDULED], None, id="unscheduled before"),
        pytest.param([SCHEDULED, MOUNT], blocked("FailedMount", NO_SECRET), id="mount"),
        pytest.param(
            [SCHEDULED, ATTACH],
            blocked("FailedAttachVolume", "Multi-Attach error for volume is used by another node"),
            id="attach",
            marks=pytest.mark.cause("volume-not-attached"),
        ),
        pytest.param(
            [SCHEDULED, event("SuccessfulAttachVolume", "", 2, warning=False), MAP],
            blocked("FailedMapVolume", MAP["message"]),
            id="no device",
        ),
        pytest.param(
            [SCHEDULED, MOUNT, event("SuccessfulAttachVolume", 'succeeded for volume "pvc-1"', 3, warning=False)],
            blocked("FailedMount", NO_SECRET),
            id="another volume attached since",
        ),
        pytest.param(
            [SCHEDULED, MOUNT, event("SuccessfulMountVolume", 'succeeded for volume "keys"', 3, warning=False)],
            None,
            id="the volume mounted since",
        ),
        pytest.param(
            [SCHEDULED, SANDBOX, CHANGED],
            blocked("FailedCreatePodSandBox", SANDBOX["message"]),
            id="network",
            marks=pytest.mark.cause("pod-network"),
        ),
        pytest.param(
            [SCHEDULED, MOUNT, PULLING],
            Pending("Pulling", 'Pulling image "mover:1"'),
            id="mounted since",
            marks=pytest.mark.cause("image-being-pulled"),
        ),
        pytest.param([SCHEDULED, MOUNT, PULLING, PULLED], None, id="progress since"),
        pytest.param(
            [SCHEDULED, event("Pulled", "", 2, warning=False), MOUNT],
            blocked("FailedMount", NO_SECRET),
            id="same second",
        ),
    ],
)
def test_the_last_warning_of_a_pod_applies_until_it_makes_progress(
    events: list[JsonDict], cause: Pending | None
) -> None:
    assert find_pod_cause(events) == cause


CONTROLLER = "persistentvolume-controller"
PROVISIONER = "hostpath.csi.k8s.io_csi-0_1"
NO_CLASS = event("ProvisioningFailed", 'storageclass.storage.k8s.io "fast" not found', 1, by=CONTROLLER)
WAITS = event("ExternalProvisioning", "Waiting for a volume to be created", 2, warning=False, by=CONTROLLER)
BEGINS = event("Provisioning", "External provisioner is provisioning volume", 3, warning=False, by=PROVISIONER)
FULL_TEXT = 'failed to provision volume with StorageClass "fast": rpc error: code = ResourceExhausted desc = no space'
FULL = event("ProvisioningFailed", FULL_TEXT, 4, by=PROVISIONER)
AGAIN = event("Provisioning", "External provisioner is provisioning volume", 9, warning=False, by=PROVISIONER)
SERIES = {"lastObservedTime": "2026-11-21T12:01:00.5Z"}
SLOW = AGAIN | {"reason": "ProvisioningSlow", "type": "Warning", "series": SERIES}


@pytest.mark.parametrize(
    ("events", "cause"),
    [
        pytest.param([], None, id="none"),
        pytest.param([WAITS], Pending("ExternalProvisioning", WAITS["message"]), id="no provisioner"),
        pytest.param([NO_CLASS, WAITS], blocked("ProvisioningFailed", NO_CLASS["message"]), id="no class"),
        pytest.param([NO_CLASS, BEGINS], Pending("Provisioning", BEGINS["message"]), id="class created since"),
        pytest.param([BEGINS, FULL, AGAIN], blocked("ProvisioningFailed", FULL_TEXT), id="tried again"),
        pytest.param([{"type": "Warning", "reason": "x"}], blocked("x", ""), id="no message and no time"),
        pytest.param([BEGINS, FULL, SLOW], blocked("ProvisioningSlow", AGAIN["message"]), id="a series"),
    ],
)
def test_the_last_warning_of_a_pvc_applies_until_its_provisioner_starts(
    events: list[JsonDict], cause: Pending | None
) -> None:
    assert find_pvc_cause(events) == cause


DAY = timedelta(hours=24)


def stored(reason: str, first: int, last: int, skew: timedelta, *, warning: bool = True) -> JsonDict:
    """Return an Event as the API server stores it, of a component whose clock is ahead by `skew`.

    It was seen from second `first` to second `last`.
    """
    begin, end = NOON + timedelta(seconds=first), NOON + timedelta(seconds=last)
    return {
        "metadata": {"creationTimestamp": format_time(begin)},
        "type": "Warning" if warning else "Normal",
        "reason": reason,
        "message": "m",
        "firstTimestamp": format_time(begin + skew),
        "lastTimestamp": format_time(end + skew),
    }


@pytest.mark.parametrize("kubelet", [-DAY, timedelta(), DAY], ids=["kubelet behind", "kubelet right", "kubelet ahead"])
@pytest.mark.parametrize("other", [-DAY, timedelta(), DAY], ids=["other behind", "other right", "other ahead"])
def test_events_are_compared_by_the_clock_of_the_api_server(kubelet: timedelta, other: timedelta) -> None:
    scheduled = stored("Scheduled", 1, 1, other, warning=False)
    attached = stored("SuccessfulAttachVolume", 20, 20, other, warning=False)
    failed = Pending("FailedMount", "m", blocked=True)
    assert find_pod_cause([scheduled, stored("FailedMount", 3, 3, kubelet)]) == failed
    assert find_pod_cause([scheduled, stored("FailedMount", 3, 30, kubelet), attached]) == failed
    assert find_pod_cause([scheduled, stored("FailedMount", 3, 10, kubelet), attached]) is None
