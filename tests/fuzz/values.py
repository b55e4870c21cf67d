"""Values that no field expects, and JSON that no API server should send.

`Raw` is JSON text that Python cannot write: nested too deeply, not UTF-8, half of a surrogate pair.
"""

import json
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from core.models.base import JsonDict


@dataclass(frozen=True)
class Raw:
    """JSON text, shown shortened."""

    text: bytes

    def __repr__(self) -> str:
        return f"Raw({self.text[:40]!r}, {len(self.text)} bytes)"


def encode(value: Any) -> bytes:
    """Return `value`, in which any part may be `Raw`, as JSON."""
    raws: list[bytes] = []

    def keep(part: object) -> str:
        assert isinstance(part, Raw)
        raws.append(part.text)
        return f"@raw-{len(raws) - 1}@"

    text = json.dumps(value, default=keep).encode()
    for number, raw in enumerate(raws):
        text = text.replace(f'"@raw-{number}@"'.encode(), raw)
    return text


def _nest(depth: int, opening: bytes) -> Raw:
    closing = b"}" if opening.startswith(b"{") else b"]"
    return Raw(opening * depth + (b"1" if opening.startswith(b"{") else b"") + closing * depth)


_RAWS = st.one_of(
    st.builds(_nest, st.sampled_from([90, 150, 400, 990, 2000, 20_000]), st.sampled_from([b"[", b'{"a":'])),
    st.sampled_from([b'"\\ud800"', b'"a\\udc00b"', b'"\xff\xfe"', b'"\xed\xa0\x80"', b"1e999", b"-1e999"]).map(Raw),
    st.sampled_from([20, 400, 4000]).map(lambda digits: Raw(b"9" * digits)),
    st.sampled_from([1000, 200_000]).map(lambda size: Raw(b'"' + b"x" * size + b'"')),
)
_TIME_TEXTS = (
    "2026-11-21T12:00:00 2026-11-21T12:00:00Z 2026-11-21T12:00:00.123456789Z 0001-01-01T00:00:00Z 9999-12-31T23:59:59Z "
    "9999-12-31T23:59:59-14:00 2026-02-30T12:00:00Z 99999-01-01T00:00:00Z 2026-11-21 12:00"
)
_TIMES = st.sampled_from(_TIME_TEXTS.split())
_DURATIONS = st.sampled_from(["100000000000h", "-1h", "1h" * 500, "9" * 400 + "s", "0", "1", "1d", "\u0661h"])
_QUANTITIES = st.sampled_from(["1e999", "1e9999999999", "-1Gi", "9" * 200, "12E", "NaN", "1e-99", "\u0661Gi"])
_NAMES = st.sampled_from(["", "..", "a/b", "a b", "a\n", "../../secrets", "x" * 300, "\u2028", "a\x00b", "a,b!=c", "é"])
_NUMBERS = st.one_of(
    st.integers(-3, 300), st.sampled_from([2**31, 2**63, -(2**63) - 1, 10**30, 10**400, 0.5, 1.0, 1e300, -0.0])
)

_TIME_FIELDS = (
    "acceptedTimestamp completionTimestamp creationTimestamp deletionTimestamp eventTime lastObservedTime "
    "lastTimestamp lastTransitionTime startTimestamp"
)
TEXTS_BY_FIELD = {
    **dict.fromkeys(("operationTimeout", "maintenanceFrequency"), _DURATIONS),
    **dict.fromkeys(("storage", "memory"), _QUANTITIES),
    **dict.fromkeys(_TIME_FIELDS.split(), _TIMES),
}
"""Texts of the right form for a field, with values that are too large or incomplete."""

hostile_texts = st.one_of(_TIMES, _DURATIONS, _QUANTITIES, _NAMES, st.text(max_size=8))
"""Texts of the wrong form."""

_LEAVES = st.one_of(st.none(), st.booleans(), _NUMBERS, hostile_texts, _RAWS)

hostile: SearchStrategy[Any] = st.one_of(
    _LEAVES,
    st.lists(_LEAVES, max_size=3),
    st.dictionaries(
        st.one_of(st.sampled_from(["name", "uid", "reason", "message", "a/b"]), st.text(max_size=4)), _LEAVES
    ),
)
"""Values of any type and size."""

_ANSWER_LINES = """
<html><body>502 Bad Gateway</body></html>
null
[]
{}
"text"
17
{"metadata":{}}
{"metadata":{},"items":null}
{"metadata":{},"items":{}}
{"metadata":{},"items":[null,1,"x",[],{}]}
{"metadata":{"resourceVersion":7,"continue":[]},"items":[]}
{"type":"ADDED"}
{"type":"MODIFIED","object":{"metadata":7}}
{"type":"ERROR","object":{"code":"?"}}
{"type":"ERROR","object":{"code":1e999,"details":[]}}
{"kind":"Status","metadata":{},"status":"Success"}"""

hostile_answers = st.one_of(
    st.sampled_from(
        [*_ANSWER_LINES.encode().split(b"\n"), *(b"\xff\xfe\x00", b"[" * 100_000, b'{"a":' * 50_000, b" " * 1_000_000)]
    ),
    st.binary(max_size=30),
    hostile.map(encode),
)
"""Bodies that no API server sends with status 200."""


def from_schema(schema: JsonDict) -> SearchStrategy[Any]:
    """Return values of an OpenAPI schema, in which any part may be hostile."""
    return st.one_of(_valid(schema), _valid(schema), _valid(schema), hostile)


def _valid(schema: JsonDict) -> SearchStrategy[Any]:
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    match schema.get("type"):
        case "object" if "properties" in schema:
            fields = {key: from_schema(field) for key, field in schema["properties"].items()}
            return st.fixed_dictionaries({}, optional=fields)
        case "object":
            inner = schema.get("additionalProperties")
            value = from_schema(inner) if isinstance(inner, dict) else hostile
            return st.dictionaries(st.text(max_size=4), value, max_size=2)
        case "array":
            return st.lists(from_schema(schema.get("items", {})), max_size=2)
        case "string":
            return (
                _TIMES if schema.get("format") == "date-time" else st.sampled_from(["", "data", "kopia", "1Gi", "5m"])
            )
        case "integer":
            return st.integers(0, 10)
        case "boolean":
            return st.booleans()
    return hostile
