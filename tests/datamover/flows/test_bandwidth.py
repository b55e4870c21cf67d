"""A data mover with limits: kopia reaches its storage through the proxy, and both obey them."""

import asyncio
import socket
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock, create_autospec

import pytest

from core.models.names import BANDWIDTH_ANNOTATION
from core.models.transfer_settings import BandwidthLimits
from datamover.bandwidth import dialing
from datamover.bandwidth.dialing import Address
from datamover.bandwidth.proxy import BandwidthProxy
from datamover.kopia.repository import Repository
from datamover.runtime.resources import read_limits
from tests.datamover.support.pods import MoverPod
from tests.datamover.support.s3server import S3Server
from tests.datamover.support.trees import describe_tree, make_large_file
from tests.support.fakekube import FakeKube

pytestmark = pytest.mark.processes

_RATE = 4_000_000
_MIB = 12
_LEAST_SECONDS = 2.5
"""Three seconds, less what may pass at once and what is not data."""


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    return make_large_file(tmp_path / "volume" / "data", _MIB).parent


@pytest.fixture
def dialed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The hosts that the proxy has connected to; each name is this machine's."""
    connect, hosts = dialing._connect, list[str]()

    async def local(to: Address) -> socket.socket:
        hosts.append(to.host)
        return await connect(Address("127.0.0.1", to.port))

    monkeypatch.setattr(dialing, "_connect", local)
    return hosts


async def _in_a_bucket(s3: S3Server, folder: Path) -> MoverPod:
    """Return a pod whose repository is in a bucket, and ready."""
    pod = MoverPod(FakeKube(), folder)
    pod.put_bucket(s3, s3.make_bucket("limited"))
    await pod.create_repository()
    # kopia uses no proxy for an address of this machine.
    pod.put_bucket(s3, "limited", url=s3.url.replace("127.0.0.1", "storage.example.com"))
    return pod


async def _seconds(pod: MoverPod, kind: str, volume: Path, **spec: Any) -> float:
    begin = time.monotonic()
    await pod.transfer(kind, volume, **spec)
    return time.monotonic() - begin


async def test_a_bucket_is_reached_at_the_rate_of_the_annotation(
    s3: S3Server, volume: Path, dialed: list[str], tmp_path: Path
) -> None:
    pod = await _in_a_bucket(s3, tmp_path)
    assert dialed == []
    limits = BandwidthLimits(upload_bytes_per_second=_RATE)
    pod.annotations = {BANDWIDTH_ANNOTATION: limits.to_json()}
    assert await _seconds(pod, "DataUpload", volume) >= _LEAST_SECONDS
    assert set(dialed) == {"storage.example.com"}
    snapshot = pod.result["snapshotID"]
    pod.annotations = {BANDWIDTH_ANNOTATION: BandwidthLimits(download_bytes_per_second=_RATE).to_json()}
    assert await _seconds(pod, "DataDownload", tmp_path / "out", snapshotID=snapshot) >= _LEAST_SECONDS
    assert describe_tree(tmp_path / "out") == describe_tree(volume)


async def test_kopia_itself_limits_what_it_writes_to_a_directory(pod: MoverPod, volume: Path) -> None:
    """It lets what belongs to six seconds pass at once."""
    limits = BandwidthLimits(upload_bytes_per_second=(_MIB << 20) // 9)
    pod.annotations = {BANDWIDTH_ANNOTATION: limits.to_json()}
    assert await _seconds(pod, "DataUpload", volume) >= _LEAST_SECONDS


async def test_an_edit_of_the_annotation_reaches_a_running_mover(
    s3: S3Server, volume: Path, dialed: list[str], tmp_path: Path
) -> None:
    """At the first rate it would take 20 minutes."""
    pod = await _in_a_bucket(s3, tmp_path)
    pod.annotations = {BANDWIDTH_ANNOTATION: BandwidthLimits(upload_bytes_per_second=10_000).to_json()}
    pod.put_transfer("DataUpload")
    async with asyncio.timeout(60):
        running = asyncio.get_running_loop().create_task(pod.run("data-upload", volume))
        await pod.wait_for(lambda: "storage.example.com" in dialed)
        pod.annotations = {BANDWIDTH_ANNOTATION: "{}"}
        pod.put_transfer("DataUpload")
        assert await running == 0, pod.message


async def test_only_at_a_limited_rate_a_proxy_runs_and_no_pack_is_fetched_as_a_whole(
    pod: MoverPod, volume: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxies = Mock(side_effect=BandwidthProxy)
    flags = create_autospec(Repository.restore_flags, side_effect=Repository.restore_flags)
    monkeypatch.setattr("datamover.pod.transfer.BandwidthProxy", proxies)
    monkeypatch.setattr(Repository, "restore_flags", flags)
    await pod.transfer("DataUpload", volume)
    snapshot = pod.result["snapshotID"]
    for annotations in ({}, {BANDWIDTH_ANNOTATION: BandwidthLimits(download_bytes_per_second=10**9).to_json()}):
        assert not proxies.called
        pod.annotations = annotations
        await pod.transfer("DataDownload", tmp_path / f"out-{len(annotations)}", snapshotID=snapshot)
    assert proxies.called
    assert [call.args[1] for call in flags.call_args_list] == [read_limits().restore_packs, 0]
    assert read_limits().restore_packs > 0
