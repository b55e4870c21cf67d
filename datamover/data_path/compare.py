"""Compares a restored volume with its kopia snapshot: each file's type, mode, owner, time and content.

kopia writes the snapshot as a tar archive into a named pipe, so nothing is stored twice. It lacks the root, whose owner
and mode the snapshot's manifest has. The volume is read by descriptors, and no link in it is followed. What it has
besides is no fault: a new one has a folder `lost+found`, for example.
Source: kopia 0.23.1, snapshot/restore/tar_output.go: the mode is Go's fs.FileMode, and times are rounded to seconds; Go
1.26, archive/tar/writer.go.
"""

import os
import stat
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Final

from core.contract import VolumeMode
from core.errors import DataPathError
from core.models.verification import WHOLE_PERCENT, VerificationOutcome, VerifiedSnapshot
from core.strict_tar import StrictTarInfo
from datamover.data_path.finished import Fingerprints
from datamover.data_path.run import DataPath
from datamover.kopia.progress import Direction, Meter
from datamover.kopia.repository import Repository
from datamover.kopia.snapshot_files import convert_mode, parse_mode
from datamover.kopia.snapshots import Snapshot
from datamover.kopia.verification import SHOWN_FAULTS, shorten_fault
from datamover.runtime.cancellation import ShouldStop, run_in_background
from datamover.runtime.work_dir import is_name, open_below, open_fifo, opened, show_path

_PIPE: Final = "snapshot.tar"
_CHUNK_BYTES: Final = 1 << 20

_NANOSECONDS: Final = 1_000_000_000


async def compare_volume(
    repository: Repository, snapshot: Snapshot, volume: Path, mode: VolumeMode, *, packs: int = 0
) -> VerifiedSnapshot:
    """Compare all of the snapshot with the volume, a directory or a device, which is only read.

    kopia fetches so many packs as a whole at a time, as in `Repository.restore_flags`.

    Raises:
        StorageOutageError: the storage does not answer.
        DataPathError: kopia could not read the snapshot.
    """
    found = _Comparison(snapshot, volume, mode)
    await _read_archive(repository, found, packs)
    found.check_count()
    return VerifiedSnapshot(
        id=snapshot.snapshot_id,
        outcome=VerificationOutcome.FAILED if found.fault_count else VerificationOutcome.PASSED,
        percent=WHOLE_PERCENT,
        files=found.files,
        bytes=found.byte_count,
        faults=found.faults,
        fault_count=found.fault_count,
    )


async def find_changed(repository: Repository, snapshot: Snapshot, volume: Path, *, packs: int = 0) -> Fingerprints:
    """Return the paths of files whose content the volume does not have; raises as `compare_volume`."""
    found = _ChangedFiles(snapshot, volume, VolumeMode.FILESYSTEM)
    await _read_archive(repository, found, packs)
    if found.entries != snapshot.entries:
        raise DataPathError(
            f"snapshot {snapshot.snapshot_id} has {found.entries} instead of {snapshot.entries} entries"
        )
    return found.changed


async def _read_archive(repository: Repository, found: "_Comparison", packs: int) -> None:
    snapshot_id = found.snapshot.snapshot_id
    attempted = f"{repository.description}: read snapshot {snapshot_id}"
    pipe = repository.work_dir.path / _PIPE
    with _open_pipe(pipe) as (ours, kopias):
        async with run_in_background(partial(found.read, ours), name="compare") as comparing:
            try:
                arguments = ("restore", snapshot_id, str(pipe), "--mode=tar", *repository.restore_flags(packs))
                answer = await repository.run(partial(repository.call_guarded, attempted, *arguments))
            finally:
                # So that the reader reaches the end of the archive.
                os.close(kopias)
            answer.check()
            data_path = DataPath(Meter(repository.watchdog.clock, Direction.RESTORE), repository.watchdog)
            doing = f"comparing {found.volume} with snapshot {snapshot_id}"
            try:
                # A small snapshot is in the pipe as a whole by now, and the volume may hang.
                await data_path.wait_for_progress(comparing, doing, lambda: (found.entries, found.byte_count))
            except tarfile.TarError as e:
                raise answer.error(f"kopia's archive is invalid: {e}") from e
            except OSError as e:
                raise DataPathError(f"cannot open the restored volume {found.volume}: {e.strerror}") from e


@contextmanager
def _open_pipe(path: Path) -> Iterator[tuple[int, int]]:
    """Yield descriptors of both ends of a new named pipe; the reader closes its own, and the caller the other one."""
    ours, kopias = open_fifo(path)
    os.set_blocking(ours, True)
    try:
        yield ours, kopias
    finally:
        path.unlink()


@dataclass
class _Comparison:
    """What was found in a volume so far; the first faults are kept."""

    snapshot: Snapshot
    volume: Path
    mode: VolumeMode
    entries: int = 0
    files: int = 0
    byte_count: int = 0
    fault_count: int = 0
    faults: list[str] = field(default_factory=list)

    def read(self, pipe: int, stop: ShouldStop) -> None:
        """Compare each entry of the archive in `pipe`, which is read to its end and closed."""
        with open(pipe, "rb", buffering=0) as stream:
            try:
                with tarfile.open(
                    fileobj=stream,
                    mode="r|",
                    bufsize=_CHUNK_BYTES,
                    encoding="utf-8",
                    errors="surrogateescape",
                    tarinfo=StrictTarInfo,
                ) as archive:
                    self._read_entries(archive, stop)
            finally:
                # kopia waits until its output is read.
                while not stop() and stream.read(_CHUNK_BYTES):
                    pass

    def check_count(self) -> None:
        """Add a fault if kopia's archive did not have what the snapshot's manifest says: nothing else would miss it."""
        # The manifest of a single file, which has no directory, does not count it as this one does.
        expected = 1 if self.mode is VolumeMode.BLOCK else self.snapshot.entries
        if self.entries != expected:
            self._add(b"", f"the snapshot has {self.entries} entries instead of {expected}")

    def _read_entries(self, archive: tarfile.TarFile, stop: ShouldStop) -> None:
        block = self.mode is VolumeMode.BLOCK
        kind = 0 if block else os.O_DIRECTORY
        with opened(self.volume, os.O_RDONLY | kind) as root:
            own = None if block else _build_root(self.snapshot)
            if own is not None and (fault := self._find_fault(own, os.fstat(root))):
                self._add(b"/", fault)
            while not stop() and (entry := archive.next()) is not None:
                # A snapshot may have millions of entries, and tarfile would keep them all.
                archive.members = []  # type: ignore[attr-defined]  # its stubs leave it out
                self.entries += 1
                path = os.fsencode(entry.name.rstrip("/"))
                try:
                    if block:
                        self._compare_content(archive.extractfile(entry), root, path, stop)
                    else:
                        self._compare_entry(archive, entry, path, root, stop)
                except OSError as e:
                    self._add(path, f"cannot be read in the restored volume: {e.strerror}")

    def _compare_entry(
        self, archive: tarfile.TarFile, entry: tarfile.TarInfo, path: bytes, root: int, stop: ShouldStop
    ) -> None:
        *folders, name = path.split(b"/")
        if not all(map(is_name, os.fsdecode(path).split("/"))):
            self._add(path, "the snapshot has a name that no file can have")
            return
        with open_below(root, b"/".join(folders)) as folder:
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if fault := self._find_fault(entry, status):
                self._add(path, fault)
                return
            if entry.issym():
                self.files += 1
                if (target := os.readlink(name, dir_fd=folder)) != os.fsencode(entry.linkname):
                    self._add(path, f"links to {show_path(target)} instead of {entry.linkname!r}")
            elif entry.isreg():
                with opened(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, folder) as fd:
                    self._compare_content(archive.extractfile(entry), fd, path, stop)

    def _compare_content(self, expected: IO[bytes] | None, fd: int, path: bytes, stop: ShouldStop) -> None:
        """Compare the bytes of a file, or the first ones of a device."""
        if expected is None:
            self._add(path, "the snapshot has no file there")
            return
        self.files += 1
        at = 0
        while not stop() and (wanted := expected.read(_CHUNK_BYTES)):
            if self.snapshot.by_block:
                # The stored file ends with zeros that the device does not have.
                wanted = wanted[: self.snapshot.size_bytes - at]
            if _read_fully(fd, len(wanted), at) != wanted:
                self._add(path, f"its content differs within the {len(wanted)} bytes from byte {at} on")
                return
            at += len(wanted)
            self.byte_count += len(wanted)

    def _find_fault(self, entry: tarfile.TarInfo, status: os.stat_result) -> str | None:
        """Return what differs, the content aside; None: nothing."""
        kinds = ((entry.isdir(), stat.S_ISDIR), (entry.issym(), stat.S_ISLNK), (entry.isreg(), stat.S_ISREG))
        if not any(wanted and is_kind(status.st_mode) for wanted, is_kind in kinds):
            return "it is of another type"
        if (owner := (status.st_uid, status.st_gid)) != (entry.uid, entry.gid):
            return f"its owner is {owner[0]}:{owner[1]} instead of {entry.uid}:{entry.gid}"
        mode = convert_mode(entry.mode)
        if not entry.issym() and stat.S_IMODE(status.st_mode) != mode:
            return f"its mode is {stat.S_IMODE(status.st_mode):o} instead of {mode:o}"
        if entry.isreg() and status.st_size != entry.size:
            return f"it has {status.st_size} bytes instead of {entry.size}"
        # A directory has in kopia the latest time of what is in it.
        if not entry.isdir() and abs(status.st_mtime_ns - int(entry.mtime) * _NANOSECONDS) > _NANOSECONDS:
            return f"its time is {status.st_mtime:.0f} instead of {entry.mtime:.0f} (seconds since 1970)"
        return None

    def _add(self, path: bytes, fault: str) -> None:
        self.fault_count += 1
        if len(self.faults) < SHOWN_FAULTS:
            self.faults.append(shorten_fault(show_path(path), fault))


@dataclass
class _ChangedFiles(_Comparison):
    """The paths of files with another content."""

    changed: Fingerprints = field(default_factory=Fingerprints)

    def _find_fault(self, entry: tarfile.TarInfo, status: os.stat_result) -> str | None:
        same = stat.S_ISREG(status.st_mode) and status.st_size == entry.size
        return None if same or not entry.isreg() else "it has another size"

    def _add(self, path: bytes, fault: str) -> None:  # noqa: ARG002 - the signature of what it overrides
        self.changed.add_text(path)


def _read_fully(fd: int, size: int, at: int) -> bytes:
    """Return so many bytes from a position on, or those until the end."""
    pieces = []
    while size and (piece := os.pread(fd, size, at)):
        pieces.append(piece)
        at, size = at + len(piece), size - len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _build_root(snapshot: Snapshot) -> tarfile.TarInfo | None:
    """Return what kopia's archive would say of the snapshot's root; None: the manifest does not say it."""
    root, found = snapshot.root_entry, tarfile.TarInfo()
    mode = str(root.get("mode", ""))
    if parse_mode(mode) is None:
        return None
    # kopia writes no owner of 0.
    found.uid, found.gid = int(root.get("uid", 0)), int(root.get("gid", 0))
    found.type, found.mode = tarfile.DIRTYPE, int(mode, 8)
    return found
