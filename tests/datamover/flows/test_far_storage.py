"""A transfer of a storage that is far away moves more files in parallel, unless its settings say how many."""

from pathlib import Path
from typing import Any

import pytest

from datamover.runtime.resources import ResourceLimits
from tests.datamover.support.backup_movers import plain_only
from tests.datamover.support.pods import MoverPod
from tests.datamover.support.s3proxy import S3Proxy
from tests.support.fakekube import FakeKube

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240), plain_only]

_SECONDS = 0.05
"""Far more than what changes the number; a busy machine only adds to it."""

_LIMITS = ResourceLimits(2, 512 << 20)


@pytest.fixture
async def pod(tmp_path: Path, proxy: S3Proxy) -> MoverPod:
    """A pod whose repository exists and is Ready, in a storage that is far away."""
    proxy.latency_seconds = _SECONDS
    pod = MoverPod(FakeKube(), tmp_path, limits=_LIMITS)
    pod.put_bucket(proxy.server, proxy.server.make_bucket("far"), url=proxy.url)
    await pod.create_repository()
    return pod


async def _go(pod: MoverPod, tree: Path, record: Path, settings: dict[str, str]) -> list[str]:
    """Back up and restore; return kopia's `--parallel` of both."""
    given: dict[str, Any] = {"dataMoverConfig": settings}
    record.write_text("")
    await pod.transfer("DataUpload", tree, **given)
    target = pod.folder / f"out-{len(list(pod.folder.iterdir()))}"
    await pod.transfer("DataDownload", target, snapshotID=pod.result["snapshotID"], **given)
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
