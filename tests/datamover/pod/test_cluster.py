"""Retries of the requests before the data path starts, and what a storage is asked."""

import base64
from dataclasses import replace
from pathlib import Path

import pytest

from core.contract import SnapshotMetadata, TrackedSnapshot
from core.kube.client import KubeClient
from core.kube.errors import ServerError
from core.kube.transport import Retry
from datamover.pod.cluster import PodContext, build_changes
from datamover.runtime.resources import ResourceLimits
from datamover.runtime.signals import StopSignal
from tests.support.clock import LoopClock
from tests.support.fakekube import FakeKube

pytestmark = pytest.mark.looptime


def _context(kube: FakeKube) -> PodContext:
    clock = LoopClock()
    return PodContext(
        client=KubeClient(kube, Retry(clock)),
        clock=clock,
        namespace="velero",
        node="node-a",
        environment={},
        limits=ResourceLimits(1),
        stop=StopSignal(),
        termination_file=Path("/dev/null"),
    )


async def test_an_api_server_that_is_unavailable_for_minutes_is_awaited(looptime: float) -> None:
    kube = FakeKube()
    location = {"provider": "velero.io/aws", "objectStorage": {"bucket": "none"}}
    metadata = {"namespace": "velero", "name": "default"}
    kube.put({"apiVersion": "velero.io/v1", "kind": "BackupStorageLocation", "metadata": metadata, "spec": location})
    kube.fail_next("GET", "backupstoragelocations", "lost", times=40)
    found = await _context(kube).reader.location("default")
    assert found.name == "default"
    assert looptime > 120


async def test_an_api_server_that_stays_unavailable_is_reported(looptime: float) -> None:
    kube = FakeKube()
    kube.fail_next("GET", "backupstoragelocations", 503, times=1000)
    with pytest.raises(ServerError):
        await _context(kube).reader.location("default")
    assert 200 < looptime < 301


async def test_a_storage_is_asked_with_the_token_that_the_pod_has_then(tmp_path: Path) -> None:
    context = replace(_context(FakeKube()), token=tmp_path / "token")
    service = SnapshotMetadata(address="csi:6443", ca_cert=base64.b64encode(b"PEM").decode())
    changes = build_changes(context, TrackedSnapshot("handle", "volume", "b1", service), None)
    assert changes is not None
    assert changes.query is not None
    assert changes.query()["token"] == ""
    context.token.write_text("of-this-pod\n")
    assert changes.query() == {
        "address": "csi:6443",
        "ca": "PEM",
        "token": "of-this-pod",
        "namespace": "velero",
        "snapshot": "b1",
        "timeout_seconds": 300,
    }
    assert context.redactor.redact("Bearer of-this-pod") == "Bearer ***"
