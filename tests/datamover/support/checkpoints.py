"""A backup that is stopped once kopia has saved a checkpoint."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.datamover.support.plainkopia import PlainKopia
from tests.datamover.support.processes import running_kopia

__all__ = ["kopia_frozen_after_a_checkpoint"]


def _manifests(repository: Path) -> int:
    return sum(1 for _ in repository.glob("q*/**/*.f"))


@asynccontextmanager
async def kopia_frozen_after_a_checkpoint(
    repository: Path, kopia: PlainKopia, *, least_bytes: int = 0
) -> AsyncIterator[int]:
    """Enter once a backup has left a checkpoint with files of that size, with kopia stopped; yield its PID."""
    async with asyncio.timeout(200):
        while not (found := running_kopia("snapshot create")):
            await asyncio.sleep(0.002)
        before = _manifests(repository)
        while not any(
            "incomplete" in one and one["rootEntry"]["summ"]["size"] >= least_bytes for one in kopia.snapshots()
        ):
            os.kill(found[0].pid, signal.SIGCONT)
            while _manifests(repository) == before:
                await asyncio.sleep(0.002)
            os.kill(found[0].pid, signal.SIGSTOP)
            before = _manifests(repository)
    yield found[0].pid
