"""A line by which a data mover passes an object to the command that runs it; its other lines are a log."""

import json
from typing import Generic, TypeVar

import msgspec

from core.errors import ContractError
from core.models.base import WireModel

__all__ = ["OutputLine"]

_Model = TypeVar("_Model", bound=WireModel)


class OutputLine(Generic[_Model]):
    """The form of the lines that have a `model`: a JSON object with one `key`, which no line of a log has."""

    def __init__(self, key: str, model: type[_Model]) -> None:
        self._key = key
        self._model = model

    def format(self, value: _Model) -> str:
        """Return the line, without its end, in ASCII: control characters are escaped."""
        return json.dumps({self._key: value.to_wire()}, separators=(",", ":"))

    def parse(self, line: str) -> _Model | None:
        """Return what a line of the output or of a log says; None: it is another line, or does not match the model."""
        try:
            found = msgspec.json.decode(line, type=dict[str, msgspec.Raw]).get(self._key)
            return None if found is None else self._model.from_json(bytes(found).decode())
        except (ValueError, RecursionError, ContractError):
            return None

    def find(self, log: str) -> list[_Model]:
        """Return what the lines of a log say, in their order."""
        return [found for line in log.splitlines() if (found := self.parse(line)) is not None]
