"""One deletion at a time: who waits, and what a killed command leaves; transfers that cannot be read hold backups."""

import asyncio
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from client.backups.delete import DeletionWish, plan_deletion
from client.backups.deletion_jobs import hold_deletions
from client.backups.retention import DeletionError
from client.session import Session
from core.errors import ContractError
from core.kube.client import KubeClient
from core.kube.resources import JOBS, LEASES, PODS
from core.kube.transport import Retry
from tests.client.support.deletion_scene import DeletionScene
from tests.support.clock import LoopClock
from tests.support.fakekube import FakeKube
from tests.support.objects import JsonDict

pytestmark = pytest.mark.looptime

_DRY_RUN = ["delete-snapshots", "--dry-run"]


class _Scene:
    def __init__(self) -> None:
        self.kube = FakeKube()
        self.shown: list[str] = []

    @property
    def tools(self) -> Session:
        clock = LoopClock()
        client = KubeClient(self.kube, Retry(clock, attempts=1))
        return Session(client, clock, "velero", self.shown.append, self.shown.append)

    @property
    def holder(self) -> str:
        (lease,) = self.kube.objects(LEASES)
        return str(lease["spec"]["holderIdentity"])

    async def hold(self, seconds: float, began: list[float]) -> None:
        async with hold_deletions(self.tools):
            began.append(asyncio.get_running_loop().time())
            await asyncio.sleep(seconds)

    def put_job(self, name: str, args: list[str], phase: str = "Running") -> JsonDict:
        labels = {"nodeagent.io/snapshot-deletion": "default"}
        meta = {"name": name, "namespace": "velero", "labels": labels}
        spec = {"template": {"spec": {"containers": [{"name": "m", "args": args}]}}}
        self.kube.put({"apiVersion": "batch/v1", "kind": "Job", "metadata": meta, "spec": spec})
        pod = {"name": f"{name}-x", "namespace": "velero", "labels": {"job-name": name}}
        return self.kube.put({"apiVersion": "v1", "kind": "Pod", "metadata": pod, "status": {"phase": phase}})


async def test_a_second_command_waits_until_the_first_one_ends() -> None:
    scene, began = _Scene(), list[float]()
    async with asyncio.TaskGroup() as group:
        group.create_task(scene.hold(300, began), name="first")
        group.create_task(scene.hold(1, began), name="second")
    assert 300 <= began[1] - began[0] < 305
    assert scene.holder == ""
    assert scene.shown[0].startswith("waiting for another command that deletes backups: ")


async def test_an_outage_of_the_api_server_is_waited_for() -> None:
    scene, began = _Scene(), list[float]()
    scene.kube.fail_next("GET", "/leases/", "lost", times=10)
    await scene.hold(1, began)
    assert began[0] > 10


async def test_a_command_that_was_killed_keeps_the_next_one_waiting_for_a_minute_and_its_job_is_ended() -> None:
    scene, began = _Scene(), list[float]()
    now = "2026-11-21T12:00:00.000000Z"
    spec = {"holderIdentity": "gone", "leaseDurationSeconds": 60, "acquireTime": now, "renewTime": now}
    meta = {"name": "node-agent-backup-deletions", "namespace": "velero"}
    scene.kube.put({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": meta, "spec": spec})
    pod = scene.put_job("left", ["delete-snapshots"])
    scene.put_job("check", _DRY_RUN)

    async def end_pod() -> None:
        await asyncio.sleep(90)
        await scene.tools.client.delete(PODS, "velero", pod["metadata"]["name"])

    start = asyncio.get_running_loop().time()
    async with asyncio.TaskGroup() as group:
        group.create_task(end_pod(), name="pod")
        group.create_task(scene.hold(1, began), name="next")
    # The Lease is free after 60 s, and the pod is gone after 90.
    assert 90 <= began[0] - start < 95
    assert [one["metadata"]["name"] for one in scene.kube.objects(JOBS)] == ["check"]


async def test_a_pod_that_does_not_end_keeps_everything_from_being_deleted() -> None:
    scene = _Scene()
    scene.put_job("left", ["delete-snapshots"])
    with pytest.raises(DeletionError, match=r"nothing is deleted: Pod velero/left-x of Job left does not end"):
        await scene.hold(1, [])
    assert scene.holder == ""


async def test_a_lease_that_another_command_has_taken_stops_the_next_step() -> None:
    scene = _Scene()
    async with hold_deletions(scene.tools) as guard:
        await guard.confirm()
        await asyncio.sleep(600)
        guard.check()
        (lease,) = scene.kube.objects(LEASES)
        scene.kube.put(lease | {"spec": lease["spec"] | {"holderIdentity": "other"}})
        with pytest.raises(DeletionError, match="was lost, another command deletes: repeat the command"):
            await guard.confirm()
        await asyncio.sleep(60)
        with pytest.raises(DeletionError, match="was lost, another command may delete"):
            guard.check()


async def test_a_machine_that_slept_deletes_nothing_before_it_has_renewed_the_lease() -> None:
    scene, clock = _Scene(), LoopClock()
    async with hold_deletions(replace(scene.tools, clock=clock)) as guard:
        # Its monotonic clock stands still meanwhile.
        clock._skew = timedelta(minutes=1)
        with pytest.raises(DeletionError, match="was lost, another command may delete"):
            guard.check()
        await guard.confirm()
        guard.check()


async def test_a_command_that_never_ends_is_named_after_two_hours() -> None:
    scene = _Scene()
    async with hold_deletions(scene.tools), asyncio.timeout(timedelta(hours=3).total_seconds()):
        with pytest.raises(DeletionError, match=f"nothing is deleted: {scene.holder} has deleted backups for 2h0m0s"):
            await scene.hold(1, [])


@pytest.fixture
def scene() -> DeletionScene:
    """Four backups of a volume; three are expired."""
    scene = DeletionScene()
    for name, days in (("first", 9.0), ("second", 7.0), ("third", 5.0), ("last", 0.5)):
        scene.put_backup(name, days)
    return scene


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"status": {"phase": "Odd"}}, "DataUpload second-data cannot be read: invalid DataUpload velero/second-data"),
        ({"spec": {"sourceNamespace": "app/x"}}, "DataUpload second-data names no namespace of its volume: app/x"),
        ({"spec": {"backupStorageLocation": ""}}, "DataUpload second-data names no BackupStorageLocation"),
    ],
    ids=["phase", "namespace", "location"],
)
async def test_an_odd_transfer_holds_its_backup_alone(scene: DeletionScene, change: dict[str, Any], why: str) -> None:
    scene.change("second-data", **change)
    plan = await scene.check()
    ((kept, text),) = [(one.backup, one.holds[0].text) for one in plan.kept]
    assert (kept, text[: len(why)]) == ("second", why)
    with pytest.raises(DeletionError, match=f"backup second cannot be deleted: {why}"):
        await plan_deletion(scene.tools, DeletionWish("second"))
    await scene.execute(plan)
    assert scene.names() == {"second-data", "last-data"}
    assert scene.kube.bucket.keys() == {"s-second-data", "s-last-data"}


async def test_an_odd_newest_transfer_is_no_copy_of_the_volume(scene: DeletionScene) -> None:
    scene.change("last-data", status={"phase": "Odd"})
    plan = await plan_deletion(scene.tools)
    assert [one.backup for one in plan.deleted] == ["first", "second"]
    assert [one.holds[0].text for one in plan.kept] == ["it has the newest copy of app/data in default"]


async def test_a_restore_that_cannot_be_read_holds_everything(scene: DeletionScene) -> None:
    scene.put("DataDownload", "back", "velero.io/v2alpha1", spec={}, status={"phase": "Odd"})
    with pytest.raises(ContractError, match="invalid DataDownload velero/back"):
        await plan_deletion(scene.tools)
