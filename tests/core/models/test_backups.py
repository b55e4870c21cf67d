"""What is known of a backup beside its data: its PVC, whether it is Shrunk, and the report of retention."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from core.errors import ContractError
from core.models.backups import (
    REPORT_KEY,
    HeldBackup,
    RetentionReport,
    SavedClaim,
    SavedSize,
    Shrinkage,
    deletes_by_old_rules,
    find_full,
    is_shrunk,
    read_report,
)
from core.models.base import JsonDict
from core.models.names import CLAIM_ANNOTATION, RETENTION_IMAGE_ANNOTATION, SCHEDULE_COMMAND, SHRUNK_ANNOTATION

_CLAIM: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "PersistentVolumeClaim",
    "metadata": {"namespace": "app", "name": "data", "uid": "u", "labels": {"app": "web", "tier/x": "a_b.c"}},
    "spec": {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "10Gi"}},
        "storageClassName": "fast",
        "volumeMode": "Block",
        "volumeName": "pv-1",
    },
}
_SAVED = SavedClaim(
    namespace="app",
    name="data",
    size="10Gi",
    storage_class="fast",
    access_modes=("ReadWriteOnce",),
    volume_mode="Block",
    labels={"app": "web", "tier/x": "a_b.c"},
)


def test_a_claim_is_kept_with_its_spec_and_labels_and_read_back() -> None:
    assert SavedClaim.from_claim(_CLAIM) == _SAVED
    assert SavedClaim.from_annotations({CLAIM_ANNOTATION: _SAVED.text}) == _SAVED
    assert json.loads(_SAVED.text) == {
        "namespace": "app",
        "name": "data",
        "size": "10Gi",
        "storageClass": "fast",
        "accessModes": ["ReadWriteOnce"],
        "volumeMode": "Block",
        "labels": {"app": "web", "tier/x": "a_b.c"},
    }


def test_a_claim_without_fields_has_those_of_a_file_system() -> None:
    meta = {"metadata": {"namespace": "app", "name": "data"}}
    saved = SavedClaim.from_claim(meta | {"spec": {}})
    assert saved == SavedClaim(namespace="app", name="data")
    assert (saved.volume_mode, saved.text) == ("Filesystem", '{"namespace":"app","name":"data"}')
    assert "more" not in SavedClaim.from_json('{"namespace": "app", "name": "data", "more": {"a": 1}}').text
    # No class and the empty one are kept apart, and the capacity beside the request.
    for fields, storage_class in (({}, None), ({"storageClassName": ""}, "")):
        saved = SavedClaim.from_claim(meta | {"spec": fields})
        assert (saved.storage_class, SavedClaim.from_json(saved.text)) == (storage_class, saved)
    spec = {"resources": {"requests": {"storage": "1Gi"}}}
    saved = SavedClaim.from_claim(meta | {"spec": spec, "status": {"capacity": {"storage": "5Gi"}}})
    assert (saved.size, saved.capacity, SavedClaim.from_json(saved.text)) == ("1Gi", "5Gi", saved)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="absent"),
        pytest.param("{", id="no JSON"),
        pytest.param("[]", id="list"),
        pytest.param('{"name": "data"}', id="no namespace"),
        pytest.param('{"namespace": "app", "name": "../other"}', id="no name of an object"),
        pytest.param('{"namespace": "app", "name": "data", "storageClass": "a/b"}', id="no class"),
        pytest.param('{"namespace": "app", "name": "data", "size": "much"}', id="no quantity"),
        pytest.param('{"namespace": "app", "name": "data", "volumeMode": "Tape"}', id="no mode"),
        pytest.param('{"namespace": "app", "name": "data", "labels": {"a": 1}}', id="label of another type"),
        pytest.param("[" * 3000, id="nested too deeply"),
    ],
)
def test_what_no_claim_could_be_reads_as_absent(text: str) -> None:
    assert SavedClaim.from_annotations({CLAIM_ANNOTATION: text}) is None


def test_a_claim_that_is_invalid_is_an_error_that_names_the_field() -> None:
    with pytest.raises(ContractError, match=r"^labels: Expected `object`, got `array`$"):
        SavedClaim.from_claim({"metadata": {"namespace": "app", "name": "data", "labels": []}, "spec": {}})


def test_labels_that_are_too_long_are_left_out() -> None:
    many = {f"label-{number}": "x" * 63 for number in range(300)}
    saved = SavedClaim(namespace="app", name="data", size="1Gi", labels=many)
    assert SavedClaim.from_json(saved.text) == SavedClaim(namespace="app", name="data", size="1Gi")


MIB = 1024**2


def _sizes(*sizes: tuple[int | None, int]) -> list[SavedSize]:
    return [SavedSize(f"s{number}", files, size * MIB) for number, (files, size) in enumerate(sizes)]


@pytest.mark.parametrize(
    ("sizes", "full"),
    [
        pytest.param([(10, 1000)], None, id="first"),
        pytest.param([(1000, 1000), (499, 1000)], "s0", id="fewer files"),
        pytest.param([(1000, 1000), (500, 1000)], None, id="half of the files"),
        pytest.param([(1000, 1000), (1000, 499)], "s0", id="fewer bytes"),
        pytest.param([(1000, 1000), (1000, 500)], None, id="half of the bytes"),
        pytest.param([(100, 64), (0, 0)], None, id="no more than 100 files and 64 MiB are missing"),
        pytest.param([(101, 0), (0, 0)], "s0", id="101 files are missing"),
        pytest.param([(1, 65), (1, 0)], "s0", id="65 MiB are missing"),
        pytest.param([(150, 100), (40, 90), (40, 90)], None, id="another one confirms it"),
        pytest.param([(1000, 1000), (100, 100), (89, 100)], "s0", id="less than nine tenths confirm nothing"),
        pytest.param([(1000, 1000), (100, 100), (90, 89)], "s0", id="nor do fewer bytes"),
        pytest.param([(1000, 1000), (100, 100), (90, 90)], None, id="nine tenths confirm it"),
        pytest.param([(1000, 1000), (100, 100), (1000, 1000), (100, 100)], "s2", id="grown back"),
        pytest.param([(1000, 1000), (400, 400), (400, 400), (199, 400)], "s2", id="shrunk again"),
        pytest.param([(1000, 1000), (100, 100), (50, 50), (50, 50)], None, id="the last one before is confirmed"),
        pytest.param([(None, 1000), (1, 1000)], None, id="files not known"),
        pytest.param([(None, 1000), (1, 400)], "s0", id="bytes alone"),
    ],
)
def test_the_newest_that_is_not_shrunk_counts(sizes: list[tuple[int | None, int]], full: str | None) -> None:
    *history, new = _sizes(*sizes)
    found = find_full(history, new)
    assert (found and found.full_snapshot) == full
    if found:
        assert (found.files, found.bytes) == (new.files, new.bytes)


def test_neither_one_that_is_acknowledged_nor_a_new_rule_is_a_loss() -> None:
    *history, new = _sizes((1000, 1000), (100, 100), (60, 60))
    assert find_full(history, new) is not None
    assert find_full(history, new, {"s1"}) is None
    full = SavedSize("s0", 1000, 500 * MIB)
    assert find_full([full], SavedSize("s1", 100, 50 * MIB, "rules", (900, 450 * MIB))) is None


def test_a_new_rule_does_not_end_what_was_shrunk_before_it() -> None:
    full, shrunk = SavedSize("s0", 1_000_000, MIB), SavedSize("s1", 1000, MIB, "rules", None)
    found = find_full([full, shrunk], SavedSize("s2", 800, MIB, "rules", (5, 5)))
    assert found is not None
    assert found.full_snapshot == "s0"


def test_its_annotation_is_read_back_until_somebody_acknowledges_it() -> None:
    (history, new) = _sizes((1000, 2), (1, 1))
    found = find_full([history], new)
    assert found is not None
    annotations = {SHRUNK_ANNOTATION: found.to_json()}
    assert Shrinkage.from_annotations(annotations) == found
    assert found.text == f"shrunk: the volume has 1 files with {MIB} bytes, and had 1000 files with {2 * MIB} bytes"
    assert is_shrunk(annotations)
    wire = found.to_json().replace("}", ',"acknowledged":"2026-01-01T00:00:00Z"}')
    assert not is_shrunk({SHRUNK_ANNOTATION: wire})
    for text in ("", "{}", "[", '{"bytes": "many", "fullBytes": 1}'):
        assert Shrinkage.from_annotations({SHRUNK_ANNOTATION: text}) is None


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
)
def test_a_schedule_that_deletes_has_older_rules_until_its_image_is_known(
    args: list[str] | None, annotated: str | None, *, old: bool
) -> None:
    annotations = {RETENTION_IMAGE_ANNOTATION: annotated} if annotated else None
    pod = {"containers": [{"image": "agent:1", "args": args}]}
    spec = {"jobTemplate": {"spec": {"template": {"spec": pod}}}}
    cron_job: JsonDict = {"metadata": {"name": "night", "annotations": annotations}, "spec": spec}
    assert deletes_by_old_rules(cron_job) is old
