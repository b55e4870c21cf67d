"""The rules of retention: each one by itself, and what no set of transfers may break."""

import itertools
from dataclasses import replace
from datetime import timedelta
from operator import attrgetter
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from client.backups.copies import Copy, KeepPolicy, KeepRule
from client.backups.retention import Check, RetentionDecision, RetentionRule, Situation, find_witnesses, judge_backups
from core.models.base import JsonDict
from core.models.phases import FINAL_PHASES, Phase
from tests.client.support.copies import DAY, make_copy
from tests.nodeagent.support.hand_clock import NOON


def _judge(*copies: Copy, **situation: Any) -> dict[str, RetentionDecision]:
    return {one.backup: one for one in judge_backups(copies, Situation(now=NOON, **situation))}


def _rules(judgment: RetentionDecision) -> list[RetentionRule]:
    return [hold.rule for hold in judgment.holds]


_NEWER: Final = make_copy("newer", 0.5)


@pytest.mark.parametrize(
    ("change", "rules", "text"),
    [
        pytest.param({}, [], "", id="expired"),
        pytest.param(
            {"created": NOON - DAY},
            [RetentionRule.NOT_EXPIRED],
            "it expires after 2026-11-21T12",
            id="as old as its ttl",
        ),
        pytest.param({"created": NOON - DAY - timedelta(seconds=1)}, [], "", id="a second older"),
        pytest.param(
            {"created": NOON + DAY},
            [RetentionRule.NOT_EXPIRED, RetentionRule.NEWEST_COPY],
            "it has",
            id="from the future",
        ),
        pytest.param({"created": None}, [RetentionRule.NOT_EXPIRED], "it has no time to live", id="without a stamp"),
        pytest.param({"ttl": None}, [RetentionRule.NOT_EXPIRED], "it has no time to live", id="without a ttl"),
        pytest.param(
            {"ttl": 292 * 365 * DAY}, [RetentionRule.NOT_EXPIRED], "it expires after 2318", id="the longest ttl"
        ),
        pytest.param(
            {"phase": Phase.IN_PROGRESS},
            [RetentionRule.IN_PROGRESS],
            "DataUpload old-1 of app/data is InProgress: cancel the backup first",
            id="in progress",
        ),
        pytest.param({"phase": Phase.FAILED, "snapshot_id": ""}, [], "", id="failed"),
        pytest.param(
            {"snapshot_id": "s-now"}, [RetentionRule.RESTORING], "DataDownload x restores app/data", id="restored"
        ),
        pytest.param(
            {"foreign": "is not of nodeagent backup create alone: Backup b owns it"},
            [RetentionRule.FOREIGN],
            "DataUpload old-1 is not of nodeagent backup create alone: Backup b owns it",
            id="foreign",
        ),
    ],
)
def test_a_backup_is_kept_by_each_rule(change: JsonDict, rules: list[RetentionRule], text: str) -> None:
    judgment = _judge(replace(make_copy("old"), **change), _NEWER, restoring={"s-now": "DataDownload x"})["old"]
    assert sorted(_rules(judgment)) == sorted(rules)
    assert not text or any(hold.text.startswith(text) for hold in judgment.holds)


def test_the_newest_complete_copy_of_a_volume_is_kept() -> None:
    judged = _judge(make_copy("a", 3), make_copy("b", 2), make_copy("c", 9, phase=Phase.FAILED, snapshot_id=None))
    assert {name: _rules(one) for name, one in judged.items()} == {"a": [], "b": [RetentionRule.NEWEST_COPY], "c": []}
    assert judged["b"].holds[0].text == "it has the newest copy of app/data in default"
    assert list(judged) == ["c", "a", "b"]
    assert _judge(make_copy("a", 3))["a"].holds[0].text == "it has the only copy of app/data in default"


@pytest.mark.parametrize(
    "change",
    [{"phase": Phase.FAILED}, {"phase": Phase.IN_PROGRESS}, {"snapshot_id": ""}, {"deleting": True}, {"foreign": "x"}],
    ids=str,
)
def test_what_is_no_complete_copy_does_not_replace_one(change: JsonDict) -> None:
    judged = _judge(make_copy("a", 3), replace(make_copy("b", 2), **change))
    assert _rules(judged["a"]) == [RetentionRule.NEWEST_COPY]


def test_each_location_is_judged_by_itself() -> None:
    nightly = [make_copy(f"n{day}", day) for day in (2, 3, 4)]
    judged = _judge(*nightly, make_copy("lab", 1.5, location="lab"))
    assert {name: _rules(one) for name, one in judged.items()} == {
        "n4": [],
        "n3": [],
        "n2": [RetentionRule.NEWEST_COPY],
        "lab": [RetentionRule.NEWEST_COPY],
    }
    closed = _judge(
        *nightly, make_copy("lab-old", 5, location="lab"), closed={"lab": "BackupStorageLocation lab is gone"}
    )
    assert _rules(closed["lab-old"]) == [RetentionRule.NEWEST_COPY, RetentionRule.LOCATION]
    assert _rules(closed["n3"]) == []


@pytest.mark.parametrize(
    ("phase", "rule"),
    [
        (Phase.FAILED, RetentionRule.FAILING_VOLUME),
        (Phase.CANCELED, RetentionRule.FAILING_VOLUME),
        (Phase.IN_PROGRESS, RetentionRule.UNDECIDED),
    ],
    ids=str,
)
def test_a_volume_whose_newest_transfer_is_not_completed_keeps_three_copies(phase: Phase, rule: RetentionRule) -> None:
    copies = [make_copy(f"n{day}", day) for day in (2, 3, 4, 5)]
    judged = _judge(*copies, make_copy("bad", 1.5, location="lab", phase=phase, snapshot_id=None))
    assert {name: set(_rules(one)) - {RetentionRule.IN_PROGRESS} for name, one in judged.items()} == {
        "n5": set(),
        "n4": {rule},
        "n3": {rule},
        "n2": {RetentionRule.NEWEST_COPY},
        # Once it were gone, nothing would say that the volume fails.
        "bad": {rule},
    }
    why = f"DataUpload bad-1, the newest of app/data, is {phase}"
    assert judged["n4"].holds[0].text == f"{why}: the newest 3 complete copies of app/data in default stay"


_CHECKED: Final = Check(frozenset({"old-data"}), frozenset({"old-data"}), {"new-data": ""})


@pytest.mark.parametrize(
    ("change", "rule", "text"),
    [
        ({}, None, ""),
        (
            {"faults": {"new-data": "snapshot s-new is not in the repository"}},
            RetentionRule.UNCONFIRMED,
            (
                "DataUpload new-1, the newest copy of app/data in default: snapshot s-new is not in the repository "
                "(nodeagent backup verify new)"
            ),
        ),
        (
            {"faults": {}},
            RetentionRule.UNCONFIRMED,
            (
                "DataUpload new-1, the newest copy of app/data in default: not looked at in this run "
                "(nodeagent backup verify new)"
            ),
        ),
        (
            {"found": frozenset()},
            RetentionRule.NOT_FOUND,
            "DataUpload old-1 of app/data: its snapshot s-old is not in default",
        ),
        (
            {"refused": {("default", None): "it is read-only"}},
            RetentionRule.LOCATION,
            "nothing can be deleted in BackupStorageLocation default: it is read-only",
        ),
        (
            {"refused": {("default", "app"): "it is locked"}},
            RetentionRule.LOCATION,
            "nothing can be deleted in BackupStorageLocation default: it is locked",
        ),
        ({"refused": {("default", "db"): "it is locked"}}, None, ""),
    ],
    ids=["confirmed", "gone", "not looked at", "own gone", "location", "repository", "other repository"],
)
def test_what_justifies_a_deletion_was_seen_in_the_bucket(
    change: JsonDict, rule: RetentionRule | None, text: str
) -> None:
    judged = _judge(make_copy("old", 3), make_copy("new", 2), check=replace(_CHECKED, **change))
    assert [(hold.rule, hold.text) for hold in judged["old"].holds] == ([(rule, text)] if rule else [])


@pytest.mark.parametrize(
    ("change", "more"),
    [({"recorded": True}, ""), ({"damaged": True}, " whose verification did not fail")],
    ids=["a command has begun to delete it", "its verification failed"],
)
def test_a_newest_copy_that_replaces_none_stays_and_so_does_the_one_before(change: JsonDict, more: str) -> None:
    judged = _judge(make_copy("a", 4), make_copy("b", 3), make_copy("c", 2, **change))
    newest = [RetentionRule.NEWEST_COPY]
    assert {name: _rules(one) for name, one in judged.items()} == {"a": [], "b": newest, "c": newest}
    assert judged["b"].holds[0].text == f"it has the newest copy of app/data in default{more}"


def test_the_newest_copy_that_is_not_shrunk_stays_until_somebody_acknowledges_the_shrunk_one() -> None:
    older, full = make_copy("a", 5), make_copy("b", 4)
    shrunk = [make_copy("c", 3, shrunk=True), make_copy("d", 2, shrunk=True)]
    judged = _judge(older, full, *shrunk)
    assert {name: _rules(one) for name, one in judged.items()} == {
        "a": [],
        "b": [RetentionRule.SHRUNK],
        "c": [RetentionRule.SHRUNK],
        "d": [RetentionRule.NEWEST_COPY],
    }
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
    lost = {uids[name]: "its snapshot is not in default" for name in "bd"}
    judged = _judge(*copies, check=Check(every, every, lost))
    assert all(RetentionRule.UNCONFIRMED in _rules(judged[name]) for name in "ab")


_STATES: Final[list[JsonDict]] = [
    {},
    {"shrunk": True},
    {"damaged": True},
    {"shrunk": True, "damaged": True},
    {"recorded": True},
    {"recorded": True, "shrunk": True},
    {"recorded": True, "damaged": True},
    {"deleting": True},
    {"phase": Phase.FAILED, "snapshot_id": ""},
]


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
    assert RetentionRule.NOT_EXPIRED in _rules(_judge(make_copy("a", 5), late, make_copy("b", 2))["a"])


def test_a_copy_by_the_other_method_counts() -> None:
    judged = _judge(make_copy("a", 3), make_copy("b", 2, kind="PodVolumeBackup"))
    assert _rules(judged["a"]) == []


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
