"""The directories of a data mover: its work directory, removed at its end, and volumes, whose links are not followed.

Volumes are opened by descriptors: each system call would resolve a path again, and a tenant who controls the tree could
put a link into it in between.
"""

import errno
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from core.errors import AgentError, ConfigError, DataPathError

_SCRATCH: Final = "/scratch"
"""Where the agent's DaemonSet, and so every mover pod, mounts an emptyDir."""

_MEMORY: Final = "/dev/shm"  # noqa: S108 - a directory with a random name is created in it
"""A file system in memory, which every container has."""

_FILE_ERRORS: Final = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE}
)
"""Errors of the node, and no defect of the data mover."""

_PREFIX: Final = "datamover-"
_CACHE: Final = "kopia-cache"


@dataclass(frozen=True)
class WorkDir:
    """A private directory, mode 0700, and kopia's cache directory: in it or on a separate volume.

    `cache_limit_mib` is what the cache's volume has room for; None: as much as the repository's limit.
    """

    path: Path
    cache: Path
    cache_limit_mib: int | None = None

    @property
    def config_file(self) -> Path:
        """kopia's configuration: the repository that it is connected to."""
        return self.path / "repository.config"

    def write(self, name: str, content: bytes) -> Path:
        """Write a file of mode 0600 and return its path; `name` may have a directory."""
        path = self.path / name
        path.parent.mkdir(mode=0o700, exist_ok=True)
        path.touch(mode=0o600)
        path.write_bytes(content)
        return path


@contextmanager
def open_work_dir(
    environment: Mapping[str, str],
    *,
    cache_volume: str | None = None,
    cache_limit_mib: int | None = None,
    keep_cache: bool = False,
    apart: bool = False,
) -> Iterator[WorkDir]:
    """Create a work directory, and remove it at the end.

    It is in the first writable one of `VELERO_SCRATCH_DIR`, `/scratch` and the system's directory for temporary files:
    the root file system may be read-only. With `apart`, it is in memory: the directory for temporary files is the jail
    in which kopia walks the volume. `cache_volume` is the mount path of a volume for kopia's cache, with room for
    `cache_limit_mib`, as in `WorkDir`; None: it is in the work directory. With `keep_cache` it is left to the deletion
    of its volume, which is faster.

    Raises:
        ConfigError: none of them is writable.
        DataPathError: the node does not let the block use a file: its disk is full, or access to it is denied.
    """
    scratch = environment.get("VELERO_SCRATCH_DIR", "") or _SCRATCH
    path = _create_directory([_MEMORY, scratch] if apart else [scratch, _SCRATCH])
    place = Path(cache_volume or (scratch if apart else path)) / _CACHE
    try:
        yield WorkDir(path, place, cache_limit_mib)
    except OSError as e:
        if e.errno not in _FILE_ERRORS:
            raise
        raise DataPathError(f"cannot use {e.filename or f'a file in {path}'}: {e.strerror}") from e
    finally:
        if keep_cache:
            _empty(path, but=place)
        else:
            shutil.rmtree(path, ignore_errors=True)


def _create_directory(tried: list[str]) -> Path:
    for parent in (*tried, ""):
        if parent and not Path(parent).is_dir():
            continue
        with suppress(OSError):
            return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent or None))
    raise ConfigError("no writable directory: mount one at /scratch, or set VELERO_SCRATCH_DIR")


def _empty(directory: Path, *, but: Path) -> None:
    """Remove the contents of `directory`, including secrets, except for `but`; errors are ignored."""
    with suppress(OSError):
        for one in list(directory.iterdir()):
            if one == but:
                continue
            with suppress(OSError):
                if one.is_dir():
                    shutil.rmtree(one, ignore_errors=True)
                else:
                    one.unlink()


DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""Flags that open a directory, and fail for a link to one."""


_Skip = Callable[[bytes, "os.DirEntry[str]"], bool]
"""Gets the path of the directory that the entry is in."""

NEW: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
"""Flags that make a file, and fail if anything is in its place."""

_KEPT_NAMES: Final = 1000
_REREAD_LEVELS: Final = 100
"""Below so many levels all names are kept: those that are read again are open, and files that are open are limited."""

_UNPRINTABLE: Final = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def escape_controls(text: str) -> str:
    """Return a text that may quote a tenant's names, with escapes for what could control a terminal, or is no UTF-8."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def show_path(path: bytes, most_characters: int | None = None) -> str:
    """Return a relative path for a message: what is no printable UTF-8 is escaped, a long one lacks its middle."""
    shown = escape_controls(path.decode(errors="backslashreplace"))
    if most_characters is None or len(shown) <= most_characters:
        return shown
    half = most_characters // 2
    return f"{shown[:half]}…{shown[-half:]}"


def is_name(name: str) -> bool:
    """Return whether an entry of a directory can have this name."""
    return name not in {"", ".", ".."} and not set(name) & {"/", "\0"}


def join(directory: bytes, name: str) -> bytes:
    """Return the relative path of an entry of a directory."""
    return directory + b"/" + os.fsencode(name) if directory else os.fsencode(name)


@contextmanager
def attempting(what: str, error: type[AgentError] = DataPathError) -> Iterator[None]:
    """Raise an OSError of the block as an error that has what was attempted."""
    try:
        yield
    except OSError as e:
        raise error(f"cannot {what}: {e.strerror}") from e


@contextmanager
def opened(path: Path | str | bytes, flags: int, directory: int | None = None) -> Iterator[int]:
    """Open a file, in the open `directory` if there is one, and close it at the end; children do not inherit it."""
    fd = os.open(path, flags | os.O_CLOEXEC, 0o600, dir_fd=directory)
    try:
        yield fd
    finally:
        os.close(fd)


def open_fifo(path: Path) -> tuple[int, int]:
    """Return both ends of the named pipe `path`, which is made if it is missing, to read first; raises OSError.

    A pipe without a writer would have ended: so this process is one until all is written. Neither end blocks.
    """
    with suppress(FileExistsError):
        os.mkfifo(path, 0o600)
    flags = os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    ours = os.open(path, os.O_RDONLY | flags)
    return ours, os.open(path, os.O_WRONLY | flags)


def open_root(root: Path) -> AbstractContextManager[int]:
    """Open the root of a tree, which may be a link to it. Raises OSError if it is not a directory."""
    return opened(root, DIRECTORY & ~os.O_NOFOLLOW)


@contextmanager
def open_below(root: int, directory: bytes) -> Iterator[int]:
    """Open a directory below the directory `root` by its relative path, which may be empty; raises OSError."""
    fd = os.dup(root)
    try:
        for name in directory.split(b"/") if directory else ():
            parent, fd = fd, os.open(name, DIRECTORY, dir_fd=fd)
            os.close(parent)
        yield fd
    finally:
        os.close(fd)


def walk_tree(
    root: Path, stop: Callable[[], bool], *, skip: _Skip = lambda _, __: False, strict: bool = False
) -> Iterator[tuple[bytes, Iterator["os.DirEntry[str]"]]]:
    """Yield each directory's path relative to `root`, and its entries, which are to be read before the next one.

    A directory is left out if `skip` returns True for it, or if it cannot be read, unless the walk is `strict`.
    `stop` ends the walk early. If a directory has very many others in it, their names are not kept, but read again.

    Raises:
        OSError: the root cannot be opened; in a strict walk, a directory cannot be read.
    """
    ignored = () if strict else (OSError,)
    fd = os.open(root, DIRECTORY & ~os.O_NOFOLLOW)
    # What is still to be read in each directory on the way to the one that is read.
    levels = [_join_all(b"", [""])]
    try:
        while levels and not stop():
            if (directory := next(levels[-1], None)) is None:
                levels.pop()
                continue
            below = _Below(partial(skip, directory), _KEPT_NAMES if len(levels) <= _REREAD_LEVELS else sys.maxsize)
            with suppress(*ignored), open_below(fd, directory) as opened, os.scandir(opened) as entries:
                yield directory, _entries(entries, below.add, ignored)
            reread = _read_again(fd, directory, skip, ignored)
            levels.append(reread if below.names is None else _join_all(directory, below.names))
    finally:
        for level in levels:
            level.close()
        os.close(fd)


class _Below:
    """The names of the directories in one, without what `skip` leaves out; None: there are more than `limit`."""

    def __init__(self, skip: Callable[["os.DirEntry[str]"], bool], limit: int) -> None:
        self.names: list[str] | None = []
        self._skip = skip
        self._limit = limit

    def add(self, entry: "os.DirEntry[str]") -> None:
        if self.names is None or not entry.is_dir(follow_symlinks=False) or self._skip(entry):
            return
        if len(self.names) < self._limit:
            self.names.append(entry.name)
        else:
            self.names = None


def _entries(
    entries: Iterator["os.DirEntry[str]"], add: Callable[["os.DirEntry[str]"], None], ignored: tuple[type[OSError], ...]
) -> Iterator["os.DirEntry[str]"]:
    with suppress(*ignored):
        for entry in entries:
            add(entry)
            yield entry


def _join_all(directory: bytes, names: list[str]) -> Generator[bytes]:
    for name in names:
        yield join(directory, name)


def _read_again(root: int, directory: bytes, skip: _Skip, ignored: tuple[type[OSError], ...]) -> Generator[bytes]:
    """Yield the path of each directory in one, which stays open meanwhile."""
    with suppress(*ignored), open_below(root, directory) as opened, os.scandir(opened) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False) and not skip(directory, entry):
                yield join(directory, entry.name)
