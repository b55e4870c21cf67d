"""A probe file in the target of a restore, which shows whether the target keeps owners, modes, times and names.

A file server may refuse to set them, set them without an effect (CIFS with `uid=`), or round them; kopia ignores the
refusals for want of a permission (`--ignore-permission-errors`, its default), and looks at nothing afterward.
"""

import errno
import logging
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from core.errors import ContractError
from core.models.base import JsonDict
from datamover.kopia.snapshot_files import parse_time_ns
from datamover.kopia.snapshots import Snapshot
from datamover.runtime.cancellation import ShouldStop
from datamover.runtime.tree import open_root

__all__ = ["TIME_TOLERANCE_NS", "Probe", "probe_target"]

_logger = logging.getLogger(__name__)

TIME_TOLERANCE_NS: Final = 2 * 10**9
"""Times that differ by less are alike: FAT has two seconds, and kopia takes such files for unchanged."""

_NAME: Final = ".nodeagent-probe-\u00e4"
_SAME: Final = (
    _NAME.upper(),
    ".NODEAGENT-PROBE-\u00e4",
    ".nodeagent-probe-a\u0308",
    f"{_NAME}.",
    f"{_NAME} ",
)
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
    """Return what the target keeps, with the owner and the latest time that the snapshot has as examples.

    Where no file can be created, nothing is known of it.
    """
    probe, root_entry = Probe(), snapshot.root_entry
    owners = dict.fromkeys([(int(root_entry.get("uid", 0)), int(root_entry.get("gid", 0))), _OTHER_OWNER])
    try:
        with open_root(target) as root:
            # An attempt that was killed may have left them.
            _remove(root)
            fd = os.open(_NAME, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=root)
            try:
                probe.owner = all(_keeps_owner(probe, fd, owner) for owner in owners)
                # After the owner: setgid needs a permission for files of other groups.
                probe.mode = probe.attempt(lambda: os.fchmod(fd, _MODE)) and stat.S_IMODE(os.fstat(fd).st_mode) == _MODE
                probe.precision_ns = _precision_ns(fd)
                probe.times = all(_keeps_time(probe, fd, time_ns) for time_ns in _times(root_entry))
                probe.names = _keeps_names(probe, root, links=snapshot.links > 0)
            finally:
                os.close(fd)
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
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    odd = probe.attempt(lambda: os.close(os.open(_ODD, flags, 0o600, dir_fd=root)))
    linked = not links or probe.attempt(lambda: os.symlink(_NAME, _LINK, dir_fd=root))
    if not linked:
        # Unlike a refused attribute, kopia ignores no refused link.
        probe.refuses = True
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
