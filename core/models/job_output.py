"""The output of a Job for the command that runs it: objects as lines between the lines of its log, and a total of them.

The termination message has the total, so a log that the kubelet has rotated is an error, and not a shorter result.
"""

import hashlib
import json
import sys
from typing import IO, Final, Generic, TypeVar

import msgspec

from core.errors import ContractError, ResultError
from core.models.base import Int64, WireModel
from core.version import VERSION

_Model = TypeVar("_Model", bound=WireModel)

_START: Final = '{"nodeagent.io/'
"""Begins each line, and no line of a log, also of one in JSON."""

_SHOWN_CHARACTERS: Final = 200


class OutputLine(Generic[_Model]):
    """The form of the lines that have a `model`: a JSON object with one `key`, which no line of a log has."""

    def __init__(self, key: str, model: type[_Model]) -> None:
        self._key = key
        self._model = model

    def format(self, value: _Model) -> str:
        """Return the line, without its end, in ASCII: control characters are escaped."""
        return json.dumps({self._key: value.to_wire()}, separators=(",", ":"))

    def is_of(self, line: str) -> bool:
        """Return whether a line of the output has this key."""
        return line.startswith(f'{{"{self._key}":')

    def parse(self, line: str) -> _Model | None:
        """Return what a line of the output or of a log says; None: it is another line, or does not match the model."""
        try:
            found = msgspec.json.decode(line, type=dict[str, msgspec.Raw]).get(self._key)
            return None if found is None else self._model.from_json(bytes(found).decode())
        except (ValueError, RecursionError, ContractError):
            return None

    def find(self, log: str) -> list[_Model]:
        """Return what the lines of a log say, in their order."""
        return [found for line in _split(log) if (found := self.parse(line)) is not None]


class _Total(WireModel):
    """How many lines were written, and the hash of them, each with its end."""

    lines: Int64
    sha256: str


class _Message(WireModel):
    """What a termination message has beside the result."""

    output: _Total | None = None


class JobOutput:
    """Writes lines to a stream, and counts them."""

    def __init__(self, stream: IO[str] | None = None) -> None:
        """Write to `stream`, by default the standard output."""
        self._stream = stream or sys.stdout
        self._hash = hashlib.sha256()
        self._lines = 0
        self.size_bytes = 0

    def write(self, kind: OutputLine[_Model], value: _Model) -> None:
        """Write the line of an object at once: a reader may use it although the Job fails later."""
        line = f"{kind.format(value)}\n"
        self._stream.write(line)
        self._stream.flush()
        self._hash.update(line.encode())
        self._lines += 1
        self.size_bytes += len(line)

    def seal(self, result: WireModel) -> str:
        """Return the termination message of a Job that succeeded: its result, with the total of the lines."""
        total = _Total(lines=self._lines, sha256=self._hash.hexdigest())
        return msgspec.json.encode(result.to_wire() | {"output": total.to_wire()}).decode()


def read_output(kind: OutputLine[_Model], message: str, log: str) -> list[_Model]:
    """Return the objects in all lines of one kind, from the log and the termination message of a Job that succeeded.

    Raises:
        ContractError: the message is not from a Job, or from one that does not count its lines.
        ResultError: the log lacks lines, of whichever kind, or one does not match its model.
    """
    total = _Message.from_json(message).output
    if total is None:
        # To be removed with the support of agents from before 0.1.0.
        raise ContractError(f"the data mover counts no results: this command needs agents of version {VERSION}")
    lines = [line for line in _split(log) if line.startswith(_START)]
    if len(lines) < total.lines:
        raise ResultError(f"its log was rotated or cut off: it has {len(lines)} of {total.lines} results")
    if hashlib.sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest() != total.sha256:
        raise ResultError(f"its log has other results than the {total.lines} that it wrote")
    found = []
    for line in lines:
        if kind.is_of(line):
            if (one := kind.parse(line)) is None:
                raise ResultError(f"a result in its log is invalid: {line[:_SHOWN_CHARACTERS]}")
            found.append(one)
    return found


def _split(log: str) -> list[str]:
    """Return the lines of a log: other separators may be in a name that a tenant chose."""
    return log.split("\n")
