"""The command line, run as a separate process."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from core.errors import AgentError, ConfigError, DataPathError, RepositoryError, ResultError
from core.version import VERSION
from datamover.__main__ import _run as run_command_line
from datamover.runtime.signals import StopSignal
from tests.datamover.support.plainkopia import PASSWORD, PlainKopia
from tests.datamover.support.processes import children_of, running_kopia
from tests.datamover.support.trees import describe_tree, make_large_file

pytestmark = pytest.mark.processes

_ROOT = Path(__file__).parents[2]
_MODULE = ("-m", "datamover")

_LIGHT = """
import sys
from pathlib import Path
import datamover.__main__
early = {"core", "asyncio"} & sys.modules.keys()
import datamover.arguments, datamover.pod.transfer
unwanted = {"kubernetes_asyncio", "prometheus_client", "pydantic", "urllib.request"} & sys.modules.keys()
unwanted |= {"datamover.local.command", "datamover.pod.storage_commands", "tarfile"} & sys.modules.keys()
(peak,) = [line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line[:6] == "VmHWM:"]
print(len(early), len(unwanted), peak)
"""


_STOPPED_EARLY = """
import os, runpy, signal, sys

class SignalOnImport:
    def find_spec(self, name, *_):
        if name == "asyncio":
            assert not {"argparse", "core"} & sys.modules.keys()
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, SignalOnImport())
sys.argv[0] = "datamover"
runpy.run_module("datamover", run_name="__main__")
"""


def _run(*arguments: str | Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=_ROOT,
        env={**os.environ, "KOPIA_PASSWORD": PASSWORD, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def _run_here(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str | int | None, str, str]:
    """Return exit code, output and errors of a command line that starts nothing; a process would take 0.3 s of CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["datamover", *arguments])
        patch.delenv("VELERO_NAMESPACE", raising=False)
        try:
            code: str | int | None = run_command_line(StopSignal())
        except SystemExit as e:
            code = e.code
    return code, *capsys.readouterr()


def _json(*arguments: str) -> Any:
    done = _run(*_MODULE, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


def test_pod_mode_imports_stay_light(tmp_path: Path) -> None:
    """As in the image: optimized and precompiled, here by the first of two runs."""
    for _ in range(2):
        done = _run("-OO", "-c", _LIGHT, PYTHONPYCACHEPREFIX=str(tmp_path), PYTHONDONTWRITEBYTECODE="")
        assert done.returncode == 0, done.stderr
    early, unwanted, peak_kib = map(int, done.stdout.split())
    assert (early, unwanted) == (0, 0)
    assert peak_kib < 36 * 1024


def test_the_exit_codes_of_the_help_are_those_of_the_manual_and_of_the_errors() -> None:
    """`ResultError` is the node agent's: a mover without a result cannot report that."""

    def family(error: type[AgentError]) -> list[type[AgentError]]:
        return [error, *(one for child in error.__subclasses__() for one in family(child))]

    help_text = _run(*_MODULE, "--help").stdout.partition("exit codes:")[2]
    reported = {int(code) for code in re.findall(r"(?:^|\s)(\d+) ", help_text)}
    manual = {int(code) for code in re.findall(r"^\| (\d+) \|", (_ROOT / "docs/mover.md").read_text(), re.MULTILINE)}
    errors: list[type[AgentError]] = [AgentError, ConfigError, *family(DataPathError)]
    raised = {error.exit_code for error in errors if error is not ResultError}
    assert reported == manual == {0, *raised}


_TASK = "required arguments: --repository (local mode), or one custom resource and --volume-path (pod mode)"


@pytest.mark.parametrize(
    ("arguments", "message_part"),
    [
        ([], "the following arguments are required: COMMAND (see datamover --help)"),
        (["backup"], _TASK),
        (["backup", "--repository", "/r"], "no repository password: set"),
        (["backup", "--repository", "/r", "--password-file", "/no/such"], "--password-file: cannot read /no/such"),
        (["backup", "--repository=/r", "--password-file=/bin/sh"], "--password-file: cannot read /bin/sh: not UTF-8"),
        (["backup", "--data-upload=x", "--volume-path=/x"], "VELERO_NAMESPACE is not set"),
        (["backup", "--volume-mode=Tape"], "argument --volume-mode: invalid VolumeMode value: 'Tape'"),
        (["restore", "--data-upload=x"], "unrecognized arguments: --data-upload=x"),
        (["init-repository", "--backup-repository=x", "--log-level=loud"], "log level: must be one of"),
    ],
)
def test_a_usage_error_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], message_part: str) -> None:
    code, _, errors = _run_here(capsys, *arguments)
    assert (code, errors.count("\n")) == (2, 1)
    assert errors.startswith("error: ")
    assert message_part in errors
    assert _run_here(capsys, "--version") == (0, f"datamover {VERSION}\n", "")


def test_a_restore_over_other_files_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KOPIA_PASSWORD", PASSWORD)
    (tmp_path / "out" / "lost+found").mkdir(parents=True)
    restore = ["restore", "--snapshot=a", "--target", str(tmp_path / "out"), "--repository", str(tmp_path / "none")]
    assert _run_here(capsys, *restore)[0] == RepositoryError.exit_code
    (tmp_path / "out" / "mine\n").touch()
    code, _, errors = _run_here(capsys, *restore)
    assert (code, errors.count("\n")) == (2, 1)
    assert f"--target: {tmp_path}/out is not empty, it has mine\\n: choose another directory, or set" in errors


def test_local_mode_backs_up_and_restores_a_directory(tree: Path, tmp_path: Path) -> None:
    """The backup creates the repository."""
    repository = str(tmp_path / "new")
    backup = _json("backup", "--source", str(tree), "--repository", repository)
    assert [one["snapshot_id"] for one in _json("list", "--repository", repository)] == [backup["snapshotID"]]
    flags = ["--snapshot", backup["snapshotID"], "--target", str(tmp_path / "out"), "--repository", repository]
    restored = _json("restore", *flags)
    assert restored["totalBytes"] == backup["totalBytes"]
    assert describe_tree(tmp_path / "out") == describe_tree(tree)


def test_a_progress_bar_is_drawn_on_a_terminal(repository: Path, tmp_path: Path) -> None:
    make_large_file(tmp_path / "volume" / "file", 2)
    (tmp_path / "password").write_text(f"{PASSWORD}\n")
    ours, theirs = pty.openpty()
    arguments = ["--source", str(tmp_path / "volume"), "--password-file", str(tmp_path / "password")]
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        done = subprocess.run(
            [sys.executable, *_MODULE, "backup", *arguments, "--repository", str(repository)],
            cwd=_ROOT,
            stdout=subprocess.PIPE,
            stderr=theirs,
            check=False,
        )
        os.close(theirs)
        drawn = terminal.read(100_000).decode()
    assert done.returncode == 0
    assert f"[{'#' * 30}] 2.1 MB of 2.1 MB, 100 %" in drawn
    assert done.stdout.startswith(b"snapshot ")


def test_sigterm_during_imports_cancels(repository: Path, tree: Path, kopia: PlainKopia) -> None:
    """A pod may be deleted while its interpreter starts."""
    done = _run("-c", _STOPPED_EARLY, "backup", "--source", tree, "--repository", repository, "--json")
    assert done.returncode == 14, done.stderr
    assert done.stderr.rstrip().endswith("stopped by SIGTERM: data path is canceled")
    assert kopia.snapshots() == []


def test_sigterm_ends_mover_and_kopia_within_two_seconds(repository: Path, tmp_path: Path, kopia: PlainKopia) -> None:
    make_large_file(tmp_path / "volume" / "file", 100)
    backup = ["backup", "--source", str(tmp_path / "volume"), "--repository", str(repository), "--json"]
    mover = subprocess.Popen(
        [sys.executable, *_MODULE, *backup],
        cwd=_ROOT,
        env={**os.environ, "KOPIA_PASSWORD": PASSWORD},
        stderr=subprocess.PIPE,
        text=True,
    )
    with mover:
        while not running_kopia("snapshot create", mover.pid):
            assert mover.poll() is None
            time.sleep(0.01)
        children = children_of(mover.pid)
        received = time.monotonic()
        mover.send_signal(signal.SIGTERM)
        _, message_part = mover.communicate()
    assert time.monotonic() - received < 2
    assert mover.returncode == 14
    assert message_part.rstrip().endswith("data path is canceled")
    assert not any(Path(f"/proc/{child.pid}").exists() for child in children)
    assert not any(PASSWORD in child.arguments for child in children)
    assert kopia.snapshots() == []
    assert not list(tmp_path.glob("datamover-*"))
