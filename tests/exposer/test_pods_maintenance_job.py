"""Maintenance Jobs: Velero's own for the same ConfigMap, less the differences that are listed here."""

import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from msgspec import structs

from core.contract import VolumeMode
from core.kube.types import NodeRequirement, PodToleration, VolumeSource
from core.models.names import (
    EXCLUDE_LABEL,
    MAINTENANCE_CONTAINER,
    OWNER_UID_LABEL,
    REPO_NAME_LABEL,
    SNAPSHOT_DELETION_LABEL,
    SNAPSHOT_FILES_LABEL,
    SNAPSHOT_LIST_LABEL,
    SNAPSHOT_REPORT_LABEL,
    SNAPSHOT_VERIFICATION_LABEL,
    label_value,
)
from core.models.storage import BackupRepository, RepositoryKey
from core.mover_specs import (
    DeleteSnapshots,
    ListFiles,
    ListSnapshots,
    MaintainRepository,
    ReportSnapshots,
    SendFiles,
    VerifySnapshots,
)
from exposer.model import Owner
from exposer.pod_manifest import MoverVolume
from exposer.pod_status import parse_pod_end
from exposer.pods import JobSettings, MaintenanceRun, build_command_job, build_maintenance_job, is_reserved_label
from exposer.settings import ExposeSettings, MoverOptions, PodSettings, RepositoryMount, StorageAccess
from nodeagent.config.repositories import parse_maintenance
from tests.exposer.support.inputs import POD_SETTINGS, template
from tests.exposer.test_pods_velero import flat
from tests.support.golden import RECORDINGS, assert_golden
from tests.support.objects import JsonDict

_LEFT_OUT: Final = {EXCLUDE_LABEL: "true"}
_FOLDER: Final = RECORDINGS / "maintenance"
NAME: Final = "app1-default-kopia-maintain-job-1795331160000"
POD: Final = "spec.template.spec"
CONTAINER: Final = f"{POD}.containers[{MAINTENANCE_CONTAINER}]"
_AFFINITY: Final = f"{POD}.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0]"

_STORED: Final = (
    "metadata.creationTimestamp",
    "metadata.generation",
    "metadata.resourceVersion",
    "metadata.uid",
    "status",
    # Defaults and admission: the recordings have the Jobs as the API server stored them.
    "spec.completionMode",
    "spec.completions",
    "spec.manualSelector",
    "spec.parallelism",
    "spec.podReplacementPolicy",
    "spec.selector",
    "spec.suspend",
    "spec.template.metadata.labels.batch.kubernetes.io/",
    "spec.template.metadata.labels.controller-uid",
    "spec.template.metadata.labels.job-name",
    f"{POD}.dnsPolicy",
    f"{POD}.schedulerName",
    f"{POD}.serviceAccount",
    f"{CONTAINER}.terminationMessagePath",
)


def _recorded(name: str, index: int = 0) -> JsonDict:
    job: JsonDict = json.loads((_FOLDER / f"{name}.json").read_text())["items"][index]
    return job


OWNER: Final = Owner.of(BackupRepository.parse(_recorded("backuprepository-two-entries")))
_KEY: Final = RepositoryKey("app1", "default")
SPEC: Final = MaintainRepository(job=NAME, verify_blobs=100_000)


def expose(**changes: Any) -> ExposeSettings:
    """The settings of an agent whose DaemonSet has what the recorded Deployment had: no labels, no annotations."""
    plain = replace(template(tolerations=[]), labels={}, annotations={})
    return ExposeSettings(**({"template": plain} | changes))


def run(settings: JobSettings | None = None, **changes: Any) -> MaintenanceRun:
    storage = StorageAccess(inherits_credentials=True)
    return replace(MaintenanceRun(OWNER, NAME, settings or JobSettings(), storage), **changes)


def differences(theirs: JsonDict, mine: JsonDict) -> dict[str, tuple[Any, Any]]:
    """Return the flat leaves that differ, without the API server's additions: path to (Velero's, ours)."""
    found = {}
    for path in sorted(theirs.keys() | mine.keys()):
        pair = tuple(None if leaf in ({}, []) else leaf for leaf in (theirs.get(path), mine.get(path)))
        if pair[0] != pair[1] and not path.startswith(_STORED):
            found[path] = (pair[0], pair[1])
    return found


_ENV: Final = f"{CONTAINER}.env"
_MOUNTS: Final = f"{CONTAINER}.volumeMounts"
_VOLUMES: Final = f"{POD}.volumes"

LISTED: Final[dict[str, tuple[Any, Any]]] = {
    # The program is ours, in the image of the agent.
    f"{CONTAINER}.command": (["/velero"], ["python", "-m", "datamover"]),
    f"{CONTAINER}.args": (
        [
            "repo-maintenance",
            "--repo-name=app1",
            "--repo-type=kopia",
            "--backup-storage-location=default",
            "--log-level=info",
            "--log-format=text",
        ],
        [
            "maintain-repository",
            "--backup-repository=app1-default-kopia",
            "--resource-timeout=10m0s",
            "--log-level=info",
            "--log-format=text",
            f"--job={NAME}",
            "--verify-blobs=100000",
        ],
    ),
    f"{CONTAINER}.image": ("docker.io/velero/velero:v1.18.2", "velero/velero:v1.18.2"),
    # The slot instead of the time. Whose Job it is.
    f"metadata.labels.{OWNER_UID_LABEL}": (None, OWNER.uid),
    # A Velero backup of the namespace leaves the pod out.
    f"spec.template.metadata.labels.{EXCLUDE_LABEL}": (None, "true"),
    # The leader adds it to the Job once its pod runs: a server waits for each Job that has it.
    f"metadata.labels.{REPO_NAME_LABEL}": ("app1-default-kopia", None),
    f"spec.template.metadata.labels.{REPO_NAME_LABEL}": ("app1-default-kopia", None),
    # A run ends by itself.
    f"{POD}.activeDeadlineSeconds": (None, 21_600),
    "spec.activeDeadlineSeconds": (None, 22_500),
    # The confinement of every mover pod, whose image is for Linux.
    f"{POD}.securityContext.runAsUser": (None, 0),
    f"{POD}.securityContext.seccompProfile.type": (None, "RuntimeDefault"),
    f"{CONTAINER}.securityContext.allowPrivilegeEscalation": (None, False),
    f"{CONTAINER}.securityContext.capabilities.drop": (None, ["ALL"]),
    f"{CONTAINER}.securityContext.capabilities.add": (
        None,
        ["CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "SYS_CHROOT"],
    ),
    f"{CONTAINER}.securityContext.readOnlyRootFilesystem": (None, True),
    f"{_MOUNTS}[cloud-credentials].readOnly": (None, True),
    f"{POD}.os.name": (None, "linux"),
    # Inherited from the DaemonSet, which has no plugins, instead of the server's Deployment.
    f"{_ENV}[NODE_NAME].name": (None, "NODE_NAME"),
    f"{_ENV}[NODE_NAME].valueFrom.fieldRef.apiVersion": (None, "v1"),
    f"{_ENV}[NODE_NAME].valueFrom.fieldRef.fieldPath": (None, "spec.nodeName"),
    f"{_ENV}[LD_LIBRARY_PATH].name": ("LD_LIBRARY_PATH", None),
    f"{_ENV}[LD_LIBRARY_PATH].value": ("/plugins", None),
    f"{_MOUNTS}[plugins].name": ("plugins", None),
    f"{_MOUNTS}[plugins].mountPath": ("/plugins", None),
    f"{_VOLUMES}[plugins].name": ("plugins", None),
    # Temporary files and the cache do not fill the node.
    f"{_VOLUMES}[scratch].emptyDir.sizeLimit": (None, "8Gi"),
}
"""The differences of every Job: path to (Velero's, ours)."""


def listed(requirements: int, name: str) -> dict[str, tuple[Any, Any]]:
    """Return the differences of a Job whose nodes must meet so many requirements by its ConfigMap."""
    path = f"{_AFFINITY}.matchExpressions[{requirements}]"
    not_windows = {"key": "kubernetes.io/os", "operator": "NotIn", "values": ["windows"]}
    added = {f"{path}.{key}": (None, leaf) for key, leaf in not_windows.items()}
    return LISTED | {"metadata.name": (name, NAME)} | added


def test_a_job_without_a_config_map_is_veleros_as_listed() -> None:
    velero = _recorded("job-running")
    ours = build_maintenance_job(run(), expose(), SPEC)
    assert differences(flat(velero), flat(ours)) == listed(0, velero["metadata"]["name"])


def test_a_job_by_the_recorded_config_map_is_veleros_as_listed() -> None:
    config_map = yaml.safe_load((_FOLDER / "configmap.yaml").read_text())
    velero = _recorded("jobs-second-running", -1)
    settings = parse_maintenance(config_map).settings_for(_KEY)
    ours = build_maintenance_job(run(settings.job), expose(), SPEC)
    assert differences(flat(velero), flat(ours)) == listed(1, velero["metadata"]["name"])
    assert settings.keep_jobs == 2


def test_what_the_deployment_of_velero_passes_on_the_daemonset_passes_on() -> None:
    tolerations = [
        {"key": "CriticalAddonsOnly", "operator": "Exists"},
        {"key": "kubernetes.azure.com/scalesetpriority", "operator": "Equal", "value": "spot"},
        {"key": "dedicated", "operator": "Exists"},
    ]
    inherited = template(tolerations=tolerations, imagePullSecrets=[{"name": "pull"}], priorityClassName="agents")
    spec = build_maintenance_job(run(), expose(template=inherited), SPEC)["spec"]["template"]
    assert spec["metadata"] == {
        "name": "velero-repo-maintenance-pod",
        "labels": {"azure.workload.identity/use": "true"} | _LEFT_OUT,
        "annotations": {"iam.amazonaws.com/role": "mover"},
    }
    windows = {"key": "os", "operator": "Equal", "value": "windows", "effect": "NoSchedule"}
    assert spec["spec"]["tolerations"] == [*tolerations[:2], windows]
    assert spec["spec"]["imagePullSecrets"] == [{"name": "pull"}]
    assert "priorityClassName" not in spec["spec"]


def test_of_the_configuration_of_movers_their_account_and_tolerations_apply() -> None:
    toleration: PodToleration = {"key": "storage", "operator": "Exists", "effect": "NoSchedule"}
    pod = replace(POD_SETTINGS, service_account="movers", tolerations=(toleration,))
    own: PodToleration = {"key": "maintenance", "operator": "Exists"}
    job = build_maintenance_job(run(settings=JobSettings(tolerations=(own,))), expose(pod=pod), SPEC)
    spec = job["spec"]["template"]["spec"]
    assert spec["serviceAccountName"] == "movers"
    assert toleration in spec["tolerations"]
    assert spec["tolerations"][-1] == own
    assert job["spec"]["template"]["metadata"]["labels"] == _LEFT_OUT
    assert job["spec"]["template"]["metadata"]["annotations"] == {}
    assert "priorityClassName" not in spec
    assert "resources" not in spec["containers"][0]


def test_a_configured_label_never_overwrites_a_reserved_one() -> None:
    """Garbage collection would delete a pod with the label of an owner; Kubernetes an owned Job, unfinished."""
    reserved = [REPO_NAME_LABEL, "velero.io/data-upload", OWNER_UID_LABEL]
    reserved += ["job-name", "controller-uid", "batch.kubernetes.io/x"]
    settings = JobSettings(labels=dict.fromkeys(reserved, "mine") | {"team": "storage"})
    job = build_maintenance_job(run(settings), expose(), SPEC)
    assert job["metadata"] == {"name": NAME, "namespace": "velero", "labels": {OWNER_UID_LABEL: OWNER.uid}}
    assert job["spec"]["template"]["metadata"]["labels"] == {"team": "storage"} | _LEFT_OUT
    assert "ownerReferences" not in job["spec"]["template"]["metadata"]
    assert all(map(is_reserved_label, reserved))


def test_deadlines_of_pod_and_job() -> None:
    job = build_maintenance_job(run(JobSettings(active_deadline=timedelta(minutes=30))), expose(), SPEC)
    assert job["spec"]["template"]["spec"]["activeDeadlineSeconds"] == 1800
    assert job["spec"]["activeDeadlineSeconds"] == 2700
    assert (job["spec"]["backoffLimit"], job["spec"]["template"]["spec"]["restartPolicy"]) == (0, "Never")


@pytest.mark.parametrize(
    ("changes", "flags"),
    [
        ({"ignore_foreign": True}, ["--ignore-foreign", "--verify-blobs=100000"]),
        ({"verify_blobs": 0}, ["--verify-blobs=0"]),
        ({"report_snapshots": True}, ["--verify-blobs=100000", "--report-snapshots"]),
        ({"full_interval_seconds": 21_600}, ["--verify-blobs=100000", "--full-interval=21600"]),
    ],
)
def test_the_arguments_of_a_run(changes: dict[str, Any], flags: list[str]) -> None:
    mover = MoverOptions(timedelta(minutes=3), "debug", "json")
    job = build_maintenance_job(run(), expose(mover=mover), structs.replace(SPEC, **changes))
    assert job["spec"]["template"]["spec"]["containers"][0]["args"] == [
        "maintain-repository",
        "--backup-repository=app1-default-kopia",
        "--resource-timeout=3m0s",
        "--log-level=debug",
        "--log-format=json",
        f"--job={NAME}",
        *flags,
    ]


def test_the_size_of_scratch_follows_the_limit_of_the_cache() -> None:
    def size(limit_mib: int, **changes: Any) -> Any:
        inherited = replace(template(), **changes)
        job = build_maintenance_job(run(cache_limit_mib=limit_mib), expose(template=inherited), SPEC)
        return next(v["emptyDir"] for v in job["spec"]["template"]["spec"]["volumes"] if "emptyDir" in v)

    assert size(5000) == {"sizeLimit": "8Gi"}
    assert size(1024) == {"sizeLimit": "4Gi"}
    own = ({"name": "scratch", "emptyDir": {"sizeLimit": "1Gi", "medium": "Memory"}},)
    assert size(5000, volumes=own) == own[0]["emptyDir"]
    assert size(5000, volumes=(), volume_mounts=()) == {"sizeLimit": "8Gi"}


def test_a_repository_on_a_shared_volume_is_mounted_writable() -> None:
    shared = (RepositoryMount("/backups", {"persistentVolumeClaim": {"claimName": "shared"}}),)
    storage = StorageAccess(directory="/backups/a")
    job = build_maintenance_job(run(storage=storage), expose(repository_volumes=shared), SPEC)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert {"name": "mover-repository", "mountPath": "/backups"} in container["volumeMounts"]


def test_its_container_is_found_beside_that_of_a_webhook() -> None:
    terminated = {"state": {"terminated": {"exitCode": 0, "message": "{}"}}}
    other = {"name": "sidecar", "state": {"running": {}}}
    pod: JsonDict = {
        "metadata": {"name": "p", "ownerReferences": [{"kind": "Job", "uid": "u"}]},
        "status": {"containerStatuses": [other, {"name": MAINTENANCE_CONTAINER, **terminated}]},
    }
    end = parse_pod_end(pod)
    assert end is not None
    assert (end.exit_code, end.message) == (0, "{}")


def test_whole_jobs() -> None:
    assert_golden("maintenance-job", build_maintenance_job(run(), expose(template=template()), SPEC))
    resources: JsonDict = {"requests": {"memory": "256Mi"}, "limits": {"memory": "512Mi"}}
    pool = NodeRequirement(key="pool", operator="In", values=["b"])
    spot = NodeRequirement(key="spot", operator="DoesNotExist")
    settings = JobSettings(resources, ((pool, spot),), "c", {"team": "a"}, {"note": "b"})
    spec = MaintainRepository(job=NAME, ignore_foreign=True, verify_blobs=100_000, full_interval_seconds=43_200)
    agent = expose(template=template(), pod=PodSettings(service_account="node-agent-mover"))
    assert_golden("maintenance-job-configured", build_maintenance_job(run(settings, cache_limit_mib=2048), agent, spec))


_LOCATION: Final = replace(OWNER, kind="BackupStorageLocation", name="default")
_PATHS: Final = {
    f"metadata.labels.{SNAPSHOT_REPORT_LABEL}",
    "spec.activeDeadlineSeconds",
    f"{POD}.activeDeadlineSeconds",
    f"{CONTAINER}.args",
}
"""In what Jobs of commands differ from that of a report, beside their own label."""


def test_the_job_of_a_report() -> None:
    assert_golden("maintenance-job-report", build_command_job(run(), expose(template=template()), ReportSnapshots()))


def test_the_label_of_a_report_is_valid_for_a_long_name() -> None:
    job = build_command_job(run(owner=replace(OWNER, name="n" * 100)), expose(), ReportSnapshots())
    labels = job["metadata"]["labels"]
    assert labels == {SNAPSHOT_REPORT_LABEL: label_value("n" * 100)}
    assert len(labels[SNAPSHOT_REPORT_LABEL]) == 63


@pytest.mark.parametrize(
    ("spec", "label", "hours", "options"),
    [
        (ListSnapshots(volume_namespaces=("app",)), SNAPSHOT_LIST_LABEL, 1, ["--volume-namespace=app"]),
        (
            VerifySnapshots(snapshots=("s1", "s2"), percent=12.5),
            SNAPSHOT_VERIFICATION_LABEL,
            6,
            ["--snapshot=s1", "--snapshot=s2", "--percent=12.5"],
        ),
        (
            DeleteSnapshots(transfer=("app/night/u",), cluster="c"),
            SNAPSHOT_DELETION_LABEL,
            1,
            ["--transfer=app/night/u", "--cluster=c"],
        ),
        (
            ListFiles(volume_namespace="app", snapshot="k1", limit=5),
            SNAPSHOT_FILES_LABEL,
            1,
            ["--volume-namespace=app", "--snapshot=k1", "--limit=5"],
        ),
        (
            SendFiles(volume_namespace="app", snapshot="k1"),
            SNAPSHOT_FILES_LABEL,
            24,
            ["--volume-namespace=app", "--snapshot=k1"],
        ),
    ],
    ids=["list", "verify", "delete", "list files", "send files"],
)
def test_the_job_of_a_command_differs_from_a_report_in_what_it_does_and_for_how_long(
    spec: Any, label: str, hours: int, options: list[str]
) -> None:
    """Never taken for maintenance or a transfer's, and a copy ends as docs/commands.md says."""
    report, job = (build_command_job(run(owner=_LOCATION), expose(), one) for one in (ReportSnapshots(), spec))
    assert differences(flat(report), flat(job)).keys() <= _PATHS | {f"metadata.labels.{label}"}
    assert job["metadata"]["labels"] == {label: "default"}
    pod = job["spec"]["template"]["spec"]
    assert job["spec"]["activeDeadlineSeconds"] == pod["activeDeadlineSeconds"] == hours * 3600
    about = ["--backup-storage-location=default", "--resource-timeout=10m0s", "--log-level=info", "--log-format=text"]
    assert pod["containers"][0]["args"] == [str(spec.verb), *about, *options]
    if isinstance(spec, SendFiles):
        text = (Path(__file__).parents[2] / "docs" / "commands.md").read_text()
        assert f"A copy ends after {hours} hours" in text


def test_a_job_mounts_the_volume_that_it_compares_and_only_reads_it() -> None:
    source: VolumeSource = {"persistentVolumeClaim": {"claimName": "scratch"}}

    def build(volume: MoverVolume) -> tuple[JsonDict, JsonDict]:
        job = build_command_job(run(volume=volume), expose(), VerifySnapshots(snapshots=("s1",)))
        spec = job["spec"]["template"]["spec"]
        return spec["volumes"], spec["containers"][0]

    volumes, container = build(MoverVolume(source, read_only=True))
    mount = next(one for one in container["volumeMounts"] if one["name"] == OWNER.uid)
    assert mount == {"name": OWNER.uid, "mountPath": "/scratch/volume", "readOnly": True}
    assert {"name": OWNER.uid, **source} in volumes
    assert "--volume-path=/scratch/volume" in container["args"]
    _, container = build(MoverVolume(source, VolumeMode.BLOCK, read_only=True))
    assert container["volumeDevices"] == [{"name": OWNER.uid, "devicePath": f"/{OWNER.uid}"}]
    assert "--volume-mode=Block" in container["args"]
