"""Long lists of kopia: element by element, and never a part of one."""

import io
import json
import tracemalloc

import pytest

from core.errors import KopiaError
from core.models.base import WireModel
from datamover.kopia.location_files import read_directories, read_elements
from datamover.kopia.process import KopiaAnswer


class Blob(WireModel):
    id: str


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
    ids=["none", "one", "two"],
)
def test_elements_are_read(output: bytes, ids: list[str]) -> None:
    assert _read(output) == ids


@pytest.mark.parametrize(
    "output",
    [b"", b"[", b'[\n {"id":"a"},\n', b'[\n {"id":"a"}', b'[\n {"length":1}\n]', b"[\n {\n]", b'[\n {"id":"\xff"}\n]'],
    ids=["empty", "begun", "cut", "no end", "another form", "no JSON", "no UTF-8"],
)
def test_an_incomplete_or_invalid_list_is_an_error(output: bytes) -> None:
    with pytest.raises(KopiaError, match="list blobs: kopia's output is"):
        _read(output)


def test_the_list_of_a_kopia_that_failed_is_not_read() -> None:
    with pytest.raises(KopiaError, match="kopia exited with code 1"):
        _read(b"[\n]", exit_code=1)


def _read_directories(output: bytes) -> list[list[str]]:
    directories = read_directories(KopiaAnswer("show", 0, b""), io.BytesIO(output))
    return [[entry["name"] for entry in entries] for entries in directories]


_DIRECTORY = '{"stream":"kopia:directory","entries":[%s],"summary":{"size":1}}\n'


@pytest.mark.parametrize("piece", [1, 7, 1 << 16])
@pytest.mark.parametrize(
    ("directories", "names"),
    [
        ([""], [[]]),
        (['{"name":"a","summ":{"dirs":1}}, {"name":"b"}', '{"name":"größe ☃"}'], [["a", "b"], ["größe ☃"]]),
        ([json.dumps({"name": '"entries":[{"name":"x"}]'})], [['"entries":[{"name":"x"}]']]),
    ],
    ids=["empty", "two", "a name like the mark"],
)
def test_entries_of_directories_are_read_piece_by_piece(
    directories: list[str], names: list[list[str]], piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datamover.kopia.location_files._PIECE_BYTES", piece)
    assert _read_directories("".join(_DIRECTORY % each for each in directories).encode()) == names


def test_a_directory_without_entries_is_null() -> None:
    assert _read_directories(b'{"stream":"kopia:directory","entries":null}') == [[]]


@pytest.mark.parametrize("entries", [b"", b"[", b'[{"name":"a"}', b'[{"name":"a"},', b'[{"name":', b'["a"]', b"{}"])
def test_a_directory_that_is_cut_or_invalid_is_an_error(entries: bytes) -> None:
    with pytest.raises(KopiaError, match="show: kopia's output is not a directory"):
        _read_directories(b'{"entries":' + entries)


def test_few_of_many_entries_are_in_memory() -> None:
    count = 20_000
    output = (_DIRECTORY % ",".join(f'{{"name":"{number}"}}' for number in range(count))).encode()
    tracemalloc.start()
    try:
        entries = next(read_directories(KopiaAnswer("show", 0, b""), io.BytesIO(output)))
        assert sum(1 for _ in entries) == count
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 2 * len(output)
