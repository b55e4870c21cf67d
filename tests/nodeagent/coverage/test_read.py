"""What is read of PVCs and schedules for coverage, with and without permission."""

import pytest

from core.kube.errors import UnreachableError
from core.models.names import SCHEDULE_COMMAND, SCHEDULE_LABEL
from nodeagent.coverage.read import PlannedVolumes, VolumeReader
from nodeagent.coverage.states import CoverageState, build_coverage
from tests.nodeagent.coverage.test_states import NOW
from tests.nodeagent.support.volume_scene import a_claim, a_pod, a_schedule, a_volume, an_object
from tests.support.fakekube import FakeKube
from tests.support.objects import JsonDict

pytestmark = pytest.mark.looptime


def a_server(*flags: str) -> JsonDict:
    container = {"name": "velero", "command": ["/velero", "server", "--features", "X,EnableCSI"], "args": [*flags]}
    spec = {"template": {"spec": {"containers": [container]}}}
    return an_object("Deployment", "velero", "velero", "apps/v1", spec=spec)


def a_cron_job(name: str, *words: str, schedule: str = "@daily", **more: object) -> JsonDict:
    pod = {"containers": [{"name": "x", "args": [SCHEDULE_COMMAND, name, *words]}]}
    spec = {"schedule": schedule, "jobTemplate": {"spec": {"template": {"spec": pod}}}} | more
    return an_object("CronJob", name, "velero", "batch/v1", labels={SCHEDULE_LABEL: name}, spec=spec)


def a_kube(*objects: JsonDict) -> FakeKube:
    kube = FakeKube()
    for one in (an_object("Namespace", "app"), a_claim("data"), a_claim("logs", labels={"tier": "web"}), *objects):
        kube.put(one)
    return kube


async def read(kube: FakeKube) -> PlannedVolumes:
    return (await VolumeReader(kube.client, "velero", lambda: NOW).read()).plan(())


async def expected(kube: FakeKube) -> dict[str, str]:
    """Return what expects backups of each volume."""
    found = await read(kube)
    assert found.notes == ()
    return {plan.key[1]: plan.by for plan in found.plans or ()}


@pytest.mark.parametrize(
    ("words", "chosen"),
    [
        (["--pvc=app/data", "--pvc=app/gone", "--method=auto"], {"data"}),
        (["--pvc", "data", "-n", "app"], {"data"}),
        (["--namespace=app", "--selector="], {"data", "logs"}),
        (["--namespace=app", "--selector=tier in (web)", "--ttl=720h"], {"logs"}),
        (["--namespace=db", "--selector="], set()),
    ],
    ids=["names", "names of a namespace", "all", "labels", "another namespace"],
)
async def test_a_schedule_of_ours_expects_backups_of_what_it_chooses(words: list[str], chosen: set[str]) -> None:
    found = await expected(a_kube(a_cron_job("night", *words)))
    assert {name for name, by in found.items() if by == "schedule night"} == chosen


async def test_the_last_run_of_schedules_is_read() -> None:
    ran = "2026-11-20T02:00:00Z"
    ours = a_cron_job("night", "--pvc=app/data") | {"status": {"lastScheduleTime": ran}}
    theirs = a_schedule("lab", labelSelector={"matchLabels": {"tier": "web"}}, snapshotMoveData=True)
    found = await read(a_kube(a_server(), ours, theirs | {"status": {"lastBackup": ran}}))
    reasons = [one.reason for one in build_coverage(found.plans, (), NOW).volumes]
    assert [reason.partition("; ")[2] for reason in reasons] == ["last run 34h ago"] * 2


async def test_the_flags_of_the_server_and_its_policies_count() -> None:
    flags = ("--default-snapshot-move-data", "--global-backup-volume-policies-configmap", "everywhere")
    skip = "version: v1\nvolumePolicies: [{conditions: {pvcLabels: {tier: web}}, action: {type: skip}}]"
    policies = an_object("ConfigMap", "everywhere", "velero", data={"p": skip})
    kube = a_kube(a_server(*flags), policies, a_schedule("night"), a_volume("data"))
    assert await expected(kube) == {"data": "Schedule night", "logs": ""}
    for more in (("--default-snapshot-move-data=false",), ("--default-snapshot-move-data", "--features=")):
        kube.put(a_server(*more))
        assert await expected(kube) == {"data": "", "logs": ""}


async def test_fs_backup_of_pods_is_read() -> None:
    volumes = [{"name": "tmp", "emptyDir": {}}]
    pod = a_pod("web-0", claims=["data"], volumes=volumes, annotations={"backup.velero.io/backup-volumes": "tmp"})
    kube = a_kube(a_server(), pod, a_schedule("night"))
    assert await expected(kube) == {"data": "", "logs": "", "web-0:tmp": "Schedule night"}


@pytest.mark.parametrize(
    ("objects", "reason"),
    [
        ([a_schedule("night")], "there is no Velero server in namespace velero"),
        ([a_server(), a_schedule("night", paused=True)], "it is paused"),
        ([a_server(), a_schedule("night", "never")], "its cron expression is invalid"),
        (
            [a_server(), a_schedule("night", resourcePolicy={"kind": "ConfigMap", "name": "p"})],
            "the server rejects its Backups: ConfigMap p of its volume policies does not exist",
        ),
        (
            [
                a_server(),
                an_object("ConfigMap", "p", "velero", data={"p": "version: v3"}),
                a_schedule("night", resourcePolicy={"kind": "configmap", "name": "p"}),
            ],
            'the server rejects its Backups: volume policies in ConfigMap p: version "v3" is not v1',
        ),
        ([a_server(), a_schedule("night", includedNamespaces=["a", "*"])], "the server rejects its Backups: "),
        (
            [a_server("--global-backup-volume-policies-configmap=all"), a_schedule("night")],
            "the server rejects its Backups: ConfigMap all of its volume policies does not exist",
        ),
        (
            [
                a_server(),
                an_object("ConfigMap", "p", "velero", data={"p": "version: v1\nincludeExcludePolicy: {}"}),
                a_schedule("night", resourcePolicy={"kind": "configmap", "name": "p"}, includedResources=["*"]),
            ],
            "the server rejects its Backups: it has older filters of resources",
        ),
        ([a_cron_job("night", "--pvc=app/data", "--pvc=app/logs", suspend=True)], "it is suspended"),
    ],
    ids=[
        "no server",
        "paused",
        "cron",
        "no policies",
        "invalid policies",
        "invalid",
        "no global policies",
        "filters",
        "suspended",
    ],
)
async def test_a_schedule_that_does_not_run_expects_nothing(objects: list[JsonDict], reason: str) -> None:
    found = await read(a_kube(*objects))
    coverage = build_coverage(found.plans, (), NOW, found.notes)
    assert [one.state for one in coverage.volumes] == [CoverageState.NEVER_BACKED_UP] * 2
    assert all(f"night does not run: {reason}" in one.reason for one in coverage.volumes)


@pytest.mark.parametrize(
    ("path", "note"),
    [
        ("/persistentvolumeclaims", "PVCs cannot be read, so volumes that were never backed up are not known"),
        ("/api/v1/namespaces?", "Namespaces cannot be read, so those that are left out are not known"),
        ("/cronjobs", "CronJobs cannot be read, so schedules of nodeagent schedule are not known"),
        ("/schedules", "Schedules cannot be read, so what Velero is to back up is not known"),
        ("/deployments", "Deployments cannot be read, so the defaults of the Velero server are not known"),
        ("/pods", "Pods cannot be read, so volumes of pods, and whether fs-backup covers a PVC, are not known"),
        ("/persistentvolumes", "PersistentVolumes cannot be read, so they are taken for volumes of CSI drivers"),
        ("/configmaps/p", "ConfigMap p cannot be read, so volume policies in it are not known"),
    ],
)
async def test_what_may_not_be_read_is_named(path: str, note: str) -> None:
    policies = {"kind": "ConfigMap", "name": "p"}
    kube = a_kube(a_server(), a_schedule("night", snapshotMoveData=True, resourcePolicy=policies))
    kube.put(an_object("ConfigMap", "p", "velero", data={"p": "version: v1"}))
    kube.fail_next("GET", path.rstrip("?"), 403, times=1)
    found = await read(kube)
    assert len(found.notes) == 1
    assert found.notes[0].startswith(note)
    assert (found.plans is None) is (path == "/persistentvolumeclaims")
    unknown = [one.reason for one in build_coverage(found.plans, (), NOW).volumes if "is not known" in one.reason]
    assert len(unknown) == 2 * (path == "/schedules")


async def test_an_object_that_cannot_be_read_is_named() -> None:
    kube = a_kube(a_server(), a_schedule("night", includedNamespaces="app"), a_cron_job("bad", "-n"))
    found = await read(kube)
    reasons = {one.reason for one in build_coverage(found.plans, (), NOW).volumes}
    assert (len(found.plans or ()), reasons) == (2, {"whether a schedule backs it up is not known"})
    assert [note.partition(":")[0] for note in sorted(found.notes)] == [
        "CronJob velero/bad cannot be read",
        "Schedule velero/night cannot be read",
    ]


async def test_what_a_transfer_moves_is_no_volume_of_a_workload() -> None:
    owner = {"apiVersion": "velero.io/v2alpha1", "kind": "DataUpload", "name": "du", "uid": "u"}
    theirs = a_claim("theirs")
    theirs["metadata"]["ownerReferences"] = [owner]
    kept = a_claim("kept")
    kept["metadata"]["ownerReferences"] = [owner | {"apiVersion": "apps/v1", "kind": "StatefulSet"}]
    kube = a_kube(theirs, kept, a_claim("ours", labels={"nodeagent.io/owner-uid": "u"}))
    assert set(await expected(kube)) == {"data", "logs", "kept"}


async def test_a_cluster_that_does_not_answer_is_an_error() -> None:
    kube = a_kube()
    kube.fail_next("GET", "/", "lost", times=99)
    with pytest.raises(UnreachableError):
        await read(kube)
