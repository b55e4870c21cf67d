"""What a data mover reports: when Events are recorded, and that results fit a termination message."""

import asyncio
import json
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import pytest
from msgspec import inspect

from core.contract import (
    TERMINATION_MESSAGE_LIMIT_BYTES,
    BackupResult,
    InitResult,
    LocationResult,
    MaintenanceResult,
    RestoreResult,
    parse_result,
)
from core.errors import DataPathError
from core.kube.client import KubeClient
from core.kube.events import EventRecorder, ObjectRef
from core.kube.resources import EVENTS
from core.kube.transport import Retry
from core.models.verification import SnapshotVerification
from core.redact import Redactor
from core.snapshot_contract import FileListing, SnapshotDeletion, SnapshotListing, SnapshotReport
from datamover.kopia.progress import Direction, Meter
from datamover.pod.reporting import Reporter, build_failure, write_termination_message
from datamover.pod.snapshot_report import SHOWN_UNREAD
from tests.support.clock import LoopClock
from tests.support.fakekube import FakeKube

_NAMES: Final = {
    "fs_type": "btrfs",
    "snapshot_id": "k" * 32,
    "full_snapshot": "k" * 32,
    "rules": "d" * 64,
    "repository_id": "k" * 64,
    "unique_id": "k" * 64,
    "by_path": "/" + "u" * 36,
    "volume_mode": "Filesystem",
    "volume_namespace": "n" * 253,
}
"""The fields that are no texts, as long as they can be."""

_ABOUT = ObjectRef(api_version="velero.io/v2alpha1", kind="DataUpload", namespace="velero", name="du-1", uid="uid-1")


@pytest.mark.looptime
async def test_the_start_of_the_snapshot_is_reported_at_once_and_from_then_on() -> None:
    """The agent must know it before the next scheduled Event, should the node be lost meanwhile."""
    kube, clock = FakeKube(), LoopClock()
    recorder = EventRecorder(KubeClient(kube, Retry(clock)), clock, component="du-1", host="node-a")
    meter = Meter(clock, Direction.BACKUP)

    def messages() -> list[dict[str, object]]:
        reasons = ("Data-Path-Progress",)
        return [json.loads(event["message"]) for event in kube.objects(EVENTS) if event["reason"] in reasons]

    following = asyncio.create_task(Reporter(recorder, _ABOUT, clock).follow(meter))
    await asyncio.sleep(9)
    before = messages()
    assert "snapshotStarted" not in before[-1]
    meter.take("Snapshotting default@default:/v ...")
    await asyncio.sleep(0.5)
    after = messages()
    await asyncio.sleep(10)
    following.cancel()
    await asyncio.wait({following})
    assert len(after) == len(before) + 1
    assert {one["snapshotStarted"] for one in messages()[len(before) :]} == {"2026-11-21T12:00:09Z"}
    assert len(messages()) == len(after) + 1


def test_a_failure_has_a_message_whatever_its_text(tmp_path: Path) -> None:
    file = tmp_path / "message"
    write_termination_message(build_failure(DataPathError("cannot open a\udcff"), Redactor()), file)
    assert file.read_text() == r"cannot open a\udcff"


_RESULTS: Final = (
    *(BackupResult, RestoreResult, InitResult, LocationResult, MaintenanceResult, SnapshotReport),
    *(SnapshotListing, SnapshotVerification, SnapshotDeletion, FileListing),
)


@pytest.mark.parametrize("model", _RESULTS)
def test_a_result_fits_a_termination_message_whatever_its_texts(model: type[Any]) -> None:
    result = _fill(inspect.type_info(model), "")
    message = result.to_json()
    assert len(message.encode()) <= TERMINATION_MESSAGE_LIMIT_BYTES
    assert parse_result(model, message) == result


def _fill(kind: inspect.Type, name: str) -> Any:
    """Return a value of this type that is as long as it can be, of characters that take the most bytes in JSON."""
    match kind:
        case inspect.StructType(cls=cls, fields=fields):
            return cls(**{one.name: _fill(one.type, one.name) for one in fields})
        case inspect.UnionType(types=types):
            return _fill(next(one for one in types if not isinstance(one, inspect.NoneType)), name)
        case inspect.ListType(item_type=item):
            return [_fill(item, name)] * SHOWN_UNREAD
        case inspect.VarTupleType(item_type=item):
            return (_fill(item, name),) * SHOWN_UNREAD
        case inspect.EnumType(cls=cls):
            return max(cls, key=lambda one: len(str(one)))
        case inspect.StrType():
            return _NAMES.get(name, '\x01"é\udcff😀' * 5000)
        case inspect.DateTimeType():
            return datetime.fromisoformat("2026-11-21T12:00:00.123456+00:00")
        case inspect.FloatType():
            return 1234567890.1
        case inspect.BoolType():
            return False
    assert isinstance(kind, inspect.IntType)
    return 2**63 - 1
