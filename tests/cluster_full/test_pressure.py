"""Movers that are lost to their node or the scheduler: no memory, a pod of a higher priority."""

import re

import pytest

from core.kube.resources import PODS, PRIORITY_CLASSES
from tests.cluster.configuration import configured
from tests.cluster.scenes import Place
from tests.cluster_full.quartet import Quartet, wait_leaked
from tests.support.objects import build_object
from tests.testbed.api import Json
from tests.testbed.demonstration.manifests import NAMESPACE
from tests.testbed.settings import PAUSE_IMAGE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

_LABELS = (
    "velero.io/data-upload",
    "velero.io/data-download",
    "velero.io/pod-volume-backup",
    "velero.io/pod-volume-restore",
)
_LIMITS = {"cpuRequest": "0", "cpuLimit": "0", "memoryRequest": "16Mi", "memoryLimit": "72Mi"}
"""Enough for a mover alone."""

_INTERRUPTED_SECONDS = 90


def _make_repository(quartet: Quartet) -> None:
    """Have the repository of their location ready before they are started."""
    repository = Place(quartet.bed, quartet.location).repository(quartet.site.space)
    quartet.bed.user.apply(repository)
    name = f"backuprepository/{repository['metadata']['name']}"
    quartet.bed.user.wait(name, "jsonpath={.status.phase}=Ready", namespace=NAMESPACE)


@pytest.mark.cause("out-of-memory")
def test_a_mover_that_gets_too_little_memory(quartet: Quartet) -> None:
    _make_repository(quartet)
    with configured(quartet.bed, podResources=_LIMITS, **{"nodeagent.io": {"retry": {"enabled": False}}}):
        quartet.start()
        quartet.wait("Failed")
        for each in quartet.transfers:
            status = each.last["status"]
            assert re.search("OOMKilled|out of memory", status["message"], re.IGNORECASE), f"{each.name}: {status}"
            assert "snapshotID" not in status
        assert wait_leaked(quartet.bed) == []


def test_its_next_attempts_get_more(quartet: Quartet) -> None:
    retry = {"initialBackoff": "1s", "oomMemoryFactor": 2}
    _make_repository(quartet)
    with configured(quartet.bed, podResources=_LIMITS, **{"nodeagent.io": {"retry": retry}}):
        quartet.start()
        quartet.wait("Completed")
        for each in quartet.transfers:
            assert set(each.causes) == {"OOMKilled"}, each.name
    assert wait_leaked(quartet.bed) == []


def test_a_pod_of_a_higher_priority(quartet: Quartet) -> None:
    quartet.hold()
    bed = quartet.bed
    bed.user.apply(build_object(PRIORITY_CLASSES, "before-movers", value=1000), _lone_pod())
    try:
        for each in quartet.transfers:
            each.wait_interrupted(seconds=_INTERRUPTED_SECONDS)
    finally:
        bed.user.kubectl("delete", "pod/lone", "priorityclass/before-movers", "--ignore-not-found")
    quartet.gate.open()
    quartet.wait("Completed")
    for each in quartet.transfers:
        # It may have preempted a second attempt, too: no node is free of movers while all four come back at once.
        assert set(each.causes) == {"Preempted"}, each.name
    assert wait_leaked(bed) == []


def _lone_pod() -> Json:
    terms = [
        {
            "labelSelector": {"matchExpressions": [{"key": label, "operator": "Exists"}]},
            "namespaces": [NAMESPACE],
            "topologyKey": "kubernetes.io/hostname",
        }
        for label in _LABELS
    ]
    spec = {
        "priorityClassName": "before-movers",
        "nodeSelector": {"kubernetes.io/hostname": "bed-1"},
        "terminationGracePeriodSeconds": 0,
        "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}},
        "containers": [{"name": "pause", "image": PAUSE_IMAGE, "imagePullPolicy": "IfNotPresent"}],
    }
    return build_object(PODS, "lone", "default", spec=spec)
