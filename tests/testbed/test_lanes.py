"""Tests of the cluster tier that run at the same time: each is run by some process, and what they share is held."""

import fcntl
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cluster.__main__ import FOLDERS, LANES, LAST
from tests.cluster.bed import Bed
from tests.cluster.sharing import Shared, has_alone, relies_on
from tests.testbed.api import Api
from tests.testbed.demonstration.user import User
from tests.testbed.processes import wait_for

pytestmark = pytest.mark.processes

_TESTS = Path(__file__).parents[1]
_TIER = re.compile(r"mark\.cluster\b")
_LANE = re.compile(r"mark\.lane\(name=\"(\w+)\"\)")
_SECONDS = 20


def _modules() -> list[tuple[str, int, list[str]]]:
    """Each module of the tier: its folder, how often it declares that it is one, and its lanes."""
    found = []
    for path in sorted(_TESTS.rglob("test_*.py")):
        text = path.read_text()
        if _TIER.search(text):
            found.append((path.parent.name, len(_TIER.findall(text)), _LANE.findall(text)))
    return found


def test_every_test_of_the_tier_has_a_lane_and_every_lane_has_tests() -> None:
    modules = _modules()
    assert {folder for folder, _, _ in modules} == set(FOLDERS)
    assert [lanes for _, times, lanes in modules if len(lanes) != times] == []
    assert {lane for _, _, lanes in modules for lane in lanes} == {*LANES, LAST}


@pytest.fixture
def bed(tmp_path: Path) -> Bed:
    """A test bed of which there is nothing but the folder."""
    return Bed({"BED_DIR": str(tmp_path)}, User(Api.__new__(Api)))


def test_exclusive_use_is_granted_before_later_shared_use(bed: Bed) -> None:
    order: list[str] = []

    def change() -> None:
        with has_alone(bed, Shared.AGENTS):
            order.append("alone")

    def rely() -> None:
        with relies_on(bed, Shared.AGENTS):
            order.append("later")

    with ThreadPoolExecutor() as pool:
        with relies_on(bed, Shared.AGENTS), relies_on(bed, Shared.AGENTS):
            changing = pool.submit(change)
            _wait_next(bed)
            later = pool.submit(rely)
            assert order == []
        changing.result(_SECONDS)
        later.result(_SECONDS)
    assert order == ["alone", "later"]


def _wait_next(bed: Bed) -> None:
    """Return once a test is the next to have the agents alone."""

    def is_waiting() -> bool:
        with (bed.folder / f"{Shared.AGENTS}-next.lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    wait_for("a test that waits to have the agents alone", is_waiting, seconds=_SECONDS)
