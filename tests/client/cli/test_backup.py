"""`nodeagent backup get`, `describe`, `cancel` and `acknowledge`: what they print, their errors and exit codes."""

import json
import re

import msgspec
import pytest

from client.collections.models import BackupList
from core.kube.resources import DATA_UPLOADS
from core.models.backups import Shrinkage
from tests.client.cli.backup_shell import BackupShell, backup_shell
from tests.support.golden import assert_golden, assert_golden_text

__all__ = ["backup_shell"]


@pytest.fixture
def shell(backup_shell: BackupShell) -> BackupShell:
    """A shell in which two backups exist: one of three volumes that runs, and a completed one of Velero's."""
    shell = backup_shell
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


def test_get_prints_a_row_for_each_backup(shell: BackupShell) -> None:
    done = shell.run("get")
    assert (done.code, done.err) == (0, "")
    assert_golden_text("cli/backup-get", done.out)
    assert_golden_text("cli/backup-get-wide", shell.run("get", "-o", "wide").out)


def test_get_shows_those_of_a_namespace_or_a_name(shell: BackupShell) -> None:
    assert shell.run("get", "-n", "other").err == "note: there is no backup in namespace velero\n"
    assert shell.run("get", "-n", "app").out == shell.run("get").out
    assert "night" not in shell.run("get", "weekly").out


def test_describe_prints_each_volume_and_what_it_waits_for(shell: BackupShell) -> None:
    done = shell.run("describe", "night")
    assert (done.code, done.err) == (0, "")
    assert_golden_text("cli/backup-describe", done.out)
    assert done.out.replace("\n", "").isprintable()


def test_a_backup_that_its_schedule_keeps_has_no_time_to_expire(shell: BackupShell) -> None:
    for raw in shell.scene.kube.objects(DATA_UPLOADS):
        raw["metadata"].setdefault("annotations", {})["nodeagent.io/backup-keep"] = "daily=7,zone=UTC"
        raw["metadata"]["annotations"].pop("nodeagent.io/backup-ttl", None)
        shell.scene.kube.put(raw)
    assert shell.run("get", "night").out.splitlines()[1].endswith("by schedule")
    assert re.search(r"Expires: +by its schedule: daily=7,zone=UTC\n", shell.run("describe", "night").out)


def test_programs_get_documents_of_the_schema(shell: BackupShell) -> None:
    found = shell.run("get", "-o", "json").out
    assert_golden("cli/backup-schema", json.loads(json.dumps(msgspec.json.schema(BackupList))))
    assert json.loads(BackupList.from_json(found).to_json()) == json.loads(found)
    assert_golden("cli/backup-get", json.loads(found))
    described = shell.run("describe", "night", "-o", "json").out
    assert json.loads(described) == json.loads(found)["backups"][0]


def test_a_backup_of_velero_with_the_same_name_is_a_note(shell: BackupShell) -> None:
    raw = next(one for one in shell.scene.kube.objects(DATA_UPLOADS) if one["metadata"]["name"] == "weekly-x")
    raw["metadata"]["labels"] = {"velero.io/backup-name": "night"}
    shell.scene.kube.put(raw)
    done = shell.run("describe", "night")
    assert "nodeagent backup create" in done.out
    assert done.err == "note: velero has another backup of this name\n"


def test_cancel_names_what_it_cannot_end(shell: BackupShell) -> None:
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


def test_acknowledge_names_the_volumes_that_are_shrunk_and_records_it_once(shell: BackupShell) -> None:
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


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["describe", "\x1b[2J"], r"there is no backup \\x1b\[2J in namespace velero"),
        (["cancel", "weekly"], "backup weekly is Velero's: use the command velero backup for it"),
    ],
    ids=["no such name", "of Velero"],
)
def test_an_error_is_one_line_with_an_exit_code(shell: BackupShell, words: list[str], error: str) -> None:
    done = shell.run(*words)
    assert (done.code, done.out) == (1, "")
    assert re.fullmatch(rf"error: .*{error}.*\n", done.err)


def test_an_unreadable_transfer_is_a_note(shell: BackupShell) -> None:
    (raw, *_) = shell.scene.kube.objects(DATA_UPLOADS)
    shell.scene.kube.put(raw | {"status": {"phase": "Odd\x1b[2J"}})
    done = shell.run("get")
    assert done.code == 0
    assert re.match(r"note: .*invalid DataUpload velero/", done.err)


def test_a_document_of_one_backup_comes_with_notes_about_what_cannot_be_read(shell: BackupShell) -> None:
    (raw,) = [one for one in shell.scene.kube.objects(DATA_UPLOADS) if one["metadata"]["name"] == "weekly-x"]
    shell.scene.kube.put(raw | {"metadata": raw["metadata"] | {"name": "odd", "uid": "9"}, "status": {"phase": "Odd"}})
    done = shell.run("describe", "weekly", "-o", "json")
    assert (json.loads(done.out)["phase"], json.loads(done.out)["unreadable"]) == ("Incomplete", 1)
    assert done.err.startswith("note: invalid DataUpload velero/odd: ")
    assert "1 transfers cannot be read" in shell.run("describe", "weekly").out
