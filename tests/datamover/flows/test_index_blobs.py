"""A repository with many index blobs, each of which a mover reads before any data moves."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.datamover.support.plainkopia import IDENTITY, PASSWORD, PORTABLE, PlainKopia
from tests.datamover.support.pods import MoverPod
from tests.datamover.support.s3proxy import S3Proxy
from tests.datamover.support.s3server import S3Server
from tests.datamover.support.trees import describe_tree
from tests.support.fakekube import FakeKube
from tests.support.tools import tool

pytestmark = pytest.mark.processes

_INDEX = "xn0_"
"""In the name of each index blob. Source: kopia 0.23.1, internal/epoch/epoch_manager.go."""

_COUNT = 1300
_PREFIX = "kopia/app"


def _fill_bucket(program: Path, folder: Path, server: S3Server, count: int) -> Path:
    """Make a repository with one snapshot, of the tree that is returned, and so many index blobs."""
    source, path = folder / "source", folder / "flat"
    source.mkdir()
    (source / "file").write_text("content")
    path.mkdir()
    kopia = PlainKopia(program, folder)
    kopia.run("repository", "create", "filesystem", f"--path={path}", "--flat", PORTABLE, *IDENTITY)
    kopia.run("snapshot", "create", str(source))
    fill: list[str | Path] = [tool("kopia", "index-blobs"), folder / "plain.config", str(count)]
    subprocess.run(fill, env={"HOME": str(folder), "KOPIA_PASSWORD": PASSWORD}, check=True)
    bucket = server.folder / server.make_bucket("many") / _PREFIX
    bucket.mkdir(parents=True)
    for file in path.iterdir():
        # In a directory, kopia adds a suffix to the name of each blob.
        shutil.copy(file, bucket / file.name.removesuffix(".f"))
    return source


def _build_pod(folder: Path, proxy: S3Proxy) -> MoverPod:
    """Return a pod whose storage delays the requests for index blobs."""
    proxy.slow = _INDEX
    pod = MoverPod(FakeKube(), folder)
    pod.put_bucket(proxy.server, "many", url=proxy.url)
    pod.put_repository(phase="Ready")
    return pod


async def _restore(program: Path, folder: Path, proxy: S3Proxy, count: int) -> MoverPod:
    """Restore from a repository with so many index blobs, and check the restored tree."""
    source = _fill_bucket(program, folder, proxy.server, count)
    (snapshot,) = PlainKopia(program, folder).snapshots()
    pod = _build_pod(folder, proxy)
    await pod.transfer("DataDownload", folder / "out", snapshotID=snapshot["id"])
    assert describe_tree(folder / "out") == describe_tree(source)
    return pod


@pytest.mark.timeout(300)
@pytest.mark.cause("repository-slow", "repository-unmaintained")
async def test_a_restore_waits_for_many_index_blobs(kopia_program: Path, tmp_path: Path, proxy: S3Proxy) -> None:
    proxy.seconds_per_request = 0.01
    pod = await _restore(kopia_program, tmp_path, proxy, _COUNT)
    events = pod.events()
    name = f"backup repository app-default-kopia (s3://many/{_PREFIX}/ at {proxy.url})"
    assert ("Data-Path-Waiting", f"still opening {name} after 10 s") in events
    assert ("Data-Path-Ready", f"{name} answers") in events
    (warning,) = [message for reason, message in events if reason == "Data-Path-Warning"]
    assert warning.startswith(f"{name} has {_COUNT + 2} index blobs")
    assert warning.endswith("run `kopia maintenance run --full`")
