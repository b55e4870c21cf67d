"""Movers that are lost to their node or the scheduler: no memory, a pod of a higher priority."""

import json
import re

import pytest

from core.kube.resources import PODS, PRIORITY_CLASSES
from tests.cluster.configuration import configured
from tests.cluster_full.quartet import Quartet, wait_leaked
from tests.support.objects import build_object
from tests.testbed.api import Json
from tests.testbed.demonstration.manifests import NAMESPACE
from tests.testbed.processes import wait_for
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


def _interruptions(transfer: Json) -> list[Json]:
    attempts = json.loads((transfer.get("metadata", {}).get("annotations") or {}).get("nodeagent.io/attempts", "{}"))
    return list(attempts.get("interruptions", []))


def _expect_failed(quartet: Quartet, pattern: str) -> None:
    for kind, transfer in quartet.wait("Failed").items():
        assert re.search(pattern, transfer["status"]["message"], re.IGNORECASE), (
            f"{kind}: {transfer['status']['message']}"
        )
        assert "snapshotID" not in transfer["status"]
    assert wait_leaked(quartet.bed) == []


@pytest.mark.cause("out-of-memory")
def test_a_mover_that_gets_too_little_memory(quartet: Quartet) -> None:
    quartet.make_repository()
    with configured(quartet.bed, podResources=_LIMITS, **{"nodeagent.io": {"retry": {"enabled": False}}}):
        quartet.make()
        _expect_failed(quartet, "OOMKilled|out of memory")


def test_its_next_attempts_get_more(quartet: Quartet) -> None:
    retry = {"initialBackoff": "1s", "oomMemoryFactor": 2}
    quartet.make_repository()
    with configured(quartet.bed, podResources=_LIMITS, **{"nodeagent.io": {"retry": retry}}):
        quartet.make()
        for kind, transfer in quartet.wait("Completed").items():
            interruptions = _interruptions(transfer)
            assert interruptions, kind
            assert {each["cause"] for each in interruptions} == {"OOMKilled"}, kind
    assert wait_leaked(quartet.bed) == []


def test_a_pod_of_a_higher_priority(quartet: Quartet) -> None:
    quartet.hold()
    bed = quartet.bed
    bed.user.apply(build_object(PRIORITY_CLASSES, "before-movers", value=1000), _lone_pod())
    try:
        _wait_interrupted(quartet)
    finally:
        bed.user.kubectl("delete", "pod/lone", "priorityclass/before-movers", "--ignore-not-found")
    quartet.seed.gate.open()
    for kind, transfer in quartet.wait("Completed").items():
        # It may have preempted a second attempt, too: no node is free of movers while all four come back at once.
        assert {each["cause"] for each in _interruptions(transfer)} == {"Preempted"}, kind
    assert wait_leaked(bed) == []


def _wait_interrupted(quartet: Quartet) -> None:
    wait_for(
        lambda: f"interruptions: {quartet.read()}",
        lambda: all(map(_interruptions, quartet.read().values())),
        seconds=_INTERRUPTED_SECONDS,
    )


def _lone_pod() -> Json:
    """A pod with anti-affinity to movers."""
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
