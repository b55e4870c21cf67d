"""Redaction of secret values in messages and logs.

The code that reads a secret adds it here.
"""

from collections.abc import Iterable
from typing import Final

__all__ = ["Redactor"]

_REPLACEMENT: Final = "***"
_MIN_CHARACTERS: Final = 4
"""Shorter values would be found in ordinary words of every message."""


class Redactor:
    """Replaces known secret values in texts."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._secrets: list[str] = []
        self.add(*secrets)

    def add(self, *secrets: str) -> None:
        """Redact these values too."""
        found = {*self._secrets, *(value for value in secrets if len(value) >= _MIN_CHARACTERS)}
        # The longest first: a secret may contain another one.
        self._secrets = sorted(found, key=len, reverse=True)

    def redact(self, text: str) -> str:
        """Return `text` without any of the secrets."""
        for secret in self._secrets:
            text = text.replace(secret, _REPLACEMENT)
        return text
