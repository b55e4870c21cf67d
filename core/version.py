"""The version of everything in this repository; `pyproject.toml` says the same (a test compares)."""

from typing import Final

__all__ = ["VERSION"]

VERSION: Final = "0.1.0"
