"""The keys of the configuration document: where each is in the models, its spellings, its path."""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, get_args, get_origin

from pydantic.fields import FieldInfo

from core.models.base import JsonDict, replace_halves
from core.text import ask, close_name
from nodeagent.config.value_types import Section

Location = tuple[str | int, ...]
"""Where a value is: keys and indexes from the top."""

_PLAIN_KEY: Final = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True)
class ConfigFinding:
    """One finding about a document: path, problem, and a hint."""

    path: str
    problem: str
    hint: str | None = None

    def __str__(self) -> str:
        where = f"{self.path}: " if self.path else ""
        return f"{where}{self.problem}" + (f" ({self.hint})" if self.hint else "")


class _Object(dict[str, Any]):
    """A JSON object that keeps all of its members, also with a repeated key."""

    members: tuple[tuple[str, Any], ...] = ()


def load_json(text: str) -> object:
    """Return the JSON document in `text`, its objects as dicts.

    Raises:
        ValueError: `text` is not JSON.
        RecursionError: it is nested too deeply.
    """

    def build(pairs: list[tuple[str, Any]]) -> _Object:
        built = _Object(pairs)
        built.members = tuple(pairs)
        return built

    return json.loads(replace_halves(text), object_pairs_hook=build)


class _Nested(NamedTuple):
    """The model inside a field: as its value, in a list, or in the values of a map."""

    section: type[Section]
    container: str


def _nested(annotation: object, container: str = "") -> _Nested | None:
    """Return the model inside a field, with `""`, `"list"` or `"map"`; None for plain values."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return _Nested(annotation, container)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is dict:
        return _nested(arguments[1], "map")
    inside = "list" if origin is tuple else container
    return next((found for part in arguments if (found := _nested(part, inside))), None)


def show_key(key: str) -> str:
    """Return a key as a step of a path: `.name`, or `["a/b"]` where that would be ambiguous."""
    return f".{key}" if _PLAIN_KEY.fullmatch(key) else f"[{json.dumps(key)}]"


class SortedKeys:
    """The known keys of a document in canonical spelling, with a finding in `notes` for every other one.

    Keys are not case-sensitive, null is the same as absent, and objects with the same key are merged, as in Velero.
    Source: Go, encoding/json.
    """

    def __init__(self, document: JsonDict, section: type[Section]) -> None:
        """Sort the keys of `document`, which `section` is the model of."""
        self.notes: list[ConfigFinding] = []
        self._written: dict[Location, str] = {}
        self._root = section
        self.document = self._sort_object(document, section, (), {})

    def show(self, location: Location) -> str:
        """Return a location as text in the original spelling, such as `loadAffinity[1].storageClass`."""
        shown = ""
        for depth, part in enumerate(location, 1):
            if isinstance(part, int):
                shown += f"[{part}]"
                continue
            shown += show_key(self._written.get(location[:depth], part))
        return shown.removeprefix(".")

    def _sort_object(self, value: JsonDict, section: type[Section], place: Location, before: JsonDict) -> JsonDict:
        """Return the known keys of `value`, added to what was there `before`, by an earlier key of the same name."""
        fields = {info.alias or name: info for name, info in section.model_fields.items()}
        spellings = {alias.lower(): alias for alias in (*fields, *section.other_names)}
        kept = dict(before)
        for key, item in getattr(value, "members", value.items()):
            spelling = key if key in fields else spellings.get(key.lower(), "")
            alias = section.other_names.get(spelling, spelling)
            if not alias and section.model_config["extra"] == "forbid":
                kept[key] = item
            elif not alias:
                hint = self._hint(key, [*fields, *section.other_names], place)
                self._note((*place, key), "unknown key; ignored", hint)
            elif spelling != alias and (alias in kept or alias in value):
                self._note((*place, key), f"{alias} is set as well; this one is ignored")
            elif item is not None:
                here = (*place, alias)
                self._written[here] = key
                if alias in kept:
                    self._note(here, "repeated key; objects are merged, any other value is replaced")
                if key != spelling:
                    self._note(here, f"read as {spelling}", "keys are case-sensitive elsewhere")
                kept[alias] = self._sort_value(item, _nested(fields[alias].annotation), here, kept.get(alias))
            elif isinstance(kept.get(alias), (dict, list)):
                del kept[alias]
        return kept

    def _sort_value(self, value: object, nested: _Nested | None, place: Location, before: object = None) -> object:
        container = nested.container if nested else ""
        inside = _Nested(nested.section, "") if nested else None
        if container == "list" and isinstance(value, list):
            return [self._sort_value(item, inside, (*place, index)) for index, item in enumerate(value)]
        if container == "list" or not isinstance(value, dict):
            return value
        earlier: JsonDict = before if isinstance(before, dict) else {}
        if nested is None:
            # Go stores null as an empty text in a map of texts.
            return earlier | {key: "" if item is None else item for key, item in value.items()}
        if container == "map":
            kept = ((key, item) for key, item in value.items() if item is not None)
            return earlier | {key: self._sort_value(item, inside, (*place, key)) for key, item in kept}
        return self._sort_object(value, nested.section, place, earlier)

    def _note(self, place: Location, problem: str, hint: str | None = None) -> None:
        self.notes.append(ConfigFinding(self.show(place), problem, hint))

    def _hint(self, key: str, candidates: Iterable[str], place: Location) -> str | None:
        """Return which known key may be meant: one of this object, else the same name at a deeper level."""
        close = close_name(key, candidates)
        if not close and not place:
            deeper = (path for path, _ in known_paths(self._root))
            close = next((path for path in deeper if path.rpartition(".")[2].lower() == key.lower()), None)
        return ask(close)


def known_paths(section: type[Section], above: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield every key as a path, such as `backupPVC.<name>.readOnly`, with its field in the model."""
    for name, info in section.model_fields.items():
        path = f"{above}{info.alias or name}"
        yield path, info
        if nested := _nested(info.annotation):
            inside = {"list": f"{path}[].", "map": f"{path}.<name>.", "": f"{path}."}[nested.container]
            yield from known_paths(nested.section, inside)
