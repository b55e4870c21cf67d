"""Kubernetes quantities of bytes, read and written as the snapshot controllers write them."""

from __future__ import annotations

import math
from decimal import Decimal

__all__ = ["format_bytes", "parse_bytes"]

_BINARY = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}
_DECIMAL = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def parse_bytes(quantity: str | int) -> int:
    """The number of bytes; fractions are rounded up."""
    text = str(quantity)
    for suffix, factor in {**_BINARY, **_DECIMAL}.items():
        if text.endswith(suffix):
            return math.ceil(Decimal(text.removesuffix(suffix)) * factor)
    return math.ceil(Decimal(text))


def format_bytes(size_bytes: int) -> str:
    """The quantity with the largest binary suffix that leaves a whole number."""
    for suffix, factor in reversed(_BINARY.items()):
        if size_bytes and size_bytes % factor == 0:
            return f"{size_bytes // factor}{suffix}"
    return str(size_bytes)
