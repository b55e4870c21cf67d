"""Files of backups in a location: lists of kopia element by element, names in them, and where kopia can read them."""

import gzip
import io
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from core.errors import KopiaError, RepositoryError
from core.models.base import JsonDict
from core.redact import Redactor
from datamover.kopia.location_files import BackupFiles, Blob, find_names, read_directories, read_elements, unpack
from datamover.kopia.process import Kopia, KopiaAnswer
from datamover.runtime.work_dir import WorkDir, open_work_dir


def _read(output: bytes, exit_code: int = 0) -> list[str]:
    answer = KopiaAnswer("list blobs", exit_code, b"", ["kopia's own words"])
    return [blob.id for blob in read_elements(answer, io.BytesIO(output), Blob)]


@pytest.mark.parametrize(
    ("output", "ids"),
    [
        (b"[\n]", []),
        (b'[\n {"id":"a","length":1}\n]', ["a"]),
        (b'// note\n[\n {"id":"a"},\n {"id":"b"}\n]', ["a", "b"]),
    ],
)
def test_elements_are_read(output: bytes, ids: list[str]) -> None:
    assert _read(output) == ids


@pytest.mark.parametrize(
    "output",
    [b"", b"[", b'[\n {"id":"a"},\n', b'[\n {"id":"a"}', b'[\n {"length":1}\n]', b"[\n {\n]", b'[\n {"id":"\xff"}\n]'],
)
def test_an_incomplete_or_invalid_list_is_an_error(output: bytes) -> None:
    with pytest.raises(KopiaError, match="list blobs: kopia's output is"):
        _read(output)
    with pytest.raises(KopiaError, match="kopia exited with code 1"):
        _read(output, exit_code=1)


def _read_directories(output: bytes) -> list[list[str]]:
    directories = read_directories(KopiaAnswer("show", 0, b""), io.BytesIO(output))
    return [[entry["name"] for entry in entries] for entries in directories]


_DIRECTORY = '{"stream":"kopia:directory","entries":%s,"summary":{"size":1}}\n'


@pytest.mark.parametrize("piece", [1, 7, 1 << 16])
@pytest.mark.parametrize(
    ("directories", "names"),
    [
        (["[]"], [[]]),
        (["null"], [[]]),
        (['[{"name":"a","summ":{"dirs":1}}, {"name":"b"}]', '[{"name":"größe ☃"}]'], [["a", "b"], ["größe ☃"]]),
        ([json.dumps([{"name": '"entries":[{"name":"x"}]'}])], [['"entries":[{"name":"x"}]']]),
    ],
    ids=["empty", "null", "two", "a name like the mark"],
)
def test_entries_of_directories_are_read_piece_by_piece(
    directories: list[str], names: list[list[str]], piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datamover.kopia.location_files._PIECE_BYTES", piece)
    assert _read_directories("".join(_DIRECTORY % each for each in directories).encode()) == names


@pytest.mark.parametrize("entries", [b"", b"[", b'[{"name":"a"}', b'[{"name":"a"},', b'[{"name":', b'["a"]', b"{}"])
def test_a_directory_that_is_cut_or_invalid_is_an_error(entries: bytes) -> None:
    with pytest.raises(KopiaError, match="show: kopia's output is not a directory"):
        _read_directories(b'{"entries":' + entries)


_ID: Final = "74b385d6f9a63c4ff9a796d7a49bf992"
_UID: Final = "6bc33b7d-f98e-42f3-b79d-e2c5b7f42847"
_WANTED: Final = frozenset({_ID, _UID})


@pytest.mark.parametrize(
    "end", ['"}]', '"}, {"other": "' + "f" * 500, ""], ids=["JSON", "long word", "name at the end"]
)
@pytest.mark.parametrize("size", [1, 7, 32, 33, 64, 1000])
def test_names_are_found_wherever_the_text_is_cut(size: int, end: str) -> None:
    text = f'[{{"uid": "{_UID}"}}, {{"snapshotHandle": "{_ID}{end}'.encode()
    pieces = (text[at : at + size] for at in range(0, len(text), size))
    assert find_names(pieces, _WANTED) == _WANTED


@pytest.mark.parametrize("text", [f"{_ID}0", f"0{_ID}", _ID[:-1], f"{'f' * 300}{_ID}", ""])
@pytest.mark.parametrize("size", [1, 40, 1000])
def test_a_part_of_a_word_is_no_name(text: str, size: int) -> None:
    raw = text.encode()
    assert find_names((raw[at : at + size] for at in range(0, len(raw), size)), _WANTED) == set()


def _compressed(*documents: Any) -> bytes:
    return b"".join(gzip.compress(json.dumps(document).encode()) for document in documents)


def test_compressed_files_are_unpacked_one_after_the_other() -> None:
    large = ["x" * 300_000]
    unpacked = b"".join(unpack(io.BytesIO(_compressed([1], large, [])), 3))
    assert unpacked == b"[1]\n%s\n[]\n" % json.dumps(large).encode()


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (_compressed([1])[:-1], EOFError),
        (_compressed([1], [2])[:-9], EOFError),
        (_compressed([1]), EOFError),
        (_compressed([1], [2], [3]), EOFError),
        (b"", EOFError),
        (b"[1]", zlib.error),
        (_compressed([1]) + b"[2]", zlib.error),
        (_compressed([1], [2])[:-8] + bytes(8), zlib.error),
    ],
    ids=["cut", "second cut", "one", "three", "none", "plain", "second plain", "checksum"],
)
def test_what_is_not_two_whole_files_is_an_error(content: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        list(unpack(io.BytesIO(content), 2))


class ScriptedKopia(Kopia):
    """Answers `blob list` with these blobs and everything else with nothing; `calls` are the arguments."""

    def __init__(self, *blobs: str) -> None:
        super().__init__({}, Redactor())
        self.calls: list[tuple[str, ...]] = []
        self._blobs = blobs

    async def call(self, attempted: str, *arguments: str, output_fd: int | None = None, **_: Any) -> KopiaAnswer:
        self.calls.append(arguments)
        if arguments[:2] == ("repository", "create"):
            cache = next(Path(one.partition("=")[2]) for one in arguments if one.startswith("--cache-directory="))
            cache.mkdir()
            (cache / "kopia.repository").write_text("{}")
            (cache / "kopia.blobcfg").write_text("{}")
        if output_fd is not None:
            lines = ",\n ".join(json.dumps({"id": blob, "length": 1}) for blob in self._blobs)
            texts = {
                "list": f"[\n {lines}\n]".encode(),
                "show": b"".join(_compressed([]) if one.endswith(".gz") else b"{}" for one in arguments[2:]),
            }
            os.pwrite(output_fd, texts[arguments[1]], 0)
        return KopiaAnswer(attempted, 0, b"")


@pytest.fixture
def work_dir() -> Iterator[WorkDir]:
    with open_work_dir(os.environ) as work_dir:
        yield work_dir


def _connected(work_dir: WorkDir, storage: str, **config: str) -> None:
    document: JsonDict = {"storage": {"type": storage, "config": config}}
    work_dir.write(work_dir.config_file.name, json.dumps(document).encode())


_FLAT: Final = (
    "backups/a/a-logs.gz",
    "backups/a/a-podvolumebackups.json.gz",
    "backups/a/velero-backup.json",
    "backups/b/velero-backup.json",
    "backups/b/a-volumeinfo.json.gz",
    "backups/stray",
)
_FOLDERS: Final = ("backups/", "backups/a/", "backups/stray")


@pytest.mark.parametrize(
    ("storage", "blobs", "shown"),
    [
        ("azureBlob", _FLAT, {"a/velero-backup.json", "b/velero-backup.json", "a/a-podvolumebackups.json.gz"}),
        ("s3", _FOLDERS, {"a/velero-backup.json", "a/a-podvolumebackups.json.gz", "a/a-volumeinfo.json.gz"}),
    ],
    ids=["objects", "folders"],
)
async def test_the_listed_files_are_read(
    work_dir: WorkDir, storage: str, blobs: tuple[str, ...], shown: set[str]
) -> None:
    _connected(work_dir, storage, bucket="b", prefix="outer/kopia/app/", storageKey="secret")
    kopia = ScriptedKopia(*blobs)
    assert await BackupFiles(kopia, work_dir, "app").find_named(_WANTED) == frozenset()
    assert {one for call in kopia.calls if call[1] == "show" for one in call[2:]} == {f"backups/{one}" for one in shown}
    file = work_dir.path / "location-files" / "repository.config"
    config = json.loads(file.read_text())
    assert config["storage"]["config"] == {"bucket": "b", "prefix": "outer/", "storageKey": "secret"}
    assert config["readonly"] is True
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(("storage", "prefix"), [("filesystem", ""), ("s3", "outer/kopia/other/"), ("s3", "")])
async def test_other_storages_are_left_alone(work_dir: WorkDir, storage: str, prefix: str) -> None:
    _connected(work_dir, storage, prefix=prefix)
    kopia = ScriptedKopia()
    with pytest.raises(RepositoryError, match=f"in a storage of the type {storage}"):
        await BackupFiles(kopia, work_dir, "app").find_named(_WANTED)
    assert kopia.calls == []
