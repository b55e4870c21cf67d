"""`nodeagent restore create --in-place`: options, the plan, the question, and what the answer leads to."""

import sys

import click
import pytest
from msgspec.structs import replace

from core.models.transfer_settings import InPlacePlan, PlannedEntries
from tests.client.support.commands import SceneShell, open_scene
from tests.client.support.in_place_scene import InPlaceScene
from tests.client.support.restore_scene import DATA
from tests.nodeagent.support.hand_clock import HandClock
from tests.support.golden import assert_golden_text

CREATE = ("restore", "create", "back", "--from-backup", "night", "--pvc", "app/data", "--in-place")
DIRECT = (*CREATE, "--no-snapshot")


_Shell = SceneShell[InPlaceScene]


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> _Shell:
    return open_scene(InPlaceScene(HandClock()), capsys, monkeypatch)


def answer(monkeypatch: pytest.MonkeyPatch, *, yes: bool) -> list[str]:
    asked: list[str] = []

    def confirm(text: str, **_: object) -> bool:
        asked.append(text)
        return yes

    monkeypatch.setattr(click, "confirm", confirm)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    return asked


def test_the_plan_is_shown_and_asked_for(shell: _Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answer(monkeypatch, yes=True)
    done = shell.run(*DIRECT, "--incremental", "--delete-extra-files")
    assert (done.code, asked) == (0, ["Restore into 1 existing volume?"])
    assert_golden_text("cli/restore-create-in-place", f"{done.out}---\n{done.err}")
    (transfer,) = shell.scene.downloads
    assert transfer["spec"]["targetVolume"]["pv"] == "pv-1"


PLAN = InPlacePlan(
    to_write=PlannedEntries(files=1200, bytes=5 << 30, directories=3, names=["a/one", "b", "c/two", "d"]),
    to_set=PlannedEntries(files=1, bytes=10, names=["secret"]),
    equal=PlannedEntries(files=34, bytes=1 << 20, names=["e"]),
    to_delete=PlannedEntries(files=2, bytes=12, directories=1, names=["extra", "old"]),
    kept=PlannedEntries(directories=1, names=["lost+found"]),
    blocked=PlannedEntries(files=1, names=["f (something else is there)"]),
)


def test_the_plan_of_a_volume_from_the_snapshot_is_shown(shell: _Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, yes=True)
    shell.scene.with_controllers(PLAN)
    done = shell.run(*CREATE, "--incremental")
    assert done.code == 0, done.err
    assert_golden_text("cli/restore-create-in-place-plan", f"{done.out}---\n{done.err}")
    assert len(shell.scene.downloads) == 1


def test_a_dry_run_ends_with_the_plan_also_for_programs(shell: _Shell) -> None:
    shell.scene.with_controllers(PLAN)
    before = (shell.scene.claims, shell.scene.volume)
    done = shell.run(*CREATE, "--dry-run", "--delete-extra-files", "-o", "json")
    assert done.code == 0, done.err
    assert_golden_text("cli/restore-create-in-place-plan-json", done.out)
    assert (shell.scene.claims, shell.scene.volume) == before
    assert (shell.scene.downloads, shell.scene.snapshots) == ([], [])


def test_a_block_volume_is_written_as_a_whole(shell: _Shell) -> None:
    shell.scene.make_block()
    shell.scene.put_upload(replace(DATA, volume_mode="Block"), "s1")
    shell.scene.with_controllers(PLAN)
    done = shell.run(*CREATE, "--dry-run")
    assert done.code == 0, done.err
    assert "app/data   write the whole device           7 B" in done.out


def test_nothing_happens_without_a_yes(shell: _Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, yes=False)
    before = (shell.scene.claims, shell.scene.volume)
    done = shell.run(*DIRECT)
    assert (done.code, "nothing was restored" in done.err) == (0, True)
    assert (shell.scene.claims, shell.scene.volume, shell.scene.downloads) == (*before, [])
    assert (shell.run(*DIRECT, "--yes", "-o", "json").code, len(shell.scene.downloads)) == (0, 1)


def test_a_used_volume_is_refused(shell: _Shell) -> None:
    shell.scene.put_pod()
    code, _, err = shell.run(*CREATE, "--yes")
    assert (code, shell.scene.downloads) == (1, [])
    assert "PVC app/data is used by pod app/db-0 of StatefulSet db: stop it first" in err
