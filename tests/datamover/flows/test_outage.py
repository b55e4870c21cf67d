"""The bucket becomes unavailable during a data path: a clear error after the stall timeout."""

import asyncio
import os
import re
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp

import pytest

from core.clock import SystemClock
from core.errors import DataPathError, KopiaError, RepositoryError, StorageOutageError
from datamover.arguments import RepositoryOptions
from datamover.local.command import LocalMover
from datamover.runtime.resources import ResourceLimits
from datamover.runtime.signals import StopSignal
from tests.datamover.support.plainkopia import PASSWORD
from tests.datamover.support.processes import children_of
from tests.datamover.support.s3server import S3Server, run_s3_server
from tests.datamover.support.servers import ServerError
from tests.datamover.support.trees import make_large_file

pytestmark = pytest.mark.processes

_SIZE_MIB = 200


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    (tmp_path / "s3").mkdir()
    # Some of these tests stop it themselves.
    with suppress(ServerError), run_s3_server(tmp_path / "s3") as server:
        server.make_bucket("backups")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", server.access_key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.secret_key)
        yield server


@pytest.fixture
def mover(server: S3Server) -> LocalMover:
    options = RepositoryOptions("s3://backups/prefix", PASSWORD, endpoint=server.url, region="us-east-1")
    return LocalMover(options, os.environ, limits=ResourceLimits(2), clock=SystemClock(), stop=StopSignal())


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    return make_large_file(tmp_path / "volume" / "file", _SIZE_MIB).parent


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA_MOVER_STALL_TIMEOUT", "4s")


def _remove_bucket(server: S3Server) -> None:
    server.remove_bucket("backups")


def _empty_bucket(server: S3Server) -> None:
    """If a bucket is gone, the server says that it does not exist, or that a file does not: kopia retries one."""
    aside = Path(mkdtemp(dir=server.folder.parent))
    for entry in (server.folder / "backups").iterdir():
        entry.rename(aside / entry.name)


def _kill_server(server: S3Server) -> None:
    for one in children_of(os.getpid()):
        if f"--port {server.url.removeprefix('http://')} " in one.arguments:
            os.kill(one.pid, signal.SIGKILL)


async def _interrupted(
    moving: Awaitable[object], started: Callable[[], bool], end: Callable[[], None]
) -> DataPathError:
    """Return the error of a data path whose storage becomes unavailable once it has started.

    An upload that the server received before `end` creates the bucket again, so the storage is ended until it fails.
    """
    task = asyncio.ensure_future(moving)
    while not started():
        assert not task.done(), task.exception()
        await asyncio.sleep(0.002)
    while not task.done():
        end()
        await asyncio.sleep(0.05)
    with pytest.raises(DataPathError) as failed:
        await task
    return failed.value


@pytest.mark.sample("bucket")
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize(
    "outage",
    [
        (_kill_server, "the endpoint cannot be reached", StorageOutageError),
        (_remove_bucket, "the bucket does not exist", RepositoryError),
    ],
    ids=["server", "bucket"],
)
async def test_a_backup_is_reported_and_fails_when_its_storage_is_unavailable(
    server: S3Server,
    mover: LocalMover,
    volume: Path,
    caplog: pytest.LogCaptureFixture,
    outage: tuple[Callable[[S3Server], None], str, type[RepositoryError]],
) -> None:
    """kopia by itself would retry for many minutes without output."""
    end, cause, kind = outage
    bucket = server.folder / "backups" / "prefix"
    error = await _interrupted(mover.back_up(volume, "", None), lambda: any(bucket.glob("p*")), lambda: end(server))
    assert type(error) is kind
    repository = re.escape(f"repository s3://backups/prefix/ at {server.url}")
    reported = rf"no progress for \d+s: {repository} does not answer: {cause}: "
    assert re.match(rf"back up {volume}: {reported}", str(error))
    assert any(re.match(reported, one.message) for one in caplog.records)
    assert server.secret_key not in str(error) + caplog.text


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_a_backup_names_the_cause(server: S3Server, mover: LocalMover, volume: Path) -> None:
    bucket = server.folder / "backups" / "prefix"
    error = await _interrupted(
        mover.back_up(volume, "", None), lambda: any(bucket.glob("p*")), lambda: _remove_bucket(server)
    )
    assert str(error).startswith(f"back up {volume}: the bucket does not exist\n")
    assert server.secret_key not in str(error)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "outage",
    [
        (_empty_bucket, "a repository file is missing", KopiaError),
        pytest.param((_kill_server, "the endpoint cannot be reached", StorageOutageError), marks=pytest.mark.slow),
    ],
    ids=["emptied bucket", "server"],
)
async def test_a_restore_names_the_cause(
    server: S3Server,
    mover: LocalMover,
    volume: Path,
    outage: tuple[Callable[[S3Server], None], str, type[DataPathError]],
) -> None:
    end, cause, kind = outage
    backup = await mover.back_up(volume, "", None)
    target = volume.parent / "out"
    names = {entry.name for entry in volume.iterdir()}
    error = await _interrupted(
        mover.restore(backup.snapshot_id, target, None),
        # Something else in the target is ours, before kopia has opened the snapshot.
        lambda: any(entry.name in names for entry in target.glob("*")),
        lambda: end(server),
    )
    assert error.exit_code == kind.exit_code
    assert str(error).startswith(f"restore snapshot {backup.snapshot_id} to {target}: {cause}\n")
    assert server.secret_key not in str(error)
