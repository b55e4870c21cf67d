"""The `kopia` of the image against kopia as released, and the checks of its sources."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.tools import go_command, tool

pytestmark = [pytest.mark.processes, pytest.mark.thorough]

_SOURCES = Path(__file__).parents[3] / "tools" / "kopia"


def _help(program: Path) -> list[str]:
    done = subprocess.run([program, "--help-full"], capture_output=True, text=True, check=True)
    return (done.stdout + done.stderr).splitlines()


def test_has_all_commands_and_flags_of_the_release() -> None:
    own, released = _help(tool("kopia", "kopia")), _help(tool("kopia", "kopia-released"))
    assert len(released) > 500
    assert own == released


@pytest.mark.parametrize("check", [["vet"], ["test", "-vet=off"]], ids=["vet", "test"])
@pytest.mark.timeout(300)
def test_sources_pass(check: list[str]) -> None:
    # As tools/build.sh compiles them, so that nothing is compiled twice.
    flags = ["-trimpath", "-gcflags=all=-dwarf=false", "-tags=nohtmlui testing"]
    argv = [str(go_command()), *check, *flags, "./..."]
    env = {**os.environ, "CGO_ENABLED": "0"}
    done = subprocess.run(
        argv, cwd=_SOURCES, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
