"""A validation by a child process: what its end means, and that it never outlives its caller."""

import json
import os
import sys
from pathlib import Path

import pytest

from core.clock import SystemClock
from nodeagent.leader.repositories.locations import ValidationProcess, Verdict
from tests.support.tasks import interrupt, until

pytestmark = pytest.mark.processes

_IN_A_POD = {**os.environ, "KUBERNETES_SERVICE_HOST": "192.0.2.1"}

_REPORTING = """
import pathlib, sys
(path,) = [word.split("=")[1] for word in sys.argv if word.startswith("--termination-message-path=")]
assert sys.argv[1:3] == ["validate-location", "--backup-storage-location=default"], sys.argv
assert "--keys-only" in sys.argv
print("a line of the log", file=sys.stderr)
pathlib.Path(path).write_text({message!r})
sys.exit({code})
"""

_WAITING = """
import pathlib, time
pathlib.Path("started").write_text("")
time.sleep(600)
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that is run in the place of the data mover."""
    (tmp_path / "datamover").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path / "datamover" / "__main__.py"


@pytest.mark.parametrize(
    ("code", "message", "verdict"),
    [
        pytest.param(0, "{}", Verdict(), id="available"),
        pytest.param(12, "the bucket does not exist", Verdict("the bucket does not exist"), id="unavailable"),
        pytest.param(0, json.dumps({"needsPod": True}), None, id="needs a pod"),
        pytest.param(0, "nonsense", None, id="no result"),
        pytest.param(16, "repository r did not answer", Verdict("repository r did not answer"), id="outage"),
        pytest.param(12, "", None, id="no cause"),
        pytest.param(1, "the API server does not answer", None, id="another error"),
        pytest.param(10, "cannot start kopia", None, id="no kopia"),
    ],
)
async def test_only_errors_of_storage_count(program: Path, code: int, message: str, verdict: Verdict | None) -> None:
    program.write_text(_REPORTING.format(code=code, message=message))
    assert await ValidationProcess(SystemClock(), _IN_A_POD).validate("default") == verdict


async def test_without_a_process_a_pod_has_to_find_out(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program.write_text(_WAITING)
    outside = {name: value for name, value in os.environ.items() if name != "KUBERNETES_SERVICE_HOST"}
    assert await ValidationProcess(SystemClock(), outside).validate("default") is None
    assert not program.parent.with_name("started").exists()
    # As if the agent were at its limit of processes.
    monkeypatch.setattr(sys, "executable", "/no/python")
    assert await ValidationProcess(SystemClock(), _IN_A_POD).validate("default") is None


async def test_the_process_is_ended_when_the_leader_is(program: Path) -> None:
    program.write_text(_WAITING)
    started = until(program.parent.with_name("started").exists, seconds=60)
    await interrupt(ValidationProcess(SystemClock(), _IN_A_POD).validate("default"), started)
