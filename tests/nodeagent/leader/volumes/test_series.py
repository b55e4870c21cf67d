"""The series of volumes: what is known, of how many, and nothing of what is gone."""

from datetime import UTC, datetime, timedelta

from core.models.backups import HeldBackup, RetentionReport
from nodeagent.leader.volumes.states import VolumeState
from nodeagent.leader.volumes.view import show_retention, show_volumes
from nodeagent.metrics import MAX_VOLUMES, Metrics

LABELS = '{claim="data",node="a",volume_namespace="app"}'


def _shown(metrics: Metrics) -> dict[str, float]:
    lines = metrics.render().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line.startswith(("nodeagent_volume", "nodeagent_retention")))
    return {name.replace("nodeagent_volume", ""): float(value) for name, value in pairs}


def test_each_volume_and_rule_has_one_series_with_its_oldest_backup_and_none_without_a_report() -> None:
    metrics = Metrics("a")
    noon = datetime(2026, 11, 21, 12, tzinfo=UTC)

    def held(backup: str, days: int | None, rule: str = "failing-volume") -> HeldBackup:
        created = noon - timedelta(days=days) if days is not None else None
        place = {"namespace": "app", "claim": "data", "location": "default"}
        return HeldBackup(backup=backup, rule=rule, reason="kept", created=created, bytes=5, **place)

    found = [held("unknown", None), held("younger", 8), held("oldest", 9), held("last", 1, "newest-copy")]
    report = RetentionReport(at=noon, held=found, waiting=3, waiting_why="runs missed", through=noon)
    show_retention(metrics, report, ["nightly"])
    labels = 'claim="data",created="2026-11-{}T12:00:00Z",node="a",rule="{}",volume_namespace="app"'
    assert _shown(metrics) == {
        f'nodeagent_retention_held_bytes{{backup="oldest",{labels.format(12, "failing-volume")}}}': 15,
        f'nodeagent_retention_held_bytes{{backup="last",{labels.format(20, "newest-copy")}}}': 5,
        'nodeagent_retention_waiting_copies{node="a",why="runs missed"}': 3,
        'nodeagent_retention_waiting_until_timestamp_seconds{node="a"}': noon.timestamp(),
        'nodeagent_retention_old_rules{node="a",schedule="nightly"}': 1,
    }
    show_retention(metrics, None, [])
    assert _shown(metrics) == {}


def test_only_what_is_known_has_series() -> None:
    metrics = Metrics("a")
    show_volumes(metrics, [VolumeState("app", "data", backup_at=100.0, bytes=0, verified_ok=False)])
    assert _shown(metrics) == {
        f"_last_backup_timestamp_seconds{LABELS}": 100,
        f"_last_backup_bytes{LABELS}": 0,
        f"_last_verification_ok{LABELS}": 0,
        's_omitted{node="a"}': 0,
    }


def test_volumes_that_are_gone_and_what_is_not_known_any_more_have_none() -> None:
    metrics = Metrics("a")
    gone = VolumeState("app", "gone", backup_at=1.0)
    show_volumes(metrics, [gone, VolumeState("app", "data", backup_at=1.0, backup_interval=60.0, backup_due_at=61.0)])
    show_volumes(metrics, [VolumeState("app", "data", backup_at=2.0)])
    assert _shown(metrics) == {f"_last_backup_timestamp_seconds{LABELS}": 2, 's_omitted{node="a"}': 0}
    show_volumes(metrics, ())
    assert _shown(metrics) == {}


def test_of_too_many_volumes_with_an_interval_those_that_are_overdue_keep_their_series() -> None:
    metrics = Metrics("a")
    day = 86_400.0
    others = [
        VolumeState("app", f"c{number}", backup_at=100 * day, backup_interval=day, backup_due_at=101 * day + number)
        for number in range(MAX_VOLUMES)
    ]
    overdue = VolumeState("app", "data", backup_at=50 * day, backup_interval=day, backup_due_at=51 * day)
    never = VolumeState("app", "never", backup_interval=day, backup_due_at=9 * day)
    unverified = VolumeState("app", "unverified", backup_at=99 * day, verification_due_at=10 * day)
    show_volumes(metrics, [*others, overdue, never, unverified])
    shown = _shown(metrics)
    assert shown['s_omitted{node="a"}'] == 3
    assert f"_backup_due_timestamp_seconds{LABELS}" in shown
    assert '_backup_due_timestamp_seconds{claim="never",node="a",volume_namespace="app"}' in shown
    assert '_verification_due_timestamp_seconds{claim="unverified",node="a",volume_namespace="app"}' in shown


def test_of_too_many_volumes_those_with_an_interval_and_then_the_newest_backups_are_shown() -> None:
    metrics = Metrics("a")
    planned = VolumeState("app", "planned", backup_interval=60.0, backup_due_at=1e9)
    others = [VolumeState("app", f"c{number}", backup_at=float(number)) for number in range(MAX_VOLUMES + 1)]
    show_volumes(metrics, [*others, planned])
    shown = _shown(metrics)
    assert shown['s_omitted{node="a"}'] == 2
    assert '_backup_interval_seconds{claim="planned",node="a",volume_namespace="app"}' in shown
    backups = {name for name in shown if name.startswith("_last_backup_timestamp")}
    assert len(backups) == MAX_VOLUMES - 1
    for omitted in ("c0", "c1"):
        assert f'_last_backup_timestamp_seconds{{claim="{omitted}",node="a",volume_namespace="app"}}' not in backups
