"""Answers of the API server: from bytes to JSON.

Reads as Go does: a field that is null counts as absent, and what is not UTF-8 becomes U+FFFD.
Source: Go, encoding/json.
"""

import json
import re
from typing import Final

__all__ = ["parse_json"]

_DEEPEST: Final = 100
"""Levels of nesting that are kept of a value that Python cannot read; no field that is read is deeper."""

_TOKEN: Final = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)


def parse_json(body: bytes) -> object:
    """Return the JSON value in `body`; of one that is nested too deeply, the upper levels.

    One object in a list must not keep the others from being read.

    Raises:
        ValueError: it is not JSON.
    """
    text = body.decode(errors="replace")
    try:
        return _loads(text)
    except RecursionError:
        return _loads(_cut(text))


def _loads(text: str) -> object:
    value: object = json.loads(text, parse_constant=_reject)
    if "\\ud" in text or "\\uD" in text:
        # Half of a surrogate pair cannot be encoded again.
        joined = json.dumps(value, ensure_ascii=False).encode("utf-16", "surrogatepass")
        value = json.loads(joined.decode("utf-16", "replace"))
    return _without_nulls(value) if "null" in text else value


def _reject(constant: str) -> None:
    """Reject NaN and the infinities, which Python would read."""
    raise ValueError(f"not JSON: {constant}")


def _without_nulls(value: object) -> object:
    """Return `value` without the fields that are null, at any depth."""
    if isinstance(value, dict):
        return {key: _without_nulls(field) for key, field in value.items() if field is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _cut(text: str) -> str:
    """Return the JSON `text` with null for what is nested deeper than `_DEEPEST`.

    Raises:
        ValueError: it ends within that.
    """
    kept, start, depth = [], 0, 0
    for token in _TOKEN.finditer(text):
        if token[0] in {"{", "["}:
            depth += 1
            if depth == _DEEPEST + 1:
                kept.append(text[start : token.start()])
        elif token[0] in {"}", "]"}:
            if depth == _DEEPEST + 1:
                kept.append("null")
                start = token.end()
            depth -= 1
    if depth > _DEEPEST:
        raise ValueError("not JSON: it ends too early")
    return "".join([*kept, text[start:]])
