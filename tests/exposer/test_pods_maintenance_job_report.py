"""The Jobs of a snapshot report, a list of snapshots and a verification: like maintenance Jobs, never taken for one."""

from dataclasses import replace
from pathlib import Path

import pytest

from core.contract import VolumeMode
from core.kube.types import VolumeSource
from core.models.names import (
    OWNER_UID_LABEL,
    SNAPSHOT_DELETION_LABEL,
    SNAPSHOT_FILES_LABEL,
    SNAPSHOT_LIST_LABEL,
    SNAPSHOT_REPORT_LABEL,
    SNAPSHOT_VERIFICATION_LABEL,
    label_value,
)
from core.mover_specs import DeleteSnapshots, ListFiles, ListSnapshots, ReportSnapshots, SendFiles, VerifySnapshots
from exposer.pod_manifest import MoverVolume
from exposer.pods import (
    JobSettings,
    MaintenanceRun,
    build_command_job,
    build_maintenance_job,
)
from tests.exposer.support.inputs import template
from tests.exposer.test_pods_maintenance_job import CONTAINER, NAME, OWNER, POD, SPEC, differences, expose, run
from tests.exposer.test_pods_velero import flat
from tests.support.golden import assert_golden
from tests.support.objects import JsonDict


def test_a_report_differs_from_maintenance_in_labels_arguments_and_deadlines() -> None:
    wanted = run(JobSettings(resources={"limits": {"memory": "256Mi"}}))
    maintenance, report = build_maintenance_job(wanted, expose(), SPEC), _report(wanted)
    assert differences(flat(maintenance), flat(report)) == {
        f"metadata.labels.{OWNER_UID_LABEL}": (OWNER.uid, None),
        f"metadata.labels.{SNAPSHOT_REPORT_LABEL}": (None, "app1-default-kopia"),
        "spec.activeDeadlineSeconds": (22_500, 3600),
        "spec.ttlSecondsAfterFinished": (None, 3600),
        f"{POD}.activeDeadlineSeconds": (21_600, 3600),
        f"{CONTAINER}.args": (
            [*_arguments("maintain-repository"), f"--job={NAME}", "--verify-blobs=100000"],
            _arguments("report-snapshots"),
        ),
    }


def _report(wanted: MaintenanceRun) -> JsonDict:
    return build_command_job(wanted, expose(), ReportSnapshots())


def _arguments(verb: str) -> list[str]:
    return [
        verb,
        "--backup-repository=app1-default-kopia",
        "--resource-timeout=10m0s",
        "--log-level=info",
        "--log-format=text",
    ]


def test_the_job_of_a_report() -> None:
    assert_golden("maintenance-job-report", build_command_job(run(), expose(template=template()), ReportSnapshots()))


def test_the_label_of_a_report_is_valid_for_a_long_name() -> None:
    owner = replace(OWNER, name="n" * 100)
    labels = _report(run(owner=owner))["metadata"]["labels"]
    assert labels == {SNAPSHOT_REPORT_LABEL: label_value("n" * 100)}
    assert len(labels[SNAPSHOT_REPORT_LABEL]) == 63


def test_the_job_of_a_list_differs_from_a_report_in_what_it_is_about() -> None:
    report = _report(run())
    owner = replace(OWNER, kind="BackupStorageLocation", name="default")
    listing = build_command_job(run(owner=owner), expose(), ListSnapshots(volume_namespaces=("app",)))
    assert differences(flat(report), flat(listing)) == {
        f"metadata.labels.{SNAPSHOT_REPORT_LABEL}": ("app1-default-kopia", None),
        f"metadata.labels.{SNAPSHOT_LIST_LABEL}": (None, "default"),
        f"{CONTAINER}.args": (
            _arguments("report-snapshots"),
            [
                "list-snapshots",
                "--backup-storage-location=default",
                *_arguments("")[2:],
                "--volume-namespace=app",
            ],
        ),
    }


def test_the_job_of_a_verification_differs_from_a_report_in_what_it_reads_and_for_how_long() -> None:
    spec = VerifySnapshots(snapshots=("s1", "s2"), percent=12.5)
    report, job = _report(run()), build_command_job(run(), expose(), spec)
    assert differences(flat(report), flat(job)) == {
        f"metadata.labels.{SNAPSHOT_REPORT_LABEL}": ("app1-default-kopia", None),
        f"metadata.labels.{SNAPSHOT_VERIFICATION_LABEL}": (None, "app1-default-kopia"),
        "spec.activeDeadlineSeconds": (3600, 21_600),
        f"{POD}.activeDeadlineSeconds": (3600, 21_600),
        f"{CONTAINER}.args": (
            _arguments("report-snapshots"),
            [*_arguments("verify-snapshots"), "--snapshot=s1", "--snapshot=s2", "--percent=12.5"],
        ),
    }


def _verification(volume: MoverVolume) -> JsonDict:
    return build_command_job(run(volume=volume), expose(), VerifySnapshots(snapshots=("s1",)))


def test_a_job_mounts_the_volume_that_it_compares_and_only_reads_it() -> None:
    source: VolumeSource = {"persistentVolumeClaim": {"claimName": "scratch"}}
    files = MoverVolume(source, read_only=True)
    spec = _verification(files)["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    mount = next(one for one in container["volumeMounts"] if one["name"] == OWNER.uid)
    assert mount == {"name": OWNER.uid, "mountPath": "/scratch/volume", "readOnly": True}
    assert {"name": OWNER.uid, **source} in spec["volumes"]
    assert "--volume-path=/scratch/volume" in container["args"]
    device = MoverVolume(source, VolumeMode.BLOCK, read_only=True)
    spec = _verification(device)["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert container["volumeDevices"] == [{"name": OWNER.uid, "devicePath": f"/{OWNER.uid}"}]
    assert "--volume-mode=Block" in container["args"]


def test_the_job_of_a_deletion_differs_from_a_list_in_label_and_arguments() -> None:
    owner = replace(OWNER, kind="BackupStorageLocation", name="default")
    listing = build_command_job(run(owner=owner), expose(), ListSnapshots())
    deletion = build_command_job(run(owner=owner), expose(), DeleteSnapshots(transfer=("app/night/u",), cluster="c"))
    arguments = ["--backup-storage-location=default", *_arguments("")[2:]]
    assert differences(flat(listing), flat(deletion)) == {
        f"metadata.labels.{SNAPSHOT_LIST_LABEL}": ("default", None),
        f"metadata.labels.{SNAPSHOT_DELETION_LABEL}": (None, "default"),
        f"{CONTAINER}.args": (
            ["list-snapshots", *arguments],
            ["delete-snapshots", *arguments, "--transfer=app/night/u", "--cluster=c"],
        ),
    }


def test_the_page_says_when_a_copy_ends() -> None:
    job = build_command_job(run(), expose(), SendFiles(volume_namespace="app", snapshot="k1"))
    text = (Path(__file__).parents[2] / "docs" / "commands.md").read_text()
    assert f"A copy ends after {job['spec']['activeDeadlineSeconds'] // 3600} hours" in text


@pytest.mark.parametrize(
    ("spec", "seconds"),
    [
        (ListFiles(volume_namespace="app", snapshot="k1", limit=5), 3600),
        (SendFiles(volume_namespace="app", snapshot="k1"), 86_400),
    ],
    ids=["list", "send"],
)
def test_the_job_of_files_reads_only_and_ends_by_itself(spec: ListFiles | SendFiles, seconds: int) -> None:
    owner = replace(OWNER, kind="BackupStorageLocation", name="default")
    job = build_command_job(run(owner=owner), expose(), spec)
    assert job["metadata"]["labels"] == {SNAPSHOT_FILES_LABEL: "default"}
    pod = job["spec"]["template"]["spec"]
    assert (job["spec"]["activeDeadlineSeconds"], pod["activeDeadlineSeconds"]) == (seconds, seconds)
    options = ["--volume-namespace=app", "--snapshot=k1", *(["--limit=5"] if isinstance(spec, ListFiles) else [])]
    assert pod["containers"][0]["args"] == [
        str(spec.verb),
        "--backup-storage-location=default",
        *_arguments("")[2:],
        *options,
    ]
