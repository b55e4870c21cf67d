"""A restore that opens its repository once: it ends as one by kopia's own commands does, also where it fails."""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from core.contract import MoverMethod, VolumeMode
from core.errors import DataPathError, KopiaCrashError, KopiaError, RepositoryError
from core.models.transfer_settings import InPlace
from datamover.kopia.repository import Repository
from datamover.kopia.snapshots import SnapshotMissingError
from tests.datamover.support.backup_movers import plain_only
from tests.datamover.support.data_paths import back_up_volume, restore_volume
from tests.datamover.support.plainkopia import PASSWORD
from tests.datamover.support.processes import children_of
from tests.datamover.support.repositories import opened, s3_storage
from tests.datamover.support.s3proxy import Fault, S3Proxy
from tests.datamover.support.trees import describe_tree, make_large_file
from tests.datamover.support.unconfined import record_kopia

# It names each way itself, so the run with the other default has nothing to add.
pytestmark = [pytest.mark.processes, pytest.mark.timeout(240), plain_only]

_MIB: Final = 1 << 20
_METHODS: Final = pytest.mark.parametrize("method", list(MoverMethod), ids=str)


@dataclass
class _Bed:
    """A repository behind a proxy, and a target."""

    proxy: S3Proxy
    folder: Path

    @property
    def target(self) -> Path:
        return self.folder / "target"

    @asynccontextmanager
    async def movers(self, password: str = PASSWORD) -> AsyncIterator[Repository]:
        """Yield the repository as another data mover opens it."""
        with opened(s3_storage(self.proxy.server, "one-open", url=self.proxy.url), password) as found:
            yield found

    async def back_up(self, volume: Path, *, block: bool = False) -> str:
        mode = VolumeMode.BLOCK if volume.is_file() else VolumeMode.FILESYSTEM
        tags = {"snapshot-uploader": "velero-block"} if block else {}
        async with self.movers() as found:
            await found.ensure()
            return (await back_up_volume(found, volume, mode=mode, by_block=block, tags=tags)).snapshot_id

    async def restore(self, snapshot_id: str, method: MoverMethod, password: str = PASSWORD, **more: Any) -> None:
        async with self.movers(password) as found:
            await restore_volume(found, snapshot_id, self.target, sparse=True, mover=method, **more)


@pytest.fixture
def bed(proxy: S3Proxy, tmp_path: Path) -> _Bed:
    proxy.server.make_bucket("one-open")
    return _Bed(proxy, tmp_path)


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    folder = tmp_path / "volume"
    for name in ("one", "deep/two", "deep/er/three"):
        _write(folder / name, name)
    (folder / "link").symlink_to("one")
    # kopia keeps a link's microseconds.
    os.utime(folder / "link", (1_700_000_000, 1_700_000_000), follow_symlinks=False)
    return folder


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _fill(target: Path) -> None:
    """Make a target with links, each in a directory that the mover then reads in the snapshot, and another file."""
    _write(target / "one", "another content")
    (target / "deep" / "er").mkdir(parents=True)
    for name in ("deep/two", "deep/er/three"):
        (target / name).symlink_to("/nothing")


@pytest.mark.sample("files", "a volume with files", "in place")
@pytest.mark.parametrize(
    ("plain_opens", "fill", "more"),
    [
        pytest.param(2, Path.mkdir, {}, id="files"),
        pytest.param(5, _fill, {}, id="a volume with files"),
        pytest.param(5, _fill, {"in_place": InPlace(incremental=True)}, id="in place"),
        pytest.param(6, _fill, {"in_place": InPlace(incremental=True, compare_content=True)}, id="comparing content"),
    ],
)
async def test_files_are_restored_with_one_open(
    bed: _Bed,
    volume: Path,
    monkeypatch: pytest.MonkeyPatch,
    plain_opens: int,
    fill: Callable[[Path], None],
    more: dict[str, Any],
) -> None:
    snapshot_id = await bed.back_up(volume)
    record = record_kopia(bed.folder, monkeypatch)
    opens = {}
    for method in MoverMethod:
        fill(bed.target)
        opens[method] = await _count_opens(bed, record, bed.restore(snapshot_id, method, **more))
        assert describe_tree(bed.target) == describe_tree(volume)
        shutil.rmtree(bed.target)
    assert opens == {MoverMethod.PLAIN: plain_opens, MoverMethod.ONE_OPEN: 1}


@pytest.mark.parametrize(("packs", "fetched"), [(0, False), (2, True)])
async def test_packs_of_small_files_are_fetched_as_a_whole(
    bed: _Bed, tmp_path: Path, packs: int, *, fetched: bool
) -> None:
    volume = tmp_path / "many"
    for number in range(60):
        _write(volume / f"{number % 3}" / f"{number}", f"{number}" * 100)
    made = await bed.back_up(volume)
    bed.proxy.requests.clear()
    await bed.restore(made, MoverMethod.ONE_OPEN, packs=packs)
    assert describe_tree(bed.target) == describe_tree(volume)
    reads = sum(line.startswith("GET") and "/p/kopia/app/p" in line for line in bed.proxy.requests)
    assert reads == 1 if fetched else reads >= 60


@pytest.mark.parametrize(("block", "plain_opens"), [(True, 2), (False, 3)], ids=["by block", "as one file"])
async def test_a_device_is_restored_with_one_open(
    bed: _Bed, monkeypatch: pytest.MonkeyPatch, block: bool, plain_opens: int
) -> None:
    device = bed.folder / "device"
    device.write_bytes(os.urandom(_MIB) + bytes(2 * _MIB) + os.urandom(_MIB // 2))
    snapshot_id = await bed.back_up(device, block=block)
    record = record_kopia(bed.folder, monkeypatch)
    opens = {}
    for method in MoverMethod:
        bed.target.write_bytes(b"\xff" * (4 * _MIB))
        restoring = bed.restore(snapshot_id, method, mode=VolumeMode.BLOCK)
        opens[method] = await _count_opens(bed, record, restoring)
        assert bed.target.read_bytes()[: 7 * _MIB // 2] == device.read_bytes()
    assert opens == {MoverMethod.PLAIN: plain_opens, MoverMethod.ONE_OPEN: 1}


async def _count_opens(bed: _Bed, record: Path, restoring: Awaitable[None]) -> int:
    """Return how many processes have opened the repository; each lists its indexes."""
    record.write_text("")
    bed.proxy.requests.clear()
    await restoring
    opens = len(record.read_text().splitlines())
    requests = bed.proxy.requests
    assert sum("/kopia.repository" in line for line in requests) == 1
    assert sum("prefix=p%2Fkopia%2Fapp%2Fxn0_" in line for line in requests) == opens
    return opens


@_METHODS
@pytest.mark.parametrize(
    ("snapshot_id", "password", "error", "message"),
    [
        ("0" * 32, PASSWORD, SnapshotMissingError, f"snapshot {'0' * 32}: it is not in the repository"),
        ("--help", PASSWORD, KopiaError, 'invalid snapshot ID: "--help"'),
        ("../a", PASSWORD, KopiaError, 'invalid snapshot ID: "../a"'),
        ("", "wrong", RepositoryError, "repository under test: the repository password does not match: "),
    ],
    ids=["missing", "a flag", "a path", "password"],
)
async def test_what_cannot_be_restored_is_told_and_leaves_nothing(
    bed: _Bed,
    volume: Path,
    method: MoverMethod,
    snapshot_id: str,
    password: str,
    error: type[DataPathError],
    message: str,
) -> None:
    made = await bed.back_up(volume)
    with pytest.raises(error) as failed:
        await bed.restore(snapshot_id or made, method, password)
    assert str(failed.value).startswith(message)
    assert not bed.target.exists()


@_METHODS
async def test_a_kopia_that_is_killed_may_be_followed_by_another_attempt(bed: _Bed, method: MoverMethod) -> None:
    made = await bed.back_up(make_large_file(bed.folder / "volume" / "file", 48).parent)
    bed.proxy.armed = ("/p/kopia/app/p", Fault.SILENCE)
    verb = "restore" if method is MoverMethod.PLAIN else "mover-restore"
    restoring = asyncio.create_task(bed.restore(made, method))
    async with asyncio.timeout(60):
        while bed.proxy.fault is None:
            assert not restoring.done(), restoring.exception()
            await asyncio.sleep(0.01)
    (pid,) = (one.pid for one in children_of(os.getpid()) if f" {verb} " in f"{one.arguments} ")
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(KopiaCrashError, match=f"restore snapshot .* to {bed.target}: kopia was killed by signal 9"):
        await restoring
