"""The Jobs of a snapshot report and of a list of snapshots: built as maintenance Jobs, and never taken for one."""

from dataclasses import replace

from core.models.names import OWNER_UID_LABEL, SNAPSHOT_LIST_LABEL, SNAPSHOT_REPORT_LABEL, label_value
from exposer.maintenance_job import JobSettings, build_list_job, build_maintenance_job, build_report_job
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
