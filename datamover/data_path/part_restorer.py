"""Runs of kopia that restore the parts of a snapshot, also into a target that refuses some entries.

kopia ends at the first entry that the target refuses. It is then run once more for the same part, and goes on after
errors: with `--ignore-errors`, which leaves directories unset, so only where that is necessary.
Source: kopia 0.23.1, cli/command_restore.go, snapshot/restore/restore.go.
"""

import logging
import shutil
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Final

from core.aio import run_shielded
from core.clock import Deadline
from datamover.data_path.links import show_path
from datamover.data_path.parts import Part, Parts, Placeholders
from datamover.data_path.run import DataPath
from datamover.kopia.process import IgnoredErrors, KopiaAnswer, KopiaFiles, is_refusal
from datamover.kopia.repository import Repository
from datamover.kopia.snapshots import Snapshot
from datamover.runtime.cancellation import ShouldStop

__all__ = ["SKIP_EXISTING", "PartRestorer"]

_logger = logging.getLogger(__name__)

_CLEANUP: Final = timedelta(seconds=1)
"""A canceled transfer ends within 2 seconds."""

SKIP_EXISTING: Final = "--skip-existing"
"""kopia takes a file for restored that has the size of the snapshot's, and its time give or take two seconds."""

_ALL_LEVELS: Final = 2**31 - 2
"""kopia takes one more for the default, which is 0 with placeholders. Source: kopia 0.23.1, cli/command_restore.go."""


@dataclass
class PartRestorer:
    """Runs kopia for the parts of a snapshot; each run has the `flags` and `files`.

    Once the target has refused an entry, kopia is `tolerant`: it goes on after errors, which leaves more unset than
    necessary.
    """

    repository: Repository
    snapshot: Snapshot
    target: Path
    flags: Sequence[str]
    files: KopiaFiles
    data_path: DataPath
    tolerant: bool = False
    errors: IgnoredErrors = field(default_factory=IgnoredErrors)
    refusals: int = 0
    _cached: int = 0

    @property
    def attempted(self) -> str:
        """What it does, for messages."""
        return self._describe("")

    def _describe(self, part: str) -> str:
        return f"restore {part}snapshot {self.snapshot.snapshot_id} to {self.target}"

    @property
    def refused(self) -> bool:
        """Whether something went wrong that kopia, or this process, has ignored."""
        return bool(self.errors.count or self.refusals)

    async def restore(self, parts: Parts, fitting: int) -> None:
        """Restore them one after the other; no placeholder stays, unless this process is killed, or the target hangs.

        kopia also has a list in memory of all that is in its cache, 150 bytes for each file. So the cache is emptied
        once more than `fitting` entries may be in it.

        Raises:
            DataPathError: one of them could not be restored.
        """
        if parts.split:
            make = partial(parts.make_directories, self.target)
            refused = await self.data_path.run_in_thread(make, f"making directories in {self.target}")
            self.refusals += len(refused)
            parts = parts.outside(refused)
        for run in parts.runs(self.target, fitting):
            await self.make_room(run, fitting)
            if len(run) == 1:
                await self._restore_alone(run)
            else:
                await self._restore_together(run)

    async def make_room(self, run: Sequence[Part], fitting: int) -> None:
        """Empty kopia's cache if more than `fitting` entries would be in it."""
        entries = sum(part.entries for part in run)
        if self._cached and self._cached + entries > fitting:
            await self._empty_cache()
            self._cached = 0
        self._cached += entries

    async def restore_placeholders(self, run: Sequence[Part], make: Callable[[], Awaitable[Sequence[str]]]) -> None:
        """Restore parts by placeholders, whose paths `make` returns before each run of kopia.

        Raises:
            DataPathError: they could not be restored.
        """

        async def prepare() -> Sequence[str]:
            paths = await make()
            return [*paths, f"--shallow={_ALL_LEVELS}"] if paths else []

        await self._run_kopia(run, prepare)

    async def finish(self, parts: Parts) -> None:
        """Set the attributes of the directories that were split, once all is restored.

        Raises:
            DataPathError: the target failed.
        """
        if parts.split:
            set_attributes = partial(parts.set_attributes, self.target)
            self.refusals += await self.data_path.run_in_thread(set_attributes, f"setting attributes in {self.target}")

    async def _empty_cache(self) -> None:
        removed = 0

        def remove(stop: ShouldStop) -> None:
            nonlocal removed
            with suppress(FileNotFoundError):
                for shard in self.repository.data_cache.iterdir():
                    if stop():
                        return
                    shutil.rmtree(shard, ignore_errors=True)
                    removed += 1

        if (server := self.repository.kopia.server) is not None:
            # It has the list in memory.
            await server.end()
        await self.data_path.run_in_thread(remove, "emptying kopia's cache", lambda: removed)

    async def _restore_alone(self, run: Sequence[Part]) -> None:
        async def prepare() -> list[str]:
            source = f"{self.snapshot.snapshot_id}/{run[0].path}".rstrip("/")
            return [source, str(self.target / run[0].path)]

        await self._run_kopia(run, prepare)

    async def _restore_together(self, run: Sequence[Part]) -> None:
        made, target = Placeholders(self.target, run), self.target
        remove = partial(self.data_path.run_in_thread, made.remove, f"removing placeholders in {target}")

        async def make() -> Sequence[str]:
            await self.data_path.run_in_thread(made.make, f"making placeholders in {target}", lambda: made.done)
            return made.paths

        try:
            await self.restore_placeholders(run, make)
            self.refusals += made.refused
            if self.tolerant:
                await remove()
        except BaseException:
            with suppress(TimeoutError):
                deadline = Deadline.after(self.data_path.clock, _CLEANUP)
                await run_shielded(remove, name="placeholders", deadline=deadline)
            raise

    async def _run_kopia(self, run: Sequence[Part], prepare: Callable[[], Awaitable[Sequence[str]]]) -> None:
        """Restore parts with one kopia, or with another one if the target refuses an entry.

        `prepare` returns kopia's arguments, before each; none: there is nothing to restore.
        """
        attempted = self._describe(f"{show_path(run[0].path.encode())} of " if run[0].path else "")
        if not (sources := await prepare()):
            return
        answer = await self._call(attempted, *sources, *self.flags)
        if not self.tolerant and is_refusal(answer):
            _logger.warning("the target refused an entry, restoring all others: %s", answer.lines[-1])
            self.tolerant = True
            # What this attempt has not finished may look finished.
            flags = [flag for flag in self.flags if flag != SKIP_EXISTING]
            answer = await self._call(attempted, *await prepare(), *flags)
        self.errors.check(answer.check())
        self.data_path.meter.finish_part(sum(part.size_bytes for part in run))

    async def _call(self, attempted: str, *arguments: str) -> KopiaAnswer:
        tolerance = ["--ignore-errors"] if self.tolerant else []
        kopia = partial(
            self.data_path.run,
            self.repository.kopia,
            attempted,
            "restore",
            *arguments,
            *tolerance,
            files=self.files,
            on_line=self.errors.take,
        )
        return await self.repository.run(kopia)
