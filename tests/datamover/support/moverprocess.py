"""A data mover of a transfer in a process of its own, with the API server that a test serves."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from core.clock import SystemClock
from core.kube.client import KubeClient
from core.kube.transport import Retry
from core.logs import set_up_logging
from datamover.pod.api_transport import HostPort, PodTransport
from datamover.runtime.signals import StopSignal
from tests.datamover.support.backup_movers import use_backup_mover
from tests.datamover.support.confining import use_means
from tests.datamover.support.pods import MoverPod
from tests.datamover.support.unconfined import leave_unconfined
from tests.support.fakekube import FakeKube

_ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class MoverRun:
    """What runs: the flag of its kind, its volume, the port of the API server, and the directory of its own files.

    `means`: those that confine kopia; empty: none, so that a script may be in its place.
    """

    flag: str
    volume: str
    port: int
    folder: str
    means: str = "default"


@asynccontextmanager
async def run_mover_process(run: MoverRun, **environment: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start the mover, and kill it at the end if it still runs; its log is `mover.log` in its directory."""
    (Path(run.folder) / "token").write_text("token")
    with (Path(run.folder) / "mover.log").open("wb") as log:
        argv, variables = [sys.executable, "-m", __name__, json.dumps(asdict(run))], {**os.environ, **environment}
        process = await asyncio.create_subprocess_exec(*argv, cwd=_ROOT, env=variables, stderr=log)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _run(run: MoverRun, stop: StopSignal) -> int:
    clock, folder = SystemClock(), Path(run.folder)
    transport = PodTransport(HostPort("127.0.0.1", run.port, authority=None), folder / "token", clock)
    pod = MoverPod(FakeKube(), folder, client=KubeClient(transport, Retry(clock)))
    pod.stop = stop
    try:
        return await pod.run(run.flag, Path(run.volume))
    finally:
        await transport.close()


def _main() -> int:
    run, stop, patch = MoverRun(**json.loads(sys.argv[1])), StopSignal(), pytest.MonkeyPatch()
    stop.install()
    set_up_logging("debug", "text")
    use_backup_mover(patch)
    if run.means:
        use_means(run.means, patch)
    else:
        leave_unconfined(patch)
    return asyncio.run(_run(run, stop))


if __name__ == "__main__":
    sys.exit(_main())
