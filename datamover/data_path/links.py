"""Links in the target of a restore, in the place of a directory or file.

kopia follows them: it writes through a link to a file, and into a link to a directory, and a file is written under all
of its names. Confinement keeps kopia from opening what is outside of the target; here links are replaced before a
restore, and found after it.
Source: kopia 0.23.1, snapshot/restore/local_fs_output.go (createDirectory, copyFileContent). Its flag
`--write-files-atomically` would replace files, but not links to directories. It syncs each file, writes no holes,
leaves temporary files when it is killed, and fails for names near the limit of the file system.
"""

import os
import re
import stat
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from itertools import chain, groupby, islice
from pathlib import Path
from typing import IO, Final

from core.models.base import JsonDict
from datamover.data_path.file_names import mangle
from datamover.kopia.location_files import open_output, read_directories
from datamover.kopia.repository import Repository
from datamover.kopia.snapshots import EntryType, Snapshot
from datamover.runtime.cancellation import ShouldStop
from datamover.runtime.work_dir import attempting, join, open_below, open_root, show_path, walk_tree

_SMALL: Final = re.compile("k[0-9a-f]+")
"""The object ID of a directory that is a single content, so that its ID is the content's too. Source: kopia 0.23.1,
repo/object/objectid.go."""

_TARGET: Final = re.compile("[0-9a-f]+")
"""The object ID of a link's target, which is never longer than one content."""

_READ_AT_A_TIME: Final = 10_000
"""Links; each takes 300 bytes, and what the snapshot has there a thousand."""

_RECORD: Final = struct.Struct("<QQQI")
"""Device, inode, number of names, and length of the path, which follows."""

_NO_INODE: Final = (0, 0, 0)
"""A symbolic link's: any file has at least one name."""

_READ_TOGETHER: Final = 200
"""Directories; one of 50 entries has 10 KiB."""


@dataclass
class Links:
    """Links in a target, relative paths; `hard` by device, inode and number of names: some may be elsewhere."""

    symbolic: list[bytes] = field(default_factory=list)
    hard: dict[tuple[int, int, int], list[bytes]] = field(default_factory=dict)

    @property
    def paths(self) -> list[bytes]:
        """All of them."""
        return [*self.symbolic, *chain.from_iterable(self.hard.values())]

    def in_the_way(self, entries: Mapping[bytes, JsonDict]) -> list[bytes]:
        """Return those that kopia would write through, although the snapshot has a file or directory of its own there.

        Names of one file that are alike in the snapshot stay: kopia writes the same through each.
        """
        symbolic = [
            path for path in self.symbolic if entries.get(path, {}).get("type", EntryType.LINK) != EntryType.LINK
        ]
        apart = (names for (_, _, count), names in self.hard.items() if not _are_alike(names, count, entries))
        hard = [path for path in chain.from_iterable(apart) if entries.get(path, {}).get("type") == EntryType.FILE]
        return symbolic + hard


def _are_alike(names: Sequence[bytes], count: int, entries: Mapping[bytes, JsonDict]) -> bool:
    """Return whether the snapshot has each of the `count` names of a file, with the same content and attributes."""
    first, *others = ({**entries.get(name, {}), "name": ""} for name in names)
    return len(names) == count and first.get("type") == EntryType.FILE and all(one == first for one in others)


class TargetLinks:
    """All links in a target, in a file: there may be millions.

    `entries` are those that were read so far, `symbolic` is the number of symbolic links among them.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self.entries = 0
        self.symbolic = 0
        self._file = file

    def add(self, path: bytes, inode: tuple[int, int, int] = _NO_INODE) -> None:
        """Add a link; `inode` is the key of a hard one in `Links`."""
        self.symbolic += inode == _NO_INODE
        self._file.write(_RECORD.pack(*inode, len(path)) + path)

    def in_parts(self) -> Iterator[Links]:
        """Yield them, so many at a time; names of one file may be in several parts."""
        self._file.seek(0)
        while records := list(islice(self._read(), _READ_AT_A_TIME)):
            part = Links()
            for path, inode in records:
                names = part.symbolic if inode == _NO_INODE else part.hard.setdefault(inode, [])
                names.append(path)
            yield part

    def _read(self) -> Iterator[tuple[bytes, tuple[int, int, int]]]:
        while head := self._file.read(_RECORD.size):
            device, number, count, length = _RECORD.unpack(head)
            yield self._file.read(length), (device, number, count)


def find_links(target: Path, stop: ShouldStop, found: TargetLinks, *, hard: bool = False) -> None:
    """Add symbolic links in the target, and with `hard` files' other names; raises DataPathError."""
    with attempting(f"read target {target}"):
        for directory, entries in walk_tree(target, stop):
            for entry in entries:
                found.entries += 1
                # It may be deleted meanwhile.
                with suppress(FileNotFoundError):
                    if entry.is_symlink():
                        found.add(join(directory, entry.name))
                    elif hard and entry.is_file(follow_symlinks=False):
                        status = entry.stat(follow_symlinks=False)
                        if status.st_nlink > 1:
                            found.add(join(directory, entry.name), (status.st_dev, status.st_ino, status.st_nlink))


def remove_links(target: Path, links: Sequence[bytes], stop: ShouldStop) -> None:
    """Remove links by relative paths, but no last name of a file. Raises DataPathError if one cannot be removed."""
    with attempting(f"open target {target}"), open_root(target) as root:
        for link in links:
            if stop():
                return
            directory, name = os.path.split(link)
            with (
                attempting(f"replace link {show_path(link)} in the target"),
                suppress(FileNotFoundError, NotADirectoryError),
                open_below(root, directory) as fd,
            ):
                status = os.stat(name, dir_fd=fd, follow_symlinks=False)
                if stat.S_ISLNK(status.st_mode) or (stat.S_ISREG(status.st_mode) and status.st_nlink > 1):
                    os.unlink(name, dir_fd=fd)


def named(path: bytes, doing: str = "restore") -> AbstractContextManager[None]:
    """Name the entry in an error of the system. Raises DataPathError if the block raised an OSError."""
    return attempting(f"{doing} {show_path(path) or '/'}")


async def read_entries(repository: Repository, snapshot: Snapshot, paths: Iterable[bytes]) -> dict[bytes, JsonDict]:
    """Return the snapshot's entries at the relative paths where it has one.

    Each directory on the way is read once, all of one depth together: a call of kopia takes a third of a second.

    Raises:
        KopiaError: the snapshot cannot be read.
    """
    wanted = set(paths)
    directories: dict[bytes, set[str]] = {}
    for path in wanted:
        _add_parents(path, directories)
    known: dict[bytes, dict[str, JsonDict]] = {}

    def find(path: bytes) -> JsonDict:
        parent, name = os.path.split(path)
        return known.get(parent, {}).get(mangle(name), {})

    for _, level in groupby(sorted(directories, key=_depth), key=_depth):
        objects = {one: _directory_object(find(one)) if one else snapshot.root_object for one in level}
        names: dict[str, set[str]] = {}
        for directory, object_id in objects.items():
            if object_id:
                names.setdefault(object_id, set()).update(directories[directory])
        found = await _read_directories(repository, snapshot, names)
        known |= {directory: found[object_id] for directory, object_id in objects.items() if object_id}
    return {path: entry for path in wanted if (entry := find(path))}


def _add_parents(path: bytes, directories: dict[bytes, set[str]]) -> None:
    """Add each directory on the way to `path`, and the name in it that leads there."""
    while path:
        path, name = os.path.split(path)
        directories.setdefault(path, set()).add(mangle(name))


def _depth(directory: bytes) -> int:
    return directory.count(b"/") + 1 if directory else 0


def _directory_object(entry: JsonDict) -> str | None:
    return entry["obj"] if entry.get("type") == EntryType.DIRECTORY else None


async def _read_directories(
    repository: Repository, snapshot: Snapshot, names: Mapping[str, Collection[str]]
) -> dict[str, dict[str, JsonDict]]:
    """Return the entries with these names of each of the directories, by the object IDs of these."""
    found: dict[str, dict[str, JsonDict]] = {}
    with open_output(repository.work_dir) as file:
        for ids in read_together(sorted(names, key=lambda one: (not _SMALL.fullmatch(one), one))):
            directories = await open_directories(repository, snapshot, ids, file)
            for one, entries in zip(ids, directories, strict=True):
                found[one] = {entry["name"]: entry for entry in entries if entry.get("name") in names[one]}
    return found


def has_target(entry: JsonDict) -> bool:
    """Return whether `read_targets` can read the target of kopia's entry of a link."""
    return bool(_TARGET.fullmatch(str(entry.get("obj", ""))))


async def read_targets(
    repository: Repository, snapshot: Snapshot, entries: Sequence[JsonDict], file: IO[bytes]
) -> Sequence[bytes | None]:
    """Return the targets of kopia's entries of links; None: it is not known.

    The size of an entry is its target's. `file` is open for kopia's output.
    Source: kopia 0.23.1, snapshot/upload/upload.go (uploadSymlinkInternal), cli/command_content_show.go.

    Raises:
        KopiaError: one cannot be read.
    """
    ids = [str(entry["obj"]) for entry in entries]
    answer = await repository.call(f"snapshot {snapshot.snapshot_id}", "content", "show", *ids, output_fd=file.fileno())
    answer.check()
    sizes = [int(entry.get("size", 0)) for entry in entries]
    if file.seek(0, os.SEEK_END) != sum(sizes):
        return [None] * len(sizes)
    file.seek(0)
    return [file.read(size) for size in sizes]


def read_together(object_ids: Iterable[str]) -> Iterator[list[str]]:
    """Yield the object IDs of directories, in their order, so many at a time as one call of kopia reads."""
    for small, alike in groupby(object_ids, key=lambda one: bool(_SMALL.fullmatch(one))):
        while together := list(islice(alike, _READ_TOGETHER if small else 1)):
            yield together


async def open_directories(
    repository: Repository, snapshot: Snapshot, object_ids: Sequence[str], file: IO[bytes]
) -> Iterator[Iterator[JsonDict]]:
    """Return the entries of each of these directories, which `read_together` lists, to be read before the next one.

    `file` is open for kopia's output.

    Raises:
        KopiaError: one of them cannot be read, also while the entries are.
    """
    verb = ("content", "show") if _SMALL.fullmatch(object_ids[0]) else ("show",)
    answer = await repository.call(f"snapshot {snapshot.snapshot_id}", *verb, *object_ids, output_fd=file.fileno())
    directories = read_directories(answer, file)

    def read() -> Iterator[Iterator[JsonDict]]:
        for _ in object_ids:
            if (entries := next(directories, None)) is None:
                raise answer.error("kopia's output is not a directory")
            yield entries

    return read()
