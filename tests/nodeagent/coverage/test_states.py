"""The state of a volume: by what is expected of it, and by the backups that it has."""

import gc
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import product
from typing import Any

import pytest

from nodeagent.coverage.selection import BackupMethod, VolumeChoice
from nodeagent.coverage.states import (
    BackupSource,
    CompletedBackup,
    Coverage,
    CoverageState,
    VolumeCoverage,
    build_coverage,
    plan_volumes,
)
from tests.nodeagent.support.volume_scene import a_claim, a_cluster, a_pod, an_object
from tests.support.objects import JsonDict

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
HOUR, DAY = timedelta(hours=1), timedelta(days=1)
KEY = ("app", "data")
NIGHT = "expected every 24h by Schedule night"
OUT = "nodeagent.io/exclude-from-backup"
LEFT_OUT = {"velero.io/exclude-from-backup": "true"}
NAMESPACE = an_object("Namespace", "app")


def source(method: BackupMethod = BackupMethod.MOVED, interval: timedelta | None = DAY, why: str = "") -> BackupSource:
    return BackupSource("Schedule night", interval, {KEY: VolumeChoice(method, why)}, "it is paused")


def copy(age: timedelta, **more: Any) -> CompletedBackup:
    return CompletedBackup(KEY, NOW - age, "DataUpload velero/du-1", **{"complete": True, "bytes": 5} | more)


def failed(age: timedelta) -> CompletedBackup:
    return copy(age, complete=False, failed=True, message="disk full")


def judged(
    *copies: CompletedBackup,
    sources: tuple[BackupSource, ...] = (),
    namespace: JsonDict = NAMESPACE,
    leave_out_namespaces: tuple[str, ...] | None = (),
    **claim: Any,
) -> VolumeCoverage:
    """Return the state of one PVC."""
    plans = plan_volumes(a_cluster(a_claim("data", **claim), namespace), sources, leave_out_namespaces)
    (found,) = build_coverage(plans, copies, NOW).volumes
    return found


@pytest.mark.parametrize(
    ("copies", "sources", "state", "reason"),
    [
        ([copy(HOUR)], [source()], "protected", NIGHT),
        ([copy(49 * HOUR - HOUR / 60)], [source()], "protected", NIGHT),
        ([copy(49 * HOUR + HOUR / 60)], [source()], "stale", "last backup is 2d old: expected every 24h by Schedule"),
        ([copy(3 * HOUR)], [source(interval=HOUR)], "stale", "expected every 60m"),
        ([copy(3 * HOUR)], [source(), source(interval=HOUR)], "stale", "expected every 60m"),
        ([copy(6 * DAY)], [], "protected", "no schedule backs it up"),
        ([copy(8 * DAY)], [], "stale", "the last backup is 8d old: no schedule backs it up"),
        ([copy(8 * DAY)], [source(interval=None)], "stale", "Schedule night does not run: it is paused"),
        ([], [], "never-backed-up", "no schedule backs it up"),
        ([], [source()], "never-backed-up", NIGHT),
        ([], [source(interval=None)], "never-backed-up", "Schedule night does not run: it is paused"),
        ([], [source(BackupMethod.NONE, why="reason")], "never-backed-up", "Schedule night copies no data: reason"),
        ([], [source(BackupMethod.SNAPSHOT, why="reason")], "snapshot-only", "Schedule night: reason"),
        ([], [source(BackupMethod.SNAPSHOT, why="reason"), source()], "never-backed-up", "expected every 24h"),
        ([], [source(BackupMethod.SKIPPED, why="reason")], "left-out", "Schedule night: reason"),
        ([copy(DAY), failed(HOUR)], [source()], "failing", "DataUpload velero/du-1 failed 60m ago: disk full"),
        ([copy(HOUR), failed(DAY)], [source()], "protected", NIGHT),
        ([failed(HOUR)], [], "failing", "disk full"),
        ([copy(HOUR, complete=False)], [source()], "never-backed-up", "expected every 24h"),
        ([copy(HOUR, shrunk="from 2 to 1"), copy(DAY)], [source()], "shrunk", "DataUpload velero/du-1: from 2 to 1"),
        ([copy(HOUR), copy(DAY, shrunk="from 2 to 1")], [source()], "protected", NIGHT),
    ],
)
def test_a_volumes_state(copies: list[CompletedBackup], sources: list[BackupSource], state: str, reason: str) -> None:
    found = judged(*copies, sources=tuple(sources))
    assert (found.state, reason in found.reason) == (state, True), found.reason


def test_what_a_schedule_is_to_copy_is_not_left_out() -> None:
    """Also while it does not run: the server may reject its Backups."""
    states = {
        (method, interval): judged(copy(8 * DAY), sources=(source(BackupMethod.SKIPPED), source(method, interval)))
        for method, interval in product(BackupMethod, (DAY, None))
    }
    assert {one for one, found in states.items() if found.state is CoverageState.STALE} == {
        (method, interval) for method, interval in states if method.copies
    }
    assert "Schedule night does not run: it is paused" in states[BackupMethod.MOVED, None].reason


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"labels": LEFT_OUT}, "the PVC has the label velero.io/exclude-from-backup"),
        ({"namespace": an_object("Namespace", "app", labels=LEFT_OUT)}, "its namespace has the label"),
        (
            {"namespace": an_object("Namespace", "app", annotations={OUT: "scratch"})},
            "annotation of its namespace: scratch",
        ),
        ({"annotations": {OUT: "cache"}, "leave_out_namespaces": ("x", "app")}, "annotation of the PVC: cache"),
    ],
    ids=["label", "label of the namespace", "annotation of the namespace", "annotation that is allowed"],
)
def test_a_volume_is_left_out_whatever_is_expected(more: Any, reason: str) -> None:
    found = judged(failed(HOUR), sources=(source(),), **more)
    assert (found.state, reason in found.reason, found.needs_attention) == (CoverageState.LEFT_OUT, True, False)


@pytest.mark.parametrize(
    ("namespaces", "note"),
    [
        (("db",), "does not count: leaveOutNamespaces does not name app"),
        (None, "counts is not known: the configuration cannot be used"),
    ],
    ids=["elsewhere", "unknown"],
)
def test_the_annotation_of_a_tenant_does_not_count_unless_it_is_allowed(
    namespaces: tuple[str, ...] | None, note: str
) -> None:
    found = judged(annotations={OUT: "cache"}, leave_out_namespaces=namespaces)
    assert (found.state, note in found.note) == (CoverageState.NEVER_BACKED_UP, True)
    assert judged(leave_out_namespaces=namespaces).note == ""


def test_plans_share_what_the_same_schedules_do_and_keep_no_choices() -> None:
    keys = [("app", name) for name in ("a", "b", "c")]
    choices = {key: VolumeChoice(BackupMethod.MOVED) for key in keys}
    night = BackupSource("Schedule night", DAY, choices)
    hourly = BackupSource("Schedule hourly", HOUR, {keys[2]: VolumeChoice(BackupMethod.MOVED)})
    one, other, both = plan_volumes(a_cluster(*(a_claim(name) for _, name in keys)), [night, hourly])
    assert one.expected is other.expected is not both.expected
    assert (both.interval, both.by) == (HOUR, "Schedule night, Schedule hourly")
    assert choices not in gc.get_referents(*one.expected.each)


def test_an_interval_of_the_pvc_counts_where_no_schedule_backs_it_up() -> None:
    annotations = {"nodeagent.io/backup-interval": "12h"}
    assert judged(copy(2 * DAY), annotations=annotations).state is CoverageState.STALE
    assert judged(copy(2 * DAY), annotations=annotations).interval_seconds == 12 * 3600
    assert judged(copy(DAY), annotations=annotations, sources=(source(),)).state is CoverageState.PROTECTED
    assert judged(annotations={"nodeagent.io/backup-interval": "soon"}).interval_seconds is None


def test_a_new_volume_needs_no_attention_before_its_first_backup_is_due() -> None:
    new = judged(created="2026-11-21T09:00:00Z", sources=(source(),))
    assert (new.state, new.needs_attention) == (CoverageState.NEVER_BACKED_UP, False)
    assert new.reason == "the volume is 3h old; expected every 24h by Schedule night"
    assert judged(created="2026-11-20T09:00:00Z", sources=(source(),)).needs_attention
    assert judged(created="2026-11-21T09:00:00Z").needs_attention


@pytest.mark.parametrize(
    "before",
    [copy(2 * DAY), failed(2 * DAY), copy(2 * DAY, shrunk="from 2 to 1")],
    ids=["complete", "failed", "Shrunk"],
)
def test_a_backup_of_a_deleted_pvc_of_the_same_name_does_not_count(before: CompletedBackup) -> None:
    new = judged(before, created="2026-11-21T09:00:00Z", sources=(source(),))
    assert (new.state, new.needs_attention, new.last_backup) == (CoverageState.NEVER_BACKED_UP, False, None)
    assert new.due == datetime(2026, 11, 22, 9, tzinfo=UTC)
    assert ("deleted PVC of the same name" in new.note) is before.complete
    later = judged(before, created="2026-11-20T09:00:00Z", sources=(source(),))
    assert (later.state, later.needs_attention) == (CoverageState.NEVER_BACKED_UP, True)
    assert judged(before, copy(HOUR), created="2026-11-21T09:00:00Z").state is CoverageState.PROTECTED


@pytest.mark.parametrize("uid", ["here", ""], ids=["its own", "unknown"])
@pytest.mark.parametrize("foreign", [{}, {"complete": False, "failed": True}], ids=["complete", "failed"])
def test_a_backup_of_another_cluster_does_not_count(foreign: dict[str, bool], uid: str) -> None:
    """A Velero server finds it in the bucket that both use."""
    other = copy(HOUR, claim_uid="elsewhere", **foreign)
    alone, after = (judged(*each, other, sources=(source(),), uid="here") for each in ([], [copy(DAY, claim_uid=uid)]))
    assert (alone.state, alone.last_backup) == (CoverageState.NEVER_BACKED_UP, None)
    assert (after.state, after.last_backup) == (CoverageState.PROTECTED, NOW - DAY)


@pytest.mark.parametrize(
    ("lost", "why"),
    [(copy(-DAY), "it is from the future"), (copy(HOUR, location="old"), "BackupStorageLocation old does not exist")],
    ids=["future", "no location"],
)
def test_a_backup_that_cannot_be_the_newest_or_not_be_restored_does_not_count(lost: CompletedBackup, why: str) -> None:
    plans = plan_volumes(a_cluster(a_claim("data"), NAMESPACE), [source()])
    other = [copy(3 * DAY, location="here"), copy(4 * DAY, location="old")]
    for copies, state in (([lost], "never-backed-up"), ([lost, *other], "stale"), ([*other, lost], "stale")):
        (found,) = build_coverage(plans, copies, NOW, locations=("here", "")).volumes
        assert (str(found.state), found.note) == (state, f"DataUpload velero/du-1 does not count: {why}")
    (found,) = build_coverage(plans, [lost, copy(HOUR / 2, location="here")], NOW, locations=("here", "")).volumes
    assert (found.state, found.note == "") == (CoverageState.PROTECTED, lost.created < NOW)


@pytest.mark.parametrize(
    ("ran", "ending"),
    [((), "night; no run yet"), ((3 * DAY, HOUR), "night; last run 60m ago")],
    ids=["never", "by several"],
)
def test_a_volume_without_an_expected_backup_says_when_its_schedule_ran(ran: Sequence[timedelta], ending: str) -> None:
    sources = tuple(replace(source(), ran=NOW - age) for age in ran) or (source(),)
    assert judged(copy(3 * DAY), sources=sources).reason.endswith(ending)
    assert judged(sources=sources).reason.endswith(ending)
    assert "run" not in judged(copy(HOUR), sources=sources).reason


def test_pvcs_without_a_volume_are_none_and_volumes_of_pods_are_and_may_be_older_than_their_pods() -> None:
    key = ("app", "web-0:share")
    pod = a_pod("web-0", volumes=[{"name": "share", "nfs": {}}], created="2026-11-21T11:30:00Z")
    choices = {key: VolumeChoice(BackupMethod.FS_BACKUP), ("app", "gone"): VolumeChoice(BackupMethod.MOVED)}
    cluster = a_cluster(a_claim("data"), a_claim("new", phase="Pending"), pod)
    plans = plan_volumes(cluster, [BackupSource("Schedule night", DAY, choices)])
    assert [plan.key for plan in plans] == [KEY, key]
    assert plans[1].created == NOW - HOUR / 2
    done = CompletedBackup(key, NOW - HOUR, "PodVolumeBackup velero/b", complete=True)
    assert build_coverage(plans[1:], [done], NOW).volumes[0].state is CoverageState.PROTECTED


@pytest.mark.parametrize(
    ("counts", "sentence"),
    [
        ({}, "no volumes"),
        ({"left-out": 1}, "no volumes; 1 left out on purpose"),
        ({"protected": 1}, "1 of 1 volume protected"),
        ({"protected": 38, "stale": 1, "never-backed-up": 1}, "38 of 40 volumes protected; 1 never backed up, 1 stale"),
        ({"failing": 3, "left-out": 3}, "0 of 3 volumes protected; 3 failing; 3 left out on purpose"),
    ],
)
def test_the_sentence_about_all_volumes(counts: dict[str, int], sentence: str) -> None:
    states = [CoverageState(state) for state, number in counts.items() for _ in range(number)]
    volumes = [VolumeCoverage(namespace="app", volume="data", state=state, reason="") for state in states]
    assert Coverage(volumes=tuple(volumes)).sentence == sentence


def test_what_needs_attention_comes_first() -> None:
    keys = [("app", name) for name in ("fine", "bad", "new")]
    cluster = a_cluster(*(a_claim(name, created="2026-11-21T09:00:00Z") for _, name in keys))
    source = BackupSource("Schedule night", DAY, {key: VolumeChoice(BackupMethod.MOVED) for key in keys})
    copies = [
        CompletedBackup(keys[0], NOW - HOUR, "du-1", complete=True),
        CompletedBackup(keys[1], NOW - HOUR, "du-2", complete=False, failed=True),
    ]
    found = build_coverage(plan_volumes(cluster, [source]), copies, NOW)
    assert [one.volume for one in found.volumes] == ["bad", "new", "fine"]


def test_without_pvcs_only_volumes_with_a_backup_are_known() -> None:
    found = build_coverage(None, [copy(HOUR)], NOW, ["PVCs cannot be read"])
    assert [(one.shown, str(one.state)) for one in found.volumes] == [("app/data", "protected")]
    assert found.sentence == "1 of 1 volume protected; volumes without a backup are not known"
    assert found.volumes[0].reason == "whether a schedule backs it up is not known"
    assert found.notes == ("PVCs cannot be read",)
    assert build_coverage(None, [copy(HOUR, complete=False)], NOW).volumes == ()
