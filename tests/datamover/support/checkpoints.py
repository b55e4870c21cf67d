"""A backup that is stopped once kopia has saved a checkpoint."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from tests.datamover.support.backup_movers import BACKUP_VERB
from tests.datamover.support.plainkopia import PlainKopia
from tests.datamover.support.processes import running_kopia


def _manifests(repository: Path) -> int:
    return sum(1 for _ in repository.glob("q*/**/*.f"))


def _has_checkpoint(kopia: PlainKopia, least_bytes: int) -> bool:
    found = (one["rootEntry"]["summ"]["size"] for one in kopia.snapshots() if "incomplete" in one)
    return any(size >= least_bytes for size in found)


@asynccontextmanager
async def kopia_frozen_after_a_checkpoint(
    repository: Path, kopia: PlainKopia, *, least_bytes: int = 0, until: Callable[[], bool] | None = None
) -> AsyncIterator[int]:
    """Enter once a backup has saved a checkpoint, with kopia stopped; yield its PID.

    Args:
        repository: its directory.
        kopia: reads it.
        least_bytes: the size of the files in the checkpoint.
        until: is asked instead after each one.
    """
    done = until or (lambda: _has_checkpoint(kopia, least_bytes))
    async with asyncio.timeout(200):
        while not (found := running_kopia(BACKUP_VERB)):
            await asyncio.sleep(0.002)
        before = _manifests(repository)
        while not done():
            os.kill(found[0].pid, signal.SIGCONT)
            while _manifests(repository) == before:
                await asyncio.sleep(0.002)
            os.kill(found[0].pid, signal.SIGSTOP)
            before = _manifests(repository)
    yield found[0].pid
