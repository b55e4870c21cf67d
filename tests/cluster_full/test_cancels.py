"""A cancel in each phase, with a transfer of each kind: all end Canceled, and nothing is left."""

import pytest

from core.kube.resources import PODS
from tests.cluster.configuration import configured
from tests.cluster.processes import is_mover, of_pod, wait_for_one
from tests.cluster.scenes import wait_until
from tests.cluster_full.quartet import Quartet, wait_leaked
from tests.cluster_full.respawn import is_kubelet
from tests.testbed.api import Json
from tests.testbed.demonstration.manifests import NAMESPACE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def _expect_canceled(quartet: Quartet) -> None:
    for transfer in quartet.wait("Canceled").values():
        assert transfer["status"]["completionTimestamp"]
        assert "cancel" in transfer["status"]["message"]
        assert "snapshotID" not in transfer["status"]
    assert wait_leaked(quartet.bed) == []


def _build_first(quartet: Quartet, name: str) -> tuple[Quartet, Json]:
    """A DataUpload that takes what the quartet waits for, which is not made yet."""
    seed = quartet.seed
    first = Quartet(seed, name)
    seed.volume.take_snapshots([name])
    seed.bed.user.apply(*first.place.build(url=seed.gate.url))
    upload = seed.volume.upload(f"{seed.space}-{name}-du", snapshot=name, location=first.place.name)
    first.transfers = {"DataUpload": upload}
    return first, upload


def test_new(quartet: Quartet) -> None:
    """Another transfer takes all of the admission quota: its pod is made, and the kubelet does nothing with it."""
    bed = quartet.bed
    first, upload = _build_first(quartet, "quota")
    kubelet = wait_for_one("kubelet", is_kubelet("bed-1"))
    with configured(bed, loadConcurrency={"prepareQueueLength": 1}):
        kubelet.hold()
        try:
            bed.user.apply(upload)
            wait_until(bed, upload, "Accepted")
            quartet.make()
            quartet.wait("", "New")
            quartet.cancel()
            quartet.wait("Canceled")
        finally:
            kubelet.go_on()
        first.wait("Completed")
        first.remove()
    _expect_canceled(quartet)


def test_accepted(quartet: Quartet) -> None:
    """Their pods are made, and the kubelet does nothing with them."""
    bed = quartet.bed
    kubelet = wait_for_one("kubelet", is_kubelet("bed-1"))
    quartet.seed.gate.shut()
    quartet.reader.start()
    waits = "jsonpath={.status.initContainerStatuses[0].state.running.startedAt}"
    bed.user.wait(f"pod/{quartet.reader.name}", waits, namespace=quartet.seed.space, seconds=60)
    kubelet.hold()
    try:
        quartet.make()
        quartet.wait("Accepted")
        quartet.cancel()
        quartet.wait("Canceled")
    finally:
        kubelet.go_on()
    _expect_canceled(quartet)


def test_prepared(quartet: Quartet) -> None:
    """The only slot of their node is taken."""
    seed = quartet.seed
    seed.gate.shut()
    with configured(seed.bed, loadConcurrency={"globalConfig": 1}):
        first, upload = _build_first(quartet, "slot")
        seed.bed.user.apply(upload)
        wait_until(seed.bed, upload, "InProgress")
        pod = seed.bed.api.get(PODS, NAMESPACE, upload["metadata"]["name"]) or {}
        seed.gate.wait_held(pod["status"]["podIP"])
        quartet.make()
        quartet.wait("Prepared")
        quartet.cancel()
        quartet.wait("Canceled")
        seed.gate.open()
        first.wait("Completed")
        first.remove()
    _expect_canceled(quartet)


def test_inprogress(quartet: Quartet) -> None:
    quartet.hold()
    quartet.cancel()
    _expect_canceled(quartet)


def test_canceling(quartet: Quartet) -> None:
    """A canceled transfer may be deleted too, and a mover that hangs does not block that."""
    quartet.hold()
    movers = []
    for pod in quartet.pods().values():
        belongs = of_pod(pod)
        mover = wait_for_one("the mover", lambda each, belongs=belongs: is_mover(each) and belongs(each))  # type: ignore[misc]
        mover.hold()
        movers.append(mover)
    quartet.cancel()
    quartet.wait("Canceling")
    names = [f"{transfer['kind'].lower()}/{transfer['metadata']['name']}" for transfer in quartet.transfers.values()]
    quartet.bed.user.kubectl("delete", *names, "-n", NAMESPACE, "--wait=false")
    for mover in movers:
        mover.go_on()
    quartet.bed.user.kubectl("wait", "--for=delete", *names, "-n", NAMESPACE, "--timeout=90s")
    assert wait_leaked(quartet.bed) == []
