"""The validation of a location with a real kopia: what makes it available, and that nothing is written to it."""

import asyncio
import json
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from core.mover_specs import ValidateLocation
from datamover.pod.storage_commands import run_storage_command
from tests.datamover.support.pods import CLOUD, MoverPod
from tests.datamover.support.s3proxy import Fault, S3Proxy
from tests.datamover.support.s3server import S3Server
from tests.support.fakekube import FakeKube

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

_AVAILABLE, _NEEDS_POD = {"needsPod": False}, {"needsPod": True}


async def _validate(pod: MoverPod, *, keys_only: bool = False) -> int:
    spec = ValidateLocation(backup_storage_location="default", keys_only=keys_only)
    return await run_storage_command(spec, pod.context)


@pytest.fixture
def on_s3(s3: S3Server, tmp_path: Path) -> MoverPod:
    """A pod whose location is a bucket, with keys."""
    pod = MoverPod(FakeKube(), tmp_path)
    pod.put_bucket(s3, s3.make_bucket("validation"))
    return pod


@pytest.mark.parametrize("access_mode", ["ReadWrite", "ReadOnly"])
async def test_a_bucket_is_available_and_stays_empty(s3: S3Server, on_s3: MoverPod, access_mode: str) -> None:
    bucket = s3.make_bucket("empty")
    on_s3.put_bucket(s3, bucket, accessMode=access_mode)
    assert await _validate(on_s3, keys_only=True) == 0, on_s3.message
    assert on_s3.result == _AVAILABLE
    assert list((s3.folder / bucket).iterdir()) == []
    if access_mode == "ReadWrite":
        await on_s3.create_repository()
        assert await _validate(on_s3) == 0, on_s3.message


def _lose_bucket(pod: MoverPod, s3: S3Server) -> None:
    pod.put_bucket(s3, "missing")


def _replace_key(pod: MoverPod, s3: S3Server) -> None:
    wrong = s3.credentials_file.replace(s3.secret_key, "not-the-secret-key")
    pod.put_secret(CLOUD["name"], CLOUD["key"], wrong)


@pytest.mark.parametrize(
    ("change", "texts"),
    [
        pytest.param(_lose_bucket, ("the bucket does not exist", "s3://missing/kopia/"), id="bucket"),
        pytest.param(_replace_key, ("the secret access key is not accepted",), id="key"),
    ],
)
async def test_what_makes_a_location_unavailable_is_named_and_no_secret_shown(
    s3: S3Server, on_s3: MoverPod, change: Callable[[MoverPod, S3Server], None], texts: Sequence[str]
) -> None:
    change(on_s3, s3)
    assert await _validate(on_s3) == 12
    assert all(text in on_s3.message for text in texts)
    assert "not-the-secret-key" not in on_s3.message


@pytest.mark.thorough
async def test_an_endpoint_that_refuses_is_reported_within_a_minute(proxy: S3Proxy, on_s3: MoverPod) -> None:
    on_s3.put_bucket(proxy.server, "validation", url=proxy.url)
    proxy.fail(Fault.REFUSE)
    async with asyncio.timeout(100):
        assert await _validate(on_s3) == 16
    assert "the endpoint cannot be reached" in on_s3.message


@pytest.mark.parametrize(
    ("provider", "config"),
    [("velero.io/aws", {"s3Url": "http://192.0.2.1:1"}), ("velero.io/fs", {"fspath": "/backups"})],
    ids=["identity", "directory"],
)
async def test_access_that_needs_a_pod_is_left_to_one(tmp_path: Path, provider: str, config: dict[str, str]) -> None:
    pod = MoverPod(FakeKube(), tmp_path)
    pod.put_location(config, provider=provider)
    assert await _validate(pod, keys_only=True) == 0, pod.message
    assert pod.result == _NEEDS_POD


@pytest.mark.parametrize("spec", [{}, {"objectStorage": {"bucket": "b", "prefix": "some/where"}}], ids=["", "prefix"])
async def test_a_directory_is_available_and_stays_empty(tmp_path: Path, spec: dict[str, Any]) -> None:
    pod, root = MoverPod(FakeKube(), tmp_path), tmp_path / "backups"
    pod.put_location({"fspath": str(root)}, provider="velero.io/fs", **spec)
    root.mkdir()
    assert await _validate(pod) == 0, pod.message
    assert json.loads(pod.message) == _AVAILABLE
    assert list(root.iterdir()) == []


async def test_a_directory_that_is_missing_or_unreadable_is_unavailable(tmp_path: Path) -> None:
    pod, root = MoverPod(FakeKube(), tmp_path), tmp_path / "backups"
    assert await _validate(pod) == 12
    assert pod.message == f"cannot read directory {root}: No such file or directory"
    root.write_text("a file")
    assert await _validate(pod) == 12
    root.unlink()
    root.mkdir(mode=stat.S_IWUSR)
    if os.geteuid() == 0:
        return
    assert await _validate(pod) == 12
    assert pod.message == f"cannot read directory {root}: Permission denied"
