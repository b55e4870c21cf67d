"""The table of tiers in CONTRIBUTING.md, and the summary at the end of `make test`."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from tests.support import tiers

_ROOT = Path(__file__).parents[2]
_MAKEFILE = (_ROOT / "Makefile").read_text(encoding="utf-8")
_SECTION = _MAKEFILE.partition("# -- tests --")[2].partition("# -- measurements --")[0]
_ROWS = {
    target: row.split("|")
    for row in (_ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines()
    if row.startswith("| `make ")
    for target in re.findall(r"`make ([a-z-]+)`", row.split("|")[1])
}
_TARGETS = {"unit": "unit", "integration": "integration", "cluster": "cluster-test", "thorough": "test-slow"}


def test_every_tier_has_a_row() -> None:
    assert set(_ROWS) == set(re.findall(r"(?m)^([a-z-]+):.* ## ", _SECTION)) - {"format"}


def test_the_table_says_which_tiers_need_root() -> None:
    needing = set(re.findall(r"(?m)^([a-z-]+):.* ## .*\(root", _SECTION))
    assert {target for target, cells in _ROWS.items() if cells[2].rstrip().endswith("; root")} == needing


@pytest.mark.parametrize("tier", _TARGETS)
def test_the_table_counts_the_tests(tier: str, request: pytest.FixtureRequest) -> None:
    stated, found = int(_ROWS[_TARGETS[tier]][3].replace(",", "")), request.config.stash[tiers.COUNTS][tier]
    whole = request.config.args_source is not pytest.Config.ArgsSource.ARGS and not request.config.option.keyword
    assert (0.9 if whole else 0) * stated <= found <= 1.1 * stated


def test_the_integration_tier_collects_every_folder_that_has_its_tests() -> None:
    folders = re.findall(r"tests/\S+", re.findall(r"(?m)^integration_folders = (.*)", _MAKEFILE)[0])
    files = (_ROOT / "tests").rglob("test_*.py")
    marked = [file for file in files if re.search(r"pytest\.mark\.integration", file.read_text(encoding="utf-8"))]
    elsewhere = [file for file in marked if not any(file.is_relative_to(_ROOT / folder) for folder in folders)]
    assert {file.parent.name for file in elsewhere} <= {"benchmarks"}  # which make test-slow has


def test_the_summary_adds_up_sessions_and_lists_long_files() -> None:
    unit = tiers.Session("unit", 100.0, 190.4, 8_000, {"tests/a.py": 20.0, "tests/b.py": 21.0})
    lanes = [
        tiers.Session(
            "cluster-test", 100.0 + n, 200.0 + 30 * n, 10, {"tests/cluster/c.py": 15.0, f"tests/cluster/{n}.py": 25.0}
        )
        for n in range(2)
    ]
    assert tiers.summarize([unit, *lanes]).splitlines() == [
        "tier            tests   time",
        "unit            8,000   1:30",
        "cluster-test       20   2:10",
        "files that took more than 20 s:",
        f"    80 tests/cluster (3 files): {tiers.EXPECTED['tests/cluster']}",
        "    21 tests/b.py: NOT EXPECTED",
    ]


def test_files_that_may_take_long_exist() -> None:
    assert [file for file in tiers.EXPECTED if not (_ROOT / file).exists()] == []


def test_what_a_session_took_is_appended(tmp_path: Path) -> None:
    path = tmp_path / "times"
    for seconds in (0.25, 0.5):
        times = tiers.FileTimes(path, "unit")
        for when in ("setup", "call"):
            times.pytest_runtest_logreport(
                pytest.TestReport(
                    f"tests/a.py::test[{when}]", ("", None, ""), {}, "passed", None, when, duration=seconds
                )
            )
        times.pytest_sessionfinish()
    sessions = [msgspec.json.decode(line, type=tiers.Session) for line in path.read_bytes().splitlines()]
    assert [(session.tests, session.files) for session in sessions] == [
        (2, {"tests/a.py": 0.5}),
        (2, {"tests/a.py": 1.0}),
    ]
