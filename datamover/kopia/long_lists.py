"""Lists that kopia prints as JSON, of any length: its output goes to a file, and is read element by element.

Source: kopia 0.23.1, cli/json_output.go (jsonList): each element is on a line of its own;
snapshot/snapshotfs/dir_writer.go: a directory is one line.
"""

import codecs
import json
import tempfile
from collections.abc import Iterator
from typing import IO, Final, TypeVar

from core.errors import ContractError
from core.models.base import JsonDict, WireModel
from datamover.kopia.process import KopiaAnswer
from datamover.runtime.work_dir import WorkDir

__all__ = ["open_output", "read_directories", "read_elements"]

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
    """Yield each element of the list in `file`, the output of the call that `answer` is of.

    Raises:
        KopiaError: kopia failed, or an element is not of that form.
    """
    answer.check()
    file.seek(0)
    last = b""
    for line in file:
        last = line.strip()
        if last in _BRACKETS or last.startswith(b"//"):
            continue
        try:
            yield model.from_json(last.removesuffix(b",").decode())
        except (ContractError, UnicodeDecodeError) as e:
            raise answer.error(f"kopia's output is invalid: {e}") from e
    if last != b"]":
        raise answer.error("kopia's output is not a complete list")


def read_directories(answer: KopiaAnswer, file: IO[bytes]) -> Iterator[Iterator[JsonDict]]:
    """Yield the entries of each directory in `file`, the output of the call that `answer` is of.

    Those of one directory are to be read before the next one.

    Raises:
        KopiaError: kopia failed, or its output is not a directory.
    """
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
        """Yield each element of the list that follows, or none for `null`.

        Raises:
            ValueError: it is not a list, or cut off.
        """
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
