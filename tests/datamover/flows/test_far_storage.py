"""A transfer of a storage that is far away moves more files in parallel, unless its settings say how many."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from datamover.runtime.resources import ResourceLimits
from tests.datamover.support.backup_movers import plain_only
from tests.datamover.support.commandlines import record_kopia
from tests.datamover.support.pods import MoverPod
from tests.datamover.support.s3proxy import S3Proxy, run_s3_proxy
from tests.datamover.support.s3server import S3Server
from tests.support.fakekube import FakeKube

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240), plain_only]

_SECONDS = 0.05
"""Far more than what changes the number; a busy machine only adds to it."""

_LIMITS = ResourceLimits(2, 512 << 20)


@pytest.fixture
def far(s3: S3Server) -> Iterator[S3Proxy]:
    with run_s3_proxy(s3) as proxy:
        proxy.latency_seconds = _SECONDS
        yield proxy


@pytest.fixture
async def pod(tmp_path: Path, far: S3Proxy) -> MoverPod:
    """A pod whose repository exists and is Ready."""
    pod = MoverPod(FakeKube(), tmp_path, limits=_LIMITS)
    bucket = far.server.make_bucket("far")
    pod.put_location(
        {"s3Url": far.url, "region": "us-east-1"}, bucket=bucket, credential={"name": "cloud", "key": "key"}
    )
    pod.put_secret("cloud", "key", far.server.credentials_file)
    pod.put_repository(phase="New")
    assert await pod.init() == 0
    pod.put_repository(phase="Ready")
    return pod


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return record_kopia(tmp_path, monkeypatch)


async def _go(pod: MoverPod, tree: Path, record: Path, settings: dict[str, str]) -> list[str]:
    """Back up and restore; return kopia's `--parallel` of both."""
    given: dict[str, Any] = {"dataMoverConfig": settings}
    record.write_text("")
    pod.put_transfer("DataUpload", **given)
    assert await pod.run("data-upload", tree) == 0, pod.message
    target = pod.folder / f"out-{len(list(pod.folder.iterdir()))}"
    target.mkdir()
    pod.put_transfer("DataDownload", snapshotID=pod.result["snapshotID"], **given)
    assert await pod.run("data-download", target) == 0, pod.message
    words = [word for line in record.read_text().splitlines() for word in line.split()]
    return [word.removeprefix("--parallel=") for word in words if word.startswith("--parallel=")]


async def test_more_files_are_moved_in_parallel_unless_settings_say_how_many(
    pod: MoverPod, tree: Path, record: Path
) -> None:
    most = _LIMITS.adapted_restore_workers(_SECONDS, 0)
    assert await _go(pod, tree, record, {}) == ["3", str(most)]
    # Also before the first backup of a volume: one that was killed may have left exclusions in the policy.
    assert record.read_text().count("policy show") == 1
    assert "--max-parallel-file-reads=3" in record.read_text()
    # kopia ignores what is more than its policy for the volume has.
    assert await _go(pod, tree, record, {"ParallelFilesUpload": "9", "ParallelFilesDownload": "3"}) == ["9", "3"]
    assert "--max-parallel-file-reads=9" in record.read_text()


@pytest.mark.thorough
async def test_settings_may_say_fewer(pod: MoverPod, tree: Path, record: Path) -> None:
    await _go(pod, tree, record, {})
    assert await _go(pod, tree, record, {"ParallelFilesUpload": "1", "ParallelFilesDownload": "2"}) == ["1", "2"]
    assert "policy set" not in record.read_text()
