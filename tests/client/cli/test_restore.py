"""`nodeagent restore`, and `nodeagent backup get --from-storage-location`: output, errors and exit codes."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import pytest

from client.cli import collection_commands, restore
from client.collections.models import RestoreList
from client.restores.sources import StoredList
from core.kube.errors import UnreachableError
from core.kube.resources import DAEMON_SETS, POD_VOLUME_RESTORES
from core.models.base import JsonDict
from nodeagent.runtime import connection
from tests.client.support.commands import SceneShell, open_scene
from tests.client.support.restore_scene import DATA, FILES, RestoreScene
from tests.client.support.restore_scene import stored as snapshot
from tests.nodeagent.support.hand_clock import FreeClock, HandClock
from tests.support.golden import assert_golden, assert_golden_text


@dataclass
class _Shell(SceneShell[RestoreScene]):
    """Runs commands against the scene; `listed` is what the bucket holds."""

    listed: StoredList = field(default_factory=lambda: StoredList(location="default"))
    asked: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)

    def document(self, *words: str) -> JsonDict:
        done = self.run(*words, "-o", "json")
        assert done.code == 0, done.err
        found: JsonDict = json.loads(done.out)
        return found

    async def read(self, _: object, location: str, *, volume_namespaces: Sequence[str], timeout: object) -> StoredList:
        assert timeout
        self.asked.append((location, tuple(volume_namespaces)))
        return self.listed


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> _Shell:
    scene = RestoreScene(HandClock())
    (agents,) = scene.kube.objects(DAEMON_SETS)
    scene.kube.put(agents | {"status": {"numberReady": 1}})
    open_scene(scene, capsys, monkeypatch)
    monkeypatch.setattr(connection, "SystemClock", FreeClock)
    shell = _Shell(capsys, scene=scene)
    monkeypatch.setattr(collection_commands, "list_location", shell.read)
    return shell


def _fill(shell: _Shell) -> None:
    by = "snapshot-pod-volume"
    velero = snapshot(FILES, "s3", backup=None, backup_uid="6bc33b7d-f98e", cluster=None, requester=by)
    odd = snapshot(None, "s4", backup="\x1b[2J", cluster="uid-2", source="default@default:\u202ex")
    both = [snapshot(DATA, "s1", requester="snapshot-data-upload-download"), snapshot(FILES, "s2", described=False)]
    shell.listed = StoredList(location="default", snapshots=[velero, *both, odd], notes=["the repository of x: no"])


def test_what_a_bucket_holds_is_shown_for_each_cluster(shell: _Shell) -> None:
    words = ("backup", "get", "--from-storage-location", "default")
    done = shell.run(*words)
    assert (done.code, done.out) == (0, "")
    assert "there is no snapshot in BackupStorageLocation default" in done.err
    _fill(shell)
    done = shell.run(*words)
    assert done.code == 0
    assert_golden_text("cli/backup-get-stored", done.out)
    assert "note: the repository of x: no" in done.err
    assert_golden_text("cli/backup-get-stored-wide", shell.run(*words, "-o", "wide").out)
    found = shell.document(*words)
    assert [one["id"] for one in found["snapshots"]] == ["s3", "s1", "s2", "s4"]
    assert found["snapshots"][1]["claim"]["storageClass"] == "fast"


def test_the_backups_of_a_bucket_by_their_names(shell: _Shell) -> None:
    _fill(shell)
    found = shell.document("backup", "get", "6bc33b7d-f98e", "--from-storage-location", "default", "-n", "db")
    assert [one["id"] for one in found["snapshots"]] == ["s3"]
    assert shell.asked == [("default", ("db",))]
    done = shell.run("backup", "get", "nihgt", "--from-storage-location", "default")
    assert (done.code, "(did you mean night?)" in done.err) == (1, True)


def test_a_volume_of_velero_s_backup_that_cannot_be_read_is_named(shell: _Shell) -> None:
    for claim, phase in ((DATA, "Completed"), (FILES, "Newer")):
        raw = shell.scene.put_upload(claim, "s1", phase)
        shell.scene.kube.put(raw | {"metadata": raw["metadata"] | {"labels": {"velero.io/backup-name": "day"}}})
    done = shell.run("restore", "create", "back", "--from-backup", "day")
    assert "note: invalid DataUpload velero/night-files: status.phase" in done.err


def test_a_partial_creation_says_what_exists_and_how_to_go_on(shell: _Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(*_: object) -> None:
        """Find nothing, so that the rejection is that of the creation."""

    monkeypatch.setattr(restore, "check_restore", check)
    shell.scene.kube.fail_next("POST", "/datadownloads", 403, message="is forbidden")
    words = ("--from-backup", "night", "--pvc", "app/data", "--pvc", "db/files", "-o", "json")
    done = shell.run("restore", "create", *words)
    given = "--from-backup night --pvc app/data --pvc db/files --output json"
    assert "none was started, but its PVC exists" in done.err
    assert f"to continue: nodeagent restore create night-20261121120000 {given}" in done.err
    again = shell.run("restore", "create", "night-20261121120000", *words)
    assert (again.code, len(shell.scene.downloads)) == (0, 2), again.err
    assert "nothing was created" not in again.err


def test_a_restore_of_what_a_bucket_holds(shell: _Shell) -> None:
    _fill(shell)
    words = ("restore", "create", "back", "--from-snapshot", "s1", "--from-storage-location", "default")
    found = shell.document(*words, "--namespace-mappings", "app:trial", "--storage-class-mappings", "fast:late")
    assert [(one["namespace"], one["claim"]) for one in found["volumes"]] == [("trial", "data")]
    assert shell.scene.claims["trial/data"]["spec"]["storageClassName"] == "late"
    chosen = ("--from-backup", "night", "--from-storage-location", "default", "--pvc", "app/data")
    assert shell.run("restore", "create", "one", *chosen).code == 0
    assert shell.asked == [("default", ()), ("default", ("app",))]
    more = shell.run("restore", "create", "one", "--from-backup", "night")
    assert (more.code, len(shell.scene.downloads)) == (1, 2)
    assert "restore one exists already, and has 1 volumes instead of 2: choose another name" in more.err


def test_without_agents_nothing_is_created_and_without_a_ready_one_a_note_says_so(shell: _Shell) -> None:
    (agents,) = shell.scene.kube.objects(DAEMON_SETS)
    words = ("restore", "create", "back", "--from-backup", "night")
    shell.scene.kube.put(agents | {"status": {"numberReady": 0}})
    assert "note: DaemonSet velero/node-agent has no ready agent: transfers wait for one\n" in shell.run(*words).err
    shell.scene.kube.fail_next("GET", "/daemonsets/node-agent", 404)
    done = shell.run(*words[:2], "other", *words[3:])
    absent = "error: DaemonSet velero/node-agent does not exist: run nodeagent install, or set --agent-namespace\n"
    assert (done.code, done.err, len(shell.scene.downloads)) == (1, absent, 2)


def test_a_backup_that_is_damaged_or_shrunk_is_noted(shell: _Shell) -> None:
    marks = {
        "verification": '{"at":"2026-11-20T12:00:00Z","outcome":"failed"}',
        "shrunk": '{"bytes":1,"fullBytes":100}',
    }
    for claim, (mark, text) in zip((DATA, FILES), marks.items(), strict=True):
        raw = shell.scene.put_upload(claim, f"s-{claim.name}")
        raw["metadata"]["annotations"][f"nodeagent.io/{mark}"] = text
        shell.scene.kube.put(raw)
    done = shell.run("restore", "create", "back", "--from-backup", "night")
    assert done.code == 0
    assert "note: the backup of PVC app/data is in doubt: its last verification failed\n" in done.err
    assert "PVC db/files is in doubt: shrunk: the volume has 1 bytes, and had 100 bytes\n" in done.err


def test_a_velero_server_is_to_be_asked(shell: _Shell) -> None:
    meta = {"name": "velero", "namespace": "velero"}
    shell.scene.kube.put({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": meta, "spec": {}})
    words = ("restore", "create", "back", "--from-backup", "night")
    done = shell.run(*words)
    assert (done.code, shell.scene.claims) == (1, {})
    text = "ask it (velero restore create), and it also restores manifests and runs hooks; --ignore-velero-server"
    assert text in done.err
    assert shell.run(*words, "--ignore-velero-server").code == 0


def test_a_cancel_deletes_the_pods_that_wait(shell: _Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("create", "back", "--from-backup", "night", "-n", "app", "--method", "restore-wait")
    started = shell.run("restore", *words)
    (volume,) = shell.document("restore", *words)["volumes"]
    assert (volume["kind"], volume["namespace"], volume["claim"]) == ("PodVolumeRestore", "app", "data")
    (pod,) = shell.scene.pods
    assert pod["spec"]["initContainers"][0]["image"] == "mover:1"
    assert "nodeagent restore cancel back deletes its pods once it has ended" in started.err

    async def end(*_: object) -> None:
        (transfer,) = shell.scene.kube.objects(POD_VOLUME_RESTORES)
        shell.scene.kube.put(transfer | {"status": {"phase": "Canceled"}})

    monkeypatch.setattr(HandClock, "sleep", end)
    done = shell.run("restore", "cancel", "back")
    assert (done.code, "PodVolumeRestore/back-" in done.out, shell.scene.pods) == (0, True, [])


def test_where_its_transfers_vanish_it_fails_and_no_pod_stays(shell: _Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    async def vanish(*_: object) -> None:
        (transfer,) = shell.scene.kube.objects(POD_VOLUME_RESTORES)
        await shell.scene.client.delete(POD_VOLUME_RESTORES, "velero", transfer["metadata"]["name"])

    monkeypatch.setattr(HandClock, "sleep", vanish)
    words = ("create", "back", "--from-backup", "night", "-n", "app", "--method", "restore-wait", "--wait")
    done = shell.run("restore", *words)
    assert (done.code, shell.scene.pods) == (1, [])
    assert "error: restore back has no transfer in namespace velero any more: they were deleted" in done.err


def test_a_cluster_that_is_lost_while_creating_is_exit_code_2(shell: _Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(_: object) -> None:
        raise UnreachableError("no answer", status=0)

    async def lose(*_: object) -> None:
        monkeypatch.setattr(shell.scene.kube, "request", refuse)

    async def repeat(*_: object) -> None:
        """Retries are not waited for."""

    monkeypatch.setattr(HandClock, "sleep", repeat)
    monkeypatch.setattr(restore, "check_restore", lose)
    done = shell.run("restore", "create", "back", "--from-backup", "night")
    assert done.code == 2, done.err
    assert "error: the cluster cannot be reached: PVC app/data is not restored: " in done.err


_PARTIAL = "the target did not take the owner of 2 of the entries: a; b"


@pytest.mark.parametrize(
    ("phase", "message", "ended", "error", "code"),
    [
        ("Completed", "", "Completed: 2/2 volumes, 7 B\n", "", 0),
        ("Completed", _PARTIAL, "Completed: 2/2 volumes, 7 B\n", f"error: PVC db/files is restored, but {_PARTIAL}", 3),
        ("Failed", "no\x1b[2J", "PartiallyFailed: 1/2", "back is PartiallyFailed: PVC db/files is Failed: no", 1),
    ],
    ids=["all is as it was", "a volume without its owners", "a volume that failed"],
)
def test_waiting_tells_how_it_ended_by_the_exit_code(
    shell: _Shell, monkeypatch: pytest.MonkeyPatch, phase: str, message: str, ended: str, error: str, code: int
) -> None:
    async def sleep(*_: object) -> None:
        shell.scene.move("data", "Completed", progress={"totalBytes": 7, "bytesDone": 7})
        shell.scene.move("files", phase, message=message)

    monkeypatch.setattr(HandClock, "sleep", sleep)
    done = shell.run("restore", "create", "back", "--from-backup", "night", "--wait")
    assert (done.code, done.out.startswith(f"restore back is {ended}")) == (code, True), done.out
    assert "app/data Completed 7 B / 7 B 100%" in done.err
    assert (error in done.err, "error: " in done.err) == (True, bool(error))
    assert "\x1b" not in done.out + done.err


def test_ctrl_c_says_how_the_pods_that_wait_are_deleted(shell: _Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    async def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(HandClock, "sleep", interrupt)
    words = ("create", "back", "--from-backup", "night", "-n", "app", "--method", "restore-wait", "--wait")
    done = shell.run("restore", *words)
    assert (done.code, len(shell.scene.pods)) == (130, 1)
    assert "nodeagent restore cancel back ends it and deletes its pods, also once it has ended" in done.err


@pytest.mark.parametrize("model", [RestoreList, StoredList])
def test_programs_get_documents_of_the_schema(model: type[RestoreList] | type[StoredList]) -> None:
    schema = json.loads(json.dumps(msgspec.json.schema(model)))
    assert_golden(f"cli/{model.__name__.lower()}-schema", schema)


def test_get_describe_and_cancel(shell: _Shell) -> None:
    assert shell.run("restore", "create", "back", "--from-backup", "night").code == 0
    shell.scene.move("data", "Completed", progress={"totalBytes": 7, "bytesDone": 7})
    shell.scene.move("files", "InProgress", message="waiting\x1b[2J", progress={"totalBytes": 3})
    assert_golden_text("cli/restore-get", shell.run("restore", "get").out)
    assert_golden_text("cli/restore-describe", shell.run("restore", "describe", "back").out)
    assert shell.document("restore", "describe", "back")["phase"] == "InProgress"
    done = shell.run("restore", "cancel", "back")
    assert (done.code, "db/files" in done.out, "app/data" in done.out) == (0, True, False)
    shell.scene.move("files", "Canceled")
    assert "has ended already: nothing to cancel" in shell.run("restore", "cancel", "back").err
    missing = shell.run("restore", "describe", "bakc")
    assert (missing.code, "(did you mean back?)" in missing.err) == (1, True)
