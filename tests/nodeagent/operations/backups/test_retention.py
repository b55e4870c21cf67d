"""The rules of retention: each one by itself, and what no set of transfers may break."""

import re
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.models.base import JsonDict
from core.models.phases import FINAL_PHASES, Phase
from core.models.transfers import DataUpload, PodVolumeBackup
from nodeagent.operations.backups.retention import (
    Check,
    Copy,
    DeletionError,
    GoneCopy,
    Judgment,
    Rule,
    Situation,
    build_copy,
    decide_now,
    explain_backlog,
    judge_backups,
    limit_deletions,
)
from tests.nodeagent.support.hand_clock import NOON

_DAY: Final = timedelta(days=1)
_DATA: Final = ("app", "data")


def _copy(backup: str, days_old: float = 10, **more: Any) -> Copy:
    values: dict[str, Any] = {
        "kind": "DataUpload",
        "transfer": f"{backup}-1",
        "uid": f"{backup}-{more.get('volume', _DATA)[1]}",
        "volume": _DATA,
        "location": "default",
        "volume_namespace": "app",
        "phase": Phase.COMPLETED,
        "created": NOON - days_old * _DAY,
        "snapshot_id": f"s-{backup}",
        "ttl": _DAY,
    }
    return Copy(backup=backup, **values | more)


def _judge(*copies: Copy, **situation: Any) -> dict[str, Judgment]:
    return {one.backup: one for one in judge_backups(copies, Situation(now=NOON, **situation))}


def _rules(judgment: Judgment) -> list[Rule]:
    return [hold.rule for hold in judgment.holds]


_NEWER: Final = _copy("newer", 0.5)


@pytest.mark.parametrize(
    ("change", "rules", "text"),
    [
        pytest.param({}, [], "", id="expired"),
        pytest.param(
            {"created": NOON - _DAY},
            [Rule.NOT_EXPIRED],
            "it expires after 2026-11-21T12",
            id="as old as its ttl",
        ),
        pytest.param({"created": NOON - _DAY - timedelta(seconds=1)}, [], "", id="a second older"),
        pytest.param({"created": NOON + _DAY}, [Rule.NOT_EXPIRED, Rule.NEWEST_COPY], "it has", id="from the future"),
        pytest.param({"created": None}, [Rule.NOT_EXPIRED], "it has no time to live", id="without a stamp"),
        pytest.param({"ttl": None}, [Rule.NOT_EXPIRED], "it has no time to live", id="without a ttl"),
        pytest.param({"ttl": timedelta.max}, [Rule.NOT_EXPIRED], "it expires after 9999", id="a ttl without end"),
        pytest.param(
            {"phase": Phase.IN_PROGRESS},
            [Rule.IN_PROGRESS],
            "DataUpload old-1 of app/data is InProgress: cancel the backup first",
            id="in progress",
        ),
        pytest.param({"phase": Phase.NEW}, [Rule.IN_PROGRESS], "DataUpload old-1 of app/data is New", id="new"),
        pytest.param({"phase": Phase.FAILED, "snapshot_id": ""}, [], "", id="failed"),
        pytest.param({"phase": Phase.CANCELED, "snapshot_id": ""}, [], "", id="canceled"),
        pytest.param({"snapshot_id": "s-now"}, [Rule.RESTORING], "DataDownload x restores app/data", id="restored"),
        pytest.param(
            {"foreign": "is not of nodeagent backup create alone: Backup b owns it"},
            [Rule.FOREIGN],
            "DataUpload old-1 is not of nodeagent backup create alone: Backup b owns it",
            id="foreign",
        ),
    ],
)
def test_a_backup_is_kept_by_each_rule(change: JsonDict, rules: list[Rule], text: str) -> None:
    judgment = _judge(replace(_copy("old"), **change), _NEWER, restoring={"s-now": "DataDownload x"})["old"]
    assert sorted(_rules(judgment)) == sorted(rules)
    assert not text or any(hold.text.startswith(text) for hold in judgment.holds)


def test_the_newest_complete_copy_of_a_volume_is_kept() -> None:
    judged = _judge(_copy("a", 3), _copy("b", 2), _copy("c", 9, phase=Phase.FAILED, snapshot_id=""))
    assert {name: _rules(one) for name, one in judged.items()} == {"a": [], "b": [Rule.NEWEST_COPY], "c": []}
    assert judged["b"].holds[0].text == "it has the newest copy of app/data in default"
    assert list(judged) == ["c", "a", "b"]
    assert _judge(_copy("a", 3))["a"].holds[0].text == "it has the only copy of app/data in default"


@pytest.mark.parametrize(
    "change",
    [{"phase": Phase.FAILED}, {"phase": Phase.IN_PROGRESS}, {"snapshot_id": ""}, {"deleting": True}, {"foreign": "x"}],
    ids=str,
)
def test_what_is_no_complete_copy_does_not_replace_one(change: JsonDict) -> None:
    judged = _judge(_copy("a", 3), replace(_copy("b", 2), **change))
    assert _rules(judged["a"]) == [Rule.NEWEST_COPY]


def test_each_location_is_judged_by_itself() -> None:
    nightly = [_copy(f"n{day}", day) for day in (2, 3, 4)]
    judged = _judge(*nightly, _copy("lab", 1.5, location="lab"))
    assert {name: _rules(one) for name, one in judged.items()} == {
        "n4": [],
        "n3": [],
        "n2": [Rule.NEWEST_COPY],
        "lab": [Rule.NEWEST_COPY],
    }
    closed = _judge(*nightly, _copy("lab-old", 5, location="lab"), closed={"lab": "BackupStorageLocation lab is gone"})
    assert _rules(closed["lab-old"]) == [Rule.NEWEST_COPY, Rule.LOCATION]
    assert _rules(closed["n3"]) == []


@pytest.mark.parametrize("phase", [Phase.FAILED, Phase.CANCELED, Phase.IN_PROGRESS], ids=str)
def test_a_volume_whose_newest_transfer_is_not_completed_keeps_three_copies(phase: Phase) -> None:
    copies = [_copy(f"n{day}", day) for day in (2, 3, 4, 5)]
    judged = _judge(*copies, _copy("bad", 1.5, location="lab", phase=phase, snapshot_id=""))
    assert {name: set(_rules(one)) - {Rule.IN_PROGRESS} for name, one in judged.items()} == {
        "n5": set(),
        "n4": {Rule.FAILING_VOLUME},
        "n3": {Rule.FAILING_VOLUME},
        "n2": {Rule.NEWEST_COPY},
        # Once it were gone, nothing would say that the volume fails.
        "bad": {Rule.FAILING_VOLUME},
    }
    why = f"DataUpload bad-1, the newest of app/data, is {phase}"
    assert judged["n4"].holds[0].text == f"{why}: the newest 3 complete copies of app/data in default stay"


_CHECKED: Final = {"wanted": frozenset({"old-data"}), "found": frozenset({"old-data"}), "faults": {"new-data": ""}}


@pytest.mark.parametrize(
    ("change", "rule", "text"),
    [
        ({}, None, ""),
        (
            {"faults": {"new-data": "snapshot s-new is not in the repository"}},
            Rule.UNCONFIRMED,
            "DataUpload new-1, the newest copy of app/data in default: snapshot s-new is not in the repository",
        ),
        (
            {"faults": {}},
            Rule.UNCONFIRMED,
            "DataUpload new-1, the newest copy of app/data in default: it was not looked at in this run",
        ),
        ({"found": frozenset()}, Rule.NOT_FOUND, "DataUpload old-1 of app/data: its snapshot s-old is not in default"),
        (
            {"refused": {("default", ""): "it is read-only"}},
            Rule.LOCATION,
            "nothing can be deleted in BackupStorageLocation default: it is read-only",
        ),
        (
            {"refused": {("default", "app"): "it is locked"}},
            Rule.LOCATION,
            "nothing can be deleted in BackupStorageLocation default: it is locked",
        ),
        ({"refused": {("default", "db"): "it is locked"}}, None, ""),
    ],
    ids=["confirmed", "gone", "not looked at", "own gone", "location", "repository", "other repository"],
)
def test_what_justifies_a_deletion_was_seen_in_the_bucket(change: JsonDict, rule: Rule | None, text: str) -> None:
    judged = _judge(_copy("old", 3), _copy("new", 2), check=Check(**_CHECKED | change))
    assert [(hold.rule, hold.text) for hold in judged["old"].holds] == ([(rule, text)] if rule else [])


def test_a_copy_that_a_command_has_begun_to_delete_counts_as_gone_and_stays() -> None:
    judged = _judge(_copy("a", 4), _copy("b", 3), _copy("c", 2, recorded=True))
    assert {name: _rules(one) for name, one in judged.items()} == {
        "a": [],
        "b": [Rule.NEWEST_COPY],
        "c": [Rule.NEWEST_COPY],
    }


def test_a_copy_whose_verification_failed_does_not_replace_one() -> None:
    judged = _judge(_copy("a", 4), _copy("b", 3), _copy("c", 2, damaged=True))
    assert {name: _rules(one) for name, one in judged.items()} == {
        "a": [],
        "b": [Rule.NEWEST_COPY],
        "c": [Rule.NEWEST_COPY],
    }
    assert judged["b"].holds[0].text == "it has the newest copy of app/data in default whose verification did not fail"


def test_one_volume_holds_the_whole_backup() -> None:
    gone = _copy("a", 5, volume=("app", "gone"))
    judged = _judge(_copy("a", 5), gone, _copy("b", 2))
    assert [hold.text for hold in judged["a"].holds] == ["it has the only copy of app/gone in default"]
    late = replace(gone, created=NOON - _DAY / 2)
    assert Rule.NOT_EXPIRED in _rules(_judge(_copy("a", 5), late, _copy("b", 2))["a"])


def test_a_copy_by_the_other_method_counts() -> None:
    judged = _judge(_copy("a", 3), _copy("b", 2, kind="PodVolumeBackup"))
    assert _rules(judged["a"]) == []


_ANY_COPY: Final = st.builds(
    _copy,
    backup=st.sampled_from("abcde"),
    days_old=st.floats(0, 20),
    volume=st.sampled_from([("app", "data"), ("app", "files"), ("db", "data")]),
    phase=st.sampled_from(Phase),
    snapshot_id=st.sampled_from(["", "s1", "s2", "s3"]),
    ttl=st.sampled_from([None, timedelta(hours=1), 5 * _DAY]),
    foreign=st.sampled_from(["", "", "Velero's"]),
    deleting=st.booleans(),
    damaged=st.booleans(),
    recorded=st.booleans(),
    location=st.sampled_from(["default", "default", "lost"]),
    uid=st.uuids().map(str),
)


@given(st.lists(_ANY_COPY, max_size=12), st.sets(st.sampled_from(["s1", "s2"])))
def test_no_set_of_copies_breaks_a_rule(copies: list[Copy], restoring: set[str]) -> None:
    judged = judge_backups(copies, Situation(dict.fromkeys(restoring, "a restore"), {"lost": "gone"}, NOON))
    deleted = [copy for one in judged if not one.holds for copy in one.copies]
    kept = [copy for copy in copies if copy not in deleted]
    assert sorted(copy.uid for one in judged for copy in one.copies) == sorted(copy.uid for copy in copies)
    for copy in deleted:
        assert not copy.foreign
        assert copy.location != "lost"
        assert copy.phase in FINAL_PHASES
        assert copy.snapshot_id not in restoring
        assert copy.ttl is not None
        assert copy.created is not None
        assert NOON - copy.created > copy.ttl
        if copy.has_data:
            left = [other for other in kept if other.complete and other.series == copy.series]
            assert any(not other.damaged for other in left)
            assert copy.recorded or max(other.created or NOON for other in left) >= copy.created


def _limit(*copies: Copy, gone: list[GoneCopy] | None = None, most: int | None = None) -> dict[str, list[Judgment]]:
    judged = limit_deletions(judge_backups(copies, Situation(now=NOON)), gone or [], NOON, most=most)
    return {
        "deleted": [one for one in judged if not one.holds],
        "waiting": [one for one in judged if one.held_by((Rule.LIMIT,))],
    }


def _names(judgments: list[Judgment]) -> list[str]:
    return [one.backup for one in judgments]


_OLD: Final = [_copy(f"n{day}", day) for day in range(9, 3, -1)]
"""Six expired copies; the younger ones keep them from being the newest."""


@pytest.mark.parametrize(
    ("younger", "gone", "deleted"),
    [
        pytest.param([_copy("new", 1.5)], [], 2, id="none completed within a day"),
        pytest.param([_copy("x", 0.9), _copy("y", 0.5)], [], 4, id="two completed"),
        pytest.param([_copy("x", 1.9, ended=NOON - _DAY / 2)], [], 3, id="completed within it, and begun before"),
        pytest.param([_copy("x", 0.9)], [(0.5, 9.0)], 2, id="one went"),
        pytest.param([_copy("x", 0.9)], [(1.5, 9.0)], 3, id="one went before"),
        pytest.param([_copy("x", 0.9)], [(0.1, 0.5)], 3, id="one came and went"),
        pytest.param([_copy("x", 0.9)], [(-3.0, 9.0)], 2, id="one went by a clock that was ahead"),
        pytest.param([_copy("new", 1.5)], [(0.5, 9.0)] * 5, 0, id="too many went"),
    ],
)
def test_as_many_copies_go_as_were_completed_and_two(
    younger: list[Copy], gone: list[tuple[float, float]], deleted: int
) -> None:
    went = [GoneCopy(_DATA, "default", NOON - at * _DAY, NOON - made * _DAY) for at, made in gone]
    limited = _limit(*_OLD, *younger, gone=went)
    assert _names(limited["deleted"]) == _names(judge_backups(_OLD, Situation()))[:deleted]
    assert len(limited["waiting"]) == len(_OLD) - deleted


def test_whole_backups_are_counted_before_the_first_goes_and_none_goes_before_an_older_one() -> None:
    files = ("app", "files")
    # Two copies of app/data go in the first ones: the third waits, and with it what is younger and has its volumes.
    first = [_copy("a", 9), _copy("b", 8), _copy("c", 7), _copy("c", 7, volume=files), _copy("d", 6, volume=files)]
    limited = _limit(*first, _copy("new", 1.5), _copy("new", 1.5, volume=files))
    assert (_names(limited["deleted"]), _names(limited["waiting"])) == (["a", "b"], ["c", "d"])
    assert limited["waiting"][0].holds[0].text == "app/data may lose 2 copies in default now: it waits for a later run"
    other = _limit(*first, _copy("z", 6, location="lab"), _copy("new", 1.5), _copy("new", 1.2, location="lab"))
    assert "z" in _names(other["deleted"])


def test_a_person_may_let_more_go_and_what_has_no_data_has_no_limit() -> None:
    failed = [_copy(f"f{n}", 9, phase=Phase.FAILED, snapshot_id="") for n in range(5)]
    assert len(_limit(*_OLD, *failed, _copy("new", 1.5))["deleted"]) == 7
    assert _names(_limit(*_OLD, _copy("new", 1.5), most=4)["deleted"]) == ["n9", "n8", "n7", "n6"]


def _explain(*copies: Copy) -> tuple[int, str, float] | None:
    judged = limit_deletions(judge_backups(copies, Situation(now=NOON)), [], NOON)
    backlog = explain_backlog(judged, NOON)
    return (backlog.copies, backlog.why, (backlog.through - NOON) / _DAY) if backlog is not None else None


def test_a_backlog_says_why_and_when_it_is_through() -> None:
    assert _explain(*_OLD[:2], _copy("new", 1.5)) is None
    assert _explain(*_OLD, _copy("new", 1.5)) == (4, "fewer backups are completed than expire", 2)
    paused = [_copy(f"n{day}", day + 20) for day in range(9, 3, -1)]
    between = "2026-10-28T12:00:00Z and 2026-11-20T00:00:00Z"
    why = f"there was no backup between {between}: runs were missed, or a clock was wrong"
    assert _explain(*paused, _copy("new", 1.5)) == (4, why, 2)
    shorter = [replace(one, ttl=3 * _DAY) for one in _OLD]
    assert _explain(*shorter, _copy("new", 1.5)) == (4, "the time to live was shortened from 72h0m0s to 24h0m0s", 2)


@pytest.mark.parametrize(
    ("ahead", "begun", "error"),
    [
        ((0.0, 0.0, 0.0), None, None),
        ((4.9, 0.0, 2.0), None, None),
        ((0.0, -4.9, 0.0), -6.0, None),
        ((31 * 1440.0, 0.0, 0.0), None, "clocks are more than 5m0s apart (a 2026-12-22T12:00:00Z, b 2026-11-21T12"),
        ((0.0, 0.0, -6.0), None, "clocks are more than 5m0s apart"),
        ((0.0, None, 0.0), None, "how old backups are is not known without b"),
        ((0.0, 0.0, 0.0), 1.0, "this run has not begun yet (2026-11-21T12:01:00Z)"),
    ],
    ids=["alike", "a little apart", "the earliest counts", "one ahead", "one behind", "silent", "before the run"],
)
def test_the_earliest_of_three_clocks_counts_if_they_agree(
    ahead: tuple[float | None, ...], begun: float | None, error: str | None
) -> None:
    def at(minutes: float | None) -> datetime | None:
        return NOON + timedelta(minutes=minutes) if minutes is not None else None

    said = dict(zip("abc", map(at, ahead), strict=True))
    if error is None:
        assert decide_now(said, at(begun)) == min(time for time in said.values() if time is not None)
        return
    with pytest.raises(DeletionError, match=f"^nothing is deleted: .*{re.escape(error)}"):
        decide_now(said, at(begun))


def _meta(**more: Any) -> JsonDict:
    labels = {"nodeagent.io/backup": "night"} | more.pop("labels", {})
    annotations = {"nodeagent.io/backup": "night", "nodeagent.io/backup-ttl": "24h"} | more.pop("annotations", {})
    own = {"name": "night-1", "namespace": "velero", "uid": "u1", "creationTimestamp": "2026-11-20T12:00:00Z"}
    return {**own, "labels": labels, "annotations": annotations, **more}


def _upload(**meta: Any) -> DataUpload:
    spec = {"snapshotType": "CSI", "sourceNamespace": "app", "sourcePVC": "data", "backupStorageLocation": "default"}
    status = {"phase": "Completed", "snapshotID": "s1", "progress": {"totalBytes": 7}}
    raw = {"apiVersion": "v2alpha1", "kind": "DataUpload", "metadata": _meta(**meta), "spec": spec, "status": status}
    return DataUpload.parse(raw)


def test_a_copy_has_what_the_rules_need_of_its_transfer() -> None:
    failed = {"nodeagent.io/verification": '{"at":"2026-11-20T12:00:00Z","outcome":"failed"}'}
    expected = _copy("night", 1, transfer="night-1", uid="u1", snapshot_id="s1", bytes=7)
    assert build_copy(_upload()) == expected
    assert build_copy(_upload(annotations=failed)) == replace(expected, damaged=True)
    pod = {"namespace": "app", "name": "writer", "uid": "p"}
    spec = {"node": "a", "pod": pod, "volume": "vol", "backupStorageLocation": "default"}
    raw = {"apiVersion": "v1", "kind": "PodVolumeBackup", "metadata": _meta(), "spec": spec}
    copy = build_copy(PodVolumeBackup.parse(raw))
    assert copy is not None
    assert (copy.volume, copy.phase, copy.complete) == (("app", "writer:vol"), Phase.NEW, False)


@pytest.mark.parametrize(
    ("meta", "foreign"),
    [
        ({"labels": {"nodeagent.io/backup": "day"}}, "its label nodeagent.io/backup is of another backup"),
        ({"labels": {"velero.io/backup-name": "b"}}, "it has Velero's label velero.io/backup-name"),
        ({"labels": {"velero.io/restore-name": "b"}}, "it has Velero's label velero.io/restore-name"),
        (
            {"ownerReferences": [{"apiVersion": "v1", "kind": "Backup", "name": "b", "uid": "u"}]},
            "Backup b owns it",
        ),
    ],
    ids=str,
)
def test_a_transfer_with_an_owner_or_a_label_of_velero_is_foreign(meta: JsonDict, foreign: str) -> None:
    copy = build_copy(_upload(**meta))
    assert copy is not None
    assert (copy.foreign, copy.complete) == (f"is not of nodeagent backup create alone: {foreign}", False)


def test_a_transfer_of_no_backup_of_ours_is_no_copy() -> None:
    assert build_copy(_upload(annotations={"nodeagent.io/backup": ""})) is None


@pytest.mark.parametrize("text", ["soon", "0s", "-1h"])
def test_a_backup_whose_ttl_cannot_be_read_never_expires(text: str) -> None:
    copy = build_copy(_upload(annotations={"nodeagent.io/backup-ttl": text}))
    assert copy is not None
    assert copy.ttl is None
