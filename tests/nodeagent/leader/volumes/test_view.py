"""The metrics of volumes as backups complete, when another agent leads, and of how many and which volumes."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from core.kube.resources import CRON_JOBS, EVENTS, PERSISTENT_VOLUME_CLAIMS
from core.models.backups import HeldBackup, RetentionReport
from core.models.names import PVC_UID_LABEL, SCHEDULE_COMMAND, SCHEDULE_LABEL
from nodeagent.config.keys import AgentConfig
from nodeagent.leader.context import DispatchRules
from nodeagent.leader.index import Entry
from nodeagent.leader.volumes.states import VolumeState
from nodeagent.leader.volumes.view import VolumeView, show_retention, show_volumes
from nodeagent.metrics import MAX_VOLUMES, Metrics
from tests.nodeagent.leader.volumes.test_states import READ_AT as NOW
from tests.nodeagent.leader.volumes.test_states import an_object, backup, deletions, history_of
from tests.nodeagent.support.clusters import build_cluster
from tests.nodeagent.support.dispatching import open_scene
from tests.support.clock import LoopClock
from tests.support.fakekube import FakeKube
from tests.support.tasks import running

pytestmark = pytest.mark.looptime


def shown(metrics: Metrics, *names: str) -> dict[str, float]:
    """Return the series whose names begin so, or those of volumes and retention, without that beginning."""
    lines = metrics.render().decode().splitlines()
    pairs = (
        line.rsplit(" ", 1) for line in lines if line.startswith(names or ("nodeagent_volume", "nodeagent_retention"))
    )
    return {name.replace("nodeagent_volume", ""): float(value) for name, value in pairs}


LABELS = '{claim="data",node="a",volume_namespace="app"}'


@asynccontextmanager
async def showing(
    kube: FakeKube, metrics: Metrics, entries: Callable[[], Sequence[Entry]] = list
) -> AsyncIterator[VolumeView]:
    clock = LoopClock()
    cluster = build_cluster(kube.client, clock, metrics=metrics)
    cluster = replace(cluster, now=lambda: datetime(2026, 11, 1, tzinfo=UTC))
    view = VolumeView(cluster, DispatchRules("velero", [], AgentConfig), entries=entries)
    async with running(view.run()):
        yield view


async def test_a_completed_backup_is_shown_soon_and_nothing_once_another_agent_leads() -> None:
    kube, metrics, entries = FakeKube(), Metrics("a"), [backup(1, bytes_=5)]
    async with showing(kube, metrics, lambda: entries) as view:
        await asyncio.sleep(1)
        assert shown(metrics)[f"_last_backup_bytes{LABELS}"] == 5
        entries.append(backup(2, bytes_=6))
        view.observe(entries[-1])
        await asyncio.sleep(5)
        assert shown(metrics)[f"_last_backup_bytes{LABELS}"] == 6
        await asyncio.sleep(895)
    assert shown(metrics) == {}
    # Plans are read again every five minutes.
    assert sum(request.path.endswith("/persistentvolumeclaims") for request in kube.requests) == 2 * 4


async def test_a_backlog_is_one_event_on_its_schedule_for_each_report_and_the_metrics_end_with_the_leader() -> None:
    kube, metrics = FakeKube(), Metrics("node-a")
    pod = {"containers": [{"image": "agent:1", "args": [SCHEDULE_COMMAND, "--ttl=720h"]}]}
    spec = {"schedule": "@daily", "jobTemplate": {"spec": {"template": {"spec": pod}}}}
    kube.put(an_object(CRON_JOBS, "nightly", spec, labels={SCHEDULE_LABEL: "nightly"}))
    # The first one is none; then one that two reads find; a command has no schedule, and that one is gone.
    reports = [(9, "nightly"), (10, "nightly"), (10, "nightly"), (12, ""), (12, "gone"), (11, "nightly")]
    async with showing(kube, metrics):
        for number, (waiting, schedule) in enumerate(reports):
            report = RetentionReport(
                at=NOW + timedelta(days=max(number, 2)),
                schedule=schedule,
                waiting=waiting,
                waiting_backups=waiting,
                waiting_why="runs missed",
                through=NOW + timedelta(days=9),
            )
            kube.put(deletions(report.to_json()))
            await asyncio.sleep(300)
        assert shown(metrics) == {
            'nodeagent_retention_waiting_copies{node="node-a",why="runs missed"}': 11,
            'nodeagent_retention_waiting_until_timestamp_seconds{node="node-a"}': 1.79604e9,
            'nodeagent_retention_old_rules{node="node-a",schedule="nightly"}': 1,
        }
    assert shown(metrics) == {}
    events = kube.objects(EVENTS)
    assert {(one["type"], one["reason"], one["involvedObject"]["kind"]) for one in events} == {
        ("Warning", "RetentionBacklog", "CronJob")
    }
    assert [one["message"] for one in events] == [
        f"{waiting} expired copies wait for the limit of deletions (runs missed); the last one goes at about "
        f"2026-11-30T12:00:00Z; to delete them at once: nodeagent backup delete --expired --at-most {waiting}"
        for waiting in (10, 11)
    ]


async def test_the_dispatcher_shows_the_backups_of_its_transfers_and_keeps_their_history() -> None:
    scene = open_scene("node-a")
    scene.add("du-1")
    times = {"startTimestamp": "2026-11-21T11:00:00Z", "completionTimestamp": "2026-11-21T11:00:30Z"}
    progress = {"totalBytes": 7, "bytesDone": 7}
    transfer = scene.add("du-2", status={"phase": "Completed", "progress": progress, "incrementalBytes": 3, **times})
    source = transfer["spec"]["sourcePVC"]
    claim = an_object(PERSISTENT_VOLUME_CLAIMS, source, {})
    claim["metadata"]["uid"] = transfer["metadata"]["labels"][PVC_UID_LABEL]
    scene.kube.put(claim)
    labels = f'{{claim="{source}",node="node-a",volume_namespace="app"}}'
    async with scene.dispatching():
        await scene.until(lambda: f"_last_backup_bytes{labels}" in shown(scene.metrics))
        assert shown(scene.metrics)[f"_last_backup_bytes{labels}"] == 7
        await scene.until(lambda: history_of(scene.kube).of(("app", source))[-1].seconds == 30)
        last = history_of(scene.kube).of(("app", source))[-1]
        assert (last.new_bytes, last.total_bytes) == (3, 7)
        await scene.until(
            lambda: set(shown(scene.metrics, 'nodeagent_queue_seconds_count{kind="DataU').values()) == {1}
        )
    assert shown(scene.metrics) == {}


def test_each_volume_and_rule_has_one_series_with_its_oldest_backup_and_none_without_a_report() -> None:
    metrics = Metrics("a")

    def held(backup: str, days: int | None, rule: str = "failing-volume") -> HeldBackup:
        created = NOW - timedelta(days=days) if days is not None else None
        place = {"namespace": "app", "claim": "data", "location": "default"}
        return HeldBackup(backup=backup, rule=rule, reason="kept", created=created, bytes=5, **place)

    found = [held("unknown", None), held("younger", 8), held("oldest", 9), held("last", 1, "newest-copy")]
    report = RetentionReport(at=NOW, held=found, waiting=3, waiting_why="runs missed", through=NOW)
    show_retention(metrics, report, ["nightly"])
    labels = 'claim="data",created="2026-11-{}T12:00:00Z",node="a",rule="{}",volume_namespace="app"'
    assert shown(metrics) == {
        f'nodeagent_retention_held_bytes{{backup="oldest",{labels.format(12, "failing-volume")}}}': 15,
        f'nodeagent_retention_held_bytes{{backup="last",{labels.format(20, "newest-copy")}}}': 5,
        'nodeagent_retention_waiting_copies{node="a",why="runs missed"}': 3,
        'nodeagent_retention_waiting_until_timestamp_seconds{node="a"}': NOW.timestamp(),
        'nodeagent_retention_old_rules{node="a",schedule="nightly"}': 1,
    }
    show_retention(metrics, None, [])
    assert shown(metrics) == {}


def test_only_what_is_known_has_series() -> None:
    metrics = Metrics("a")
    show_volumes(metrics, [VolumeState("app", "data", backup_at=100.0, bytes=0, verified_ok=False)])
    assert shown(metrics) == {
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
    assert shown(metrics) == {f"_last_backup_timestamp_seconds{LABELS}": 2, 's_omitted{node="a"}': 0}
    show_volumes(metrics, ())
    assert shown(metrics) == {}


def test_of_too_many_volumes_those_due_first_and_then_the_newest_backups_are_shown() -> None:
    metrics, day = Metrics("a"), 86_400.0
    due = [
        VolumeState("app", "overdue", backup_at=50 * day, backup_interval=day, backup_due_at=51 * day),
        VolumeState("app", "never", backup_interval=day, backup_due_at=9 * day),
        VolumeState("app", "unverified", backup_at=1.0, verification_due_at=1e9),
        VolumeState("app", "shrunk", backup_at=1.0, shrunk=True),
    ]
    others = [VolumeState("app", f"c{number}", backup_at=float(number)) for number in range(MAX_VOLUMES)]
    show_volumes(metrics, [*others, *due])
    found = shown(metrics)
    assert found['s_omitted{node="a"}'] == 4
    names = {re.search('claim="(.*?)"', name)[1] for name in found if "claim" in name}  # type: ignore[index] # it matches
    assert names == {one.claim for one in (*due, *others[4:])}
