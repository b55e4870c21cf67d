"""The results of `make attack-matrix`: how often each attack reached something outside of the volume.

A plugin of pytest (`-p tests.datamover.support.attack_matrix`): it prints what tests have recorded with `record_rate`,
as a table, and as a JSON object in the last line.
"""

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

import pytest

UNCONFINED: Final = "none"
"""The means of a control."""

_PROPERTY: Final = "attack"
_ROWS: Final = pytest.StashKey[list[dict[str, Any]]]()


def record_rate(record_property: Callable[[str, object], None], attack: str, means: str, leaks: Sequence[bool]) -> None:
    """Record in how many rounds an attack against these means of confinement succeeded."""
    row = {"attack": attack, "means": means, "leaked": sum(leaks), "of": len(leaks)}
    record_property(_PROPERTY, row)


def pytest_configure(config: pytest.Config) -> None:
    """Begin an empty table."""
    config.stash[_ROWS] = []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the table."""
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    tests = [report for report in reports if isinstance(report, pytest.TestReport) and report.when == "call"]
    rows = [row for report in tests for name, row in report.user_properties if name == _PROPERTY]
    config.stash[_ROWS] += sorted(rows, key=lambda row: (row["attack"], row["means"]))  # type: ignore[arg-type]
    terminalreporter.write_line("| attack | confined by | rounds that reached something outside |")
    terminalreporter.write_line("| --- | --- | --- |")
    for row in config.stash[_ROWS]:
        terminalreporter.write_line(f"| {row['attack']} | {row['means']} | {row['leaked']} of {row['of']} |")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Print the last line."""
    sys.stdout.write(f"{json.dumps({'attacks': config.stash[_ROWS]})}\n")
