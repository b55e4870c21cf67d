"""A cancel in each phase, with a transfer of each kind: all end Canceled, and nothing is left."""

import pytest

from tests.cluster.configuration import configured
from tests.cluster.followed import Followed
from tests.cluster.processes import is_mover, of_pod, wait_for_one
from tests.cluster_full.quartet import Quartet, wait_leaked
from tests.cluster_full.respawn import is_kubelet
from tests.testbed.demonstration.manifests import NAMESPACE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def _expect_canceled(quartet: Quartet) -> None:
    quartet.wait("Canceled")
    for each in quartet.transfers:
        status = each.last["status"]
        assert status["completionTimestamp"]
        assert "cancel" in status["message"]
        assert "snapshotID" not in status
    assert wait_leaked(quartet.bed) == []


def _build_first(quartet: Quartet, name: str) -> Followed:
    """A DataUpload that takes what the quartet waits for."""
    return quartet.site.upload(name, location=quartet.site.open_place(name))


def test_new(quartet: Quartet) -> None:
    """Another transfer takes all of the admission quota: its pod is made, and the kubelet does nothing with it."""
    first, kubelet = _build_first(quartet, "quota"), wait_for_one("kubelet", is_kubelet("bed-1"))
    with configured(quartet.bed, loadConcurrency={"prepareQueueLength": 1}):
        kubelet.hold()
        try:
            first.start()
            first.wait_phase("Accepted")
            quartet.start()
            quartet.wait("", "New")
            quartet.cancel()
            quartet.wait("Canceled")
        finally:
            kubelet.go_on()
        first.wait_phase("Completed")
        quartet.site.remove([first], first.transfer["spec"]["backupStorageLocation"])
    _expect_canceled(quartet)


def test_accepted(quartet: Quartet) -> None:
    """Their pods are made, and the kubelet does nothing with them."""
    kubelet = wait_for_one("kubelet", is_kubelet("bed-1"))
    quartet.gate.shut()
    kubelet.hold()
    try:
        quartet.start()
        quartet.wait("Accepted")
        quartet.cancel()
        quartet.wait("Canceled")
    finally:
        kubelet.go_on()
    _expect_canceled(quartet)


def test_prepared(quartet: Quartet) -> None:
    """The only slot of their node is taken."""
    first = _build_first(quartet, "slot")
    quartet.gate.shut()
    with configured(quartet.bed, loadConcurrency={"globalConfig": 1}):
        first.start()
        first.wait_phase("InProgress")
        quartet.gate.wait_held(first.pod()["status"]["podIP"])
        quartet.start()
        quartet.wait("Prepared")
        quartet.cancel()
        quartet.wait("Canceled")
        quartet.gate.open()
        first.wait_phase("Completed")
        quartet.site.remove([first], first.transfer["spec"]["backupStorageLocation"])
    _expect_canceled(quartet)


def test_inprogress(quartet: Quartet) -> None:
    quartet.hold()
    quartet.cancel()
    _expect_canceled(quartet)


def test_canceling(quartet: Quartet) -> None:
    """A canceled transfer may be deleted too, and a mover that hangs does not block that."""
    quartet.hold()
    movers = []
    for pod in quartet.pods():
        belongs = of_pod(pod)
        mover = wait_for_one("the mover", lambda each, belongs=belongs: is_mover(each) and belongs(each))  # type: ignore[misc]
        mover.hold()
        movers.append(mover)
    quartet.cancel()
    quartet.wait("Canceling")
    names = [f"{each.transfer['kind'].lower()}/{each.name}" for each in quartet.transfers]
    quartet.bed.user.kubectl("delete", *names, "-n", NAMESPACE, "--wait=false")
    for mover in movers:
        mover.go_on()
    quartet.bed.user.kubectl("wait", "--for=delete", *names, "-n", NAMESPACE, "--timeout=90s")
    assert wait_leaked(quartet.bed) == []
