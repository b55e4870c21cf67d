"""Redaction of secrets in text: known values, and what has the form of a secret.

The code that reads a secret adds its value to the process's `Redactor`. Forms cover secrets that no code of ours has
read, as in an error that quotes a URL. A line of 110 characters costs 5 µs, most of it to search for triggers; one
with a secret 16 µs.
"""

import base64
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, quote_plus

from core.models.base import JsonDict

_REPLACEMENT: Final = "***"

_MIN_CHARACTERS: Final = 4
"""Shorter values would be found in ordinary words of every message."""

_MIN_ENCODED_CHARACTERS: Final = 8
"""Shorter values have encoded forms that may be found elsewhere."""

_END: Final = r"""\s&;,"'<>\\)\]}`"""
"""What ends an unquoted value."""

_KEY: Final = (
    r"(?:pass(?:word|wd|phrase)|pwd|client[_-]?secret|secret[_-]?(?:access[_-]?)?key|shared[_-]?access[_-]?key|account[_-]?key"
    r"|access[_-]?key(?![_-]?id)|storage[_-]?key|api[_-]?key|private[_-]?key|encryption[_-]?key"
    r"|(?:access|refresh|auth|id|session|security|sas|bearer|service[_-]?account)?[_-]?token)"
)
"""The end of a key whose value is a secret."""

_QUERY_KEY: Final = (
    r"(?:x-(?:amz|goog|oss|cos)-(?:signature|credential|security-token)|security-token|q-signature"
    r"|[a-z-]{0,20}access-?key-?id|GoogleAccessId)"
)
"""A parameter of a signed URL. The ID of a key is part of a signature; elsewhere it is not secret."""


@dataclass(frozen=True)
class _Form:
    """A form of secrets: tried where the lower-case text contains one of the triggers."""

    triggers: tuple[str, ...]
    pattern: re.Pattern[str]
    replacement: str


def _form(triggers: str, pattern: str, replacement: str) -> _Form:
    return _Form(tuple(triggers.split()), re.compile(pattern, re.IGNORECASE), replacement)


_KEY_TRIGGERS: Final = "passw passp pwd secret key token"

_FORMS: Final = (
    _form("-----begin", r"(-----BEGIN ([A-Z0-9 ]{1,40})-----)(?s:.*?)(-----END \2-----|\Z)", r"\1***\3"),
    # A / in a password is escaped, unless it is why the URL is rejected; an @ need not be.
    _form("://", r"(://[^\s/:@[\"'<>]*:)(?:[^\s/\"'<>]+|(?!\d{1,5}/)[^\s\"'<>]{1,200}?)(?=@)", r"\1***"),
    _form("://", r"(://)(?:gh[oprsu]_|github_pat_|glpat-)[^\s/:@\"'<>]+(?=@)", r"\1***"),
    _form("authorization", r"(authorization[\"']?\s*[:=]\s*[\"']?)(?:[a-z][\w-]*[ ]+)?[^\s\"'][^\"'\n]*", r"\1***"),
    _form("bearer", r"(\bbearer[ ]+)(?=[^\s\"']*\d)[\w.~+/=-]{8,}", r"\1***"),
    _form("eyj", r"\beyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*){0,3}", _REPLACEMENT),
    _form("aws4-hmac", r"(AWS4-HMAC-SHA256\s+Credential=)[^\s,]+(.{0,200}?Signature=)[0-9a-f]+", r"\1***\2***"),
    _form("sharedaccesssignature", r"(SharedAccessSignature[= ]+)[^\s;\"'<>]+", r"\1***"),
    # In a query, or in what is left of one: the first parameter has no mark before it.
    _form(
        "sig",
        rf"((?:[?&;]|%26|%3f|\b)(?:sig|signature)(?:=|%3d))(?!\*\*\*)(?:[^{_END}%:]|%[0-9a-f]{{2}}){{8,}}",
        r"\1***",
    ),
    _form(
        "x-amz- x-goog- x-oss- x-cos- security-token q-signature accesskeyid googleaccessid",
        rf"((?:[?&]|%26|%3f|\b){_QUERY_KEY}(?:=|%3d))[^{_END}:]+",
        r"\1***",
    ),
    _form(_KEY_TRIGGERS, rf"({_KEY}[ \t]*=[ \t]*)(?:\"[^\"\n]*\"|'[^'\n]*'|(?!\*\*\*)[^{_END}]+(?<![:.]))", r"\1***"),
    _form(_KEY_TRIGGERS, rf"({_KEY}\\?[\"']\s*:\s*\\?[\"'])[^\"'\\]+(?:\\[^\"'][^\"'\\]*)*", r"\1***"),
    # A pair of name and value, as of an environment variable.
    _form(
        _KEY_TRIGGERS,
        rf"((?:name|key)\\?[\"']\s*:\s*\\?[\"'][^\"'\\]{{0,60}}{_KEY}\\?[\"']\s*,\s*\\?[\"']value\\?[\"']\s*:\s*\\?[\"'])"
        r"[^\"'\\]+(?:\\[^\"'][^\"'\\]*)*",
        r"\1***",
    ),
    _form(_KEY_TRIGGERS, rf"(--[a-z-]{{0,40}}{_KEY}[ ]+)(?!-)(?=\S*[^a-z\s])[^{_END}]+", r"\1***"),
    _form("<", rf"(<[a-z]{{0,40}}{_KEY}>)[^<]+", r"\1***"),
    _form(
        "ya29. aiza gho_ ghp_ ghs_ ghu_ ghr_ glpat- xox",
        (r"\b(?:ya29\.[\w-]{20,}|AIza[\w-]{35}|gh[oprsu]_\w{36,}|glpat-[\w-]{20,}|xox[abprs]-[\w-]{10,})"),
        _REPLACEMENT,
    ),
)


def redact(text: str) -> str:
    """Return `text` without anything that has the form of a secret."""
    return _replace(text, _FORMS)


def _replace(text: str, forms: Iterable[_Form]) -> str:
    lowered = text.lower()
    for form in forms:
        for trigger in form.triggers:
            if trigger in lowered:
                text = form.pattern.sub(form.replacement, text)
                break
    return text


_SECRET_KEY: Final = re.compile(rf"{_KEY}\Z", re.IGNORECASE)
_NAMES: Final = ("name", "key")
_SECRET_FLAG: Final = re.compile(rf"--?[a-z_-]{{0,40}}?{_KEY}\Z", re.IGNORECASE)
_FLAG: Final = re.compile(r"--[a-z]", re.IGNORECASE)

_LINE_FORMS: Final = (
    # A block: the lines below that are indented deeper.
    _form(
        _KEY_TRIGGERS,
        rf"(?m)^(([ \t]*)[^\s:#{{]*{_KEY}[\"']?[ \t]*:[ \t]*[|>])[^\n]*(?:\n\2[ \t]+[^\n]*|\n[ \t]*$)*",
        r"\1 ***",
    ),
    _form(
        _KEY_TRIGGERS,
        rf"(?m)^([ \t]*(?:-[ \t]+)*[^\s:#{{]*{_KEY}[\"']?[ \t]*:[ \t]+)(?![{{\[]|[\"']?\*\*\*|[|>] \*\*\*)[^\n]+",
        r"\1***",
    ),
    _form(
        _KEY_TRIGGERS, rf"([{{,][ \t]*[^\s:,{{}}]{{0,40}}{_KEY}[\"']?[ \t]*:[ \t]+)(?![{{\[\"'*])[^,}}\n]+", r"\1***"
    ),
    _form(
        _KEY_TRIGGERS,
        rf"(\b(?:name|key)[\"']?[ \t]*:[ \t]+[\"']?[^\s\"',]{{0,60}}{_KEY}[\"']?"
        r"(?:[ \t]*\n[ \t]+|,[ \t]*)value[\"']?[ \t]*:[ \t]+)"
        r"(?![{\[])[^,}\n]+",
        r"\1***",
    ),
    # An argument and its value, in a list in one line or in lines of their own.
    _form(
        _KEY_TRIGGERS,
        rf"(--[a-z-]{{0,40}}{_KEY}[\"']?(?:[ \t]*,\s*|[ \t]*\n[ \t]*-[ \t]+)[\"']?)(?!--)[^\s\"',\]]+",
        r"\1***",
    ),
)
"""What a file of configuration has beside the other forms: YAML needs no quotes."""


def redact_lines(text: str) -> str:
    """Return a text that may be YAML without secrets; in other texts it may replace what is none."""
    return _replace(redact(text), _LINE_FORMS)


def redact_values(document: JsonDict, redact_text: Callable[[str], str] = redact) -> JsonDict:
    """Return a JSON document with `redact_text` applied to each text in it, except keys.

    The value of a key that looks like a secret's is replaced as a whole, also if the key is a text beside the
    value (`{"name": "password", "value": ...}`), and what follows such a flag in a list.
    """
    names = (document.get(key) for key in _NAMES)
    is_pair = "value" in document and any(isinstance(name, str) and _is_secret_key(name) for name in names)
    return {
        key: _redact_value(value, redact_text, secret=_is_secret_key(key) or (is_pair and key == "value"))
        for key, value in document.items()
    }


def _redact_value(value: object, redact_text: Callable[[str], str], *, secret: bool = False) -> object:
    match value:
        case str():
            return (_REPLACEMENT if value else value) if secret else redact_text(value)
        case bool():
            return value
        case int() | float():
            return _REPLACEMENT if secret else value
        case dict():
            return redact_values(value, redact_text)
        case list() | tuple():
            hidden = _follow_flags(value)
            return [_redact_value(each, redact_text, secret=secret or next(hidden)) for each in value]
    return value


def _is_secret_key(key: str) -> bool:
    lowered = key.lower()
    return any(trigger in lowered for trigger in _KEY_TRIGGERS.split()) and _SECRET_KEY.search(lowered) is not None


def _follow_flags(values: Sequence[object]) -> Iterator[bool]:
    """Yield for each value whether it belongs to a flag whose value is a secret."""
    before = ""
    for value in values:
        text = value if isinstance(value, str) else ""
        yield _SECRET_FLAG.match(before) is not None and _FLAG.match(text) is None
        before = text


class Redactor:
    """Replaces known secret values in texts, in the encodings that errors quote, and then forms of secrets."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._secrets: list[str] = []
        self.add(*secrets)

    def add(self, *secrets: str) -> None:
        """Redact these values too."""
        found = {*self._secrets}
        for value in secrets:
            if len(value) >= _MIN_CHARACTERS:
                found.add(value)
            if len(value) >= _MIN_ENCODED_CHARACTERS:
                found.update(_encoded(value))
        # The longest first: a secret may contain another one.
        self._secrets = sorted(found, key=len, reverse=True)

    def redact(self, text: str) -> str:
        """Return `text` without any of the secrets."""
        for secret in self._secrets:
            text = text.replace(secret, _REPLACEMENT)
        return redact(text)


def _encoded(value: str) -> set[str]:
    content = value.encode(errors="surrogateescape")
    raw = base64.b64encode(content).decode()
    return {quote(content, safe=""), quote_plus(content), json.dumps(value)[1:-1], raw, raw.rstrip("=")}
