"""Secrets never leave through a text.

Knows how secret values are blanked out of what a program said. Does not know where they come
from: whoever reads a secret adds it here.
"""

from collections.abc import Iterable
from typing import Final

__all__ = ["Redactor"]

_BLANK: Final = "***"
_LEAST_CHARACTERS: Final = 4
"""Shorter values would blank ordinary words out of every message and hide nothing."""


class Redactor:
    """Blanks the secret values it was told about."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._secrets: list[str] = []
        self.add(*secrets)

    def add(self, *secrets: str) -> None:
        """Blank these values too from now on."""
        found = {*self._secrets, *(value for value in secrets if len(value) >= _LEAST_CHARACTERS)}
        # The longest first: a secret may hold another one.
        self._secrets = sorted(found, key=len, reverse=True)

    def redact(self, text: str) -> str:
        """Return `text` without any of the secrets."""
        for secret in self._secrets:
            text = text.replace(secret, _BLANK)
        return text
