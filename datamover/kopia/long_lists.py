"""Lists that kopia prints as JSON, of any length: its output goes to a file, and is read element by element.

Source: kopia 0.23.1, cli/json_output.go (jsonList): each element is on a line of its own.
"""

import tempfile
from collections.abc import Iterator
from typing import IO, Final, TypeVar

from core.errors import ContractError
from core.models.base import WireModel
from datamover.kopia.process import KopiaAnswer
from datamover.runtime.work_dir import WorkDir

__all__ = ["open_output", "read_elements"]

_T = TypeVar("_T", bound=WireModel)

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
