"""The program that writes and deletes snapshots, `tools/kopia/backups`: what it is asked, and what it answers."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from benchmarks.processes import BenchmarkError
from benchmarks.repository.clock import SimulatedClock
from core.models.base import JsonDict
from tests.support.tools import tool

__all__ = ["Backups", "Shape", "run_backups"]

_ANSWER_BYTES: Final = 1 << 22
"""Thousands of IDs of snapshots are in one line."""

_LIMIT_SECONDS: Final = 600.0


@dataclass(frozen=True)
class Shape:
    """What a backup of one volume writes: `rounds` times `files` new files, with an index blob after each round.

    One more index blob has directories and manifest. `bytes` is the size of a file.
    """

    rounds: int
    files: int
    bytes: int

    @property
    def index_blobs(self) -> int:
        """How many index blobs a backup leaves."""
        return self.rounds + 1


class Backups:
    """Writes and deletes snapshots in one repository."""

    def __init__(self, process: asyncio.subprocess.Process, clock: SimulatedClock) -> None:
        """Talk to the program `process`, at the times of `clock`."""
        self._process = process
        self._clock = clock

    async def back_up(
        self, shape: Shape, sources: Sequence[str], *, base_files: int = 0, expired: Sequence[str] = ()
    ) -> list[str]:
        """Write a snapshot of each source, and return their IDs; then delete the `expired` snapshots.

        Args:
            shape: what is new in each.
            sources: paths of volumes.
            base_files: files that these and all later snapshots contain, too; 0: those of before.
            expired: IDs of snapshots.

        Raises:
            BenchmarkError: the program failed.
        """
        write = {**asdict(shape), "sources": list(sources), "base_files": base_files}
        return list((await self._ask(write=write, delete=list(expired)))["snapshots"])

    async def delete_tracking(self, snapshots: Sequence[str]) -> int:
        """Delete the snapshots; return the bytes of what only they held.

        Raises:
            BenchmarkError: the program failed.
        """
        return int((await self._ask(delete=list(snapshots), track=True))["held_bytes"])

    async def count_stored(self) -> int:
        """Return how many bytes of what only deleted snapshots held are still in the bucket.

        Raises:
            BenchmarkError: the program failed.
        """
        return int((await self._ask(stored=True))["stored_bytes"])

    async def _ask(self, **request: object) -> JsonDict:
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise BenchmarkError("the program that writes backups has no pipes")
        line = json.dumps({"time": self._clock.now().isoformat(), **request})
        stdin.write(line.encode() + b"\n")
        async with asyncio.timeout(_LIMIT_SECONDS):
            answer = await stdout.readline()
        if not answer:
            raise BenchmarkError("the program that writes backups failed; its output is above")
        found: JsonDict = json.loads(answer)
        return found


@asynccontextmanager
async def run_backups(config: Path, clock: SimulatedClock, environment: Mapping[str, str]) -> AsyncIterator[Backups]:
    """Start the program on the repository of a kopia configuration, and stop it at the end."""
    process = await asyncio.create_subprocess_exec(
        tool("kopia", "backups"),
        config,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_ANSWER_BYTES,
        env=dict(environment),
    )
    try:
        yield Backups(process, clock)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
