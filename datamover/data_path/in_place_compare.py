"""What a restore in place does with each entry: the snapshot's directories are compared with the volume's, by lstat.

A comparison decides and writes nothing. A kind of it does what it decides: the restore, or a plan, which only counts.
What the snapshot does not have is deleted, except what its backup may have left out.
"""

import os
import stat
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Final, TypeVar

from core.errors import DataPathError
from core.models.base import JsonDict
from core.models.transfer_settings import DELETE_EXTRA_FILES, Exclusions, InPlace
from datamover.data_path import stage
from datamover.data_path.file_names import is_kept, mangle
from datamover.data_path.finished import Fingerprints
from datamover.data_path.links import named, read_targets
from datamover.data_path.refused import Directories, Unit
from datamover.data_path.run import DataPath
from datamover.kopia.client_config import IDENTITY
from datamover.kopia.location_files import open_output
from datamover.kopia.policy import describe_exclusions, read_policy
from datamover.kopia.repository import Repository
from datamover.kopia.snapshots import EntryType, Snapshot
from datamover.kopia.storage_calls import KopiaCaller
from datamover.runtime.cancellation import ShouldStop
from datamover.runtime.work_dir import is_name, join, open_below, show_path

_IsWanted = Callable[[bytes], bool] | None
"""Returns whether the snapshot has a name in the directory; None: it does not have the directory."""


async def find_unexplained(kopia: KopiaCaller, snapshot: Snapshot) -> str | None:
    """Return why extra files may be what the backup left out by rules that the snapshot does not name; None: none is.

    kopia counts what patterns, `.kopiaignore` files and marks of caches leave out, and what it could not read, not what
    is too large or mounted. So the policy as it is now must have no rules that may have left out what is not counted,
    or what patterns explain.

    Raises:
        KopiaError: the policy cannot be read.
    """
    patterns = {*snapshot.exclusions.patterns}
    # A stage that was left out counts once, and once more if kopia scans the volume for an estimate. So one is nothing
    # else, and two may be.
    counted = snapshot.excluded > (1 if stage.STAGE_PATTERN in patterns else 0)
    if snapshot.ignored or (counted and not patterns - {stage.STAGE_PATTERN}):
        lacks = (
            f"lacks {snapshot.excluded + snapshot.ignored} files and directories that its backup left out by policies "
            "of the repository, .kopiaignore files or CACHEDIR.TAG"
        )
    else:
        policy = await read_policy(kopia, f"{IDENTITY}:{snapshot.source}")
        if not (rules := describe_exclusions(policy, counted=counted)):
            return None
        lacks = f"may lack what policies of the repository leave out: {', '.join(rules)}"
    return (
        f"snapshot {snapshot.snapshot_id} {lacks}, and they would be deleted. Nothing was changed: restore without "
        f"{DELETE_EXTRA_FILES}"
    )


@dataclass
class ExtraFiles:
    """Deletes extra files, if that is `allowed`; what `exclude` names stays, and what is mounted.

    `remove` deletes an entry of an open directory with all in it, by its name, and returns whether it is gone; the last
    argument is its path. A plan deletes nothing. `on_kept` gets the path of each that stays. `steps` counts what was
    looked at, `deleted` the entries that are gone.
    """

    exclude: Exclusions
    allowed: bool
    remove: Callable[[str, int, bytes], bool]
    mounts: list[bytes] = field(default_factory=list)
    on_kept: Callable[[bytes], None] = lambda _: None
    steps: int = 0
    deleted: int = 0

    def may_delete(self, path: bytes) -> bool:
        """Return whether a directory may be deleted with all in it: nothing is mounted there, or above it."""
        inner, mounts = path + b"/", [mount + b"/" for mount in self.mounts]
        mounted = any(mount.startswith(inner) or inner.startswith(mount) for mount in mounts)
        return self.allowed and not mounted

    def may_replace(self, fd: int, directory: bytes, name: str, stop: ShouldStop) -> bool:
        """Return whether a directory with this name in an open one may be deleted, since a file is to be there."""
        path = join(directory, name)
        excluded = self.exclude.excludes_name(mangle(path), is_dir=True)
        holding = excluded or self.find_holding(fd, directory, name, stop)
        return self.may_delete(path) and not holding and not stop()

    def find_holding(self, fd: int, directory: bytes, name: str, stop: ShouldStop) -> set[bytes]:
        """Return which directories below one are excluded, or hold something that is, unless `stop` ends it."""
        found, left = set[bytes](), [name] if self.exclude and self.allowed else []
        while left and not stop():
            below = left.pop()
            with (
                suppress(NotADirectoryError, FileNotFoundError),
                open_below(fd, os.fsencode(below)) as opened,
                os.scandir(opened) as entries,
            ):
                for entry in entries:
                    if stop():
                        return found
                    self.steps += 1
                    path, is_dir = f"{below}/{entry.name}", entry.is_dir(follow_symlinks=False)
                    if self._is_excluded(opened, entry, join(directory, path)):
                        # There may be millions of files.
                        _add_above(found, directory, path if is_dir else below)
                    elif is_dir:
                        left.append(path)
        return found

    def delete(
        self, fd: int, directory: bytes, is_wanted: _IsWanted, stop: ShouldStop, *, holding: set[bytes] | None = None
    ) -> None:
        """Delete what is not wanted in an open directory; `holding`, if known: what below has something excluded.

        Raises:
            DataPathError: something cannot be deleted; names it.
        """
        if directory and self.exclude.excludes_path(mangle(directory), is_dir=True):
            return
        search, holding = holding is None, set() if holding is None else holding
        left = [""]
        while left and not stop():
            below = left.pop()
            with open_below(fd, os.fsencode(below)) as opened:
                above = join(directory, below) if below else directory
                wanted, known = (None, True) if below else (is_wanted, not search)
                names = self._delete_in(opened, above, wanted, stop, holding=holding, known=known)
            left += [f"{below}/{name}" if below else name for name in names]

    def _delete_in(
        self, fd: int, directory: bytes, is_wanted: _IsWanted, stop: ShouldStop, *, holding: set[bytes], known: bool
    ) -> set[str]:
        """Delete what is not wanted, and return the names of what holds something excluded."""
        found, names = True, set[str]()
        # A file system may leave out entries of a directory that changes while it is read.
        while found and not stop():
            found = False
            with os.scandir(fd) as entries:
                for entry in entries:
                    path, name = join(directory, entry.name), entry.name
                    if name in names or (is_wanted is not None and is_wanted(os.fsencode(name))):
                        continue
                    if (
                        (not directory and stage.is_kept_at_root(name))
                        # It may have been there when the directory was backed up.
                        or (is_wanted is not None and not is_kept(entry))
                        or (self.exclude and self._is_excluded(fd, entry, path))
                    ):
                        self.on_kept(path)
                        continue
                    if not known:
                        holding |= self.find_holding(fd, directory, name, stop)
                    if stop():
                        return names
                    if path in holding:
                        names.add(name)
                        continue
                    found |= self._delete_one(fd, name, path)
        return names

    def _delete_one(self, fd: int, name: str, path: bytes) -> bool:
        if not self.may_delete(path):
            raise DataPathError(f"cannot delete {show_path(path)}: another volume is mounted in it")
        with named(path, "delete"):
            gone = self.remove(name, fd, path)
        self.deleted += gone
        return gone

    def _is_excluded(self, fd: int, entry: "os.DirEntry[str]", path: bytes) -> bool:
        """Return whether the exclusions of the backup name an entry itself: it stays as it is."""
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            return False
        is_dir = stat.S_ISDIR(status.st_mode)
        if self.exclude.excludes_name(mangle(path), is_dir=is_dir):
            return True
        if self.exclude.one_file_system and status.st_dev != os.fstat(fd).st_dev:
            return True
        return not is_dir and self.exclude.excludes_size(status.st_size)


def _add_above(found: set[bytes], directory: bytes, path: str) -> None:
    """Add a path and all above it, down from the open directory."""
    while path and (whole := join(directory, path)) not in found:
        found.add(whole)
        path = os.path.dirname(path)  # noqa: PTH120 - names need not be UTF-8


_RESTORED: Final = frozenset(EntryType)

_T = TypeVar("_T")


@dataclass
class Comparison(ABC):
    """Compares a snapshot with a volume; a subclass does what is decided.

    `changed` has the paths of files whose content is not the snapshot's; None: their content is not compared.
    `precision_ns` is how exact the volume's times are. `entries` counts what was compared, or done otherwise. The
    descriptors are of the directory that an entry is in.
    """

    repository: Repository
    snapshot: Snapshot
    target: Path
    rule: InPlace
    data_path: DataPath
    changed: Fingerprints | None = None
    precision_ns: int = 1
    entries: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        allowed = self.rule.delete_extra_files
        self._extra = ExtraFiles(self.snapshot.exclusions, allowed, self._delete, on_kept=self._keep_extra)

    @abstractmethod
    def _open(self, stop: ShouldStop) -> AbstractContextManager[int]:
        """Open the root of the volume, for what follows in one thread."""

    @abstractmethod
    def _is_whole(self, unit: Unit, *, there: bool) -> bool:
        """Return whether a directory is written as a whole; `there`: the volume has a directory in its place."""

    def _is_taken(self, path: bytes, fd: int, name: str) -> bool:  # noqa: ARG002 - a volume may keep all names apart
        """Return whether the volume takes an entry for another one that is restored; if so, it is refused."""
        return False

    @abstractmethod
    def _act(self, step: stage.Step, unit: Unit, fd: int, status: os.stat_result | None) -> bool:
        """Take the step, but READ; `status` is of what is there. Return whether a directory may be compared.

        Raises:
            OSError: the volume does not take the entry.
        """

    @abstractmethod
    def _delete(self, name: str, fd: int, path: bytes) -> bool:
        """Delete an extra entry with all in it; return whether it is gone. Raises OSError if it cannot be deleted."""

    def _keep_extra(self, path: bytes) -> None:  # noqa: B027 - only a plan does
        """Record an extra entry that stays."""

    @abstractmethod
    def _refuse(self, path: bytes, cause: OSError | str) -> None:
        """Record an entry that the volume does not take."""

    @abstractmethod
    def _reject(self, directory: bytes, entry: JsonDict) -> None:
        """Record an entry of the snapshot that no volume can have."""

    async def _advance(self) -> None:  # noqa: B027 - only a restore does
        """Continue after some directories: what was decided may be much."""

    def _progress(self) -> Hashable:
        return self.entries, self._extra.steps

    async def _in_thread(self, work: Callable[[ShouldStop], _T], doing: str) -> _T:
        return await self.data_path.run_in_thread(work, doing, self._progress)

    async def _run(self, directories: Directories) -> None:
        """Compare all of it; `directories` gets those that were compared."""
        doing = f"comparing {self.target} with the snapshot"
        with ExitStack() as files:
            output, links = (files.enter_context(open_output(self.repository.work_dir)) for _ in range(2))
            self._links = stage.PendingUnits(links)
            self._directories = directories
            while listed := await directories.read(self.repository, self.snapshot, output):
                await self._in_thread(partial(self._compare, listed), doing)
                if self._links.full:
                    await self._compare_links(output, doing)
                await self._advance()
            await self._compare_links(output, doing)

    def _compare(self, listed: Iterable[tuple[Unit, Iterable[JsonDict]]], stop: ShouldStop) -> None:
        with self._open(stop) as root:
            for directory, entries in listed:
                with named(directory.path), open_below(root, directory.path) as fd:
                    known = self._compare_directory(directory.path, entries, fd, stop)
                    if self.rule.delete_extra_files and not stop():
                        self._extra.delete(fd, directory.path, known.has_text, stop)

    def _compare_directory(
        self, directory: bytes, entries: Iterable[JsonDict], fd: int, stop: ShouldStop
    ) -> Fingerprints:
        """Compare what is in an open directory, and return the names that the snapshot has there."""
        known = Fingerprints()
        for entry in entries:
            if stop():
                break
            self.entries += 1
            name = str(entry.get("name", ""))
            if not is_name(name) or entry.get("type") not in _RESTORED:
                self._reject(directory, entry)
            elif directory or name != stage.STAGE:
                known.add_text(os.fsencode(name))
                unit = Unit(join(directory, name), entry)
                try:
                    self._compare_entry(unit, name, fd)
                except OSError as e:
                    self._refuse(unit.path, e)
        return known

    def _compare_entry(self, unit: Unit, name: str, fd: int) -> None:
        if unit.path in self._extra.mounts:
            self._refuse(unit.path, "another volume is mounted there")
            return
        status = _read_status(name, fd)
        if self._is_taken(unit.path, fd, name):
            return
        step = self._decide(unit, status)
        if step is stage.Step.READ:
            self._links.add(unit)
            return
        if self._act(step, unit, fd, status) and step is stage.Step.ENTER:
            self._directories.add(unit.path, unit.entry)

    def _decide(self, unit: Unit, status: os.stat_result | None) -> stage.Step:
        if unit.is_directory:
            there = status is not None and stat.S_ISDIR(status.st_mode)
            return stage.Step.WRITE if self._is_whole(unit, there=there) else stage.Step.ENTER
        if unit.entry["type"] == EntryType.LINK:
            return stage.decide_link(unit.entry, status, self.rule)
        return stage.decide_file(
            unit.entry, status, self.rule, path=unit.path, changed=self.changed, precision_ns=self.precision_ns
        )

    async def _compare_links(self, output: IO[bytes], doing: str) -> None:
        while self._links.count:
            units = self._links.take(sys.maxsize)
            targets = await read_targets(self.repository, self.snapshot, [unit.entry for unit in units], output)
            await self._in_thread(partial(self._decide_links, units, targets), doing)

    def _decide_links(self, units: Sequence[Unit], targets: Sequence[bytes | None], stop: ShouldStop) -> None:
        with self._open(stop) as root:
            for unit, target in zip(units, targets, strict=True):
                if stop():
                    return
                self.entries += 1
                above, name = os.path.split(os.fsdecode(unit.path))
                try:
                    with open_below(root, os.fsencode(above)) as fd:
                        status, step = _read_status(name, fd), stage.Step.WRITE
                        if self._is_taken(unit.path, fd, name):
                            continue
                        is_link = status is not None and stat.S_ISLNK(status.st_mode)
                        found = os.readlink(os.fsencode(name), dir_fd=fd) if is_link else None
                        if status is not None and found is not None and found == target:
                            step = stage.decide_same_link(unit.entry, status, precision_ns=self.precision_ns)
                        self._act(step, unit, fd, status)
                except OSError as e:
                    self._refuse(unit.path, e)


def _read_status(name: str, fd: int) -> os.stat_result | None:
    # A name that is too long for the volume is refused where it is moved.
    with suppress(OSError):
        return os.stat(name, dir_fd=fd, follow_symlinks=False)
    return None
