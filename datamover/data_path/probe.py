"""What the target of a restore keeps: a probe file shows it; owners, modes and times; entries that are read-only.

A file server may refuse to set them, set them without an effect (CIFS with `uid=`), or round them; kopia ignores the
refusals for want of a permission (`--ignore-permission-errors`, its default), and looks at nothing afterward. It leaves
out of an entry what is 0, and gives a directory the latest time of what is below it, the root aside. It opens what is
there already for writing, and sets the mode afterward: root needs no mode, an ordinary user does.
Source: kopia 0.23.1, snapshot/manifest.go (DirEntry), snapshot/snapshotfs/repofs.go (loadLocked),
snapshot/restore/local_fs_output.go (createDirectory, copyFileContent).
"""

import errno
import logging
import os
import re
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Final, Self

from core.errors import ContractError
from core.models.base import JsonDict
from datamover.data_path.links import TargetLinks, read_entries
from datamover.data_path.run import DataPath
from datamover.kopia.location_files import open_output
from datamover.kopia.repository import Repository
from datamover.kopia.snapshot_files import parse_mode, parse_time_ns
from datamover.kopia.snapshots import EntryType, Snapshot
from datamover.runtime.cancellation import ShouldStop
from datamover.runtime.work_dir import NEW, attempting, join, open_below, open_root, opened, walk_tree

_logger = logging.getLogger(__name__)

TIME_TOLERANCE_NS: Final = 2 * 10**9
"""Times that differ by less are alike: FAT has two seconds, and kopia takes such files for unchanged."""

_NAME: Final = ".nodeagent-probe-\u00e4"
_SAME: Final = (_NAME.upper(), ".NODEAGENT-PROBE-\u00e4", ".nodeagent-probe-a\u0308", f"{_NAME}.", f"{_NAME} ")
"""Names that some file systems take for the same: in another case, some beyond ASCII and some not, decomposed, without
what is at the end."""

_ODD: Final = f'{_NAME}:"*?<>|\\'
_LINK: Final = f"{_NAME}-link"
_MADE: Final = (_NAME, _ODD, _LINK)

_OTHER_OWNER: Final = (1, 1)
_MODE: Final = 0o6751
_EARLY_NS: Final = 86_400_123_456_789
_STEPS_NS: Final = (1, 100, 1000, 10**6, 10**9)

_IGNORED: Final = frozenset({errno.EPERM, errno.EACCES})
"""Source: Go 1.26, os.IsPermission."""


@dataclass
class Probe:
    """What the target keeps as it is set.

    `apart`: it takes no name for another one. `refuses`: it refuses something with an error that ends a restore, unless
    kopia is to ignore errors. `precision_ns`: times that differ by less are alike to it, such as 100 on an SMB share.
    """

    owner: bool = False
    mode: bool = False
    times: bool = False
    names: bool = False
    apart: bool = False
    refuses: bool = False
    precision_ns: int = 1

    @property
    def sound(self) -> bool:
        """Whether it keeps all of them: kopia's success means that all is restored."""
        return self.owner and self.mode and self.times and self.names

    def attempt(self, change: Callable[[], object]) -> bool:
        """Return whether the target accepts a change."""
        try:
            change()
        except OSError as e:
            self.refuses |= e.errno not in _IGNORED
            return False
        return True


def probe_target(target: Path, snapshot: Snapshot, _: ShouldStop) -> Probe:
    """Return what the target keeps, such as the snapshot's owner and latest time; unknown if it takes no file."""
    probe, root_entry = Probe(), snapshot.root_entry
    owners = dict.fromkeys([(int(root_entry.get("uid", 0)), int(root_entry.get("gid", 0))), _OTHER_OWNER])
    try:
        with open_root(target) as root:
            # An attempt that was killed may have left them.
            _remove(root)
            try:
                with opened(_NAME, NEW, root) as fd:
                    probe.owner = all(_keeps_owner(probe, fd, owner) for owner in owners)
                    # After the owner: setgid needs a permission for files of other groups.
                    accepted = probe.attempt(lambda: os.fchmod(fd, _MODE))
                    probe.mode = accepted and stat.S_IMODE(os.fstat(fd).st_mode) == _MODE
                    probe.precision_ns = _precision_ns(fd)
                    probe.times = all(_keeps_time(probe, fd, time_ns) for time_ns in _times(root_entry))
                    probe.names = _keeps_names(probe, root, links=snapshot.links > 0)
            finally:
                _remove(root)
    except OSError as e:
        _logger.info("cannot probe target %s: %s", target, e.strerror)
    return probe


def _keeps_owner(probe: Probe, fd: int, owner: tuple[int, int]) -> bool:
    if not probe.attempt(lambda: os.fchown(fd, *owner)):
        return False
    status = os.fstat(fd)
    return (status.st_uid, status.st_gid) == owner


def _keeps_time(probe: Probe, fd: int, time_ns: int) -> bool:
    kept = probe.attempt(lambda: os.utime(fd, ns=(time_ns, time_ns)))
    return kept and abs(os.fstat(fd).st_mtime_ns - time_ns) < TIME_TOLERANCE_NS


def _precision_ns(fd: int) -> int:
    """Return what the target cuts times to; 1 if it keeps them, or refuses them."""
    try:
        os.utime(fd, ns=(_EARLY_NS, _EARLY_NS))
    except OSError:
        return 1
    kept = os.fstat(fd).st_mtime_ns
    return next((step for step in _STEPS_NS if _EARLY_NS // step * step == kept), 1)


def _times(root_entry: JsonDict) -> list[int]:
    """Return an early time and the latest one of the snapshot: some file systems end in 2038."""
    times = [_EARLY_NS]
    with suppress(ContractError):
        times.append(parse_time_ns((root_entry.get("summ") or {}).get("maxTime", "")))
    return times


def _keeps_names(probe: Probe, root: int, *, links: bool) -> bool:
    odd = probe.attempt(lambda: os.close(os.open(_ODD, NEW, 0o600, dir_fd=root)))
    linked = not links or probe.attempt(lambda: os.symlink(_NAME, _LINK, dir_fd=root))
    # Unlike a refused attribute, kopia ignores no refused link.
    probe.refuses |= not linked
    probe.apart = not any(_exists(name, root) for name in _SAME)
    return odd and linked and probe.apart


def _exists(name: str, root: int) -> bool:
    try:
        os.stat(name, dir_fd=root, follow_symlinks=False)
    except OSError:
        return False
    return True


def _remove(root: int) -> None:
    for name in _MADE:
        with suppress(OSError):
            if _is_ours(name, root):
                os.unlink(name, dir_fd=root)


def _is_ours(name: str, root: int) -> bool:
    """Return whether it is what the probe makes: an empty file, or a link to it. All else was in the target before."""
    status = os.stat(name, dir_fd=root, follow_symlinks=False)
    if stat.S_ISLNK(status.st_mode):
        return os.readlink(name, dir_fd=root) == _NAME
    return stat.S_ISREG(status.st_mode) and not status.st_size


_SECOND_NS: Final = 10**9


class Attribute(StrEnum):
    """What a restore sets of an entry, as messages name it."""

    OWNER = "owner"
    MODE = "mode"
    TIME = "time"


@dataclass(frozen=True, slots=True)
class Attributes:
    """Owner, mode and time of one entry of a snapshot; a link has no mode, and an entry may have no valid time."""

    owner: tuple[int, int]
    mode: int | None
    time_ns: int | None

    @classmethod
    def of(cls, entry: JsonDict, *, root: bool = False) -> Self:
        """Return the attributes that kopia sets for one of its entries; `root`: it is the snapshot's root."""
        time = "" if root else (entry.get("summ") or {}).get("maxTime", "")
        time_ns = None
        with suppress(ContractError):
            time_ns = parse_time_ns(str(time or entry.get("mtime", "1970-01-01T00:00:00Z")))
        mode = None if entry.get("type") == EntryType.LINK else parse_mode(str(entry.get("mode", "0"))) or 0
        return cls((int(entry.get("uid", 0)), int(entry.get("gid", 0))), mode, time_ns)

    def find_unset(self, status: os.stat_result, *, tolerance_ns: int = TIME_TOLERANCE_NS) -> dict[str, str]:
        """Return which of them a file does not have, and what it has; times within `tolerance_ns` are alike."""
        found: dict[str, str] = {}
        if (owner := (status.st_uid, status.st_gid)) != self.owner:
            found[Attribute.OWNER] = "owner {}:{} instead of {}:{}".format(*owner, *self.owner)
        if self.mode is not None and (mode := stat.S_IMODE(status.st_mode)) != self.mode:
            found[Attribute.MODE] = f"mode {mode:o} instead of {self.mode:o}"
        if self.time_ns is not None and abs(status.st_mtime_ns - self.time_ns) >= tolerance_ns:
            seconds = status.st_mtime_ns // _SECOND_NS, self.time_ns // _SECOND_NS
            found[Attribute.TIME] = "time {} instead of {}".format(*seconds)
        return found

    def changes(self, name: str, directory: int, unset: Collection[str]) -> Iterator[Callable[[], None]]:
        """Yield what sets these attributes of an entry of the open directory; no link is followed."""
        if Attribute.OWNER in unset:
            yield partial(os.chown, name, *self.owner, dir_fd=directory, follow_symlinks=False)
        if self.time_ns is not None and Attribute.TIME in unset:
            times = (self.time_ns, self.time_ns)
            yield partial(os.utime, name, ns=times, dir_fd=directory, follow_symlinks=False)
        # The last one: a new owner may change it, and it may close the directory.
        if self.mode is not None and (Attribute.MODE in unset or Attribute.OWNER in unset):
            yield partial(_set_mode, name, self.mode, directory)


def _set_mode(name: str, mode: int, directory: int) -> None:
    """Set the mode of what is opened: meanwhile, a link may be there."""
    with opened(name, os.O_PATH | os.O_NOFOLLOW, directory) as fd:
        if not stat.S_ISLNK(os.fstat(fd).st_mode):
            os.chmod(f"/proc/self/fd/{fd}", mode)  # noqa: PTH101 - a descriptor


_EFFECTIVE: Final = re.compile(r"^CapEff:\s*([0-9a-f]+)$", re.MULTILINE)
_OVERRIDE: Final = 1 << 1
"""Source: linux/capability.h, CAP_DAC_OVERRIDE."""


async def allow_writing(
    repository: Repository, snapshot: Snapshot, target: Path, *, data_path: DataPath, files: bool
) -> None:
    """Let the owner write to directories, and with `files` to files, that kopia sets the modes of later.

    Raises:
        DataPathError: the target cannot be read, or a mode not be changed.
    """
    if _overrides_modes():
        return
    with open_output(repository.work_dir) as file:
        found = TargetLinks(file)
        walk = partial(_find, target, found=found, files=files)
        await data_path.run_in_thread(walk, "looking for read-only files in the target", lambda: found.entries)
        for part in found.in_parts():
            entries = await read_entries(repository, snapshot, [path for path in part.paths if path])
            wanted = [path for path in part.paths if not path or path in entries]
            await data_path.run_in_thread(partial(_change, target, wanted), "making files in the target writable")


def _overrides_modes() -> bool:
    found = _EFFECTIVE.search(Path("/proc/self/status").read_text())
    return found is not None and bool(int(found[1], 16) & _OVERRIDE)


def _find(target: Path, stop: ShouldStop, found: TargetLinks, *, files: bool) -> None:
    """Add the root, and each entry whose owner may not write to it."""
    user = os.geteuid()
    found.add(b"")
    with attempting(f"read target {target}"):
        for directory, entries in walk_tree(target, stop):
            for entry in entries:
                found.entries += 1
                # It may be deleted meanwhile, or its directory be unreadable.
                with suppress(FileNotFoundError, PermissionError):
                    status = entry.stat(follow_symlinks=False)
                    if status.st_uid == user and _missing(status.st_mode, files=files):
                        found.add(join(directory, entry.name))


def _missing(mode: int, *, files: bool = True) -> int:
    """Return the bits of a mode that the owner lacks to write to a directory or file."""
    wanted = stat.S_IRWXU if stat.S_ISDIR(mode) else stat.S_IWUSR if files and stat.S_ISREG(mode) else 0
    return wanted & ~mode


def _change(target: Path, paths: Sequence[bytes], _: ShouldStop) -> None:
    with open_root(target) as root:
        for path in paths:
            directory, name = os.path.split(path)
            with (
                suppress(FileNotFoundError, NotADirectoryError),
                open_below(root, directory) as above,
                opened(name or b".", os.O_PATH | os.O_NOFOLLOW, above) as fd,
            ):
                status = os.fstat(fd)
                if status.st_uid == os.geteuid() and (missing := _missing(status.st_mode)):
                    # By what was opened: meanwhile, a link may be there.
                    os.chmod(f"/proc/self/fd/{fd}", stat.S_IMODE(status.st_mode) | missing)  # noqa: PTH101
