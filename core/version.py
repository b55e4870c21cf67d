"""The version of the project, the same as in `pyproject.toml` (checked by a test)."""

from typing import Final

__all__ = ["VERSION"]

VERSION: Final = "0.1.0"
