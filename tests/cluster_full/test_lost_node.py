"""A node that is killed for good while movers move data, without retries. It comes last: the node does not come back.

`test_interruptions` has what is retried.
"""

from collections.abc import Iterator

import pytest

from core.kube.resources import PODS
from tests.cluster.bed import Bed
from tests.cluster.configuration import change
from tests.cluster.gate import HELD_BYTES, Gate, open_gate
from tests.cluster.scenes import RESTORE_UID, Place, Volume, build_pod_transfer
from tests.cluster.upkeep import Upkeep, open_upkeep
from tests.cluster_full.quartet import Seed, wait_all, wait_leaked
from tests.cluster_full.respawn import kill_node
from tests.support.objects import build_object
from tests.testbed.api import Json
from tests.testbed.demonstration.manifests import NAMESPACE, build_claim, build_container

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

_NODE, _OTHER = "bed-2", "bed-1"
_FAILED_SECONDS = 240
"""The node controller alone takes 50 s to set a lost node to not Ready."""

_DETACHED_SECONDS = 480
"""Kubernetes detaches volumes from a node that is gone after 6 minutes (kube-controller-manager, attach-detach
controller, maxWaitForUnmountDuration); until then their driver deletes neither them nor their snapshots."""

_WRITE = f"head -c {HELD_BYTES + (8 << 20)} /dev/urandom > /data/file && touch /data/done && exec sleep infinity"
_WAIT = f"until [ -e /data/.velero/{RESTORE_UID} ]; do sleep 1; done"


@pytest.fixture
def quick_to_fail(quick_to_notice: Bed) -> Bed:
    """Agents that soon notice the loss of a node, and retry nothing."""
    change(quick_to_notice, **{"nodeagent.io": {"retry": {"enabled": False}}})
    return quick_to_notice


@pytest.fixture
def held(quick_to_fail: Bed, seed: Seed) -> Iterator[list[Json]]:
    """A transfer of each kind whose mover is on the node, held while data moves."""
    bed, place = quick_to_fail, Place(quick_to_fail, f"{seed.space}-far")
    bed.user.apply(*place.build(url=seed.gate.url))
    pods = [_pod(seed, "far-writer"), _pod(seed, "far-reader", waits=True), _pod(seed, "far-source", claim="far")]
    target = seed.volume.target("far-target")
    target["spec"]["storageClassName"] = "bed-wait"
    bed.user.apply(_claim(seed, "far"), target, *pods, _pod(seed, "far-consumer", claim="far-target"))
    for name in ("far-writer", "far-source"):
        bed.user.wait(f"pod/{name}", "condition=Ready", namespace=seed.space, seconds=90)
    running = "jsonpath={.status.initContainerStatuses[0].state.running.startedAt}"
    bed.user.wait("pod/far-reader", running, namespace=seed.space, seconds=90)
    seed.gate.shut()
    bed.user.kubectl("cordon", _OTHER)
    transfers = _transfers(seed, place)
    bed.user.apply(*transfers)
    wait_all(bed, transfers, "InProgress")
    bed.user.kubectl("uncordon", _OTHER)
    movers = [bed.api.get(PODS, NAMESPACE, transfer["metadata"]["name"]) or {} for transfer in transfers]
    assert [mover["spec"]["nodeName"] for mover in movers] == [_NODE] * len(movers)
    seed.gate.wait_held(*(mover["status"]["podIP"] for mover in movers))
    yield transfers
    seed.gate.open()


@pytest.fixture
def upkeep_gate() -> Iterator[Gate]:
    with open_gate() as gate:
        yield gate
        gate.open()


@pytest.fixture
def upkeep(quick_to_fail: Bed, upkeep_gate: Gate) -> Iterator[Upkeep]:
    """A repository that an agent on the other node maintains, by a Job whose pod is held on the node."""
    with open_upkeep(quick_to_fail, upkeep_gate, node=_OTHER) as upkeep:
        upkeep.start()
        upkeep.wait_for_entry("Succeeded")
        there = {"nodeSelector": {"matchLabels": {"kubernetes.io/hostname": _NODE}}}
        upkeep.configure(keepLatestMaintenanceJobs=20, loadAffinity=[there])
        upkeep_gate.shut(passes_bytes=0)
        upkeep.make_due()
        pod = upkeep.pod_of(upkeep.wait_for_run())
        assert pod is not None
        assert pod["spec"]["nodeName"] == _NODE
        upkeep_gate.wait_held(pod["status"]["podIP"])
        yield upkeep


def _transfers(seed: Seed, place: Place) -> list[Json]:
    far = Volume(seed.bed, seed.space, "far")
    far.take_snapshots(["far"])
    upload = far.upload(f"{seed.space}-far-du", snapshot="far", location=place.name)
    upload["spec"]["csiSnapshot"]["storageClass"] = "bed-wait"
    kept = seed.kept["DataUpload"]["status"]["snapshotID"]
    download = seed.volume.download("far-target", snapshot_id=kept, location=seed.place.name)
    download["metadata"]["name"] = f"{seed.space}-far-dd"
    writer, reader = (seed.bed.api.get(PODS, seed.space, name) or {} for name in ("far-writer", "far-reader"))
    backup = build_pod_transfer("PodVolumeBackup", f"{seed.space}-far-writer", writer, location=place.name)
    restore = build_pod_transfer(
        "PodVolumeRestore",
        f"{seed.space}-far-reader",
        reader,
        location=seed.place.name,
        snapshotID=seed.kept["PodVolumeBackup"]["status"]["snapshotID"],
    )
    return [upload, download, backup, restore]


def _claim(seed: Seed, name: str) -> Json:
    claim = build_claim(seed.space, name, size="128Mi")
    claim["spec"]["storageClassName"] = "bed-wait"
    return claim


def _pod(seed: Seed, name: str, *, waits: bool = False, claim: str = "") -> Json:
    """A pod on the node whose volume `data` is filled, or is waiting for a restore."""
    mounts = [{"name": "data", "mountPath": "/data"}]
    probe = {"exec": {"command": ["test", "-e", "/data/done"]}, "periodSeconds": 1}
    container = build_container("app", ["sh", "-ec", _WRITE], readinessProbe=probe, volumeMounts=mounts)
    first = build_container("restore-wait", ["sh", "-ec", _WAIT], volumeMounts=mounts)
    volume: Json = {"persistentVolumeClaim": {"claimName": claim}} if claim else {"emptyDir": {}}
    spec = {
        "nodeSelector": {"kubernetes.io/hostname": _NODE},
        "terminationGracePeriodSeconds": 0,
        "initContainers": [first] if waits else [],
        "containers": [container],
        "volumes": [{"name": "data", **volume}],
    }
    return build_object(PODS, name, seed.space, spec=spec)


def test_its_transfers_and_maintenance_fail(
    held: list[Json], upkeep: Upkeep, upkeep_gate: Gate, quick_to_fail: Bed
) -> None:
    job, before = upkeep.wait_for_run(), len(upkeep.history)
    kill_node()
    ended = wait_all(quick_to_fail, held, "Failed", seconds=_FAILED_SECONDS)
    for kind, transfer in ended.items():
        assert _NODE in transfer["status"]["message"], f"{kind}: {transfer['status']['message']}"
        assert transfer["status"]["completionTimestamp"]
    # Its pods end when the administrator deletes the Node, because it will not come back.
    # Its maintenance may still write until then, so none follows.
    assert (len(upkeep.jobs), len(upkeep.history)) == (before + 1, before)
    quick_to_fail.user.kubectl("delete", "node", _NODE)
    upkeep.configure(keepLatestMaintenanceJobs=20)
    upkeep.wait("the end of the Job", lambda: len(upkeep.history) > before)
    entry = upkeep.history[before]
    assert (entry["result"], entry["startTimestamp"]) == ("Failed", job["metadata"]["creationTimestamp"])
    upkeep_gate.open()
    upkeep.wait_for_entry("Succeeded")
    assert wait_leaked(quick_to_fail, seconds=_DETACHED_SECONDS) == []
