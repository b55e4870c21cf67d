"""Unpacks a tar of a tenant's files on a person's machine, entry by entry, in bounded memory.

Only to replace files, it remembers a number for each that it has made.

What a name, a link or a device in it could do outside of the target is refused, and the rest goes on. Python's filter
`data` decides first. Beyond it nothing is ever written through a link, absolute names and `..` are refused instead of
changed, and so are hard links, which kopia has none of. A file appears under its name once it is complete.
Source: Python 3.11.4, "Extraction filters" of tarfile.
"""

import errno
import os
import secrets
import stat
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import IO, Final

from core.errors import AgentError, ConfigError
from core.snapshot_contract import FileEntry, FileType
from core.strict_tar import StrictTarInfo

_PIECE_BYTES: Final = 1 << 20
_HOLE_BYTES: Final = 64 * 1024
"""The smallest hole that is written as one."""

_ZEROS: Final = bytes(_HOLE_BYTES)

_TEMPORARY: Final = ".nodeagent-cp-"
_FILE_MODE: Final = 0o644

_NO_DIRECTORY: Final = "its directory was refused"
_NO_NAME: Final = "its name cannot be used here"

_FILTERED: Final = {
    "AbsoluteLinkError": "it is a link to an absolute path",
    "LinkOutsideDestinationError": "it is a link that leads out of the target",
    "OutsideDestinationError": "it would be written outside of the target",
    "SpecialFileError": "it is a device or a pipe",
}
"""What tarfile's errors mean, by their names: an older Python has none of them."""

_UNUSABLE: Final = {errno.ENOTDIR, errno.ENAMETOOLONG, errno.EILSEQ, errno.EINVAL}
"""Errors about one name or link, not about the target as a whole; which names a file system takes differs."""


class UnpackError(AgentError):
    """The target cannot be written, or the tar is broken."""


def check_python() -> None:
    """Check that this Python has the filters; ConfigError: it is too old."""
    if not hasattr(tarfile, "data_filter"):
        raise ConfigError("this Python's tarfile has no extraction filters: use Python 3.11.4 or newer")


@dataclass(frozen=True)
class Destination:
    """Where something goes: into the directory `folder`; a single file or link as `name`, else the content of it."""

    folder: Path
    name: str = ""


def choose_target(destination: Path, entry: FileEntry, otherwise: str, *, overwrite: bool) -> Destination:
    """Return where the entry goes, as with `cp -r`: into a directory that exists, else it becomes the destination.

    An `entry` without a name is called `otherwise`. With `overwrite`, an existing file may be replaced.

    Raises:
        UnpackError: the destination cannot be that.
    """
    name = entry.name or otherwise
    if "/" in name or "\0" in name or name in {".", ".."}:
        raise UnpackError(f"the name that was sent is none: {name!a}")
    place = destination / name if destination.is_dir() else destination
    if not place.parent.is_dir():
        raise UnpackError(f"{place.parent} is not a directory")
    there = os.path.lexists(place)
    if entry.type is FileType.DIRECTORY:
        if there and (place.is_symlink() or not place.is_dir()):
            raise UnpackError(f"{place} exists, and is no directory")
        return Destination(place)
    if there and place.is_dir() and not place.is_symlink():
        raise UnpackError(f"{place} is a directory")
    if there and not overwrite:
        raise UnpackError(f"{place} exists: --overwrite replaces it")
    return Destination(place.parent, place.name)


@dataclass
class Unpacker:
    """Unpacks into `target`; `on_refused` gets the name of each entry that is not unpacked, and why.

    `on_progress` is called with the bytes and files so far. `overwrite`: existing files are replaced, but none of this
    copy: kopia may give two entries one name, and a file system that ignores case, too.
    """

    target: Destination
    on_refused: Callable[[str, str], None]
    on_progress: Callable[[int, int], None] = lambda *_: None
    overwrite: bool = False
    files: int = 0
    size_bytes: int = 0
    refused: int = 0
    _made: set[int] = field(default_factory=set, repr=False)
    _buffer: bytearray = field(default_factory=lambda: bytearray(_PIECE_BYTES), repr=False)

    def run(self, stream: IO[bytes]) -> None:
        """Unpack the tar; UnpackError: it is broken, or the target cannot be written; what was complete stays."""
        try:
            if not self.target.name:
                self.target.folder.mkdir(exist_ok=True)
            with tarfile.open(
                fileobj=stream, mode="r|", bufsize=_HOLE_BYTES, errors="surrogateescape", tarinfo=StrictTarInfo
            ) as tar:
                for member in tar:
                    self._unpack(tar, member)
                    # tarfile remembers all of them.
                    tar.members.clear()  # type: ignore[attr-defined]  # typeshed lacks it
        except tarfile.TarError as e:
            raise UnpackError(f"what was sent is not a complete tar: {e}") from e
        except OSError as e:
            raise UnpackError(f"cannot write to {e.filename or self.target.folder}: {e.strerror or e}") from e

    def _unpack(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        name = self.target.name or member.name
        place = self.target.folder / name
        try:
            if why := self._find_fault(member, name, place):
                self._refuse(member.name, why)
            else:
                self._make(tar, member, place)
        except OSError as e:
            if e.errno not in _UNUSABLE:
                raise
            self._refuse(member.name, e.strerror or _NO_NAME)
        except (ValueError, OverflowError) as e:
            # A name with a NUL, or a time that no file can have.
            self._refuse(member.name, str(e))
        self.on_progress(self.size_bytes, self.files)

    def _make(self, tar: tarfile.TarFile, member: tarfile.TarInfo, place: Path) -> None:
        if member.isdir():
            place.mkdir(exist_ok=True)
        elif member.issym():
            self._replace(place, lambda temporary: temporary.symlink_to(member.linkname))
        else:
            content = tar.extractfile(member)
            if content is None:
                self._refuse(member.name, "it is no file")
                return
            self._replace(place, lambda temporary: self._write(temporary, content, member))

    def _refuse(self, name: str, why: str) -> None:
        self.refused += 1
        self.on_refused(name, why)

    def _find_fault(self, member: tarfile.TarInfo, name: str, place: Path) -> str | None:
        # kopia writes Go's modes, whose bits of types are not in the filter's range.
        member.mode &= 0o777
        parts = name.split("/")
        if Path(name).anchor:
            return "its name is an absolute path"
        if ".." in parts:
            return "its name leads out of the target (..)"
        if member.islnk():
            return "it is a hard link"
        if not (member.isreg() or member.isdir() or member.issym()):
            return "it is a device or a pipe"
        if member.issym() and _turns_back(member.linkname):
            # Any of the directories in it may become a link later, and the filter sees only what is there by now.
            return "it is a link through a directory and back (..)"
        try:
            tarfile.data_filter(member.replace(name=name, deep=False), str(self.target.folder))
        except tarfile.FilterError as e:
            return _FILTERED.get(type(e).__name__, str(e))
        return self._find_obstacle(parts) or self._find_conflict(member, place)

    def _find_obstacle(self, parts: Sequence[str]) -> str | None:
        try:
            for depth in range(1, len(parts)):
                if stat.S_ISLNK(self.target.folder.joinpath(*parts[:depth]).lstat().st_mode):
                    return "it would be written through a link"
        except FileNotFoundError:
            # Names of any length come with a path that is too long to look at.
            return _NO_DIRECTORY
        except OSError as e:
            return f"{_NO_DIRECTORY}: {e.strerror}"
        return None

    def _find_conflict(self, member: tarfile.TarInfo, place: Path) -> str | None:
        try:
            found = place.lstat()
        except FileNotFoundError:
            return None if place.parent.is_dir() else _NO_DIRECTORY
        except OSError as e:
            return e.strerror or _NO_NAME
        if member.isdir():
            return None if stat.S_ISDIR(found.st_mode) else "a file of that name exists"
        if stat.S_ISDIR(found.st_mode):
            return "a directory of that name exists"
        if not self.overwrite:
            return "it exists: --overwrite replaces it"
        return "another file of this copy has that name" if found.st_ino in self._made else None

    def _replace(self, place: Path, make: Callable[[Path], None]) -> None:
        """Make a file or link under another name, and give it its own when it is complete."""
        temporary = place.with_name(f"{_TEMPORARY}{secrets.token_hex(8)}")
        try:
            make(temporary)
            if self.overwrite:
                self._made.add(temporary.lstat().st_ino)
            temporary.replace(place)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        self.files += 1

    def _write(self, temporary: Path, content: IO[bytes], member: tarfile.TarInfo) -> None:
        with temporary.open("xb", buffering=0) as file, memoryview(self._buffer) as buffer:
            while count := content.readinto(buffer):  # type: ignore[attr-defined]  # it is a BufferedReader
                _write_sparsely(file, buffer[:count])
                self.size_bytes += count
                self.on_progress(self.size_bytes, self.files)
            if file.tell() != member.size:
                raise tarfile.ReadError(f"unexpected end of {member.name!a}")
            file.truncate(member.size)
        temporary.chmod(member.mode & 0o755 | 0o600 if member.mode else _FILE_MODE)
        os.utime(temporary, (member.mtime, member.mtime))


def _write_sparsely(file: IO[bytes], data: memoryview) -> None:
    for start in range(0, len(data), _HOLE_BYTES):
        piece = data[start : start + _HOLE_BYTES]
        if not piece[0] and bytes(piece) == _ZEROS[: len(piece)]:
            file.seek(len(piece), os.SEEK_CUR)
            continue
        while piece:
            piece = piece[file.write(piece) :]


def _turns_back(link: str) -> bool:
    """Return whether the target of a link has `..` behind an ordinary name."""
    parts = Path(link).parts
    return ".." in parts[sum(1 for _ in takewhile("..".__eq__, parts)) :]
