"""`nodeagent backup delete`: its plan, its question, its errors and exit codes."""

import re
import sys
from dataclasses import dataclass, field

import pytest

from client.backups.deletion_report import BackupDeletion
from core.kube.resources import JOBS
from tests.client.support.commands import Done, SceneShell, assert_document, open_scene
from tests.client.support.deletion_scene import DeletionScene
from tests.support.golden import assert_golden_text


@dataclass
class _Shell(SceneShell[DeletionScene]):
    """Runs the command; without an `answer` there is no terminal, else it is what the user types."""

    monkeypatch: pytest.MonkeyPatch = field(kw_only=True)

    def run(self, *words: str, answer: str | None = None) -> Done:
        self.monkeypatch.setattr(sys.stdin, "isatty", lambda: answer is not None, raising=False)
        self.monkeypatch.setattr("click.termui.visible_prompt_func", lambda _: _answer(answer))
        return super().run(*words)


def _answer(answer: str | None) -> str:
    if not answer:
        raise EOFError
    return answer


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> _Shell:
    scene = DeletionScene()
    scene.put_backup("night", 9, "data", "gone")
    scene.put_backup("day", 1)
    opened = open_scene(scene, capsys, monkeypatch, "backup", "delete", clock=lambda: scene.clock)
    return _Shell(capsys, opened.begin, scene=scene, monkeypatch=monkeypatch)


def test_the_plan_is_shown_and_a_yes_deletes_the_backup(shell: _Shell) -> None:
    code, out, err = shell.run("night", answer="y")
    assert (code, err.splitlines()[0]) == (0, "checking the snapshots of backup night")
    assert_golden_text("cli/backup-delete", out)
    assert shell.scene.names() == {"day-data"}
    assert shell.scene.kube.bucket.keys() == {"s-day-data"}
    assert shell.scene.names(JOBS) == set()


def test_a_no_deletes_nothing(shell: _Shell) -> None:
    code, _, err = shell.run("night", answer="n")
    assert code == 0
    assert err.endswith("note: nothing was deleted\n")
    assert len(shell.scene.names()) == 3
    assert [one.dry_run for one in shell.scene.kube.ran] == [True]


def test_without_an_answer_nothing_is_deleted(shell: _Shell) -> None:
    assert shell.run("night") == (
        2,
        "",
        "error: backup delete asks a question, and there is no terminal: --yes skips it\n",
    )
    code, _, err = shell.run("night", answer="")
    assert code == 2
    assert err.endswith("error: nothing was deleted: there is no answer to the question (use --yes)\n")
    assert len(shell.scene.names()) == 3


def test_a_dry_run_deletes_nothing_and_asks_nothing(shell: _Shell) -> None:
    code, out, _ = shell.run("night", "--dry-run", "-o", "json")
    assert code == 0
    assert_document("backup-delete", BackupDeletion, out)
    assert len(shell.scene.names()) == 3


def test_expired_backups_are_deleted_as_a_schedule_would_or_so_many(shell: _Shell) -> None:
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


_NIGHT, _ANY = "backup night cannot be deleted", "nothing can be deleted in BackupStorageLocation default"


@pytest.mark.parametrize(
    ("words", "error"),
    [("night -y", _NIGHT), ("--expired -y", _ANY), ("--expired -y -o json", _ANY), ("--expired --dry-run", _ANY)],
)
def test_backups_that_cannot_be_checked_are_an_error(shell: _Shell, words: str, error: str) -> None:
    shell.scene.put_backup("n6", 6)
    shell.scene.kube.fail_next("POST", "/jobs", 403, times=9, message="denied")
    code, _, err = shell.run(*words.split())
    assert (code, len(shell.scene.names())) == (1, 4)
    assert re.search(rf"\nerror: {error}: create Job .*denied\n$", err)


def test_an_interrupted_deletion_is_finished_by_the_same_command(shell: _Shell) -> None:
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
