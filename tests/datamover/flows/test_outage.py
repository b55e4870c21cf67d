"""The bucket becomes unavailable during a data path: a clear error after the stall timeout."""

import asyncio
import os
import re
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from core.clock import SystemClock
from core.errors import DataPathError, RepositoryError, StorageOutageError
from datamover.arguments import RepositoryOptions
from datamover.local.command import LocalMover
from datamover.runtime.resources import ResourceLimits
from datamover.runtime.signals import StopSignal
from tests.datamover.support.plainkopia import PASSWORD
from tests.datamover.support.processes import children_of
from tests.datamover.support.s3server import S3Server, run_s3_server
from tests.datamover.support.servers import ServerError
from tests.datamover.support.trees import make_large_file

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


def _remove_bucket(server: S3Server) -> None:
    server.remove_bucket("backups")


def _kill_server(server: S3Server) -> None:
    for one in children_of(os.getpid()):
        if f"--port {server.url.removeprefix('http://')} " in one.arguments:
            os.kill(one.pid, signal.SIGKILL)


@pytest.mark.sample("bucket")
@pytest.mark.parametrize(
    ("end", "cause", "kind"),
    [
        (_kill_server, "the endpoint cannot be reached", StorageOutageError),
        (_remove_bucket, "the bucket does not exist", RepositoryError),
    ],
    ids=["server", "bucket"],
)
async def test_a_backup_is_reported_and_fails_when_its_storage_is_unavailable(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    end: Callable[[S3Server], None],
    cause: str,
    kind: type[DataPathError],
) -> None:
    """kopia by itself would retry for many minutes without output."""
    volume = make_large_file(tmp_path / "volume" / "file", 200).parent
    (tmp_path / "s3").mkdir()
    with suppress(ServerError), run_s3_server(tmp_path / "s3") as server:
        packs = server.folder / server.make_bucket("backups") / "prefix"
        keys = {"AWS_ACCESS_KEY_ID": server.access_key, "AWS_SECRET_ACCESS_KEY": server.secret_key}
        options = RepositoryOptions("s3://backups/prefix", PASSWORD, endpoint=server.url, region="us-east-1")
        environment = {**os.environ, **keys, "DATA_MOVER_STALL_TIMEOUT": "4s"}
        mover = LocalMover(options, environment, limits=ResourceLimits(2), clock=SystemClock(), stop=StopSignal())
        running = asyncio.create_task(mover.back_up(volume, "", None))
        while not any(packs.glob("p*")):
            assert not running.done(), running.exception()
            await asyncio.sleep(0.002)
        # An upload that the server received before creates the bucket again.
        while not running.done():
            end(server)
            await asyncio.sleep(0.05)
    error = running.exception()
    assert type(error) is kind
    repository = re.escape(f"repository s3://backups/prefix/ at {server.url}")
    reported = rf"no progress for \d+s: {repository} does not answer: {cause}: "
    assert re.match(rf"back up {volume}: {reported}", str(error))
    assert any(re.match(reported, one.message) for one in caplog.records)
    assert server.secret_key not in str(error) + caplog.text
