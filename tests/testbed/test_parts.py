"""Parts of the test bed that are used before a cluster is there."""

import sys
import time
from pathlib import Path

import pytest

from tests.testbed.processes import BedError, Supervisor

pytestmark = pytest.mark.processes


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
