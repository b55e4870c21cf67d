"""The copies that transfers are, which transfers are not ours, and what a schedule keeps, as text."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from client.backups.copies import KeepPolicy, KeepRule, build_copy, format_keep, parse_keep
from core.errors import ConfigError
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


_POLICY = KeepPolicy({KeepRule.YEARLY: 1, KeepRule.DAILY: 7}, "Europe/Berlin")


def test_the_annotation_has_the_policy_and_the_time_to_live() -> None:
    text = format_keep(_POLICY, timedelta(days=2))
    assert text == "daily=7,yearly=1,zone=Europe/Berlin,ttl=48h0m0s"
    assert parse_keep(text) == _POLICY
    for keep, ttl in ((text, timedelta(days=2)), (format_keep(_POLICY, None), None), ("", None)):
        copy = build_copy(_upload(annotations={"nodeagent.io/backup-ttl": "", "nodeagent.io/backup-keep": keep}))
        assert copy is not None
        assert copy.ttl == ttl


def test_words_and_text_have_one_order() -> None:
    assert _POLICY.argv == ["--keep-daily=7", "--keep-yearly=1", "--time-zone=Europe/Berlin"]
    assert KeepPolicy({KeepRule.LAST: 3}).argv == ["--keep-last=3"]
    assert list(_POLICY.by_name.items()) == [("daily", 7), ("yearly", 1)]


def test_without_a_count_there_is_no_policy() -> None:
    assert KeepPolicy.of(dict.fromkeys(KeepRule), "Mars") is None
    assert KeepPolicy.of({KeepRule.DAILY: 1, KeepRule.LAST: None}, "") == KeepPolicy({KeepRule.DAILY: 1})


@pytest.mark.parametrize(
    ("count", "zone", "error"),
    [(0, "", "--keep-daily: must be at least 1: 0"), (1, "Europe/Berln", "--time-zone: no time zone: Europe/Berln")],
    ids=["count", "zone"],
)
def test_an_invalid_policy_names_the_flag(count: int, zone: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        KeepPolicy.of({KeepRule.DAILY: count}, zone)


@pytest.mark.parametrize("text", ["", "ttl=1h", "daily", "daily=x", "daily=0", "daily=1,zone=Mars", "quarterly=1"])
def test_an_invalid_annotation_is_an_error(text: str) -> None:
    with pytest.raises((ValueError, ConfigError), match=r"."):
        parse_keep(text)
