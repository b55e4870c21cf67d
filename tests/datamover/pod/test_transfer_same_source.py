"""Whether another transfer backs up the same source at present."""

from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pytest

from core.clock import SystemClock
from core.kube.client import KubeClient
from core.kube.transport import Retry
from core.models.names import ATTEMPTS_ANNOTATION
from core.models.phases import Attempts
from core.models.transfers import DataUpload
from datamover.kinds import TRANSFER_KINDS
from datamover.pod.transfer import backs_up_alone
from tests.support.fakekube import FakeKube
from tests.support.objects import JsonDict

_SOURCE: Final = "snapshot-data-upload-download/kopia/app/data"


_START: Final = datetime(2026, 11, 30, 12, tzinfo=UTC)


def _put(kube: FakeKube, name: str, phase: str, start: datetime = _START, **spec: Any) -> JsonDict:
    whole = {"snapshotType": "CSI", "sourceNamespace": "app", "sourcePVC": "data", "backupStorageLocation": "default"}
    return kube.put(
        {
            "apiVersion": "velero.io/v2alpha1",
            "kind": "DataUpload",
            "metadata": {
                "namespace": "velero",
                "name": name,
                "annotations": {ATTEMPTS_ANNOTATION: Attempts(starts=(start,)).to_json()},
            },
            "spec": {**whole, "operationTimeout": "10m0s", **spec},
            "status": {"phase": phase},
        }
    )


async def _is_alone(kube: FakeKube) -> bool:
    own = DataUpload.parse(_put(kube, "own", "InProgress"))
    client = KubeClient(kube, Retry(SystemClock(), attempts=1))
    return await backs_up_alone(client, TRANSFER_KINDS["data-upload"], own, _SOURCE)


@pytest.mark.parametrize(
    ("phase", "spec", "alone"),
    [
        ("InProgress", {}, False),
        ("Canceling", {}, False),
        ("Prepared", {}, True),
        ("Completed", {}, True),
        ("InProgress", {"sourcePVC": "other"}, True),
        ("InProgress", {"sourceNamespace": "other"}, True),
    ],
)
async def test_only_a_transfer_that_moves_data_of_the_same_source_counts(
    phase: str, spec: dict[str, str], alone: bool
) -> None:
    kube = FakeKube()
    _put(kube, "another", phase, _START - timedelta(hours=1), **spec)
    assert await _is_alone(kube) is alone


@pytest.mark.parametrize("phase", ["Completed", "Failed", "InProgress"])
@pytest.mark.parametrize(
    ("seconds", "spec", "alone"),
    [(10, {}, False), (-10, {}, False), (60, {}, True), (0, {"sourcePVC": "other"}, True)],
)
async def test_one_that_began_at_the_same_time_counts_in_any_phase(
    phase: str, seconds: float, spec: dict[str, str], alone: bool
) -> None:
    """It may have left a checkpoint."""
    kube = FakeKube()
    _put(kube, "another", phase, _START + timedelta(seconds=seconds), **spec)
    assert await _is_alone(kube) is (alone and (phase != "InProgress" or bool(spec)))


async def test_a_transfer_that_is_invalid_may_be_of_the_same_source() -> None:
    kube = FakeKube()
    _put(kube, "another", "InProgress", backupStorageLocation=5)
    assert not await _is_alone(kube)


async def test_it_is_not_alone_if_that_cannot_be_found_out() -> None:
    kube = FakeKube()
    kube.fail_next("GET", "datauploads", 403)
    assert not await _is_alone(kube)
