"""A restore in place in a process of its own, so that it can be killed."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from core.models.transfer_settings import InPlace
from datamover.storage.providers import FileStorage
from tests.datamover.support.data_paths import restore_volume
from tests.datamover.support.repositories import opened

_ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class InPlaceRun:
    """What is restored, from where, and how; the paths are of the repository and the volume."""

    repository: str
    snapshot_id: str
    volume: str
    incremental: bool
    delete: bool


@contextmanager
def run_in_place_process(run: InPlaceRun) -> Iterator[subprocess.Popen[bytes]]:
    """Start the restore, and kill it at the end if it still runs."""
    process = subprocess.Popen([sys.executable, "-m", __name__, json.dumps(asdict(run))], cwd=_ROOT, env=os.environ)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def _run(run: InPlaceRun) -> None:
    rule = InPlace(incremental=run.incremental, delete_extra_files=run.delete)
    with opened(FileStorage(Path(run.repository))) as repository:
        await restore_volume(repository, run.snapshot_id, Path(run.volume), in_place=rule)


if __name__ == "__main__":
    asyncio.run(_run(InPlaceRun(**json.loads(sys.argv[1]))))
