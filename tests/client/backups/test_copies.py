"""The copies that transfers are, and what schedules keep by count and calendar: restic's answers, and more."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import pytest

from client.backups.copies import (
    Copy,
    KeepPolicy,
    KeepRule,
    build_copy,
    decide_kept,
    explain_scheduled,
    format_keep,
    parse_keep,
)
from core.models.base import JsonDict
from core.models.phases import Phase
from core.models.transfers import DataUpload, PodVolumeBackup
from tests.client.support.copies import make_copy


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
    expected = make_copy("night", 1, transfer="night-1", uid="u1", snapshot_id="s1", bytes=7)
    assert build_copy(_upload()) == expected
    assert build_copy(_upload(annotations=failed)) == replace(expected, damaged=True)
    shrunk = {"nodeagent.io/shrunk": '{"bytes":1,"fullBytes":100}'}
    assert build_copy(_upload(annotations=shrunk)) == replace(expected, shrunk=True)
    pod = {"namespace": "app", "name": "writer", "uid": "p"}
    spec = {"node": "a", "pod": pod, "volume": "vol", "backupStorageLocation": "default"}
    raw = {"apiVersion": "v1", "kind": "PodVolumeBackup", "metadata": _meta(), "spec": spec}
    copy = build_copy(PodVolumeBackup.parse(raw))
    assert copy is not None
    assert (copy.volume, copy.phase, copy.complete) == (("app", "writer:vol"), Phase.NEW, False)
    assert build_copy(_upload(annotations={"nodeagent.io/backup": ""})) is None


@pytest.mark.parametrize(
    ("meta", "foreign"),
    [
        ({"labels": {"nodeagent.io/backup": "day"}}, "its label nodeagent.io/backup is of another backup"),
        ({"labels": {"velero.io/backup-name": "b"}}, "it has Velero's label velero.io/backup-name"),
        ({"labels": {"velero.io/restore-name": "b"}}, "it has Velero's label velero.io/restore-name"),
        ({"ownerReferences": [{"apiVersion": "v1", "kind": "Backup", "name": "b", "uid": "u"}]}, "Backup b owns it"),
    ],
    ids=str,
)
def test_a_transfer_with_an_owner_or_a_label_of_velero_is_foreign(meta: JsonDict, foreign: str) -> None:
    copy = build_copy(_upload(**meta))
    assert copy is not None
    assert (copy.foreign, copy.complete) == (f"is not of nodeagent backup create alone: {foreign}", False)


_POLICY = KeepPolicy({KeepRule.YEARLY: 1, KeepRule.DAILY: 7}, "Europe/Berlin")


def test_the_annotation_has_the_policy_and_the_time_to_live() -> None:
    assert _POLICY.argv == ["--keep-daily=7", "--keep-yearly=1", "--time-zone=Europe/Berlin"]
    assert KeepPolicy.of({KeepRule.DAILY: 1, KeepRule.LAST: None}, "") == KeepPolicy({KeepRule.DAILY: 1})
    text = format_keep(_POLICY, timedelta(days=2))
    assert text == "daily=7,yearly=1,zone=Europe/Berlin,ttl=48h0m0s"
    assert parse_keep(text) == _POLICY
    marks = [{"nodeagent.io/backup-ttl": "", "nodeagent.io/backup-keep": text}]
    marks += [{"nodeagent.io/backup-ttl": ttl} for ttl in ("", "soon", "0s", "-1h")]
    copies = [build_copy(_upload(annotations=one)) for one in marks]
    assert [one and one.ttl for one in copies] == [timedelta(days=2), None, None, None, None]


_RECORDING: Final = Path(__file__).parents[2] / "recordings/restic-0.18.0/retention.json"
_HISTORIES: Final = json.loads(_RECORDING.read_text())["histories"]

_DAILY: Final = KeepPolicy({KeepRule.DAILY: 2})


def _spell(reasons: list[str]) -> str:
    return ",".join(f"{'oldest ' if one.endswith(', the oldest') else ''}{one.split()[0]}" for one in reasons)


@pytest.mark.parametrize("zone", sorted({one["zone"] for one in _HISTORIES}))
def test_what_restic_keeps_is_kept_for_the_same_reasons(zone: str) -> None:
    for history in (one for one in _HISTORIES if one["zone"] == zone):
        # Of copies of the same second, restic takes the first one for the newest.
        copies = {
            f"{999 - number:03}": make_copy("a", uid=f"{999 - number:03}", created=datetime.fromtimestamp(at, UTC))
            for number, at in enumerate(history["times"])
        }
        policy = KeepPolicy({KeepRule(rule): count for rule, count in history["policy"].items()}, zone)
        kept = decide_kept(copies.values(), policy)
        assert [_spell(kept.get(uid, [])) for uid in copies] == history["kept"], history


def _days(*days_old: float, **more: Any) -> list[Copy]:
    return [make_copy(f"n{day}", day, uid=f"n{day}", **more) for day in days_old]


@pytest.mark.parametrize(
    ("change", "stays"),
    [
        ({"phase": Phase.FAILED, "snapshot_id": ""}, {"n0.9"}),
        ({"phase": Phase.CANCELED, "snapshot_id": ""}, {"n0.9"}),
        ({"damaged": True}, {"n0.9"}),
        ({"recorded": True}, {"n0.9"}),
        ({"deleting": True}, set()),
        ({"foreign": "x"}, set()),
    ],
    ids=str,
)
def test_what_is_no_sound_copy_takes_no_place_and_stays_as_if_it_did(change: dict[str, Any], stays: set[str]) -> None:
    kept = decide_kept([*_days(1, 2, 3, 4), *_days(0.9, 3.9, **change)], _DAILY)
    assert kept.keys() == {"n1", "n2"} | stays


def _explain(
    *copies: Copy, keep: str = format_keep(_DAILY, None), **policies: KeepPolicy | None
) -> dict[str, str | None]:
    made = [Copy(**vars(one) | {"schedule": one.schedule or "night", "keep": one.keep or keep}) for one in copies]
    return explain_scheduled(made, policies)


def test_each_volume_and_location_is_judged_by_itself() -> None:
    other = {"volume": ("app", "files")}
    found = _explain(*_days(1, 2, 3), *_days(5.1, **other), *_days(3.1, location="lab"))
    assert found == {
        "n1": "schedule night keeps it: daily 1 of 2, the newest of 2026-11-20",
        "n2": "schedule night keeps it: daily 2 of 2, the newest of 2026-11-19",
        "n3": None,
        "n5.1": "schedule night keeps it: daily 1 of 2, the newest of 2026-11-16",
        "n3.1": "schedule night keeps it: daily 1 of 2, the newest of 2026-11-18",
    }


def test_the_policy_of_the_newest_backup_of_a_schedule_counts() -> None:
    before = _days(1, 2, 3, keep="last=1,zone=UTC")
    assert [uid for uid, why in _explain(*before, *_days(0.5)).items() if not why] == ["n2", "n3"]
    assert _explain(*before, keep="", other=_DAILY).keys() == {"n1", "n2", "n3"}
    assert explain_scheduled([make_copy("a", keep="daily=1"), make_copy("b", schedule="night")], {}) == {}


@pytest.mark.parametrize(
    ("ttl", "held"), [(None, ["n1", "n2"]), (timedelta(days=9), [])], ids=["nor a time to live", "but a time to live"]
)
def test_copies_with_a_count_stay_once_their_schedule_has_none(ttl: timedelta | None, held: list[str]) -> None:
    before = _days(1, 2, schedule="night", keep="monthly=12,zone=UTC,ttl=1h0m0s", ttl=timedelta(hours=1))
    found = explain_scheduled([*before, *_days(0.5, schedule="night", ttl=ttl)], {})
    assert sorted(found) == held
    assert all(why and why.startswith("schedule night had a count when it was made") for why in found.values())


@pytest.mark.parametrize("keep", ["quarterly=4", "ttl=1h", "daily", "daily=x", "daily=0", "daily=1,zone=Mars/Base"])
def test_a_policy_that_cannot_be_read_keeps_everything_of_its_schedule(keep: str) -> None:
    found = _explain(*_days(1, 2, 3), *_days(0.5, keep=keep))
    unread = "what schedule night keeps cannot be read in its newest backup"
    assert [why and why.partition(": ")[0] for why in found.values()] == [unread] * 4


def test_the_text_of_a_copy_has_all_its_rules() -> None:
    policy = KeepPolicy(dict.fromkeys(KeepRule, 3), "Europe/Berlin")
    found = _explain(*_days(0, 0.01), night=policy)
    assert found["n0"] == (
        "schedule night keeps it: last 1 of 3; hourly 1 of 3, the newest of 2026-11-21 13h; "
        "daily 1 of 3, the newest of 2026-11-21; weekly 1 of 3, the newest of 2026-W47; "
        "monthly 1 of 3, the newest of 2026-11; yearly 1 of 3, the newest of 2026"
    )
