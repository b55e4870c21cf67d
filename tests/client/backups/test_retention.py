"""The rules of retention: each one by itself, and what no set of transfers may break."""

import itertools
import re
from dataclasses import replace
from datetime import datetime, timedelta
from operator import attrgetter
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from client.backups.copies import Copy, KeepPolicy, KeepRule
from client.backups.retention import (
    Check,
    DeletionError,
    GoneCopy,
    RetentionDecision,
    Situation,
    decide_now,
    explain_backlog,
    find_witnesses,
    judge_backups,
    limit_deletions,
)
from client.backups.retention import RetentionRule as Rule
from core.models.base import JsonDict
from core.models.phases import FINAL_PHASES, Phase
from tests.client.support.copies import DATA, DAY, make_copy
from tests.nodeagent.support.hand_clock import NOON


def _judge(*copies: Copy, **situation: Any) -> dict[str, RetentionDecision]:
    return {one.backup: one for one in judge_backups(copies, Situation(now=NOON, **situation))}


def _rules(judgment: RetentionDecision) -> list[Rule]:
    return [hold.rule for hold in judgment.holds]


_NEWER: Final = make_copy("newer", 0.5)


@pytest.mark.parametrize(
    ("change", "rules", "text"),
    [
        ({}, [], ""),
        ({"created": NOON - DAY}, [Rule.NOT_EXPIRED], "it expires after 2026-11-21T12"),
        ({"created": NOON - DAY - timedelta(seconds=1)}, [], ""),
        ({"created": NOON + DAY}, [Rule.NOT_EXPIRED], "it is from the future: it was made at 2026-11-22T12"),
        ({"created": None}, [Rule.NOT_EXPIRED], "it has no time to live"),
        ({"ttl": None}, [Rule.NOT_EXPIRED], "it has no time to live"),
        ({"ttl": 292 * 365 * DAY}, [Rule.NOT_EXPIRED], "it expires after 2318"),
        ({"phase": Phase.IN_PROGRESS}, [Rule.IN_PROGRESS], "DataUpload old-1 of app/data is InProgress: cancel the "),
        ({"phase": Phase.FAILED, "snapshot_id": ""}, [], ""),
        ({"snapshot_id": "s-now"}, [Rule.RESTORING], "DataDownload x restores app/data"),
        ({"foreign": "has an owner"}, [Rule.FOREIGN], "DataUpload old-1 has an owner"),
    ],
    ids=str,
)
def test_a_backup_is_kept_by_each_rule(change: JsonDict, rules: list[Rule], text: str) -> None:
    judgment = _judge(replace(make_copy("old"), **change), _NEWER, restoring={"s-now": "DataDownload x"})["old"]
    assert sorted(_rules(judgment)) == sorted(rules)
    assert not text or any(hold.text.startswith(text) for hold in judgment.holds)


def test_the_newest_complete_copy_of_a_volume_is_kept() -> None:
    """By whichever method it was made."""
    newer = make_copy("b", 2, kind="PodVolumeBackup")
    judged = _judge(make_copy("a", 3), newer, make_copy("c", 9, phase=Phase.FAILED, snapshot_id=None))
    assert {name: _rules(one) for name, one in judged.items()} == {"a": [], "b": [Rule.NEWEST_COPY], "c": []}
    assert judged["b"].holds[0].text == "it has the newest copy of app/data in default"
    assert list(judged) == ["c", "a", "b"]
    assert _judge(make_copy("a", 3))["a"].holds[0].text == "it has the only copy of app/data in default"
    for change in ({"phase": Phase.FAILED}, {"snapshot_id": ""}, {"deleting": True}, {"foreign": "x"}):
        judged = _judge(make_copy("a", 3), make_copy("b", 2, **change))
        assert Rule.NEWEST_COPY in _rules(judged["a"]), change


def test_each_location_is_judged_by_itself() -> None:
    nightly = [make_copy(f"n{day}", day) for day in (2, 3, 4)]
    newest = [Rule.NEWEST_COPY]
    judged = _judge(*nightly, make_copy("lab", 1.5, location="lab"))
    assert {name: _rules(one) for name, one in judged.items()} == {"n4": [], "n3": [], "n2": newest, "lab": newest}
    closed = _judge(*nightly, make_copy("lab-old", 5, location="lab"), closed={"lab": "lab is gone"})
    assert _rules(closed["lab-old"]) == [Rule.NEWEST_COPY, Rule.LOCATION]
    assert _rules(closed["n3"]) == []


@pytest.mark.parametrize(
    ("phase", "rule"),
    [(Phase.FAILED, Rule.FAILING_VOLUME), (Phase.CANCELED, Rule.FAILING_VOLUME), (Phase.IN_PROGRESS, Rule.UNDECIDED)],
    ids=str,
)
def test_a_volume_whose_newest_transfer_is_not_completed_keeps_three_copies(phase: Phase, rule: Rule) -> None:
    copies = [make_copy(f"n{day}", day) for day in (2, 3, 4, 5)]
    judged = _judge(*copies, make_copy("bad", 1.5, location="lab", phase=phase, snapshot_id=None))
    assert {name: set(_rules(one)) - {Rule.IN_PROGRESS} for name, one in judged.items()} == {
        "n5": set(),
        "n4": {rule},
        "n3": {rule},
        "n2": {Rule.NEWEST_COPY},
        # Once it were gone, nothing would say that the volume fails.
        "bad": {rule},
    }
    why = f"DataUpload bad-1, the newest of app/data, is {phase}"
    assert judged["n4"].holds[0].text == f"{why}: the newest 3 complete copies of app/data in default stay"


def test_what_a_wrong_clock_has_dated_in_the_future_stays_and_does_not_count() -> None:
    """For a year it would be the newest copy and the newest transfer, and have the policy of its schedule."""
    copies = [make_copy("a", 4), make_copy("b", 3), make_copy("future", -365)]
    judged = _judge(*copies)
    rules = {"a": [], "b": [Rule.NEWEST_COPY], "future": [Rule.NOT_EXPIRED]}
    assert {name: _rules(one) for name, one in judged.items()} == rules
    assert judged["future"].holds[0].text == "it is from the future: it was made at 2027-11-21T12:00:00Z"
    assert find_witnesses(judged[name].copies[0] for name in rules) == {copies[1].series: copies[1]}
    failing = _judge(*copies, make_copy("bad", 2, phase=Phase.FAILED, snapshot_id=None))
    assert _rules(failing["a"]) == [Rule.FAILING_VOLUME]
    scheduled = (replace(one, schedule="night", ttl=None, keep="last=1") for one in copies)
    judged = _judge(*scheduled, make_copy("new", 1, schedule="night", ttl=None, keep="last=2"))
    assert [name for name, one in judged.items() if not one.holds] == ["a"]


_NEWEST: Final = "DataUpload new-1, the newest copy of app/data in default"
_VERIFY: Final = "(nodeagent backup verify new)"
_CLOSED: Final = "nothing can be deleted in BackupStorageLocation default"
_CHECKED: Final = Check(frozenset({"old-data"}), frozenset({"old-data"}), {"new-data": ""})


@pytest.mark.parametrize(
    ("change", "rule", "text"),
    [
        ({}, None, ""),
        ({"faults": {"new-data": "s-new is lost"}}, Rule.UNCONFIRMED, f"{_NEWEST}: s-new is lost {_VERIFY}"),
        ({"faults": {}}, Rule.UNCONFIRMED, f"{_NEWEST}: not looked at in this run {_VERIFY}"),
        ({"found": frozenset()}, Rule.NOT_FOUND, "DataUpload old-1 of app/data: its snapshot s-old is not in default"),
        ({"refused": {("default", None): "it is read-only"}}, Rule.LOCATION, f"{_CLOSED}: it is read-only"),
        ({"refused": {("default", "app"): "it is locked"}}, Rule.LOCATION, f"{_CLOSED}: it is locked"),
        ({"refused": {("default", "db"): "it is locked"}}, None, ""),
    ],
    ids=str,
)
def test_what_justifies_a_deletion_was_seen_in_the_bucket(change: JsonDict, rule: Rule | None, text: str) -> None:
    judged = _judge(make_copy("old", 3), make_copy("new", 2), check=replace(_CHECKED, **change))
    assert [(hold.rule, hold.text) for hold in judged["old"].holds] == ([(rule, text)] if rule else [])


@pytest.mark.parametrize(
    ("change", "more"),
    [({"recorded": True}, ""), ({"damaged": True}, " whose verification did not fail")],
    ids=["a command has begun to delete it", "its verification failed"],
)
def test_a_newest_copy_that_replaces_none_stays_and_so_does_the_one_before(change: JsonDict, more: str) -> None:
    judged = _judge(make_copy("a", 4), make_copy("b", 3), make_copy("c", 2, **change))
    newest = [Rule.NEWEST_COPY]
    assert {name: _rules(one) for name, one in judged.items()} == {"a": [], "b": newest, "c": newest}
    assert judged["b"].holds[0].text == f"it has the newest copy of app/data in default{more}"


def test_the_newest_copy_that_is_not_shrunk_stays_until_somebody_acknowledges_the_shrunk_one() -> None:
    older, full = make_copy("a", 5), make_copy("b", 4)
    shrunk = [make_copy("c", 3, shrunk=True), make_copy("d", 2, shrunk=True)]
    judged = _judge(older, full, *shrunk)
    kept = {name: _rules(one) for name, one in judged.items()}
    assert kept == {"a": [], "b": [Rule.SHRUNK], "c": [Rule.SHRUNK], "d": [Rule.NEWEST_COPY]}
    command = "nodeagent backup acknowledge d"
    text = "DataUpload d-1, the newest copy of app/data in default, is Shrunk: the newest that is not stays"
    assert (judged["b"].holds[0].text, judged["b"].holds[0].command) == (f"{text} ({command})", command)
    for last in (replace(shrunk[1], shrunk=False), make_copy("e", 1.5)):
        judged = _judge(older, full, *shrunk, last)
        assert [name for name, one in judged.items() if one.holds] == [last.backup]


def test_a_shrunk_or_damaged_copy_does_not_justify_that_a_full_one_goes() -> None:
    copies = [make_copy("a", 5), make_copy("b", 4), make_copy("c", 3, shrunk=True), make_copy("d", 2)]
    uids = {one.backup: one.uid for one in copies}
    damaged = make_copy("e", 1, damaged=True)
    assert find_witnesses([*copies[:3], damaged]) == {copies[0].series: copies[1]}
    every = frozenset(uids.values())
    lost: dict[str, str | None] = {uids[name]: "its snapshot is not in default" for name in "bd"}
    judged = _judge(*copies, check=Check(every, every, lost))
    assert all(Rule.UNCONFIRMED in _rules(judged[name]) for name in "ab")


_MARKS: Final = (
    "",
    "shrunk",
    "damaged",
    "shrunk damaged",
    "recorded",
    "recorded shrunk",
    "recorded damaged",
    "deleting",
)
_STATES: Final[list[JsonDict]] = [dict.fromkeys(marks.split(), True) for marks in _MARKS]
_STATES.append({"phase": Phase.FAILED, "snapshot_id": ""})

_TWO: Final = KeepPolicy({KeepRule.LAST: 2})


@pytest.mark.parametrize("oldest", _STATES, ids=str)
def test_of_any_four_copies_the_last_good_ones_stay(oldest: JsonDict) -> None:
    """A deletion that was recorded may have been interrupted before it deleted anything: such a copy is one too."""
    for states in itertools.product([oldest], *[_STATES] * 3):
        copies = [make_copy(f"b{4 - days}", days, **state) for days, state in zip((5, 4, 3, 2), states, strict=True)]
        judged = _judge(*copies)
        before = [one for one in copies if one.has_data and not one.deleting]
        after = [one for one in before if judged[one.backup].holds]
        for good in (attrgetter("has_data"), lambda one: not one.damaged, lambda one: not (one.damaged or one.shrunk)):
            assert any(map(good, after)) == any(map(good, before)), states
        kept = _judge(*(replace(one, schedule="night") for one in copies), policies={"night": _TWO})
        sound = [one for one in before if not one.damaged]
        assert all(kept[one.backup].holds for one in sound[-2:]), states


def test_one_volume_holds_the_whole_backup() -> None:
    gone = make_copy("a", 5, volume=("app", "gone"))
    judged = _judge(make_copy("a", 5), gone, make_copy("b", 2))
    assert [hold.text for hold in judged["a"].holds] == ["it has the only copy of app/gone in default"]
    late = replace(gone, created=NOON - DAY / 2)
    assert Rule.NOT_EXPIRED in _rules(_judge(make_copy("a", 5), late, make_copy("b", 2))["a"])


_ANY_COPY: Final = st.builds(
    make_copy,
    backup=st.sampled_from("abcde"),
    days_old=st.floats(0, 20),
    volume=st.sampled_from([("app", "data"), ("app", "files"), ("db", "data")]),
    phase=st.sampled_from(Phase),
    snapshot_id=st.sampled_from(["", "s1", "s2", "s3"]),
    ttl=st.sampled_from([None, timedelta(hours=1), 5 * DAY]),
    foreign=st.sampled_from(["", "", "Velero's"]),
    deleting=st.booleans(),
    damaged=st.booleans(),
    shrunk=st.booleans(),
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
            assert copy.shrunk or copy.damaged or any(not (other.shrunk or other.damaged) for other in left)
            assert copy.recorded or max(other.created or NOON for other in left) >= copy.created


def _limit(
    *copies: Copy, gone: list[GoneCopy] | None = None, most: int | None = None
) -> dict[str, list[RetentionDecision]]:
    judged = limit_deletions(judge_backups(copies, Situation(now=NOON)), gone or [], NOON, most=most)
    return {
        "deleted": [one for one in judged if not one.holds],
        "waiting": [one for one in judged if one.held_by((Rule.LIMIT,))],
    }


def _names(judgments: list[RetentionDecision]) -> list[str]:
    return [one.backup for one in judgments]


_OLD: Final = [make_copy(f"n{day}", day) for day in range(9, 3, -1)]
"""Six expired copies; the younger ones keep them from being the newest."""


@pytest.mark.parametrize(
    ("younger", "gone", "deleted"),
    [
        pytest.param([make_copy("new", 1.5)], [], 2, id="none completed within a day"),
        pytest.param([make_copy("x", 0.9), make_copy("y", 0.5)], [], 4, id="two completed"),
        pytest.param([make_copy("x", 1.9, ended=NOON - DAY / 2)], [], 3, id="completed within it, and begun before"),
        pytest.param([make_copy("x", 5.5, ended=NOON + 30 * DAY)], [], 2, id="completed by a clock that is ahead"),
        pytest.param([make_copy("x", 0.9)], [(0.5, 9.0)], 2, id="one went"),
        pytest.param([make_copy("x", 0.9)], [(1.5, 9.0)], 3, id="one went before"),
        pytest.param([make_copy("x", 0.9)], [(0.1, 0.5)], 3, id="one came and went"),
        pytest.param([make_copy("x", 0.9)], [(-3.0, 9.0)], 2, id="one went by a clock that was ahead"),
    ],
)
def test_as_many_go_as_were_completed_and_two(
    younger: list[Copy], gone: list[tuple[float, float]], deleted: int
) -> None:
    went = [GoneCopy(DATA, "default", NOON - at * DAY, NOON - made * DAY) for at, made in gone]
    limited = _limit(*_OLD, *younger, gone=went)
    assert _names(limited["deleted"]) == _names(judge_backups(_OLD, Situation()))[:deleted]
    assert len(limited["waiting"]) == len(_OLD) - deleted


def test_whole_backups_are_counted_before_the_first_goes_and_none_goes_before_an_older_one() -> None:
    files = ("app", "files")
    # Two copies of app/data go in the first ones: the third waits, and with it what is younger and has its volumes.
    first = [make_copy(name, days) for name, days in (("a", 9), ("b", 8), ("c", 7))]
    first += [make_copy("c", 7, volume=files), make_copy("d", 6, volume=files)]
    limited = _limit(*first, make_copy("new", 1.5), make_copy("new", 1.5, volume=files))
    assert (_names(limited["deleted"]), _names(limited["waiting"])) == (["a", "b"], ["c", "d"])
    assert limited["waiting"][0].holds[0].text == "app/data may lose 2 copies in default now: it waits for a later run"
    lab = [make_copy("z", 6, location="lab"), make_copy("new", 1.2, location="lab")]
    assert "z" in _names(_limit(*first, *lab, make_copy("new", 1.5))["deleted"])


def test_a_person_may_let_more_go_and_what_has_no_data_has_no_limit() -> None:
    failed = [make_copy(f"f{n}", 9, phase=Phase.FAILED, snapshot_id=None) for n in range(5)]
    assert len(_limit(*_OLD, *failed, make_copy("new", 1.5))["deleted"]) == 7
    assert _names(_limit(*_OLD, make_copy("new", 1.5), most=4)["deleted"]) == ["n9", "n8", "n7", "n6"]


def _explain(*copies: Copy) -> tuple[int, str | None, float] | None:
    judged = limit_deletions(judge_backups(copies, Situation(now=NOON)), [], NOON)
    _, waiting, why, through = explain_backlog(judged, NOON)
    return (waiting, why, (through - NOON) / DAY) if through is not None else None


def test_a_backlog_says_why_and_when_it_is_through() -> None:
    assert _explain(*_OLD[:2], make_copy("new", 1.5)) is None
    assert _explain(*_OLD, make_copy("new", 1.5)) == (4, "fewer backups are completed than expire", 2)
    paused = [make_copy(f"n{day}", day + 20) for day in range(9, 3, -1)]
    between = "2026-10-28T12:00:00Z and 2026-11-20T00:00:00Z"
    why = f"there was no backup between {between}: runs were missed, or a clock was wrong"
    assert _explain(*paused, make_copy("new", 1.5)) == (4, why, 2)
    shorter = [replace(one, ttl=3 * DAY) for one in _OLD]
    assert _explain(*shorter, make_copy("new", 1.5)) == (4, "the time to live was shortened from 72h0m0s to 24h0m0s", 2)


@pytest.mark.parametrize(
    ("ahead", "begun", "error"),
    [
        ((0.0, 0.0, 0.0), None, None),
        ((4.9, 0.0, 2.0), None, None),
        ((0.0, -4.9, 0.0), 0.0, None),
        ((31 * 1440.0, 0.0, 0.0), None, "clocks are more than 5m0s apart (a 2026-12-22T12:00:00Z, b 2026-11-21T12"),
        ((0.0, 0.0, -6.0), None, "clocks are more than 5m0s apart"),
        ((0.0, None, 0.0), None, "how old backups are is not known without b"),
        ((0.0, 0.0, 0.0), 6.0, "this run has not begun yet (2026-11-21T12:06:00Z)"),
    ],
    ids=["alike", "a little apart", "the earliest counts", "one ahead", "one behind", "silent", "before the run"],
)
def test_the_earliest_of_three_clocks_counts(
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
