"""The commands for users beside those of an agent: who loads what, and what happens without the extra."""

import asyncio
import io
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Literal

import click
import pytest
from click.shell_completion import ShellComplete

from client.cli import options, run_restore_test, run_schedule
from client.cli.options import confirm
from client.cli.user_commands import _root
from client.session import interrupted_by_signals
from nodeagent.__main__ import complete, main
from tests.client.support.commands import reach
from tests.client.support.user_scene import NAME, UserScene

_ROOT = Path(__file__).parents[3]
_MODULES = {f"client.cli.{name}" for name in ("user_commands", "repo", "options", "output")}


def test_a_full_disk_below_standard_output_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Path("/dev/full").open("wb", buffering=0) as full:
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(full, write_through=True))
        assert main(["version", "--client-only"]) == 1
    assert capsys.readouterr().err == "error: input or output failed: [Errno 28] No space left on device\n"


@pytest.mark.parametrize("package", ["click", "rich"])
def test_without_the_extra_one_line_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    for name in list(sys.modules):
        if name in _MODULES or name.startswith(f"{package}."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["repo", "get"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: repo needs the Python package {package}: install node-agent with its extra")
    assert captured.err.count("\n") == 1


_LEFT_OUT = "[name for name in sys.modules if name.split('.')[0] in {'click', 'rich', 'client'}]"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("use", "heavy"),
    [
        ("import nodeagent.app", _LEFT_OUT),
        ("from nodeagent.__main__ import main\ntry: main(['serve', '--help'])\nexcept SystemExit: pass", _LEFT_OUT),
        ("import client.cli.preflight, client.cli.support_bundle, client.cli.version", "'pydantic' in sys.modules"),
    ],
    ids=["agent", "serve --help", "commands without a configuration"],
)
def test_what_is_not_needed_is_not_loaded(use: str, heavy: str) -> None:
    argv = [sys.executable, "-c", f"{use}\nimport sys\nprint('loaded:', {heavy} or None)"]
    done = subprocess.run(argv, cwd=_ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("loaded: None\n")


@pytest.mark.processes
def test_a_shell_completes_commands() -> None:
    asked = {"_NODEAGENT_COMPLETE": "bash_complete", "COMP_WORDS": "nodeagent repo d", "COMP_CWORD": "2"}
    argv = [sys.executable, "-m", "nodeagent"]
    done = subprocess.run(argv, cwd=_ROOT, env=os.environ | asked, capture_output=True, text=True, check=True)
    assert done.stdout == "plain,describe\n"


@pytest.mark.parametrize("fault", [403, "lost", None])
def test_a_shell_completes_no_unread_names(
    monkeypatch: pytest.MonkeyPatch, fault: Literal["lost"] | int | None
) -> None:
    scene = UserScene()
    if fault is not None:
        scene.kube.fail_next("GET", "/backuprepositories", fault, times=9)
    else:
        monkeypatch.setattr(options, "_COMPLETION_SECONDS", 0.0)
    reach(lambda: scene.kube, monkeypatch)
    complete = ShellComplete(_root, {}, "nodeagent", "_NODEAGENT_COMPLETE")
    assert complete.get_completions(["repo", "describe", "-n", "velero"], "ap") == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["des"], "describe\tShow everything about one transfer, and...\n:4\n"),
        (["repo", "describe", "-n", "velero", "ap"], f"{NAME}\n:4\n"),
        (["backup", "create", "night", "--method", "c"], "csi-snapshot\n:4\n"),
        (["backup", "get", "--kubeconfig", "s"], ":0\n"),
        (["install", "--secret-file", "s"], ":0\n"),
        (["install", "--prefix", "s"], ":4\n"),
    ],
)
def test_kubectl_completes_its_plug_in(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], expected: str
) -> None:
    scene = UserScene()
    reach(lambda: scene.kube, monkeypatch)
    monkeypatch.setattr(sys, "argv", ["kubectl_complete-nodeagent", *words])
    assert complete() == 0
    assert capsys.readouterr().out == expected


def test_kubectl_completes_nothing_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "client.cli.user_commands", None)
    monkeypatch.setattr(sys, "argv", ["kubectl_complete-nodeagent", ""])
    assert complete() == 1
    assert capsys.readouterr() == ("", "")


@pytest.fixture(autouse=True)
def _in_a_terminal() -> Iterator[None]:
    """The tests themselves may run below nohup, or in the background."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL), signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in zip((signal.SIGHUP, signal.SIGINT), before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_cancels_the_command_which_cleans_up(number: signal.Signals, background: bool) -> None:
    cleaned = []
    if background:
        # As a shell without job control starts it.
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    async def command() -> None:
        try:
            signal.raise_signal(number)
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.append(number)

    with pytest.raises(KeyboardInterrupt), interrupted_by_signals():
        asyncio.run(command())
    assert cleaned == [number]
    assert signal.getsignal(number) is signal.SIG_DFL


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (run_schedule, ["night", "--pvc=app/data"]),
        (run_restore_test, ["DataUpload", "night", "--agent-namespace=velero"]),
    ],
    ids=["schedule", "restore test"],
)
def test_a_command_whose_pod_is_deleted_cleans_up(
    module: ModuleType, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux ignores SIGTERM for the first process of a container, unless it has a handler."""
    cleaned = []

    async def run(*_: object) -> None:
        try:
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
            signal.raise_signal(signal.SIGTERM)
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.append(True)

    monkeypatch.setattr(module, "_run", run)
    with pytest.raises(KeyboardInterrupt):
        module.run_words(words)
    assert cleaned


def test_ctrl_c_at_a_question_ends_the_command_which_cleans_up(monkeypatch: pytest.MonkeyPatch) -> None:
    cleaned = []

    def ask(_: str) -> str:
        signal.raise_signal(signal.SIGINT)
        return "y"

    async def command() -> None:
        try:
            confirm("Restore?", "nothing was restored")
        finally:
            await asyncio.sleep(0)
            cleaned.append(True)

    monkeypatch.setattr(click.termui, "visible_prompt_func", ask)
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(command())
    assert cleaned
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_below_nohup_a_command_continues() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with interrupted_by_signals():
        signal.raise_signal(signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_after_a_hang_up_nothing_is_written_to_the_terminal() -> None:
    ours, theirs = pty.openpty()
    kept = os.dup(2)
    os.dup2(theirs, 2)
    try:
        with pytest.raises(KeyboardInterrupt), interrupted_by_signals():
            signal.raise_signal(signal.SIGHUP)
        assert os.ttyname(theirs)
        assert not os.isatty(2)
    finally:
        os.dup2(kept, 2)
        for fd in (ours, theirs, kept):
            os.close(fd)
