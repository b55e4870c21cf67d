"""From objects to records: whatever an object contains, there is a record of it."""

import json
from typing import Any

import msgspec
import pytest

from client.status.parse import (
    agent_record,
    config_record,
    decode_agent,
    decode_transfer,
    lease_record,
    transfer_record,
)
from client.status.records import TRANSFER_KINDS, ClusterSnapshot, TransferKind, copy_of
from core.errors import ContractError
from core.models.names import label_value
from core.models.phases import Phase
from tests.client.support.status_scene import transfer
from tests.support.clock import NOON
from tests.support.objects import only

_each_kind = pytest.mark.parametrize("kind", TRANSFER_KINDS, ids=lambda kind: kind.name)


def _text(raw: object) -> msgspec.Raw:
    return msgspec.Raw(json.dumps(raw).encode())


@_each_kind
def test_json_and_a_dict_give_the_same_record(kind: TransferKind) -> None:
    raw = transfer(kind.name, "t", "InProgress", node="a", progress={"totalBytes": 4, "bytesDone": 1})
    record = decode_transfer(kind, _text(raw))
    assert record == transfer_record(kind, raw)
    assert (record.kind, record.phase, record.node) == (kind.name, Phase.IN_PROGRESS, "a")
    assert (record.bytes_done, record.fault, bool(record.queue), bool(record.volume)) == (1, "", True, True)


@_each_kind
@pytest.mark.parametrize("phase", ["Completed", "Failed", "Canceled"])
def test_one_that_has_ended_has_what_is_shown_of_it(kind: TransferKind, phase: str) -> None:
    raw = transfer(kind.name, "t", phase, node="a", message="m", completionTimestamp="2026-11-21T11:00:00Z")
    marks = {"nodeagent.io/backup": "night", "velero.io/pvc-name": "p"}
    marks["nodeagent.io/shrunk"] = '{"bytes":1,"fullBytes":100}'
    raw["metadata"] |= {"annotations": marks, "creationTimestamp": "2026-11-21T10:00:00Z"}
    short, whole = decode_transfer(kind, _text(raw)), transfer_record(kind, raw)
    for name in ("kind", "namespace", "name", "phase", "node", "message", "completed", "datamover", "active"):
        assert getattr(short, name) == getattr(whole, name)
    for name in () if kind.restores else ("queue", "volume", "location", "created", "backup", "shrunk", "claim"):
        assert getattr(short, name) == getattr(whole, name)
    raw["status"]["message"] = None
    assert decode_transfer(kind, _text(raw)).phase == phase


@_each_kind
def test_a_field_that_is_null_counts_as_absent(kind: TransferKind) -> None:
    raw = transfer(kind.name, "t")
    raw["status"]["message"] = raw["metadata"]["annotations"] = None
    assert decode_transfer(kind, _text(raw)).fault == ""


def test_one_that_has_ended_is_unreadable_where_its_timeout_is() -> None:
    """Such a backup can be neither listed nor restored."""
    raw = transfer("DataUpload", "t", "Completed")
    raw["spec"]["operationTimeout"] = "4 hours"
    for record in (decode_transfer(TRANSFER_KINDS[0], _text(raw)), transfer_record(TRANSFER_KINDS[0], raw)):
        assert "operationTimeout" in record.fault
        assert copy_of(record) is None


@pytest.mark.parametrize("length", [63, 64, 253])
def test_one_that_has_ended_has_the_whole_name_of_its_backup(length: int) -> None:
    raw, name = transfer("DataUpload", "t", "Completed"), "n" * length
    owner = {"apiVersion": "velero.io/v1", "kind": "Backup", "name": name, "uid": "u"}
    raw["metadata"] |= {"labels": {"velero.io/backup-name": label_value(name)}, "ownerReferences": [owner]}
    assert decode_transfer(TRANSFER_KINDS[0], _text(raw)).backup == name


@_each_kind
@pytest.mark.parametrize(
    "garble",
    [
        lambda raw: raw | {"spec": 5},
        lambda raw: raw | {"status": {"phase": "Odd"}},
        lambda raw: {"metadata": raw["metadata"]},
        lambda _: [],
        lambda _: {"metadata": 3},
    ],
    ids=["spec", "phase", "no spec", "no object", "metadata"],
)
def test_one_that_is_invalid_has_a_record_that_says_so(kind: TransferKind, garble: Any) -> None:
    record = decode_transfer(kind, _text(garble(transfer(kind.name, "t"))))
    assert record.fault.startswith(f"invalid {kind.name}")
    assert not record.active


def test_an_agent_that_is_being_deleted_is_not_ready() -> None:
    meta = {"name": "p", "deletionTimestamp": "2026-11-21T12:00:00Z"}
    pod = {"metadata": meta, "status": {"conditions": [{"type": "Ready", "status": "True"}]}}
    assert not agent_record(pod).ready
    del meta["deletionTimestamp"]
    assert agent_record(pod).ready
    assert decode_agent(_text(pod)) == agent_record(pod) == decode_agent(_text(pod | {"spec": None}))
    with pytest.raises(ContractError):
        decode_agent(_text(pod | {"status": 5}))


def test_a_lease_without_a_renewal_never_counts() -> None:
    assert lease_record(None).expires is None
    assert lease_record(only(spec={"holderIdentity": "a_1"})).expires is None
    with pytest.raises(ContractError, match="out of range"):
        lease_record(only(spec={"renewTime": "9999-12-31T23:59:59.000000Z", "leaseDurationSeconds": 99}))


def test_a_config_map_that_is_missing_or_invalid_has_errors_and_the_default_slots() -> None:
    record, concurrency = config_record("c", None)
    assert record.errors == ("ConfigMap c does not exist",)
    assert record.slots == concurrency.global_config == 1
    meta = {"name": "c", "namespace": "velero"}
    assert "exactly one key" in config_record("c", only(metadata=meta, data={}))[0].errors[0]
    assert config_record("", None)[0].errors == ()
    rejected = only(metadata=meta, data={"c": '{"podLabels": 1, "nodeagent.io": {"leaveOutNamespaces": ["app"]}}'})
    config, _ = config_record("c", rejected)
    assert (config.leave_out_namespaces, ClusterSnapshot("velero", NOON, config=config).slots_of("a")) == (None, None)
