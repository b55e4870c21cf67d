"""The Jobs of a snapshot report, a list of snapshots and a verification: like maintenance Jobs, never taken for one."""

from dataclasses import replace
from pathlib import Path

import pytest

from core.contract import VolumeMode
from core.models.names import (
    OWNER_UID_LABEL,
    SNAPSHOT_DELETION_LABEL,
    SNAPSHOT_FILES_LABEL,
    SNAPSHOT_LIST_LABEL,
    SNAPSHOT_REPORT_LABEL,
    SNAPSHOT_VERIFICATION_LABEL,
    label_value,
)
from exposer.maintenance_job import (
    FileRequest,
    JobSettings,
    build_deletion_job,
    build_file_job,
    build_list_job,
    build_maintenance_job,
    build_report_job,
    build_verification_job,
)
from exposer.pod_files import MoverVolume
from tests.exposer.support.inputs import template
from tests.exposer.test_maintenance_job import CONTAINER, NAME, OWNER, POD, differences, expose, run
from tests.exposer.test_pods_velero import flat
from tests.support.golden import assert_golden

__all__: list[str] = []


def test_a_report_differs_from_maintenance_in_labels_arguments_and_deadlines() -> None:
    wanted = run(JobSettings(resources={"limits": {"memory": "256Mi"}}), ignore_foreign=True, report_snapshots=True)
    maintenance, report = build_maintenance_job(wanted, expose()), build_report_job(wanted, expose())
    assert differences(flat(maintenance), flat(report)) == {
        f"metadata.labels.{OWNER_UID_LABEL}": (OWNER.uid, None),
        f"metadata.labels.{SNAPSHOT_REPORT_LABEL}": (None, "app1-default-kopia"),
        "spec.activeDeadlineSeconds": (22_500, 3600),
        "spec.ttlSecondsAfterFinished": (None, 3600),
        f"{POD}.activeDeadlineSeconds": (21_600, 3600),
        f"{CONTAINER}.args": (
            [*_arguments("maintain-repository"), f"--job={NAME}", "--ignore-foreign", "--report-snapshots"],
            _arguments("report-snapshots"),
        ),
    }


def _arguments(verb: str) -> list[str]:
    return [
        verb,
        "--backup-repository=app1-default-kopia",
        "--resource-timeout=10m0s",
        "--log-level=info",
        "--log-format=text",
    ]


def test_the_job_of_a_report() -> None:
    assert_golden("maintenance-job-report", build_report_job(run(), expose(template=template())))


def test_the_label_of_a_report_is_valid_for_a_long_name() -> None:
    owner = replace(OWNER, name="n" * 100)
    labels = build_report_job(run(owner=owner), expose())["metadata"]["labels"]
    assert labels == {SNAPSHOT_REPORT_LABEL: label_value("n" * 100)}
    assert len(labels[SNAPSHOT_REPORT_LABEL]) == 63


def test_the_job_of_a_list_differs_from_a_report_in_what_it_is_about() -> None:
    report = build_report_job(run(), expose())
    owner = replace(OWNER, kind="BackupStorageLocation", name="default")
    listing = build_list_job(run(owner=owner), expose(), ["app"])
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
    report, job = build_report_job(run(), expose()), build_verification_job(run(), expose(), ["s1", "s2"], 12.5)
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


def test_a_job_mounts_the_volume_that_it_compares_and_only_reads_it() -> None:
    source = {"persistentVolumeClaim": {"claimName": "scratch"}}
    files = MoverVolume(source, read_only=True)
    spec = build_verification_job(run(volume=files), expose(), ["s1"], 100)["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    mount = next(one for one in container["volumeMounts"] if one["name"] == OWNER.uid)
    assert mount == {"name": OWNER.uid, "mountPath": "/scratch/volume", "readOnly": True}
    assert {"name": OWNER.uid, **source} in spec["volumes"]
    assert "--volume-path=/scratch/volume" in container["args"]
    device = MoverVolume(source, VolumeMode.BLOCK, read_only=True)
    spec = build_verification_job(run(volume=device), expose(), ["s1"], 100)["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert container["volumeDevices"] == [{"name": OWNER.uid, "devicePath": f"/{OWNER.uid}"}]
    assert "--volume-mode=Block" in container["args"]


def test_the_job_of_a_deletion_differs_from_a_list_in_label_and_arguments() -> None:
    owner = replace(OWNER, kind="BackupStorageLocation", name="default")
    listing = build_list_job(run(owner=owner), expose())
    deletion = build_deletion_job(run(owner=owner), expose(), ["--cluster=c", "--transfer=app/night/u"])
    arguments = ["--backup-storage-location=default", *_arguments("")[2:]]
    assert differences(flat(listing), flat(deletion)) == {
        f"metadata.labels.{SNAPSHOT_LIST_LABEL}": ("default", None),
        f"metadata.labels.{SNAPSHOT_DELETION_LABEL}": (None, "default"),
        f"{CONTAINER}.args": (
            ["list-snapshots", *arguments],
            ["delete-snapshots", *arguments, "--cluster=c", "--transfer=app/night/u"],
        ),
    }


def test_the_page_says_when_a_copy_ends() -> None:
    job = build_file_job(run(owner=replace(OWNER, kind="BackupStorageLocation")), expose(), FileRequest("app", "k1"))
    text = (Path(__file__).parents[2] / "docs" / "commands.md").read_text()
    assert f"A copy ends after {job['spec']['activeDeadlineSeconds'] // 3600} hours" in text


@pytest.mark.parametrize(("limit", "verb", "seconds"), [(5, "list-files", 3600), (0, "send-files", 86_400)])
def test_the_job_of_files_reads_only_and_ends_by_itself(limit: int, verb: str, seconds: int) -> None:
    owner = replace(OWNER, kind="BackupStorageLocation", name="default")
    job = build_file_job(run(owner=owner), expose(), FileRequest("app", "k1", limit=limit))
    assert job["metadata"]["labels"] == {SNAPSHOT_FILES_LABEL: "default"}
    pod = job["spec"]["template"]["spec"]
    assert (job["spec"]["activeDeadlineSeconds"], pod["activeDeadlineSeconds"]) == (seconds, seconds)
    options = ["--volume-namespace=app", "--snapshot=k1", *([f"--limit={limit}"] if limit else [])]
    own = [verb, "--backup-storage-location=default", *_arguments(verb)[2:]]
    assert pod["containers"][0]["args"] == [*own, *options]
