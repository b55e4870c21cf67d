"""The version of the project, and the only place that has it: `pyproject.toml` and the chart take it from here."""

from typing import Final

VERSION: Final = "0.1.0"
