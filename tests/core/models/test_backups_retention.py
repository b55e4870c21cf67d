"""The report of retention as commands and the leader read it, and which schedules have older rules."""

from datetime import UTC, datetime

import pytest

from core.models.backups import REPORT_KEY, HeldBackup, RetentionReport, deletes_by_old_rules, read_report
from core.models.base import JsonDict
from core.models.names import RETENTION_IMAGE_ANNOTATION, SCHEDULE_COMMAND

_NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)


def test_a_report_is_read_as_it_was_written_and_an_invalid_or_absent_one_is_none() -> None:
    held = HeldBackup(backup="b", rule="limit", reason="r", namespace="app", claim="data", location="default")
    report = RetentionReport(at=_NOON, held=[held], held_count=1, through=_NOON)
    assert read_report({REPORT_KEY: report.to_json(), "b": "{}"}) == report
    assert [read_report(data) for data in (None, {}, {REPORT_KEY: "{}"}, {REPORT_KEY: "["})] == [None] * 4


def test_ten_copies_that_wait_are_a_backlog() -> None:
    assert RetentionReport(at=_NOON, waiting=9).backlog is None
    assert RetentionReport(at=_NOON, waiting=10, waiting_backups=10).backlog == (
        "10 expired copies wait for the limit of deletions; "
        "to delete them at once: nodeagent backup delete --expired --at-most 10"
    )
    late = RetentionReport(at=_NOON, waiting=12, waiting_why="runs missed", through=_NOON)
    assert "deletions (runs missed); the last one goes at about 2026-11-21T12:00:00Z; to" in (late.backlog or "")


@pytest.mark.parametrize(
    ("args", "annotated", "old"),
    [
        ([SCHEDULE_COMMAND, "--ttl=24h"], None, True),
        ([SCHEDULE_COMMAND, "--ttl", "24h"], "agent:0", True),
        ([SCHEDULE_COMMAND, "--ttl=24h"], "agent:1", False),
        ([SCHEDULE_COMMAND], None, False),
        (["verify", "--ttl=24h"], None, False),
        ([SCHEDULE_COMMAND, "night", "--keep-daily=7"], None, True),
        (None, None, False),
    ],
    ids=[
        "never renewed",
        "another image since",
        "renewed",
        "deletes nothing",
        "another command",
        "by calendar",
        "no arguments",
    ],
)
def test_a_schedule_that_deletes_has_older_rules_until_its_image_is_known(
    args: list[str] | None, annotated: str | None, *, old: bool
) -> None:
    annotations = {RETENTION_IMAGE_ANNOTATION: annotated} if annotated else None
    pod = {"containers": [{"image": "agent:1", "args": args}]}
    spec = {"jobTemplate": {"spec": {"template": {"spec": pod}}}}
    cron_job: JsonDict = {"metadata": {"name": "night", "annotations": annotations}, "spec": spec}
    assert deletes_by_old_rules(cron_job) is old
