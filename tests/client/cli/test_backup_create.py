"""`nodeagent backup create`: what it prints with and without a terminal, its errors and exit codes."""

import asyncio
import json
import re
from functools import partial
from typing import NoReturn

import pytest

from client.cli import backup as backup_commands
from client.cli.output import Printer
from tests.client.cli.backup_shell import BackupShell, backup_shell
from tests.client.support.commands import FakeTerminal
from tests.support.golden import assert_golden_text

__all__ = ["backup_shell"]

_BOTH = ("--pvc=app/data", "--pvc=app/files")


def _run_to_the_end(shell: BackupShell, last: str = "Completed", **status: str) -> None:
    """Let both volumes move while the command waits."""
    half, whole = {"totalBytes": 2**30, "bytesDone": 2**29}, {"totalBytes": 2**30, "bytesDone": 2**30}
    move = shell.scene.move
    shell.scene.clock.steps = [
        partial(move, "files", "New", reason="Queued", message="position 3 of 7\x1b[2J"),
        partial(move, "data", "InProgress", progress={"totalBytes": 2**30, "bytesDone": 0}),
        partial(move, "data", "InProgress", progress=half),
        partial(move, "data", "Completed", progress=whole),
        partial(move, "files", last, **status),
    ]


def test_a_command_that_is_shown_has_the_flags_of_the_cluster(backup_shell: BackupShell) -> None:
    flags = ("--kubecontext", "blue", "--kubeconfig", "/my config")
    done = backup_shell.run("create", "night", *_BOTH, *flags)
    more = "--kubecontext blue --kubeconfig '/my config'"
    assert f"nodeagent backup describe night {more} shows it" in done.err
    assert f"nodeagent backup describe night {more} shows how" in backup_shell.run("cancel", "night", *flags).err


def test_a_wait_prints_a_line_for_each_change_where_no_terminal_is(backup_shell: BackupShell) -> None:
    _run_to_the_end(backup_shell)
    done = backup_shell.run("create", "night", *_BOTH, "--wait")
    assert done.code == 0
    assert_golden_text("cli/backup-create-wait", done.err + done.out)
    assert (done.err + done.out).replace("\n", "").isprintable()


def test_a_terminal_shows_the_volumes_in_place(backup_shell: BackupShell, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "110")
    terminal = FakeTerminal()
    monkeypatch.setattr(backup_commands, "Printer", partial(Printer, terminal, terminal))
    _run_to_the_end(backup_shell)
    assert backup_shell.run("create", "night", *_BOTH, "-w").code == 0
    shown = terminal.getvalue()
    assert "512.0 MiB / 1.0 GiB 50%   512.0 MiB/s   1s left" in re.sub("\x1b\\[[0-9;]*m", "", shown)
    assert "\\x1b[2J" in shown
    assert "\x1b[2J" not in shown


def test_a_volume_that_fails_ends_the_wait_with_its_cause(backup_shell: BackupShell) -> None:
    _run_to_the_end(backup_shell, "Failed", message="disk\nfull")
    done = backup_shell.run("create", "night", *_BOTH, "--wait", "-o", "json")
    assert done.code == 1
    assert json.loads(done.out)["phase"] == "PartiallyFailed"
    assert done.err.splitlines()[-1] == "error: backup night is PartiallyFailed: PVC app/files is Failed: disk full"


def _interrupt() -> NoReturn:
    raise KeyboardInterrupt


def test_an_interrupted_wait_ends_no_backup_and_says_how_to(backup_shell: BackupShell) -> None:
    backup_shell.scene.clock.steps = [_interrupt]
    done = backup_shell.run("create", "night", *_BOTH, "--wait")
    assert done.code == 130
    # click ends the line in which the terminal shows ^C.
    assert done.err.rstrip("\n").endswith(
        "note: the backup goes on: nodeagent backup describe night shows it, nodeagent backup cancel night ends it"
    )
    assert len(backup_shell.scene.made) == 3
    assert '"cancel": true' not in backup_shell.run("get", "-o", "json").out


def test_each_volume_that_is_rejected_is_named_also_if_the_wait_is_interrupted(backup_shell: BackupShell) -> None:
    names = [f"app/more-{number}" for number in range(5)]
    for name in names:
        backup_shell.scene.put_claim(name.removeprefix("app/"), "fast")
    backup_shell.scene.reject_after_check("/datauploads")
    backup_shell.scene.clock.steps = [_interrupt]
    words = [f"--pvc={name}" for name in names]
    for backup, more, code in (
        ("night", ["--pvc=app/files", "--wait"], 130),
        ("day", ["--pvc=app/files"], 1),
        ("all", [], 1),
    ):
        done = backup_shell.run("create", backup, *words, *more)
        assert done.code == code
        assert re.findall(r"note: PVC (\S+) is missing in the backup: .*quota\n", done.err) == names


def test_nothing_goes_on_after_an_interrupted_check(backup_shell: BackupShell, monkeypatch: pytest.MonkeyPatch) -> None:
    async def interrupt(*_: object) -> None:
        await asyncio.sleep(0)
        _interrupt()

    monkeypatch.setattr(backup_commands, "check_backup", interrupt)
    done = backup_shell.run("create", "night", *_BOTH)
    assert (done.code, backup_shell.scene.made) == (130, [])
    assert "goes on" not in done.err


@pytest.mark.parametrize("words", [["--pvc", "data", "-n", "app"], ["-n", "app", "-l", "!tier"]], ids=" ".join)
def test_claims_are_named_within_the_namespace_or_selected(backup_shell: BackupShell, words: list[str]) -> None:
    backup_shell.scene.put_claim("loose", "fast")
    done = backup_shell.run("create", "night", *words, "-o", "json")
    assert done.code == 0
    assert {one["claim"] for one in json.loads(done.out)["volumes"]} >= {"data"}
