"""The files of a storage location, Velero's about backups among them, with kopia as the client of its storage.

kopia reads any blob of a repository. So it gets a configuration whose storage is a path that holds no repository,
read-only, and the format of an empty repository, which kopia takes from its cache. Nothing is written to the location,
except to remove a file.
Source: kopia 0.23.1, repo/format/format_manager.go and format_blob_cache.go, repo/blob/*, cli/command_blob_list.go and
command_blob_show.go, cli/json_output.go (each element is on a line of its own), snapshot/snapshotfs/dir_writer.go (a
directory is one line); Velero v1.18, pkg/persistence/object_store_layout.go, internal/volume/volumes_information.go.
"""

import codecs
import json
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Final, TypeVar

from core.errors import ContractError, RepositoryError, Translated
from core.models.base import JsonDict, WireModel
from datamover.kopia.client_config import IDENTITY_FLAGS, CacheLimit, build_config
from datamover.kopia.process import Kopia, KopiaAnswer
from datamover.runtime.cancellation import ShouldStop, run_in_background
from datamover.runtime.work_dir import WorkDir

_T = TypeVar("_T", bound=WireModel)

_ENTRIES: Final = '"entries":'
"""The quotes of a name are escaped."""

_NO_DIRECTORY: Final = "kopia's output is not a directory"

_PIECE_BYTES: Final = 1 << 16
_DECODER: Final = json.JSONDecoder()

_BRACKETS: Final = (b"", b"[", b"]")


def open_output(work_dir: WorkDir) -> IO[bytes]:
    """Return a file without a name for kopia's output."""
    return tempfile.TemporaryFile(dir=work_dir.path)


def read_elements(answer: KopiaAnswer, file: IO[bytes], model: type[_T]) -> Iterator[_T]:
    """Yield each element of the list in `file`, the output of the call that was answered; raises KopiaError."""
    answer.check()
    file.seek(0)
    last = b""
    for line in file:
        last = line.strip()
        if last in _BRACKETS or last.startswith(b"//"):
            continue
        with Translated((ContractError, UnicodeDecodeError), answer.error, "kopia's output is invalid"):
            yield model.from_json(last.removesuffix(b",").decode())
    if last != b"]":
        raise answer.error("kopia's output is not a complete list")


def read_directories(answer: KopiaAnswer, file: IO[bytes]) -> Iterator[Iterator[JsonDict]]:
    """Yield each directory's entries in `file`, kopia's output, to be read before the next one's; raises KopiaError."""
    answer.check()
    file.seek(0)
    text = _Text(file)

    def read_entries() -> Iterator[JsonDict]:
        try:
            for value in text.values():
                if not isinstance(value, dict):
                    raise answer.error(_NO_DIRECTORY)
                yield value
        except ValueError as e:
            raise answer.error(_NO_DIRECTORY) from e

    while text.skip_to(_ENTRIES):
        yield read_entries()


class _Text:
    """A file with JSON; one piece of it is in memory."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._piece = ""
        self._at = 0

    def skip_to(self, mark: str) -> bool:
        """Skip what precedes the next `mark`, and the mark; return False if there is none."""
        while (found := self._piece.find(mark, self._at)) < 0:
            self._at = max(self._at, len(self._piece) - len(mark))
            if not self._read_more():
                return False
        self._at = found + len(mark)
        return True

    def values(self) -> Iterator[object]:
        """Yield each element of the list that follows, or none for `null`."""
        separator = self._next()
        while separator in {"[", ","} and self._peek() != "]":
            yield self._value()
            separator = self._next()
        if separator not in {"[", "]", "n"}:
            raise ValueError("not a list")

    def _value(self) -> object:
        while True:
            try:
                decoded: tuple[object, int] = _DECODER.raw_decode(self._piece, self._at)
            except ValueError:
                if not self._read_more():
                    raise
            else:
                value, self._at = decoded
                return value

    def _next(self) -> str:
        character = self._peek()
        self._at += 1
        return character

    def _peek(self) -> str:
        """Return the next character that is no space; empty at the end of the file."""
        while True:
            while (character := self._piece[self._at : self._at + 1]).isspace():
                self._at += 1
            if character or not self._read_more():
                return character

    def _read_more(self) -> bool:
        read = self._file.read(_PIECE_BYTES)
        self._piece = self._piece[self._at :] + self._decoder.decode(read, final=not read)
        self._at = 0
        return bool(read)


_FOLDER: Final = "location-files"
_CONFIG: Final = f"{_FOLDER}/repository.config"
_EMPTY: Final = {"KOPIA_PASSWORD": "empty"}
"""The password of the empty repository, which protects nothing."""

QUICK_FORMAT: Final = "--format-block-key-derivation-algorithm=pbkdf2-sha256-600000"
"""Each start of kopia derives the key from the password: this takes half the time of kopia's default, and no memory.
Source: kopia 0.23.1, cli/command_repository_create.go."""

_FORMAT: Final = ("kopia.repository", "kopia.blobcfg")

_CALL_SECONDS: Final = 600.0
"""Less than 15 minutes, for which kopia takes the format from the cache."""


class Blob(WireModel):
    """One element of `kopia blob list --json`; some storages list a folder alone, whose name ends in a slash."""

    id: str


class LocationFiles:
    """The files below a path of a storage that holds no repository."""

    def __init__(self, kopia: Kopia, work_dir: WorkDir, attempted: str) -> None:
        """Read by the credentials that `kopia` has, with files in `work_dir`; `attempted` is for errors."""
        self._kopia = kopia
        self._work_dir = work_dir
        self._attempted = attempted

    @property
    def _cache(self) -> Path:
        return self._work_dir.path / _FOLDER / "cache"

    async def prepare(self, storage: JsonDict, *, read_only: bool = True) -> None:
        """Write kopia's configuration for `storage`, and the format to its cache. Raises KopiaError if kopia fails."""
        folder = self._work_dir.path / _FOLDER
        shutil.rmtree(folder, ignore_errors=True)
        self._cache.mkdir(mode=0o700, parents=True)
        empty = ["filesystem", f"--path={folder / 'empty'}", f"--cache-directory={folder / 'empty-cache'}"]
        (await self.call("repository", "create", *empty, QUICK_FORMAT, *IDENTITY_FLAGS)).check()
        for name in _FORMAT:
            shutil.copyfile(folder / "empty-cache" / name, self._cache / name)
        config = build_config(storage, cache=self._cache, limit=CacheLimit(), read_only=read_only)
        self._work_dir.write(_CONFIG, json.dumps(config).encode())

    async def list_folders(self) -> list[str]:
        """Return the names of the folders, ordered; only S3 lists them without all files. Raises DataPathError."""
        with open_output(self._work_dir) as file:
            parts = (name.partition("/") for name in await self.list_files(file))
            return sorted({name for name, slash, _ in parts if name and slash})

    async def remove_if_only(self, name: str) -> bool:
        """Remove the file if it is the only one; return whether it is gone; raises DataPathError."""
        with open_output(self._work_dir) as file:
            if list(islice(await self.list_files(file), 2)) != [name]:
                return False
        # kopia would write a log to the storage, encrypted with the key of the empty repository.
        flags = ("--dangerous-commands=enabled", "--disable-repository-log")
        (await self.call("blob", "delete", name, *flags)).check()
        return True

    async def list_files(self, file: IO[bytes], prefix: str = "") -> Iterator[str]:
        """Return the names of all files, or those with a prefix, by way of the open file."""
        flags = [f"--prefix={prefix}"] if prefix else []
        answer = await self.call("blob", "list", *flags, "--json", output_fd=file.fileno())
        return (blob.id for blob in read_elements(answer, file, Blob))

    async def call(self, *arguments: str, output_fd: int | None = None) -> KopiaAnswer:
        """Return kopia's answer."""
        attempted = f"{self._attempted}: {' '.join(arguments[:2])}"
        for file in self._cache.glob("kopia.*"):
            file.touch()
        more = _EMPTY | {"KOPIA_CONFIG_PATH": str(self._work_dir.path / _CONFIG)}
        return await self._kopia.call(attempted, *arguments, seconds=_CALL_SECONDS, more=more, output_fd=output_fd)


_BACKUPS: Final = "backups/"

_METADATA: Final = "velero-backup.json"
"""The Backup, with its UID. Every backup has it."""

_COMPRESSED: Final = ("volumeinfo.json.gz", "podvolumebackups.json.gz")
"""Both name snapshots; preceded by the backup's name. Velero before 1.13 does not write the first one."""

_OBJECT_STORES: Final = frozenset({"s3", "azureBlob", "gcs"})
"""Types of storage whose blobs kopia gives the names of their objects. Source: kopia 0.23.1, repo/blob/*."""

_NOT_FOUND: Final = "error presenting blob: error reading blob: BLOB not found"
"""The whole line: kopia could also miss the format of the repository."""

_FILES_A_CALL: Final = 64
"""A start of kopia takes longer than to read a file."""

_GZIP: Final = 16 + zlib.MAX_WBITS
_NAME: Final = re.compile(rb"[0-9A-Za-z-]+")
_LONGEST_NAME: Final = 256
"""As a part of a longer word, this is not a name either."""


class BackupFiles:
    """The files of all backups in the location of a repository."""

    def __init__(self, kopia: Kopia, work_dir: WorkDir, volume_namespace: str) -> None:
        """Read the location of the repository that `kopia` is connected to, by the configuration in `work_dir`."""
        self._files = LocationFiles(kopia, work_dir, "files of backups")
        self._work_dir = work_dir
        self._volume_namespace = volume_namespace
        self._count = 0

    async def exist(self) -> bool:
        """Return whether the location has a file or folder of a backup; raises DataPathError if that cannot be read."""
        await self._prepare()
        with open_output(self._work_dir) as file:
            return any(name.removeprefix(_BACKUPS) for name in await self._files.list_files(file, _BACKUPS))

    async def find_named(self, wanted: frozenset[str]) -> frozenset[str]:
        """Return the part of `wanted`, IDs of snapshots and UIDs of backups, that a file names.

        Raises:
            RepositoryError: the location has no backups, or its files cannot be read in this way.
            DataPathError: not all of them could be read.
        """
        await self._prepare()
        self._count = 0
        named: set[str] = set()
        for files, unpack in zip(await self._list(), (False, True), strict=True):
            for first in range(0, len(files), _FILES_A_CALL):
                named |= await self._read(files[first : first + _FILES_A_CALL], wanted, unpack=unpack)
        if not self._count:
            raise RepositoryError(f"the location has no backups: no files of any below {_BACKUPS}")
        return frozenset(named)

    async def _prepare(self) -> None:
        storage = json.loads(self._work_dir.config_file.read_bytes())["storage"]
        prefix, inner = str(storage["config"].get("prefix", "")), f"kopia/{self._volume_namespace}/"
        if storage["type"] not in _OBJECT_STORES or not prefix.endswith(inner):
            raise RepositoryError(f"kopia cannot read Velero's files in a storage of the type {storage['type']}")
        outer = storage["config"] | {"prefix": prefix.removesuffix(inner)}
        await self._files.prepare({"type": storage["type"], "config": outer})

    async def _list(self) -> tuple[list[str], list[str]]:
        """Return the blobs with the metadata of backups, and the compressed ones.

        Some storages list all objects, others the folder of each backup alone: then some of these may not exist.
        """
        plain: set[str] = set()
        compressed: set[str] = set()
        with open_output(self._work_dir) as file:
            for file_name in await self._files.list_files(file, _BACKUPS):
                name, _, rest = file_name.removeprefix(_BACKUPS).partition("/")
                folder = f"{_BACKUPS}{name}/"
                if not name or file_name == f"{_BACKUPS}{name}":
                    continue
                wanted = {f"{folder}{name}-{ending}" for ending in _COMPRESSED}
                if not rest:
                    plain.add(f"{folder}{_METADATA}")
                    compressed |= wanted
                elif rest == _METADATA:
                    plain.add(file_name)
                elif file_name in wanted:
                    compressed.add(file_name)
        return sorted(plain), sorted(compressed)

    async def _read(self, files: Sequence[str], wanted: frozenset[str], *, unpack: bool) -> set[str]:
        """Return what the files name; one that does not exist names nothing."""
        with open_output(self._work_dir) as output:
            answer = await self._files.call("blob", "show", *files, output_fd=output.fileno())
            if answer.succeeded:
                self._count += len(files)
                return await _scan(answer, output, wanted, members=len(files) if unpack else 0)
        if not any(line.endswith(_NOT_FOUND) for line in answer.lines):
            raise answer.error()
        if len(files) == 1:
            return set()
        # kopia does not say which one.
        middle = len(files) // 2
        first = await self._read(files[:middle], wanted, unpack=unpack)
        return first | await self._read(files[middle:], wanted, unpack=unpack)


async def _scan(answer: KopiaAnswer, file: IO[bytes], wanted: frozenset[str], *, members: int) -> set[str]:
    """Return what the output in `file` names, which is of that many compressed files; 0: of plain ones."""
    file.seek(0)

    def work(should_stop: ShouldStop) -> set[str]:
        pieces = unpack(file, members) if members else iter(lambda: file.read(_PIECE_BYTES), b"")
        return find_names(pieces, wanted, should_stop)

    with Translated((zlib.error, EOFError), answer.error, "a file is damaged"):
        async with run_in_background(work, name="backup-files") as found:
            return await found


def find_names(pieces: Iterator[bytes], wanted: frozenset[str], should_stop: ShouldStop = lambda: False) -> set[str]:
    """Return the part of `wanted` that stands in the text by itself, which comes in pieces of any size."""
    names = {name.encode(): name for name in wanted}
    found: set[str] = set()
    rest = b""
    for piece in pieces:
        if should_stop():
            break
        text = rest + piece
        *words, last = [b"", *_NAME.findall(text)]
        if text.endswith(last):
            # It may go on in the next piece.
            rest = last[-_LONGEST_NAME:]
        else:
            rest = b""
            words.append(last)
        found.update(names[word] for word in words if word in names)
    return found | {names[word] for word in (rest,) if word in names}


def unpack(file: IO[bytes], members: int) -> Iterator[bytes]:
    """Yield the content of a file that consists of so many compressed ones.

    Raises:
        zlib.error: one of them is not a compressed file, or damaged.
        EOFError: one is cut off, or they are more or less: what is missing may name a snapshot.
    """
    count, data, inflater = 0, b"", None
    while data or (data := file.read(_PIECE_BYTES)):
        if inflater is None:
            count, inflater = count + 1, zlib.decompressobj(_GZIP)
        yield inflater.decompress(data, _PIECE_BYTES)
        data = inflater.unconsumed_tail or inflater.unused_data
        if inflater.eof:
            inflater = None
            yield b"\n"
    if inflater is not None or count != members:
        raise EOFError(f"{count} instead of {members}, or cut off")
