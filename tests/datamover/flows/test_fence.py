"""A data mover that another attempt may replace ends with its kopia: it writes no more to the volume.

In processes of their own, with an API server that stops answering, and a program in the place of kopia that writes for
as long as it lives.
"""

import asyncio
import os
import shutil
import signal
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from core.kube.resources import DATA_DOWNLOADS, DATA_UPLOADS, Resource
from core.models.names import ATTEMPTS_ANNOTATION
from tests.datamover.support.backup_movers import plain_only
from tests.datamover.support.kubehttp import KubeServer, serve_kube
from tests.datamover.support.moverprocess import MoverRun, run_mover_process
from tests.datamover.support.pods import FLAGS, MoverPod
from tests.datamover.support.processes import children_of, moves_data
from tests.datamover.support.trees import make_large_file

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

_PIECE_BYTES = 65536
_TIMEOUT = "4s"
"""A busy machine needs a while for the first answer."""
_FENCED = 17

_WRITER = f"""#!/bin/sh
case " $* " in
*" --progress "*" restore "*)
  for one; do [ -d "$one" ] && target=$one; done
  while :; do head -c {_PIECE_BYTES} /dev/zero >>"$target/written"; sleep 0.02; done;;
*" --progress "*)
  while :; do head -c {_PIECE_BYTES} /dev/urandom; sleep 0.02; done;;
esac
exec PROGRAM "$@"
"""
"""Where kopia would move data, writes at most 50 pieces a second to the target of a restore, or to its output."""


@dataclass
class _Cluster:
    """The API server of a mover process, which has the writer in the place of kopia."""

    pod: MoverPod
    server: KubeServer
    target: Path

    async def prepare(self, kind: str) -> None:
        """Create the transfer, and for a restore its kopia snapshot and its target."""
        volume = make_large_file(self.pod.folder / "volume" / "file", 20 if kind == "DataUpload" else 1).parent
        if kind == "DataUpload":
            self.target = volume
            self.pod.put_transfer(kind)
            return
        self.pod.put_transfer(kind, snapshotID=(await self.pod.transfer("DataUpload", volume))["snapshotID"])
        self.target.mkdir()

    @asynccontextmanager
    async def moving(self, kind: str, means: str = "") -> AsyncIterator[tuple[Process, int]]:
        """Run the mover; yield its process and the ID of its kopia's, which moves data."""
        await self.prepare(kind)
        self.pod.kube.requests.clear()
        run = MoverRun(FLAGS[kind], str(self.target), self.server.port, str(self.pod.folder), means)
        path = os.environ["PATH"] if means else f"{_put_writer(self.pod.folder / 'bin')}:{os.environ['PATH']}"
        async with run_mover_process(run, PATH=path, DATA_MOVER_FENCE_TIMEOUT=_TIMEOUT) as mover, asyncio.timeout(60):

            def started() -> list[int]:
                found = children_of(mover.pid)
                return [one.pid for one in found if moves_data(one.arguments)]

            await self.pod.wait_for(lambda: bool(started()) or mover.returncode is not None)
            assert mover.returncode is None, self.pod.message
            yield mover, started()[0]

    def announce(self, resource: Resource) -> None:
        """Announce the next attempt, as the agent does once it counts the mover as lost."""
        (cr,) = self.pod.kube.objects(resource)
        cr["metadata"]["annotations"] = {ATTEMPTS_ANNOTATION: '{"number": 2, "stage": "Waiting"}'}
        self.pod.kube.put(cr)

    @property
    def written_bytes(self) -> int:
        """How many bytes kopia has written to the target of a restore."""
        file = self.target / "written"
        return file.stat().st_size if file.exists() else 0


def _put_writer(folder: Path) -> Path:
    folder.mkdir()
    (folder / "kopia").write_text(_WRITER.replace("PROGRAM", str(shutil.which("kopia"))))
    (folder / "kopia").chmod(0o755)
    return folder


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
async def cluster(pod: MoverPod, tmp_path: Path) -> AsyncIterator[_Cluster]:
    async with serve_kube(pod.kube) as server:
        yield _Cluster(pod, server, tmp_path / "target")


@plain_only
async def test_a_restore_ends_when_the_api_server_does_not_answer(cluster: _Cluster) -> None:
    """It went on for longer than the time of the fence before, and its watch was silent."""
    async with cluster.moving("DataDownload") as (mover, kopia):
        asked = len(cluster.pod.kube.requests)
        # Four questions in the time of the fence.
        await cluster.pod.wait_for(lambda: len(cluster.pod.kube.requests) > asked + 6)
        assert mover.returncode is None
        before = cluster.written_bytes
        cluster.server.silence()
        assert await mover.wait() == _FENCED
        await cluster.pod.wait_for(lambda: not _runs(kopia))
        assert cluster.written_bytes > before
    assert cluster.pod.message == f"no answer from the API server for {_TIMEOUT}: another attempt may begin"


@plain_only
async def test_a_restore_that_was_frozen_ends_at_once_when_it_goes_on(cluster: _Cluster) -> None:
    """Its kopia goes on too, until the mover has seen the clock: for an instant, so a second is more than enough."""
    async with cluster.moving("DataDownload") as (mover, kopia):
        await cluster.pod.wait_for(lambda: cluster.written_bytes > 0)
        for pid in (kopia, mover.pid):
            os.kill(pid, signal.SIGSTOP)
        cluster.announce(DATA_DOWNLOADS)
        await asyncio.sleep(5)
        before = cluster.written_bytes
        for pid in (kopia, mover.pid):
            os.kill(pid, signal.SIGCONT)
        assert await mover.wait() == _FENCED
        await cluster.pod.wait_for(lambda: not _runs(kopia))
        after = cluster.written_bytes
    assert after - before <= 50 * _PIECE_BYTES
    assert "Data-Path-Failed" not in cluster.pod.reasons()


@pytest.mark.sample("restore")
@pytest.mark.parametrize(
    ("kind", "resource"),
    [
        pytest.param("DataUpload", DATA_UPLOADS, id="backup"),
        pytest.param("DataDownload", DATA_DOWNLOADS, id="restore", marks=plain_only),
    ],
)
async def test_a_mover_ends_when_another_attempt_has_begun(cluster: _Cluster, kind: str, resource: Resource) -> None:
    async with cluster.moving(kind) as (mover, kopia):
        cluster.announce(resource)
        assert await mover.wait() == _FENCED
        assert not _runs(kopia)
    ended = f"another attempt (2) has begun: attempt 1 of {kind} velero/transfer-1 ended itself"
    assert cluster.pod.message == ended
    # What it could say is no longer about the transfer.
    assert cluster.pod.reasons()[-1] in {"Data-Path-Started", "Data-Path-Warning"}


@pytest.mark.parametrize("means", ["landlock", "jail"])
async def test_a_confined_kopia_dies_with_its_mover(cluster: _Cluster, means: str) -> None:
    """Also one that is stopped: SIGKILL needs no answer of the process."""
    async with cluster.moving("DataUpload", means=means) as (mover, kopia):
        os.kill(kopia, signal.SIGSTOP)
        mover.kill()
        await mover.wait()
        await cluster.pod.wait_for(lambda: not _runs(kopia))
    assert mover.returncode == -signal.SIGKILL
