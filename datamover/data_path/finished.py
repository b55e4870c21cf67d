"""What says that files are restored: the list of finished files, for the next attempt, and the done file, for pods.

The mark says that they may not be: kopia gives a file its size first, and its time in the end, so that after a power
loss a file may have both, and zeros as content.

The list is a file in the root of the restored volume, for as long as no workload has the volume. Each file is listed as
a fingerprint of its path, inode, size and times. Whatever is done to a file changes its ctime, which no program can
set: a file with a listed fingerprint has the content, owner and mode that it was listed with. A batch of fingerprints
is appended once the file system was synced after the files were found, and counts only if it is complete: even after a
power loss, the list is not ahead of the data. The done file ends the init container `restore-wait`. No link is
followed: a tenant may have put it.
Source: kopia 0.23.1, snapshot/restore/local_fs_output.go (WriteFile, setAttributes); Velero v1.18.2,
pkg/podvolume/restore_micro_service.go (writeCompletionMark), cmd/velero-restore-helper.
"""

import os
import shutil
import stat
import struct
from array import array
from collections.abc import Container, Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Final

from datamover.kopia.process import FULL
from datamover.runtime.cancellation import ShouldStop
from datamover.runtime.work_dir import NEW, attempting, join, open_below, open_root, opened, walk_tree

_FINGERPRINT: Final = struct.Struct("<QqqQ")
"""Inode, mtime, ctime and size; the path follows."""

_SET_NS: Final = 60 * 10**9
"""A file whose mtime is further than this from its ctime has got its mtime from the snapshot. kopia sets owner, mode
and times within moments after the last write. A younger file of the snapshot is not listed, and written again."""

_COUNT: Final = struct.Struct("<I")
_DIGEST_BYTES: Final = 16
_BATCH: Final = 1 << 16
"""Fingerprints; half a MiB."""

_SPARE_BYTES: Final = 16 << 20
"""The list does not grow while the volume has less space left: the restore may need it."""


@dataclass
class WalkProgress:
    """Counts the entries that a walk has read and removed, and the bytes of the files that are listed."""

    entries: int = 0
    removed: int = 0
    listed_files: int = 0
    listed_bytes: int = 0


class Fingerprints:
    """A set of 64-bit numbers other than 0 in 16 to 32 bytes each: Python's own needs a hundred."""

    def __init__(self, capacity: int = 0) -> None:
        self._make_table(capacity)

    def add(self, number: int) -> None:
        """Add a number."""
        slot = self._slot(number)
        self._count += not self._table[slot]
        self._table[slot] = number
        if 2 * self._count > self._mask:
            known = self._table
            self._make_table(2 * self._count)
            for one in filter(None, known):
                self.add(one)

    def add_text(self, text: bytes) -> None:
        """Add a name or path."""
        self.add(_hash(text))

    def has_text(self, text: bytes) -> bool:
        """Return whether a name or path was added; another one may be taken for it, once in 2^64."""
        return _hash(text) in self

    def __contains__(self, number: int) -> bool:
        return self._table[self._slot(number)] == number

    def _make_table(self, capacity: int) -> None:
        self._mask = (1 << (2 * capacity).bit_length()) - 1
        self._table = array("Q", [0]) * (self._mask + 1)
        self._count = 0

    def _slot(self, number: int) -> int:
        slot = number & self._mask
        while self._table[slot] not in {0, number}:
            slot = (slot + 1) & self._mask
        return slot


class FinishedList:
    """The list in a target's root, and its growth; each method opens it, in threads that are abandoned if it hangs."""

    def __init__(self, target: Path, name: str, end: int, listed: Fingerprints | None = None) -> None:
        self.path = target / name
        self.resumed = listed is not None
        """Whether an earlier attempt began it."""
        self._end = end
        self._listed = listed

    def forget(self) -> None:
        """Release what an earlier attempt listed, 16 to 32 bytes for each file."""
        self._listed = None

    def has(self, path: bytes, status: os.stat_result) -> bool:
        """Return whether an earlier attempt listed the file, and it is unchanged since."""
        return self._listed is not None and _fingerprint(path, status) in self._listed

    def now_ns(self) -> int:
        """Return the time by the clock that sets ctimes, which may be a file server's; raises OSError."""
        with opened(self.path, os.O_RDWR | os.O_NOFOLLOW) as fd:
            os.utime(fd)
            return os.fstat(fd).st_ctime_ns

    def append(self, fingerprints: "array[int]") -> None:
        """Append files that were on the disk before, and wait until the list is; raises OSError."""
        with opened(self.path, os.O_RDWR | os.O_NOFOLLOW) as fd:
            space = os.fstatvfs(fd)
            if space.f_bavail * space.f_frsize < _SPARE_BYTES + fingerprints.itemsize * len(fingerprints):
                return
            for start in range(0, len(fingerprints), _BATCH):
                part = fingerprints[start : start + _BATCH]
                content = _COUNT.pack(len(part)) + part.tobytes()
                self._end = _write(fd, content + _digest(self._end, content), self._end)
            os.fdatasync(fd)


def open_list(target: Path, name: str, owner: bytes, stop: ShouldStop) -> FinishedList | None:
    """Open the list of an earlier attempt, or begin one; None: there is none, and the target has files already.

    Nothing distinguishes those from finished ones. A list of another `owner` is removed.

    Raises:
        OSError: the target cannot be read or written.
    """
    header = owner + b"\n"
    with suppress(FileNotFoundError):
        with opened(target / name, os.O_RDWR | os.O_NOFOLLOW) as fd:
            if (found := _read(fd, header)) is not None:
                return FinishedList(target, name, *found)
        (target / name).unlink()
    walk = walk_tree(target, stop, strict=True)
    if any(not entry.is_dir(follow_symlinks=False) for _, entries in walk for entry in entries) or stop():
        return None
    with opened(target / name, NEW) as fd:
        _write(fd, header, 0)
        os.fsync(fd)
    with opened(target, os.O_RDONLY | os.O_DIRECTORY) as root:
        os.fsync(root)
    return FinishedList(target, name, len(header))


def remove_list(path: Path) -> None:
    """Remove the list, and leave the times of the root as restored, if possible; raises OSError."""
    with opened(path.parent, os.O_RDONLY | os.O_DIRECTORY) as root:
        status = os.fstat(root)
        # An attempt that failed may have removed it.
        with suppress(FileNotFoundError):
            os.unlink(path.name, dir_fd=root)
        # A file server may let only the owner of the directory do that, who need not be root.
        with suppress(OSError):
            os.utime(root, ns=(status.st_atime_ns, status.st_mtime_ns))


def find_finished(target: Path, since_ns: int, stop: ShouldStop, progress: WalkProgress) -> "array[int]":
    """Return the fingerprints of files that were finished at `since_ns` or later. Raises OSError of the target.

    kopia finishes a directory, and sets its times, after everything in it: those finished before are not read again.
    """
    found = array("Q")

    def was_finished(_: bytes, directory: "os.DirEntry[str]") -> bool:
        with suppress(OSError):
            status = directory.stat(follow_symlinks=False)
            return status.st_ctime_ns < since_ns and _is_set(status)
        return True

    for directory, entries in walk_tree(target, stop, skip=was_finished):
        for entry in entries:
            progress.entries += 1
            with suppress(FileNotFoundError):
                if entry.is_file(follow_symlinks=False):
                    status = entry.stat(follow_symlinks=False)
                    if status.st_ctime_ns >= since_ns and _is_set(status):
                        found.append(_fingerprint(join(directory, entry.name), status))
    return found


def remove_unlisted(finished: FinishedList, stop: ShouldStop, progress: WalkProgress) -> None:
    """Remove each file that is not listed, and each symbolic link, and mark the directories above as unfinished.

    All of them are of an earlier attempt: its list was begun in a volume without files, which no other pod has.

    Raises:
        ValueError: this attempt began the list, which does not say where the files are from.
        OSError: the target cannot be read, or an entry cannot be removed.
    """
    if not finished.resumed:
        raise ValueError("the list is new")
    target, marked = finished.path.parent, [b""]
    with opened(target, os.O_RDONLY | os.O_DIRECTORY) as root:
        for directory, names in find_unlisted(target, finished, stop, progress):
            with open_below(root, directory) as fd:
                for name in names:
                    if stop():
                        return
                    os.unlink(name, dir_fd=fd)
                    progress.removed += 1
            marked = _mark_above(root, directory, marked)


def find_unlisted(
    target: Path, finished: FinishedList, stop: ShouldStop, progress: WalkProgress
) -> Iterator[tuple[bytes, list[str]]]:
    """Yield unlisted files in each directory, and symbolic links, which never are. Raises OSError of the target.

    Each directory was read to its end: a file system may leave out entries of one that changes meanwhile.
    """
    for directory, entries in walk_tree(target, stop, strict=True):
        if names := [entry.name for entry in entries if _is_unlisted(directory, entry, finished, progress)]:
            yield directory, names


def _is_unlisted(directory: bytes, entry: "os.DirEntry[str]", finished: FinishedList, progress: WalkProgress) -> bool:
    """Return whether an entry is a file that is not listed, or a symbolic link: those are never listed."""
    progress.entries += 1
    path = join(directory, entry.name)
    if entry.is_symlink():
        return True
    if not entry.is_file(follow_symlinks=False) or path == os.fsencode(finished.path.name):
        return False
    status = entry.stat(follow_symlinks=False)
    if not finished.has(path, status):
        return True
    progress.listed_files += 1
    progress.listed_bytes += status.st_size
    return False


def _mark_above(root: int, directory: bytes, marked: Container[bytes]) -> list[bytes]:
    """Give a directory, and those above that are not `marked`, a time unlike the snapshot's; return all of them."""
    way = [directory]
    while way[-1]:
        way.append(os.path.split(way[-1])[0])
    for above in way:
        if above not in marked:
            with open_below(root, above) as fd:
                os.utime(fd)
    return way


def _is_set(status: os.stat_result) -> bool:
    return abs(status.st_mtime_ns - status.st_ctime_ns) > _SET_NS


def _fingerprint(path: bytes, status: os.stat_result) -> int:
    known = _FINGERPRINT.pack(status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size)
    return _hash(known + path)


def _hash(content: bytes) -> int:
    return int.from_bytes(blake2b(content, digest_size=8).digest()) or 1


def _read(fd: int, header: bytes) -> tuple[int, Fingerprints] | None:
    """Return the end of the list and what it has, up to an incomplete batch; None: it is no list with that header."""
    if os.pread(fd, len(header), 0) != header:
        return None
    listed = Fingerprints(os.fstat(fd).st_size // array("Q").itemsize)
    end = len(header)
    while batch := _read_batch(fd, end):
        for number in batch:
            listed.add(number)
        end += _COUNT.size + len(batch) * batch.itemsize + _DIGEST_BYTES
    return end, listed


def _read_batch(fd: int, at: int) -> "array[int]":
    """Return the batch that begins there, without numbers if there is none, or not all of it was written."""
    batch = array("Q")
    head = os.pread(fd, _COUNT.size, at)
    count = _COUNT.unpack(head)[0] if len(head) == _COUNT.size else 0
    if count <= _BATCH:
        length = _COUNT.size + count * batch.itemsize
        content = os.pread(fd, length + _DIGEST_BYTES, at)
        if content[length:] == _digest(at, content[:length]):
            batch.frombytes(content[_COUNT.size : length])
    return batch


def _digest(at: int, content: bytes) -> bytes:
    return blake2b(at.to_bytes(8) + content, digest_size=_DIGEST_BYTES).digest()


def _write(fd: int, content: bytes, at: int) -> int:
    """Write the content there, and return where it ends."""
    while content:
        count = os.pwrite(fd, content, at)
        at += count
        content = content[count:]
    return at


_MARK: Final = ".nodeagent-restore-unfinished"


def mark_unfinished(target: Path, _: ShouldStop) -> None:
    """Mark a target into which kopia writes, if it takes another file, and wait until the mark is on the disk."""
    with suppress(OSError):
        with opened(target / _MARK, NEW) as fd:
            os.fsync(fd)
        with opened(target, os.O_RDONLY | os.O_DIRECTORY) as root:
            os.fsync(root)


def is_unfinished(target: Path, _: ShouldStop) -> bool:
    """Return whether a restore that was interrupted has left its mark."""
    return os.path.lexists(target / _MARK)


def remove_mark(target: Path, _: ShouldStop) -> None:
    """Remove the mark, if there is one, once all is on the disk; raises OSError."""
    remove_list(target / _MARK)


_DONE_DIRECTORY: Final = ".velero"
_ROOT: Final = "."
"""Where the done directory leads, as a link, in a volume without room for it."""


def write_done_file(volume: Path, owner_uid: str, uid: str) -> None:
    """Write the done file, named after the Restore's UID, into its directory, which is emptied before.

    It has the UID of the transfer, where there is room for that.

    Raises:
        DataPathError: it cannot be written.
    """
    with attempting(f"write done file {volume / _DONE_DIRECTORY / owner_uid}"), open_root(volume) as root:
        _remove(_DONE_DIRECTORY, root)
        try:
            os.mkdir(_DONE_DIRECTORY, mode=0o755, dir_fd=root)
            with open_below(root, _DONE_DIRECTORY.encode()) as directory:
                _let_remove(directory, root)
                _create(owner_uid, directory, uid)
        except OSError as e:
            if e.errno not in FULL:
                raise
            _write_without_block(owner_uid, root)


def take_done_file(volume: Path, owner_uid: str, uid: str) -> bool:
    """Return whether an earlier attempt of this transfer wrote the done file, and remove any other one.

    The restore is complete then, and a pod may use the volume. Another transfer of the Restore, or a person, may have
    written one as well: the pod would start while this one writes. A tenant who writes it loses only data of its own.
    The restore helper removes it before the pod's containers start, so without one the pod may have started too.

    Raises:
        DataPathError: it cannot be read or removed.
    """
    missing = suppress(FileNotFoundError, NotADirectoryError)
    with attempting(f"read done file {volume / _DONE_DIRECTORY / owner_uid}"), missing, open_root(volume) as root:
        with missing, open_below(root, _DONE_DIRECTORY.encode()) as directory:
            if stat.S_ISREG(os.stat(owner_uid, dir_fd=directory, follow_symlinks=False).st_mode):
                with opened(owner_uid, os.O_NOFOLLOW | os.O_NONBLOCK, directory) as fd:
                    if os.read(fd, len(uid) + 1) == uid.encode():
                        return True
        _remove(_DONE_DIRECTORY, root)
    return False


def _write_without_block(owner_uid: str, root: int) -> None:
    """Write the done file into the root of a full volume, where a link finds it: only a directory needs a block."""
    _remove(_DONE_DIRECTORY, root)
    os.symlink(_ROOT, _DONE_DIRECTORY, dir_fd=root)
    with suppress(FileNotFoundError):
        os.unlink(owner_uid, dir_fd=root)
    _create(owner_uid, root)


def _create(name: str, directory: int, content: str = "") -> None:
    with opened(name, NEW, directory) as fd:
        _let_read(fd, 0o644)
        os.write(fd, content.encode())


def _let_remove(directory: int, root: int) -> None:
    """Let everyone read the directory, and remove it who may write to the volume, as the init container may."""
    volume = os.fstat(root)
    with suppress(OSError):
        os.fchown(directory, volume.st_uid, volume.st_gid)
    _let_read(directory, (volume.st_mode & 0o777) | 0o755)


def _let_read(fd: int, mode: int) -> None:
    """Set the mode whatever the umask: the init container may run as any user."""
    # A file system without modes has the same ones for all files.
    with suppress(OSError):
        os.fchmod(fd, mode)


def _remove(name: str, root: int) -> None:
    """Remove a directory with its content, or a file or link, in the directory `root`."""
    try:
        os.unlink(name, dir_fd=root)
    except FileNotFoundError:
        return
    except IsADirectoryError:
        # It follows no links, since it is given a descriptor.
        shutil.rmtree(name, dir_fd=root)
