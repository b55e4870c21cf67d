"""The base of all models of API objects: parsing, metadata, JSON.

A model has only the fields that are read: only patches are written, so fields of a newer Velero are preserved.

msgspec instead of pydantic, which parses the configuration: a mover starts for every
volume, and pydantic costs it 15 MiB and 0.1 s (docs/benchmarks.md).
"""

import re
from bisect import bisect_right
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Final, Self, TypedDict, dataclass_transform

import msgspec
from msgspec.structs import force_setattr

from core.errors import ContractError

JsonDict = dict[str, Any]
"""A JSON object as `json.loads` returns it."""

Time = Annotated[datetime, msgspec.Meta(tz=True)]
"""A metav1.Time: RFC 3339; one without a time zone is invalid, since it cannot be compared with others."""

Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""An integer as Go stores it; a larger one could be neither written back nor counted by a metric."""

_SHOWN_CHARACTERS: Final = 500
"""Characters of msgspec's message: it quotes values of any length."""


def format_time(moment: datetime) -> str:
    """Return `moment` in the format of metav1.Time: RFC 3339, UTC, whole seconds."""
    return to_utc(moment).strftime("%Y-%m-%dT%H:%M:%SZ")


def to_utc(moment: datetime) -> datetime:
    """Return the time in UTC; beyond the calendar, which an object may have by its time zone, the same day and hour."""
    try:
        return moment.astimezone(UTC)
    except OverflowError:
        return moment.replace(tzinfo=UTC)


def parse_time(text: str) -> datetime:
    """Return the metav1.Time or metav1.MicroTime in `text`; raise ContractError if it is none with a time zone."""
    try:
        moment: datetime = msgspec.convert(text, Time)
    except ValueError as e:
        raise ContractError(f'not a time with a time zone: "{text[:_SHOWN_CHARACTERS]}"') from e
    return moment


class _WireMeta(msgspec.StructMeta):
    """Makes each model frozen, with fields by name alone: msgspec passes only some options on to subclasses."""

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: JsonDict, **options: Any) -> type:  # noqa: ANN401 - msgspec's own
        return super().__new__(cls, name, bases, namespace, **{"frozen": True, "kw_only": True} | options)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(msgspec.field,))
class WireModel(msgspec.Struct, metaclass=_WireMeta, frozen=True, rename="camel"):
    """A frozen part of an API object: camelCase on the wire; unknown fields are ignored.

    `annotation` is the name of the annotation that has it as JSON, if one does.
    """

    annotation: ClassVar[str] = ""

    @classmethod
    def from_wire(cls, raw: object) -> Self:
        """Return the model of `raw`, as `json.loads` returns it; a field that is null counts as absent, as in Go.

        Raises:
            ContractError: it does not match; the message names the invalid field.
        """
        try:
            return msgspec.convert(without_nulls(raw), cls)
        except (ValueError, RecursionError) as e:
            raise ContractError(explain_invalid(e)) from e

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the model of the JSON `text`; raise ContractError if it is not JSON, or does not match the model."""
        try:
            return msgspec.json.decode(text, type=cls)
        except (ValueError, RecursionError) as e:
            raise ContractError(explain_invalid(e)) from e

    @classmethod
    def from_annotations(cls, annotations: Mapping[str, str]) -> Self | None:
        """Return what the annotations have; None where it is absent or invalid."""
        try:
            return cls.from_json(annotations.get(cls.annotation, ""))
        except ContractError:
            return None

    @classmethod
    def like(cls, source: object, **more: Any) -> Self:  # noqa: ANN401 - of any field
        """Return the model with what `source` has under the names of its fields, and with `more`, which comes first."""
        names = [name for name in cls.__struct_fields__ if name not in more and hasattr(source, name)]
        return cls(**{name: getattr(source, name) for name in names}, **more)

    def to_wire(self) -> JsonDict:
        """Return the JSON object, as `json.loads` would."""
        wire: JsonDict = msgspec.to_builtins(self)
        return wire

    def to_json(self) -> str:
        """Return the JSON text, without spaces."""
        return msgspec.json.encode(self).decode()


class SparseModel(WireModel):
    """A model with texts that may be absent: an empty one counts as absent.

    Go's encoder writes "" for a string that was never set, unless its field has `omitempty`.
    """

    def __post_init__(self) -> None:
        """Read an empty text as an absent one."""
        for name in _optional_texts(type(self)):
            if getattr(self, name) == "":
                force_setattr(self, name, None)


@lru_cache
def _optional_texts(model: type[SparseModel]) -> tuple[str, ...]:
    return tuple(one.name for one in msgspec.structs.fields(model) if one.type == str | None)


def cut_texts(result: msgspec.Struct, **most_bytes: int) -> None:
    """Cut texts of a result that is being made to so many bytes as JSON; an absent one stays absent."""
    for name, most in most_bytes.items():
        if isinstance(text := getattr(result, name), str):
            force_setattr(result, name, cut_text(text, most))


def cut_text(text: str, most_bytes: int) -> str:
    """Return a text with at most so many bytes as JSON, cut at its end: a control character takes six of them."""
    text = text.encode(errors="replace").decode()
    if len(text) <= most_bytes and _count_json_bytes(text) <= most_bytes:
        return text
    mark = "…"
    room = most_bytes - len(mark.encode())
    kept = bisect_right(range(most_bytes), room, key=lambda count: _count_json_bytes(text[:count])) - 1
    return f"{text[:kept]}{mark}"


def _count_json_bytes(text: str) -> int:
    return len(msgspec.json.encode(text)) - len('""')


def explain_invalid(error: ValueError | RecursionError) -> str:
    """Return msgspec's message with the path first, as the API server formats it."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    text, _, path = str(error).partition(" - at `$")
    place, shown = path.strip("`."), text[:_SHOWN_CHARACTERS]
    return f"{place}: {shown}" if place else shown


_HALF: Final = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)"
    r"|([\ud800-\udfff])",
    re.DOTALL,
)
"""Each escape in JSON; a group is half of a surrogate pair, escaped or not."""


def replace_halves(text: str) -> str:
    """Return JSON with U+FFFD for each half of a surrogate pair, which could not be encoded again, as in Go."""
    return _HALF.sub(lambda found: r"\ufffd" if found.lastindex else found[0], text)


def without_nulls(value: object) -> object:
    """Return `value` without the fields that are null, at any depth."""
    if isinstance(value, dict):
        return {key: without_nulls(field) for key, field in value.items() if field is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


class OwnerReference(WireModel):
    """One of `metadata.ownerReferences`."""

    api_version: str
    kind: str
    name: str
    uid: str


class ObjectMeta(WireModel):
    """`metadata` of a stored object."""

    name: str
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    creation_timestamp: Time | None = None
    deletion_timestamp: Time | None = None
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    annotations: dict[str, str] = msgspec.field(default_factory=dict)
    finalizers: list[str] = msgspec.field(default_factory=list)
    owner_references: list[OwnerReference] = msgspec.field(default_factory=list)


class Identity(TypedDict):
    """What names an object."""

    kind: str
    namespace: str
    name: str
    uid: str


class CustomResource(WireModel):
    """An object of the group velero.io."""

    kind_name: ClassVar[str]

    api_version: str
    kind: str
    metadata: ObjectMeta

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Self:
        """Return the model of `raw`, an object as the API server delivers it.

        Raises:
            ContractError: it does not match; the message names the object and the invalid field.
        """
        try:
            return cls.from_wire(raw)
        except ContractError as e:
            meta = raw.get("metadata")
            known = meta if isinstance(meta, dict) else {}
            name = f"{known.get('namespace', '')}/{known.get('name', '?')}"
            raise ContractError(f"invalid {cls.kind_name} {name}: {e}") from e

    @property
    def name(self) -> str:
        """`metadata.name`."""
        return self.metadata.name

    @property
    def uid(self) -> str:
        """`metadata.uid`."""
        return self.metadata.uid

    @property
    def place(self) -> str:
        """Namespace and name, as messages show them."""
        return f"{self.metadata.namespace}/{self.name}"

    @property
    def identity(self) -> Identity:
        """The fields that name it in a log."""
        return {"kind": self.kind_name, "namespace": self.metadata.namespace, "name": self.name, "uid": self.uid}

    @property
    def deleting(self) -> bool:
        """Whether the object is being deleted."""
        return self.metadata.deletion_timestamp is not None
