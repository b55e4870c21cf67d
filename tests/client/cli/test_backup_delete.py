"""`nodeagent backup delete`: its plan, its question, its errors and exit codes."""

import json
import re
import sys
from dataclasses import dataclass, field

import msgspec
import pytest

from client import session
from client.backups.deletion_report import BackupDeletion
from core.kube.resources import JOBS
from tests.client.support import commands
from tests.client.support.deletion_scene import DeletionScene
from tests.support.golden import assert_golden, assert_golden_text


@dataclass
class Shell(commands.Shell):
    """Runs the command; without an `answer` there is no terminal, else it is what the user types."""

    monkeypatch: pytest.MonkeyPatch
    scene: DeletionScene = field(default_factory=DeletionScene)

    def run(self, *words: str, answer: str | None = None) -> commands.Done:
        self.monkeypatch.setattr(sys.stdin, "isatty", lambda: answer is not None, raising=False)
        self.monkeypatch.setattr("click.termui.visible_prompt_func", lambda _: _answer(answer))
        return super().run("backup", "delete", *words)


def _answer(answer: str | None) -> str:
    if not answer:
        raise EOFError
    return answer


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    shell = Shell(capsys, monkeypatch)
    commands.reach(lambda: shell.scene.kube, monkeypatch)
    monkeypatch.setattr(session, "SystemClock", lambda: shell.scene.clock)
    shell.scene.put_backup("night", 9, "data", "gone")
    shell.scene.put_backup("day", 1)
    return shell


def test_the_plan_is_shown_and_a_yes_deletes_the_backup(shell: Shell) -> None:
    code, out, err = shell.run("night", answer="y")
    assert (code, err.splitlines()[0]) == (0, "checking the snapshots of backup night")
    assert_golden_text("cli/backup-delete", out)
    assert shell.scene.names() == {"day-data"}
    assert shell.scene.kube.bucket.keys() == {"s-day-data"}
    assert shell.scene.names(JOBS) == set()


def test_a_no_deletes_nothing(shell: Shell) -> None:
    code, _, err = shell.run("night", answer="n")
    assert code == 0
    assert err.endswith("note: nothing was deleted\n")
    assert len(shell.scene.names()) == 3
    assert [one.dry_run for one in shell.scene.kube.ran] == [True]


def test_without_an_answer_nothing_is_deleted(shell: Shell) -> None:
    assert shell.run("night") == (
        *(2, ""),
        "error: backup delete asks a question, and there is no terminal: --yes skips it\n",
    )
    code, _, err = shell.run("night", answer="")
    assert code == 2
    assert err.endswith("error: nothing was deleted: there is no answer to the question (use --yes)\n")
    assert len(shell.scene.names()) == 3


def test_a_dry_run_deletes_nothing_and_asks_nothing(shell: Shell) -> None:
    code, out, _ = shell.run("night", "--dry-run", "-o", "json")
    assert code == 0
    assert_golden("cli/backup-delete-schema", json.loads(json.dumps(msgspec.json.schema(BackupDeletion))))
    assert_golden("cli/backup-delete", json.loads(out))
    assert len(shell.scene.names()) == 3


def test_expired_backups_are_deleted_as_a_schedule_would_or_so_many(shell: Shell) -> None:
    for day in range(6, 2, -1):
        shell.scene.put_backup(f"n{day}", day)
    code, out, _ = shell.run("--expired", "--dry-run")
    assert (code, [line for line in out.splitlines() if line.startswith("Backup")]) == (0, ["Backup n6:", "Backup n5:"])
    code, out, err = shell.run("--expired", "--at-most", "3", answer="y")
    assert (code, out.splitlines()[-1]) == (0, "3 expired backups were deleted, with 3 snapshots")
    assert "note: backup night is expired, and kept: it has the only copy of app/gone in default" in err
    assert shell.scene.names() == {"night-data", "night-gone", "n3-data", "day-data"}
    code, _, err = shell.run("--expired", "-y")
    assert (code, err.splitlines()[-1]) == (0, "note: there is nothing to delete")


@pytest.mark.parametrize("words", [("--yes",), ("--yes", "-o", "json"), ("--dry-run",)], ids=" ".join)
def test_expired_backups_that_cannot_be_checked_are_an_error(shell: Shell, words: tuple[str, ...]) -> None:
    shell.scene.put_backup("n6", 6)
    shell.scene.kube.fail_next("POST", "/jobs", 403, times=9, message="denied")
    code, _, err = shell.run("--expired", *words)
    assert (code, "n6-data" in shell.scene.names()) == (1, True)
    assert re.search(r"\nerror: nothing can be deleted in BackupStorageLocation default: create Job .*denied\n$", err)


def test_programs_get_what_was_deleted(shell: Shell) -> None:
    code, out, _ = shell.run("night", "--yes", "-o", "json")
    deletion = BackupDeletion.from_json(out)
    assert (code, deletion.done, [one.name for one in deletion.backups]) == (0, True, ["night"])
    assert sum(one.snapshots for one in deletion.backups[0].volumes) == 2


def test_an_interrupted_deletion_is_finished_by_the_same_command(shell: Shell) -> None:
    shell.scene.kube.failure = "object is locked until 2027 (object lock)"
    code, out, err = shell.run("night", "--confirm")
    assert code == 1
    assert "was deleted" not in out
    assert re.search(
        r"error: snapshots were not deleted, repeat the command to delete them: Pod .* of the deletion failed: .*lock",
        err,
    )
    assert shell.scene.names() == {"day-data"}
    shell.scene.kube.failure = ""
    code, out, err = shell.run("night", "--confirm")
    assert (code, out) == (0, "backup night was deleted, with 2 snapshots\n")
    assert "note: snapshots of 2 transfers are left of a deletion that was interrupted\n" in err
    assert shell.scene.kube.bucket.keys() == {"s-day-data"}


def test_a_missing_permission_is_one_line(shell: Shell) -> None:
    shell.scene.kube.fail_next("POST", "/jobs", 403, times=9, message="eve cannot create jobs in velero")
    code, out, err = shell.run("night", "--confirm")
    assert (code, out) == (1, "")
    assert re.fullmatch(
        r"error: backup night cannot be deleted: create Job .*eve cannot create jobs.*", err.splitlines()[-1]
    )
    assert len(shell.scene.names()) == 3
