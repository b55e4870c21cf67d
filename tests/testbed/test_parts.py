"""Parts of the test bed that are used before a cluster is there."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from tests.testbed.processes import BedError, Supervisor
from tests.testbed.storage.faults import Fault
from tests.testbed.storage.quantity import format_bytes, parse_bytes

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("quantity", "size_bytes"),
    [("2Gi", 2 << 30), ("64Mi", 64 << 20), ("1500M", 1_500_000_000), ("1.5Ki", 1536), ("7", 7), (12, 12)],
)
def test_quantity_is_read(quantity: str | int, size_bytes: int) -> None:
    assert parse_bytes(quantity) == size_bytes


@pytest.mark.parametrize(("size_bytes", "quantity"), [(2 << 30, "2Gi"), (3 << 29, "1536Mi"), (1001, "1001"), (0, "0")])
def test_quantity_is_written_with_the_largest_unit(size_bytes: int, quantity: str) -> None:
    assert format_bytes(size_bytes) == quantity


def test_slow_fault_ends_by_itself_and_others_do_not() -> None:
    long_ago = "2001-01-01T00:00:00Z"
    assert not Fault("slow", "5").holds(long_ago)
    assert Fault("never", "").holds(long_ago)
    assert Fault("fail", " the disk is full").message == "the disk is full"


def test_component_that_ends_is_reported_with_its_last_output(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path)
    supervisor.start("broken", [sys.executable, "-c", "import sys; print('no more'); sys.exit(3)"])
    try:
        with pytest.raises(BedError, match=r"broken ended with 3(.|\n)*no more"):
            supervisor.wait("nothing", lambda: False, seconds=10)
    finally:
        supervisor.stop()


def test_no_component_outlives_its_supervisor(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path)
    component = supervisor.start("stubborn", ["sh", "-c", "trap '' TERM; sleep 100"])
    began = time.monotonic()
    supervisor.stop()
    assert component.process.returncode is not None
    assert time.monotonic() - began < 5
