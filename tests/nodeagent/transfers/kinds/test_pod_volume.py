"""PodVolumeBackups and PodVolumeRestores: what is particular to them, and their way to the end."""

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from core.kube.resources import BACKUP_STORAGE_LOCATIONS, PODS
from core.models.base import JsonDict
from core.models.reasons import FailureReason
from exposer.causes import CauseFinder
from exposer.pod_volume import PodVolumeExposer
from exposer.settings import ExposeSettings
from exposer.template import AgentTemplate
from nodeagent.metrics import Metrics
from nodeagent.transfers.kinds.base import Admission, AdmissionState, Kind
from nodeagent.transfers.kinds.pod_volume import PodVolumeBackupKind, PodVolumeRestoreKind
from tests.nodeagent.support.harness import accepted, open_world
from tests.nodeagent.support.simulation import Mover
from tests.nodeagent.support.transfers import NODE, pod_volume_backup, pod_volume_restore, workload_pod
from tests.support.clock import LoopClock
from tests.support.fakekube import FakeKube
from tests.support.objects import build_object

pytestmark = pytest.mark.looptime

TRANSFERS = {"PodVolumeBackup": pod_volume_backup, "PodVolumeRestore": pod_volume_restore}
BUILT_IN = frozenset({"velero", ""})
LOCATION = build_object(
    BACKUP_STORAGE_LOCATIONS, "default", "velero", spec={"provider": "aws", "objectStorage": {"bucket": "b"}}
)


def kind_of(name: str, kube: FakeKube, *, reachable: bool = True, names: frozenset[str] = BUILT_IN) -> Kind[Any]:
    client = kube.client
    exposer = PodVolumeExposer(client, CauseFinder(client, LoopClock()))
    settings = ExposeSettings(AgentTemplate("mover:1", host_pods="/host_pods" if reachable else ""))
    if name == "PodVolumeBackup":
        return PodVolumeBackupKind(exposer, lambda: settings, names)
    return PodVolumeRestoreKind(exposer, lambda: settings, names)


async def admission(transfer: JsonDict, *objects: JsonDict, reachable: bool = True) -> Admission:
    """Return what is said of `transfer` in a cluster that holds `objects`."""
    kube = FakeKube()
    for obj in objects:
        kube.put(obj)
    kind = kind_of(transfer["kind"], kube, reachable=reachable)
    return await kind.check_admission(kind.parse(transfer), kube.client)


@pytest.mark.parametrize("name", TRANSFERS)
async def test_a_transfer_goes_to_the_node_of_its_pod(name: str) -> None:
    transfer = TRANSFERS[name]()
    assert await admission(transfer, LOCATION, workload_pod(transfer)) == Admission(AdmissionState.READY, node=NODE)


@pytest.mark.parametrize("name", TRANSFERS)
@pytest.mark.cause("pod-volumes-off")
async def test_what_can_never_be_moved_fails_with_its_reason(name: str) -> None:
    transfer, restic = TRANSFERS[name](), TRANSFERS[name]()
    restic["spec"]["uploaderType"] = "restic"
    pod = workload_pod(transfer)
    answers = [
        await admission(restic, LOCATION, pod),
        await admission(transfer, LOCATION),
        await admission(transfer, LOCATION, pod, reachable=False),
    ]
    assert {answer.decision for answer in answers} == {AdmissionState.FAILED}
    assert [answer.message.partition(":")[0] for answer in answers] == [
        "restic is not supported",
        f"workload pod {pod['metadata']['namespace']}/writer is not available",
        "pod volumes are not accessible",
    ]


@pytest.mark.parametrize("setting", ["false", "true", "maybe"])
@pytest.mark.parametrize("kind", ["", "none", "Full", "incremental", "partly"])
@pytest.mark.cause("restore-type-unsupported")
async def test_a_restore_is_admitted_unless_its_type_or_setting_is_unknown(kind: str, setting: str) -> None:
    transfer = pod_volume_restore()
    transfer["spec"] |= {"restoreType": kind, "uploaderSettings": {"DeleteExtraFiles": setting}}
    found = (await admission(transfer, LOCATION, workload_pod(transfer))).reason
    unknown = kind == "partly" or (setting == "maybe" and kind not in {"", "none"})
    assert found == (FailureReason.RESTORE_TYPE_UNSUPPORTED if unknown else "")


@pytest.mark.cause("wrong-node")
async def test_a_backup_for_another_node_than_its_pods_fails() -> None:
    transfer = pod_volume_backup()
    answer = await admission(transfer, LOCATION, workload_pod(transfer, node="node-b"))
    expected = "workload pod app/writer runs on node node-b, and not on node-a"
    assert answer == Admission(AdmissionState.FAILED, FailureReason.WRONG_NODE, expected)


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([], ("WorkloadNotWaiting", True, False, None)),
        (
            [{"name": "restore-wait", "state": {"waiting": {"reason": "ErrImagePull"}}}],
            ("WorkloadNotStarting", False, True, timedelta(minutes=2)),
        ),
    ],
    ids=["not started", "cannot start"],
)
async def test_a_restore_waits_for_its_pod_without_end_unless_that_cannot_start(
    states: list[JsonDict], expected: tuple[object, ...]
) -> None:
    transfer = pod_volume_restore()
    status = {"phase": "Pending", "initContainerStatuses": states}
    answer = await admission(transfer, LOCATION, workload_pod(transfer, status=status))
    assert (answer.reason, answer.indefinite, answer.blocked, answer.limit) == expected
    assert answer.pod is not None


async def test_the_node_of_a_transfer_is_known_before_it_is_exposed() -> None:
    kube = FakeKube()
    backup, restore = pod_volume_backup(), pod_volume_restore()
    kube.put(workload_pod(restore, node="node-c"))
    nodes = [
        await (k := kind_of(transfer["kind"], kube)).read_node(k.parse(transfer)) for transfer in (backup, restore)
    ]
    assert nodes == [backup["spec"]["node"], "node-c"]


@pytest.mark.parametrize(("names", "ours"), [({""}, True), ({"velero"}, True), ({"other"}, False)])
def test_pod_volumes_are_the_built_in_movers(names: set[str], ours: bool) -> None:
    for name, make in TRANSFERS.items():
        kind = kind_of(name, FakeKube(), names=frozenset(names))
        assert kind.managed(kind.parse(make())) is ours


async def test_a_backup_is_counted_as_velero_counts_it() -> None:
    metrics = Metrics(NODE)
    owner = {"apiVersion": "velero.io/v1", "kind": "Backup", "name": "b1", "uid": "uid-of-b1"}
    backup = accepted(pod_volume_backup(ownerReferences=[owner]))
    async with open_world(backup, mover=Mover(seconds=4.5)) as world, world.agent(metrics=metrics):
        await world.until(lambda: world.phase("PodVolumeBackup") == "InProgress")
        begun = metrics.render().decode()
        await world.until(lambda: world.done("PodVolumeBackup"))
    done = metrics.render().decode()
    count = 'podVolume_pod_volume_backup_{}_count{{node="node-a"}} {}'
    assert count.format("enqueue", "1.0") in begun
    assert count.format("dequeue", "0.0") in begun
    assert count.format("dequeue", "1.0") in done
    labels = 'backupName="velero/b1",node="node-a",operation="pvb-1-default-app-kopia-backup",pod_volume_backup="pvb-1"'
    gauge = f"podVolume_pod_volume_operation_latency_seconds_gauge{{{labels}}}"
    (line,) = [row for row in done.splitlines() if row.startswith(gauge)]
    assert float(line.split()[-1]) in {4.0, 5.0}


@pytest.mark.parametrize("phase", ["Accepted", "Prepared", "InProgress"])
@pytest.mark.parametrize("name", TRANSFERS)
async def test_a_transfer_fails_when_its_workload_goes(name: str, phase: str) -> None:
    """An empty volume must not become a good backup, nor pass for a filled one."""
    transfer = accepted(TRANSFERS[name]())
    ref = transfer["spec"]["pod"]
    async with open_world(transfer, mover=Mover(seconds=5, starts=phase != "Accepted")) as world:
        async with world.agent(slots=0 if phase == "Prepared" else 1):
            await world.until(lambda: world.phase(name) == phase)
            await world.cluster.client.delete(PODS, ref["namespace"], ref["name"])
        # A new agent has a slot for it.
        async with world.agent():
            await world.until(lambda: world.done(name))
    status = world.transfer(name)["status"]
    expected = f"workload pod {ref['namespace']}/writer is not available: it does not exist"
    assert (status["phase"], status["message"]) == ("Failed", expected)
    assert world.left() == {}


@pytest.mark.parametrize("name", TRANSFERS)
async def test_a_transfer_that_waits_for_a_slot_sees_within_ten_seconds_that_its_workload_is_gone(name: str) -> None:
    transfer = accepted(TRANSFERS[name]())
    ref = transfer["spec"]["pod"]
    async with open_world(transfer) as world, world.agent(slots=0):
        await world.until(lambda: world.phase(name) == "Prepared")
        await asyncio.sleep(60)
        await world.cluster.client.delete(PODS, ref["namespace"], ref["name"])
        await world.until(lambda: world.phase(name) == "Failed", seconds=10)
    assert (
        world.transfer(name)["status"]["message"]
        == f"workload pod {ref['namespace']}/writer is not available: it does not exist"
    )


@pytest.mark.parametrize(
    ("phase", "end"), [("Accepted", "Failed"), ("Prepared", "Failed"), ("InProgress", "Completed")]
)
async def test_a_restore_does_not_start_in_a_pod_that_no_longer_waits(phase: str, end: str) -> None:
    """People create the done file by hand: the application would run on files that are being replaced."""
    transfer = accepted(pod_volume_restore())
    state = {"name": "restore-wait", "state": {"terminated": {"exitCode": 0}}}
    status = {"phase": "Running", "initContainerStatuses": [state]}
    async with open_world(transfer, mover=Mover(starts=phase != "Accepted")) as world:
        async with world.agent(slots=0 if phase == "Prepared" else 1):
            await world.until(lambda: world.phase("PodVolumeRestore") == phase)
            world.kube.put(workload_pod(transfer, status=status))
        async with world.agent():
            await world.until(lambda: world.done("PodVolumeRestore"))
    assert (world.phase("PodVolumeRestore"), "Started" in world.reasons()) == (end, end == "Completed")


async def test_the_message_of_the_mover_is_reported_beside_the_cause() -> None:
    transfer = accepted(pod_volume_backup())
    mover = Mover(seconds=3, exit_code=11, message="cannot read /uid/file")
    async with open_world(transfer, mover=mover) as world, world.agent():
        await world.until(lambda: world.phase("PodVolumeBackup") == "InProgress")
        await world.cluster.client.delete(PODS, "app", "writer")
        await world.until(lambda: world.done("PodVolumeBackup"))
    assert world.transfer("PodVolumeBackup")["status"]["message"] == (
        "workload pod app/writer is not available: it does not exist; the data mover reported: cannot read /uid/file"
    )
