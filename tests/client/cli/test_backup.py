"""`nodeagent backup get`, `describe`, `cancel` and `acknowledge`: what they print, their errors and exit codes."""

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from email.utils import format_datetime
from functools import partial
from typing import NoReturn

import pytest

from client.cli import backup as backup_commands
from client.cli.output import Printer
from client.collections.models import BackupList
from core.kube.errors import UnreachableError
from core.kube.resources import DATA_UPLOADS
from core.kube.transport import Request, Response
from core.models.backups import Shrinkage
from tests.client.support.backup_scene import BackupScene
from tests.client.support.commands import FakeTerminal, SceneShell, assert_document, open_scene
from tests.support.golden import assert_golden_text

_Shell = SceneShell[BackupScene]


@pytest.fixture
def empty(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> _Shell:
    """A shell in which no backup exists."""
    scene = BackupScene()
    return open_scene(scene, capsys, monkeypatch, "backup", clock=lambda: scene.clock)


@pytest.fixture
def shell(empty: _Shell) -> _Shell:
    """A shell in which two backups exist: one of three volumes that runs, and a completed one of Velero's."""
    shell = empty
    assert shell.run("create", "night", "--pvc=app/data", "--pvc=app/files", "--ttl=24h").code == 0
    shell.scene.move("data", "Completed", snapshotID="k1", progress={"totalBytes": 2**30, "bytesDone": 2**30})
    shell.scene.move("files", "Accepted", reason="Queued", message="position 3\x1b[2J of 7")
    (raw,) = shell.scene.kube.objects(DATA_UPLOADS)
    labels = {"velero.io/backup-name": "weekly"}
    meta = {"name": "weekly-x", "namespace": "velero", "labels": labels, "creationTimestamp": "2026-11-20T12:00:00Z"}
    status = {"phase": "Completed", "completionTimestamp": "2026-11-20T12:10:00Z"}
    shell.scene.kube.put(raw | {"metadata": meta, "status": status})
    shell.scene.clock.seconds = 600
    return shell


def test_get_prints_a_row_for_each_backup(shell: _Shell) -> None:
    done = shell.run("get")
    assert (done.code, done.err) == (0, "")
    assert_golden_text("cli/backup-get", done.out)
    assert_golden_text("cli/backup-get-wide", shell.run("get", "-o", "wide").out)


def test_get_shows_those_of_a_namespace_or_a_name(shell: _Shell) -> None:
    no_backup = "note: there is no backup with volumes of namespace other in namespace velero\n"
    assert shell.run("get", "-n", "other").err == no_backup
    assert shell.run("get", "-n", "app").out == shell.run("get").out
    assert "night" not in shell.run("get", "weekly").out


def test_describe_prints_each_volume_and_what_it_waits_for(shell: _Shell) -> None:
    done = shell.run("describe", "night")
    assert (done.code, done.err) == (0, "")
    assert_golden_text("cli/backup-describe", done.out)
    assert done.out.replace("\n", "").isprintable()


def test_a_backup_that_its_schedule_keeps_has_no_time_to_expire(shell: _Shell) -> None:
    for raw in shell.scene.kube.objects(DATA_UPLOADS):
        raw["metadata"].setdefault("annotations", {})["nodeagent.io/backup-keep"] = "daily=7,zone=UTC"
        raw["metadata"]["annotations"].pop("nodeagent.io/backup-ttl", None)
        shell.scene.kube.put(raw)
    assert shell.run("get", "night").out.splitlines()[1].endswith("by schedule")
    assert re.search(r"Expires: +by its schedule: daily=7,zone=UTC\n", shell.run("describe", "night").out)


def test_programs_get_documents_of_the_schema(shell: _Shell) -> None:
    found = shell.run("get", "-o", "json").out
    assert_document("backup-get", BackupList, found)
    described = shell.run("describe", "night", "-o", "json").out
    assert json.loads(described) == json.loads(found)["backups"][0]


def test_a_backup_of_velero_with_the_same_name_is_a_note(shell: _Shell) -> None:
    raw = next(one for one in shell.scene.kube.objects(DATA_UPLOADS) if one["metadata"]["name"] == "weekly-x")
    raw["metadata"]["labels"] = {"velero.io/backup-name": "night"}
    shell.scene.kube.put(raw)
    done = shell.run("describe", "night")
    assert "nodeagent backup create" in done.out
    assert done.err == "note: velero has another backup of this name\n"


def test_cancel_names_what_it_cannot_end(shell: _Shell) -> None:
    shell.scene.move("data", "InProgress")
    shell.scene.kube.fail_next("PATCH", "/datauploads/", 403, message="denied")
    done = shell.run("cancel", "night")
    assert (done.code, "app/files" in done.out) == (1, True)
    assert re.search(
        r"\nerror: not all volumes are canceled in backup night, 1 are not: PVC app/data: .*denied\n", done.err
    )
    shell.scene.move("data", "Odd")
    shell.scene.move("files", "Completed")
    done = shell.run("cancel", "night")
    assert (done.code, "nothing to cancel" in done.err) == (1, False)
    assert "1 are not: invalid DataUpload velero/" in done.err


def test_acknowledge_names_the_volumes_that_are_shrunk_and_records_it_once(shell: _Shell) -> None:
    shrunk = {"nodeagent.io/shrunk": '{"bytes":1,"fullBytes":100}'}
    for raw in shell.scene.kube.objects(DATA_UPLOADS):
        meta = raw["metadata"]
        shell.scene.kube.put(raw | {"metadata": meta | {"annotations": (meta.get("annotations") or {}) | shrunk}})
    for name, count in (("night", 1), ("weekly", 1)):
        done = shell.run("acknowledge", name)
        assert (done.code, done.out.count("app/data")) == (0, count)
        assert done.err == "note: acknowledged: older copies of it expire as usual\n"
        again = f"note: no volume of backup {name} is Shrunk: nothing to acknowledge\n"
        assert shell.run("acknowledge", name).err == again
    for raw in shell.scene.kube.objects(DATA_UPLOADS):
        found = Shrinkage.from_annotations(raw["metadata"]["annotations"])
        assert found is not None
        assert found.acknowledged is not None
        assert found == Shrinkage(bytes=1, full_bytes=100, acknowledged=found.acknowledged)


def test_a_transfer_that_cannot_be_read_is_a_note_and_counted(shell: _Shell) -> None:
    (raw,) = [one for one in shell.scene.kube.objects(DATA_UPLOADS) if one["metadata"]["name"] == "weekly-x"]
    meta = raw["metadata"] | {"name": "odd", "uid": "9"}
    shell.scene.kube.put(raw | {"metadata": meta, "status": {"phase": "Odd\x1b[2J"}})
    done = shell.run("describe", "weekly", "-o", "json")
    assert (json.loads(done.out)["phase"], json.loads(done.out)["unreadable"]) == ("Incomplete", 1)
    assert done.err.startswith("note: invalid DataUpload velero/odd: ")
    assert "1 transfers cannot be read" in shell.run("describe", "weekly").out
    assert (shell.run("get").code, shell.run("get").err) == (0, done.err)


_BOTH = ("--pvc=app/data", "--pvc=app/files")


def _run_to_the_end(shell: _Shell, last: str = "Completed", **status: str) -> None:
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


def test_a_command_that_is_shown_has_the_flags_of_the_cluster(empty: _Shell) -> None:
    flags = ("--kubecontext", "blue", "--kubeconfig", "/my config")
    done = empty.run("create", "night", *_BOTH, *flags)
    more = "--kubecontext blue --kubeconfig '/my config'"
    assert f"nodeagent backup describe night {more} shows it" in done.err
    assert f"nodeagent backup describe night {more} shows how" in empty.run("cancel", "night", *flags).err


def test_a_wait_prints_a_line_for_each_change_where_no_terminal_is(empty: _Shell) -> None:
    _run_to_the_end(empty)
    done = empty.run("create", "night", *_BOTH, "--wait")
    assert done.code == 0
    assert_golden_text("cli/backup-create-wait", done.err + done.out)
    assert (done.err + done.out).replace("\n", "").isprintable()


def test_a_terminal_shows_the_volumes_in_place(empty: _Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "110")
    terminal = FakeTerminal()
    monkeypatch.setattr(backup_commands, "Printer", partial(Printer, terminal, terminal))
    _run_to_the_end(empty)
    assert empty.run("create", "night", *_BOTH, "-w").code == 0
    shown = terminal.getvalue()
    assert "512.0 MiB / 1.0 GiB 50%   512.0 MiB/s   1s left" in re.sub("\x1b\\[[0-9;]*m", "", shown)
    assert "\\x1b[2J" in shown
    assert "\x1b[2J" not in shown


def test_a_volume_that_fails_ends_the_wait_with_its_cause(empty: _Shell) -> None:
    _run_to_the_end(empty, "Failed", message="disk\nfull")
    done = empty.run("create", "night", *_BOTH, "--wait", "-o", "json")
    assert done.code == 1
    assert json.loads(done.out)["phase"] == "PartiallyFailed"
    assert done.err.splitlines()[-1] == "error: backup night is PartiallyFailed: PVC app/files is Failed: disk full"


def _interrupt() -> NoReturn:
    raise KeyboardInterrupt


def _lose() -> NoReturn:
    raise UnreachableError("no answer", status=0)


@pytest.mark.parametrize(("end", "code"), [(_interrupt, 130), (_lose, 2)])
def test_a_wait_that_ends_early_ends_no_backup_and_says_how_to(
    end: Callable[[], None], code: int, empty: _Shell
) -> None:
    empty.scene.clock.steps = [end]
    done = empty.run("create", "night", *_BOTH, "--wait")
    assert done.code == code
    assert (
        "note: the backup goes on: nodeagent backup describe night shows it, nodeagent backup cancel night ends it\n"
    ) in done.err
    assert len(empty.scene.made) == 3
    assert '"cancel": true' not in empty.run("get", "-o", "json").out


def test_each_volume_that_is_rejected_is_named_also_if_the_wait_is_interrupted(empty: _Shell) -> None:
    names = [f"app/more-{number}" for number in range(5)]
    for name in names:
        empty.scene.put_claim(name.removeprefix("app/"), "fast")
    empty.scene.reject_after_check("/datauploads")
    empty.scene.clock.steps = [_interrupt]
    words = [f"--pvc={name}" for name in names]
    more = ["--pvc=app/files"]
    for backup, extra, code in (("night", [*more, "--wait"], 130), ("day", more, 1), ("all", [], 1)):
        done = empty.run("create", backup, *words, *extra)
        assert done.code == code
        assert re.findall(r"note: PVC (\S+) is missing in the backup: .*quota\n", done.err) == names


def test_nothing_goes_on_after_an_interrupted_check(empty: _Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    async def interrupt(*_: object) -> None:
        await asyncio.sleep(0)
        _interrupt()

    monkeypatch.setattr(backup_commands, "check_backup", interrupt)
    done = empty.run("create", "night", *_BOTH)
    assert (done.code, empty.scene.made) == (130, [])
    assert "goes on" not in done.err


@pytest.mark.parametrize("words", [["--pvc", "data", "-n", "app"], ["-n", "app", "-l", "!tier"]], ids=" ".join)
def test_claims_are_named_within_the_namespace_or_selected(empty: _Shell, words: list[str]) -> None:
    empty.scene.put_claim("loose", "fast")
    done = empty.run("create", "night", *words, "-o", "json")
    assert done.code == 0
    assert {one["claim"] for one in json.loads(done.out)["volumes"]} >= {"data"}


def test_ages_and_ends_are_by_the_clock_of_the_api_server(shell: _Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = [shell.run("get").out, shell.run("describe", "night").out]
    kube, clock = shell.scene.kube, shell.scene.clock
    answer, date = kube.request, format_datetime(clock.now(), usegmt=True)

    async def dated(request: Request) -> Response:
        return replace(await answer(request), date=date)

    monkeypatch.setattr(kube, "request", dated)
    clock.skew = timedelta(hours=3)
    assert [shell.run("get").out, shell.run("describe", "night").out] == shown
