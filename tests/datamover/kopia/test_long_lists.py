"""Long lists of kopia: element by element, and never a part of one."""

import io

import pytest

from core.errors import KopiaError
from core.models.base import WireModel
from datamover.kopia.long_lists import read_elements
from datamover.kopia.process import KopiaAnswer

__all__: list[str] = []


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
