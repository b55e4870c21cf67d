"""The tiers of tests: how many tests each has, what they took, and which files took long.

`make test` lets each pytest append what its tests took to the file that `TEST_TIMES` names. At its end
`python -m tests.support.tiers FILE` prints it.
"""

import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest

COUNTS = pytest.StashKey[Counter[str]]()
"""How many tests of each tier were collected, before any were deselected."""

EXPECTED: dict[str, str] = {
    "tests/cluster": "waits for pods, and for tests of other lanes that change the agents",
    "tests/image": "the image, unpacked, and its programs started",
    "tests/integration": "programs and charts against an API server, beside the cluster tier",
    "tests/crash/test_apiserver_matrix.py": "transfers that are stopped at each write, against an API server",
    "tests/crash/test_definitions_matrix.py": "transfers that are held, canceled and ended, against an API server",
    "tests/datamover/flows/test_clouds.py": "starts the emulators of the clouds",
    "tests/datamover/flows/test_confinement.py": "each attack, while a real backup or restore walks the volume",
    "tests/datamover/flows/test_fence.py": "how long a mover waits for the API server before it ends",
    "tests/datamover/flows/test_opening.py": "one of each kind of a real time-out",
    "tests/datamover/data_path/test_resume.py": "volumes large enough to be interrupted, which are read again",
    "tests/datamover/flows/test_resume.py": "volumes large enough to be interrupted, which are read again",
    "tests/nodeagent/leader/maintenance/test_writes.py": "a history for each write that fails",
    "tests/client/ui/test_browser.py": "a browser of its own for each test",
}
"""Files and folders that may take longer, and why."""

_LONG_SECONDS = 20
"""Files that take longer are listed."""

_MARKERS = ("slow", "thorough", "cluster", "integration")
"""Of a test with several, the first one decides."""


def tier_of(item: pytest.Item) -> str:
    """Return the tier that runs a test: the name of its marker, or `unit`."""
    return next((name for name in _MARKERS if item.get_closest_marker(name)), "unit")


class Session(msgspec.Struct, frozen=True):
    """What one pytest ran."""

    tier: str
    began: float
    """Seconds of a clock that all processes share, as `ended`."""

    ended: float
    tests: int
    files: dict[str, float]
    """Seconds that the tests of each file took, with their fixtures."""


class FileTimes:
    """Plugin that adds up what the tests of each file take, and appends it to a file at the end."""

    def __init__(self, path: Path, tier: str) -> None:
        self._path = path
        self._tier = tier
        self._began = time.monotonic()
        self._seconds: dict[str, float] = defaultdict(float)
        self._tests: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the duration of a part of a test."""
        self._seconds[report.nodeid.partition("::")[0]] += report.duration
        self._tests.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        """Append what was added up as one line."""
        session = Session(self._tier, self._began, time.monotonic(), len(self._tests), dict(self._seconds))
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(session) + b"\n")


def register(config: pytest.Config) -> None:
    """Register the plugin where `make test` asks for it; the processes of pytest-xdist report to the one that does."""
    path = os.environ.get("TEST_TIMES")
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(FileTimes(Path(path), os.environ.get("TIER", "")))


def summarize(sessions: Iterable[Session]) -> str:
    """Return the tiers, and the files that took long, as a text of lines."""
    tiers: dict[str, list[Session]] = {}
    files: dict[str, float] = defaultdict(float)
    for session in sessions:
        tiers.setdefault(session.tier, []).append(session)
        for file, seconds in session.files.items():
            files[file] += seconds
    lines = [f"{'tier':14} {'tests':>6} {'time':>6}"]
    for tier, parts in tiers.items():
        seconds = round(max(part.ended for part in parts) - min(part.began for part in parts))
        tests = sum(part.tests for part in parts)
        lines.append(f"{tier:14} {tests:6,} {seconds // 60:3}:{seconds % 60:02}")
    lines.append(f"files that took more than {_LONG_SECONDS} s:")
    long: dict[str, list[float]] = defaultdict(list)
    for file, seconds in files.items():
        if seconds > _LONG_SECONDS:
            folder = str(Path(file).parent)
            long[folder if folder in EXPECTED else file].append(seconds)
    for name, times in sorted(long.items(), key=lambda item: -sum(item[1])):
        lines.append(f"{sum(times):6.0f} {name}{_several(times)}: {EXPECTED.get(name, 'NOT EXPECTED')}")
    return "\n".join(lines)


def _several(times: list[float]) -> str:
    return f" ({len(times)} files)" if len(times) > 1 else ""


def main(arguments: list[str]) -> None:
    """Print the summary of a file."""
    lines = Path(arguments[0]).read_bytes().splitlines()
    sys.stdout.write(f"\n{summarize(msgspec.json.decode(line, type=Session) for line in lines)}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
