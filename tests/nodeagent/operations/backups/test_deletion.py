"""Which backups may be deleted: each rule by itself, and what no set of transfers may break."""

from dataclasses import replace
from datetime import timedelta
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.models.base import JsonDict
from core.models.phases import FINAL_PHASES, Phase
from core.models.transfers import DataUpload, PodVolumeBackup
from nodeagent.operations.backups.deletion import Copy, Judgment, Rule, build_copy, judge_backups
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


def _judge(*copies: Copy, restoring: dict[str, str] | None = None) -> dict[str, Judgment]:
    return {one.backup: one for one in judge_backups(copies, restoring or {}, NOON)}


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
    assert judged["b"].holds[0].text == "it has the newest copy of app/data"
    assert list(judged) == ["c", "a", "b"]
    assert _judge(_copy("a", 3))["a"].holds[0].text == "it has the only copy of app/data"


@pytest.mark.parametrize(
    "change",
    [{"phase": Phase.FAILED}, {"phase": Phase.IN_PROGRESS}, {"snapshot_id": ""}, {"deleting": True}, {"foreign": "x"}],
    ids=str,
)
def test_what_is_no_complete_copy_does_not_replace_one(change: JsonDict) -> None:
    judged = _judge(_copy("a", 3), replace(_copy("b", 2), **change))
    assert _rules(judged["a"]) == [Rule.NEWEST_COPY]


def test_a_copy_whose_verification_failed_does_not_replace_one() -> None:
    judged = _judge(_copy("a", 4), _copy("b", 3), _copy("c", 2, damaged=True))
    assert {name: _rules(one) for name, one in judged.items()} == {
        "a": [],
        "b": [Rule.NEWEST_COPY],
        "c": [Rule.NEWEST_COPY],
    }
    assert judged["b"].holds[0].text == "it has the newest copy of app/data whose verification did not fail"


def test_one_volume_holds_the_whole_backup() -> None:
    gone = _copy("a", 5, volume=("app", "gone"))
    judged = _judge(_copy("a", 5), gone, _copy("b", 2))
    assert [hold.text for hold in judged["a"].holds] == ["it has the only copy of app/gone"]
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
    uid=st.uuids().map(str),
)


@given(st.lists(_ANY_COPY, max_size=12), st.sets(st.sampled_from(["s1", "s2"])))
def test_no_newest_copy_and_no_foreign_one_is_ever_deleted(copies: list[Copy], restoring: set[str]) -> None:
    judged = judge_backups(copies, dict.fromkeys(restoring, "a restore"), NOON)
    deleted = [copy for one in judged if not one.holds for copy in one.copies]
    kept = [copy for copy in copies if copy not in deleted]
    assert sorted(copy.uid for one in judged for copy in one.copies) == sorted(copy.uid for copy in copies)
    for copy in deleted:
        assert not copy.foreign
        assert copy.phase in FINAL_PHASES
        assert copy.snapshot_id not in restoring
        assert copy.ttl is not None
        assert copy.created is not None
        assert NOON - copy.created > copy.ttl
        if copy.complete:
            others = [other for other in kept if other.complete and other.volume == copy.volume]
            assert max(other.created or NOON for other in others) >= copy.created
            assert copy.damaged or any(not other.damaged for other in others)


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
