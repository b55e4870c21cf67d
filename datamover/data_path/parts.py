"""Parts of a large snapshot, which kopia restores one after the other, each within the memory limit.

kopia keeps all entries of what it restores in memory. So a directory that has more of them than fit is split: what is
in it are parts. The mover makes the directory itself, and sets its attributes once all is restored.

One kopia restores many directories, if there is a placeholder file beside each: it has the entry of the directory, and
kopia removes it once it has restored what it stands for. Anything else needs a kopia of its own. kopia ends at the
first entry that the target refuses. It is then run once more for the same part, and goes on after errors: with
`--ignore-errors`, which leaves directories unset, so only where that is necessary.
Source: kopia 0.23.1, cli/command_restore.go (constructTargetPairs), snapshot/restore/restore.go (copyDirectoryContent),
local_fs_output.go (FinishDirectory, setAttributes), fs/localfs/shallowentry.go, snapshot/manifest.go (DirEntry).
"""

import json
import logging
import os
import shutil
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Final, Self

from core.errors import KopiaError
from datamover.data_path.file_names import PLACEHOLDER
from datamover.data_path.links import named, open_directories
from datamover.data_path.probe import Attribute, Attributes
from datamover.data_path.refused import Unit
from datamover.data_path.run import DataPath
from datamover.kopia.location_files import open_output
from datamover.kopia.process import TARGET_FAILURES, IgnoredErrors, KopiaAnswer, KopiaFiles, is_refusal
from datamover.kopia.repository import Repository
from datamover.kopia.snapshots import EntryType, Snapshot
from datamover.runtime.cancellation import ShouldStop
from datamover.runtime.work_dir import NEW, is_name, join, open_below, open_root, show_path, walk_tree

_logger = logging.getLogger(__name__)

_MOST_ALONE: Final = 2000
"""Parts with a kopia of their own: each takes a third of a second until it has opened the repository."""

_MOST_PARTS: Final = 50_000
"""In all; each takes half a KiB of memory. A directory with more entries of its own is not split."""

_PATHS_BYTES: Final = 512 * 1024
"""The limit of one kopia's arguments; Linux permits 2 MiB with the environment."""

_ARGUMENT_BYTES: Final = 10
"""What each takes beside its text: a slash, the end, and a pointer."""

_NAME_BYTES: Final = 255
_PATH_BYTES: Final = 3500
"""The limits of file systems and Linux, NAME_MAX and PATH_MAX, the latter without the target's path."""

_ENTRY_BYTES: Final = 64 * 1024
"""A placeholder's limit: it is much smaller."""


@dataclass(frozen=True, slots=True)
class Part:
    """A directory, file or link: its path in the snapshot, empty for all of it, its entries, and the size of its files.

    A directory is an entry of itself, but for the root. `entry` is kopia's, as JSON: there may be thousands of
    directories.
    """

    path: str
    entries: int
    size_bytes: int
    entry: str = field(default="", compare=False, repr=False)

    @classmethod
    def of(cls, unit: Unit) -> Self:
        """Return the part that is a unit of the snapshot."""
        entry = unit.placeholder if unit.is_directory else ""
        return cls(os.fsdecode(unit.path), unit.entries, unit.size_bytes, entry)

    @property
    def placeholder(self) -> str | None:
        """The path of its placeholder; None if it has none: one kopia restores it alone."""
        path = f"{self.path}{PLACEHOLDER}"
        encoded = path.encode()
        fits = len(encoded) <= _PATH_BYTES and len(encoded.rpartition(b"/")[2]) <= _NAME_BYTES
        return path if fits and self.path and self.entry else None

    @property
    def name(self) -> str:
        """What it is, for messages."""
        return f"{show_path(self.path.encode())} of the snapshot" if self.path else "the snapshot"


@dataclass(frozen=True)
class Parts:
    """What is restored one after the other, and the directories that were split, outer ones first."""

    parts: Sequence[Part]
    split: Sequence[Part] = ()

    def runs(self, target: Path, fitting: int) -> Iterator[Sequence[Part]]:
        """Yield what one kopia restores: parts with a placeholder, `fitting` entries at most, or a single part."""
        run: list[Part] = []
        each_bytes, paths_bytes, entries = len(os.fsencode(target)) + _ARGUMENT_BYTES, 0, 0
        for part in self.parts:
            if not (path := part.placeholder):
                yield [part]
                continue
            paths_bytes += each_bytes + len(path.encode())
            entries += part.entries
            if run and (paths_bytes > _PATHS_BYTES or entries > fitting):
                yield run
                run, paths_bytes, entries = [], each_bytes + len(path.encode()), part.entries
            run.append(part)
        if run:
            yield run

    @property
    def largest(self) -> Part:
        """The one with the most entries."""
        return max(self.parts, key=lambda part: part.entries)

    def make_directories(self, target: Path, _: ShouldStop) -> Collection[str]:
        """Make the directories that were split; return the paths that the target refused; raises DataPathError."""
        refused: set[str] = set()
        for one in self.split:
            with _named(one.path):
                try:
                    (target / one.path).mkdir(mode=0o700, exist_ok=True)
                except OSError as e:
                    if count_refusal(e):
                        refused.add(one.path)
        return refused

    def set_attributes(self, target: Path, _: ShouldStop) -> int:
        """Set the attributes of split directories; return how many the target refused; raises DataPathError."""
        refused = 0
        with _named(""), open_root(target) as root:
            for one in reversed(self.split):
                attributes = Attributes.of(json.loads(one.entry), root=not one.path)
                with _named(one.path):
                    try:
                        with open_below(root, one.path.encode()) as fd:
                            for change in attributes.changes(".", fd, tuple(Attribute)):
                                # As kopia, which does without a permission.
                                with suppress(PermissionError):
                                    change()
                    except OSError as e:
                        refused += count_refusal(e)
        return refused


class Placeholders:
    """The placeholders of what one kopia restores, beside the directories, in a target that no pod has yet.

    `done` counts what was made, removed or looked at, `refused` what the target did not take: `paths` lacks them.
    """

    def __init__(self, target: Path, run: Sequence[Part] = ()) -> None:
        self._target = target
        self._run = run
        self.done = 0
        self.refused = 0

    @property
    def paths(self) -> list[str]:
        """Their absolute paths."""
        return [str(self._target / placeholder) for part in self._run if (placeholder := part.placeholder) is not None]

    def make(self, stop: ShouldStop) -> None:
        """Make them, until `stop` returns True. Raises DataPathError if the target failed."""
        made = []
        with _named(""), open_root(self._target) as root:
            for directory, name, part in self._places():
                if stop():
                    return
                with _named(part.path):
                    try:
                        _write_placeholder(root, directory, name, part.entry)
                        made.append(part)
                    except OSError as e:
                        self.refused += count_refusal(e)
                self.done += 1
        self._run = made

    def remove(self, stop: ShouldStop) -> None:
        """Remove those that a kopia which did not succeed has left, until `stop` returns True."""
        with suppress(OSError), open_root(self._target) as root:
            for directory, name, _ in self._places():
                if stop():
                    return
                with suppress(OSError), open_below(root, directory) as fd:
                    os.unlink(name, dir_fd=fd)
                self.done += 1

    def remove_left(self, stop: ShouldStop, *, began_empty: bool) -> None:
        """Remove what an earlier attempt that was killed has left, no other files; raises DataPathError.

        After a power loss that may be an empty file: it is only known as the mover's if the target had no files before.
        """
        with _named(""), open_root(self._target) as root:
            device = os.fstat(root).st_dev

            def is_foreign(_: bytes, entry: "os.DirEntry[str]") -> bool:
                return entry.stat(follow_symlinks=False).st_dev != device

            for directory, entries in walk_tree(self._target, stop, skip=is_foreign, strict=True):
                names = []
                for entry in entries:
                    self.done += 1
                    if entry.name.endswith(PLACEHOLDER) and entry.is_file(follow_symlinks=False):
                        names.append(entry.name)
                # A file system may leave out entries of a directory that changes while it is read.
                with open_below(root, directory) as fd:
                    for name in names:
                        if _is_placeholder(name, fd, empty=began_empty):
                            os.unlink(name, dir_fd=fd)

    def _places(self) -> Iterator[tuple[bytes, bytes, Part]]:
        for part in self._run:
            if (placeholder := part.placeholder) is not None:
                directory, _, name = placeholder.encode().rpartition(b"/")
                yield directory, name, part


async def find_parts(repository: Repository, snapshot: Snapshot, fitting: int | None) -> Parts:
    """Return the parts of a snapshot with at most `fitting` entries each, if it can be split so far; None: all fit.

    Raises:
        RepositoryError: the snapshot cannot be read.
    """
    whole = Part("", snapshot.entries, snapshot.size_bytes, json.dumps(dict(snapshot.root_entry)))
    if fitting is None or snapshot.entries <= fitting:
        return Parts([whole])
    parts: list[Part] = []
    split: list[Part] = []
    left, alone = [whole], 0
    while left:
        part = left.pop()
        most = _MOST_PARTS - len(parts) - len(split) - len(left)
        below = await _find_below(repository, snapshot, part, most)
        own = sum(not one.placeholder for one in below or ())
        if below is None or alone + own > _MOST_ALONE:
            parts.append(part)
            continue
        alone += own
        split.append(part)
        for one in below:
            (left if one.entries > fitting else parts).append(one)
    return Parts(parts, split)


async def _find_below(repository: Repository, snapshot: Snapshot, part: Part, most: int) -> Sequence[Part] | None:
    """Return what is in a directory; None: it has more than `most` entries, or a name that the mover does not write.

    A tenant may have chosen such names: kopia takes a placeholder that it finds in a volume as it is.
    """
    try:
        with open_output(repository.work_dir) as file:
            listed = next(await open_directories(repository, snapshot, [json.loads(part.entry)["obj"]], file))
            # It may have millions.
            entries = [*islice(listed, most + 1)]
    except KopiaError as e:
        _logger.warning("cannot split %s: %s", part.name, e)
        return None
    names = (str(entry.get("name", "")) for entry in entries)
    if len(entries) > most or any(not is_name(name) or name.endswith(PLACEHOLDER) for name in names):
        return None
    return [Part.of(Unit(join(os.fsencode(part.path), entry["name"]), entry)) for entry in entries]


def _write_placeholder(root: int, directory: bytes, name: bytes, entry: str) -> None:
    with open_below(root, directory) as fd:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=fd)
        with os.fdopen(os.open(name, NEW, 0o600, dir_fd=fd), "w") as file:
            file.write(entry)


def _is_placeholder(name: str, directory: int, *, empty: bool) -> bool:
    """Return whether a file is the mover's placeholder of a directory; with `empty`, also without content.

    kopia's own ones of directories are directories. Source: kopia 0.23.1, fs/localfs/shallow_fs.go (placeholderPath).
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with suppress(OSError, ValueError, AttributeError):
        with os.fdopen(os.open(name, flags, dir_fd=directory), "rb") as file:
            text = file.read(_ENTRY_BYTES).strip(b"\0")
        if not text:
            return empty
        entry = json.loads(text)
        return entry.get("type") == EntryType.DIRECTORY and f"{entry.get('name')}{PLACEHOLDER}" == name
    return False


def count_refusal(error: OSError) -> bool:
    """Return True: the target refused something; an error of the target as a whole is raised again."""
    if error.errno in TARGET_FAILURES:
        raise error
    return True


def _named(path: str) -> AbstractContextManager[None]:
    return named(path.encode(), "restore directory")


CLEANUP: Final = timedelta(seconds=1)
"""A canceled transfer ends within 2 seconds."""

SKIP_EXISTING: Final = "--skip-existing"
"""kopia takes a file for restored that has the size of the snapshot's, and its time give or take two seconds."""

SPARSE: Final = "--write-sparse-files"

_SPARSE_BYTES: Final = 64 * 1024
"""kopia crashes at a file with this flag if the directory with its target is in a file system with larger blocks, such
as NFS or CephFS. Source: kopia 0.23.1, internal/sparsefile/sparsefile.go, internal/iocopy (BufSize)."""

_ALL_LEVELS: Final = 2**31 - 2
"""kopia takes one more for the default, which is 0 with placeholders. Source: kopia 0.23.1, cli/command_restore.go."""


@dataclass
class PartRestorer:
    """Runs kopia for the parts of a snapshot, with the `flags` and `files`; `tolerant`: kopia goes on after errors."""

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

    def describe(self, part: str = "") -> str:
        """Return what it does, for messages."""
        return f"restore {part}snapshot {self.snapshot.snapshot_id} to {self.target}"

    @property
    def refused(self) -> bool:
        """Whether something went wrong that kopia, or this process, has ignored."""
        return bool(self.errors.count or self.refusals)

    async def restore(self, parts: Parts, fitting: int) -> None:
        """Restore them one after the other; no placeholder stays, unless this process is killed, or the target hangs.

        kopia has a list in memory of all that is in its cache, 150 bytes for each file. So the cache is emptied once
        more than `fitting` entries may be in it. Raises DataPathError if a part could not be restored.
        """
        if parts.split:
            make = partial(parts.make_directories, self.target)
            refused = await self.data_path.run_in_thread(make, f"making directories in {self.target}")
            self.refusals += len(refused)
            # Without the directory, kopia fails where it is to write a sparse file.
            left = [part for part in parts.parts if part.path.rpartition("/")[0] not in refused]
            parts = replace(parts, parts=left)
        for run in parts.runs(self.target, fitting):
            await self.make_room(run, fitting)
            if len(run) == 1:
                await self._restore_alone(run)
            else:
                await self._restore_together(run)
        if parts.split:
            set_attributes = partial(parts.set_attributes, self.target)
            self.refusals += await self.data_path.run_in_thread(set_attributes, f"setting attributes in {self.target}")

    async def make_room(self, run: Sequence[Part], fitting: int) -> None:
        """Empty kopia's cache if more than `fitting` entries would be in it."""
        entries = sum(part.entries for part in run)
        if self._cached and self._cached + entries > fitting:
            await self._empty_cache()
            self._cached = 0
        self._cached += entries

    async def restore_placeholders(self, run: Sequence[Part], make: Callable[[], Awaitable[Sequence[str]]]) -> None:
        """Restore parts by placeholders, whose paths `make` returns before each run of kopia; raises DataPathError."""

        async def prepare() -> Sequence[str]:
            paths = await make()
            return [*paths, f"--shallow={_ALL_LEVELS}"] if paths else []

        await self._run_kopia(run, prepare)

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
            await self.data_path.clean_up(remove, "placeholders", CLEANUP)
            raise

    async def _run_kopia(self, run: Sequence[Part], prepare: Callable[[], Awaitable[Sequence[str]]]) -> None:
        """Restore parts with one kopia, or with another one if the target refuses an entry.

        `prepare` returns kopia's arguments, before each; none: there is nothing to restore.
        """
        attempted = self.describe(f"{show_path(run[0].path.encode())} of " if run[0].path else "")
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
        if SPARSE in arguments:
            folder = next(Path(one).parent for one in arguments if one.startswith("/"))
            if await self.data_path.run_in_thread(partial(_has_large_blocks, folder), f"opening target {self.target}"):
                arguments = tuple(one for one in arguments if one != SPARSE)
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


def _has_large_blocks(folder: Path, _: ShouldStop) -> bool:
    # kopia reports an error.
    with suppress(OSError):
        return os.statvfs(folder).f_bsize > _SPARSE_BYTES
    return False
