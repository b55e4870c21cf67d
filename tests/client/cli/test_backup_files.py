"""`nodeagent backup ls` and `cp`: what they print and leave, their errors and exit codes."""

import json
import re
import tarfile
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from client import session
from client.backups import files
from client.backups.files import FileList
from core.clock import SystemClock
from core.kube.errors import UnreachableError
from core.kube.resources import BACKUP_STORAGE_LOCATIONS, DATA_UPLOADS, JOBS, POD_VOLUME_BACKUPS, PODS
from core.models.names import BLOCK_DATA_MOVER, CLAIM_ANNOTATION
from core.snapshot_contract import ENTRY_LINE, FileEntry, FileListing, FileType
from nodeagent.runtime import connection
from nodeagent.runtime.connection import ERRORS
from tests.client.support.backup_scene import BackupScene
from tests.client.support.commands import SceneShell, assert_document, open_scene
from tests.client.support.files_scene import DIRECTORY, SUCCESS, FilesKube, pack
from tests.support.golden import assert_golden_text
from tests.support.job_output import seal

_Shell = SceneShell[BackupScene]

_NIGHT = "2026-11-20T12:00:0"
_ENTRIES = (
    FileEntry(name="evil\x1b[2J\nname", type=FileType.FILE, mode="0644", user_id=1000, group_id=50, size_bytes=2048),
    FileEntry(name="etc", type=FileType.DIRECTORY, mode="0755", size_bytes=2**30, files=7, modified=f"{_NIGHT}1.5Z"),
    FileEntry(name="link", type=FileType.LINK, mode="0777", size_bytes=4, modified=f"{_NIGHT}0Z"),
)

_PIECES = 30
"""Messages with the tar of a file of 9000 bytes, which tarfile fills up."""


@pytest.fixture
def kube() -> FilesKube:
    return FilesKube()


@pytest.fixture
def shell(
    capsys: pytest.CaptureFixture[str], kube: FilesKube, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> _Shell:
    """A shell in which a backup of two volumes exists, one of which has failed."""
    scene = BackupScene()
    shell = open_scene(scene, capsys, monkeypatch, "backup", clock=lambda: scene.clock)
    assert shell.run("create", "night", "--pvc=app/data", "--pvc=app/files").code == 0
    scene.move("data", "Completed", snapshotID="k1", progress={"totalBytes": 2**30, "bytesDone": 2**30})
    scene.move("files", "Failed", message="disk\x1b[2J full")
    for resource in (BACKUP_STORAGE_LOCATIONS, DATA_UPLOADS, POD_VOLUME_BACKUPS):
        for one in scene.kube.objects(resource):
            kube.put(one)
    scene.kube = kube
    serve = {"name": "a", "image": "mover:1", "command": ["python", "-m", "nodeagent"], "args": ["serve"]}
    scene.put("DaemonSet", "node-agent", "apps/v1", spec={"template": {"spec": {"containers": [serve]}}})
    monkeypatch.chdir(tmp_path)
    for module in (session, connection):
        monkeypatch.setattr(module, "SystemClock", SystemClock)
    return shell


def _args(kube: FilesKube) -> list[str]:
    """Return the arguments of the last Job that was created."""
    *_, created = (one for one in kube.requests if one.method == "POST" and one.path.endswith("/jobs"))
    (container,) = json.loads(created.body or b"")["spec"]["template"]["spec"]["containers"]
    return list(container["args"])


def _listing(kube: FilesKube, *entries: FileEntry, total: int = 0) -> None:
    result = FileListing(type=FileType.DIRECTORY, entries=total or len(entries), listed=len(entries))
    lines = ["time=1 level=info msg=begin", *map(ENTRY_LINE.format, entries)]
    kube.end(0, seal(result, *lines), *lines)


def test_ls_lists_a_directory_with_escaped_names(shell: _Shell, kube: FilesKube) -> None:
    _listing(kube, *_ENTRIES)
    done = shell.run("ls", "night", "app/data/sub $(X)/deep")
    assert (done.code, kube.objects(JOBS)) == (0, [])
    assert_golden_text("cli/backup-ls", done.out)
    assert done.out.replace("\n", "").isprintable()
    assert _args(kube)[:2] == ["list-files", "--backup-storage-location=default"]
    path = "--path=sub%20%24%28X%29/deep"
    assert _args(kube)[-4:] == ["--volume-namespace=app", "--snapshot=k1", path, "--limit=5000"]
    assert_golden_text("cli/backup-ls-wide", shell.run("ls", "night", "data", "-o", "wide").out)


def test_programs_get_documents_of_the_schema(shell: _Shell, kube: FilesKube) -> None:
    _listing(kube, *_ENTRIES)
    assert_document("backup-ls", FileList, shell.run("ls", "night", "data", "-o", "json").out)
    assert json.loads(shell.run("ls", "night", "-o", "json").out)["name"] == "night"


def test_a_list_that_is_cut_or_empty_says_so(shell: _Shell, kube: FilesKube) -> None:
    _listing(kube, _ENTRIES[0], total=9000)
    done = shell.run("ls", "night", "data", "--limit=1", "--after=a b")
    assert "note: 8999 more entries are not shown: --after continues behind the last name" in done.err
    assert "--after=a%20b" in _args(kube)
    _listing(kube)
    assert "note: app/data is empty" in shell.run("ls", "night", "data").err


@pytest.mark.parametrize("mode", ["0899", "-1", "x", "77777777"])
def test_a_mode_that_is_none_is_shown_as_no_permissions(shell: _Shell, kube: FilesKube, mode: str) -> None:
    line = ENTRY_LINE.format(FileEntry(name="name", type=FileType.FILE)).replace('"type"', f'"mode":"{mode}","type"')
    kube.end(0, seal(FileListing(type=FileType.DIRECTORY, entries=1, listed=1), line), line)
    done = shell.run("ls", "night", "data")
    assert (done.code, done.out.splitlines()[1].split()[0]) == (0, "----------")


@pytest.mark.parametrize(
    ("words", "code", "error"),
    [
        (["ls", "night", "files"], 1, r"of PVC app/files is Failed: disk\\x1b\[2J full: it has no files"),
        (["ls", "night", "data/\udcff"], 2, r'"data/\\udcff" is not UTF-8: kopia keeps U\+FFFD'),
        (["ls", "night", "data", "--after=\udcff"], 2, r'"\\udcff" is not UTF-8: kopia keeps U\+FFFD'),
        (["cp", "night:data/\udcff", "x"], 2, r'"data/\\udcff" is not UTF-8: kopia keeps U\+FFFD'),
    ],
    ids=lambda value: ascii(" ".join(value)) if isinstance(value, list) else "",
)
def test_an_error_is_one_line_with_an_exit_code(shell: _Shell, words: list[str], code: int, error: str) -> None:
    done = shell.run(*words)
    assert (done.code, done.out) == (code, "")
    assert re.search(rf"error: .*{error}.*\n\Z", done.err)


def test_a_path_that_does_not_exist_is_the_movers_message(shell: _Shell, kube: FilesKube) -> None:
    kube.end(10, "the snapshot has no ect (did you mean etc?)")
    for words in (["ls", "night", "data/ect"], ["cp", "night:data/ect", "x"]):
        done = shell.run(*words)
        assert done.code == 1
        assert "the snapshot has no ect (did you mean etc?)" in done.err
        assert kube.objects(JOBS) == []


def test_cp_copies_a_directory(shell: _Shell, kube: FilesKube) -> None:
    kube.send(DIRECTORY, pack(sub=b"", sub_file=b"one" * 1000, top=b"two"))
    done = shell.run("cp", "night:app/data/etc", ".")
    assert (done.code, done.out) == (0, "copied 2 files, 2.9 KiB, to etc\n")
    assert Path("etc/sub/file").read_bytes() == b"one" * 1000
    ((path, query),) = kube.opened
    assert re.fullmatch(r"/api/v1/namespaces/velero/pods/default-files-.*-x/exec", path)
    assert [value for key, value in query if key == "command"] == ["python", "-m", "datamover.pod.file_relay"]
    assert kube.objects(JOBS) == []


def test_cp_copies_a_file_and_does_not_replace_one_without_being_told(shell: _Shell, kube: FilesKube) -> None:
    target = Path("mine")
    kube.send(FileEntry(name="top", type=FileType.FILE, size_bytes=3), pack(top=b"two"))
    assert shell.run("cp", "night:data/top", "mine").code == 0
    target.write_bytes(b"changed")
    done = shell.run("cp", "night:data/top", "mine")
    assert (done.code, target.read_bytes()) == (1, b"changed")
    assert "error: mine exists: --overwrite replaces it" in done.err
    assert shell.run("cp", "night:data/top", "mine", "--overwrite").code == 0
    assert target.read_bytes() == b"two"


def test_cp_names_what_it_refuses_and_fails_in_the_end(shell: _Shell, kube: FilesKube) -> None:
    kube.send(DIRECTORY, pack(_etc_x=b"1", good=b"2"))
    done = shell.run("cp", "night:data/etc", "new")
    assert done.code == 1
    assert "note: /etc/x is not copied: its name is an absolute path" in done.err
    assert "error: 1 entries were not copied" in done.err
    assert Path("new/good").read_bytes() == b"2"


@pytest.mark.parametrize("cut", [0, 5000])
def test_a_pod_that_cannot_send_the_rest_says_why(shell: _Shell, kube: FilesKube, cut: int) -> None:
    kube.send(DIRECTORY, pack(first=b"1", second=b"2" * 9000), error="blob is missing", cut=cut)
    done = shell.run("cp", "night:data/etc", "new")
    assert done.code == 1
    assert "error: blob is missing" in done.err
    assert not [path for path in Path().rglob("*") if path.name.startswith(".nodeagent")]
    assert kube.objects(JOBS) == []


@pytest.mark.parametrize("gone", [False, True], ids=["the pod has ended", "the API server is gone"])
def test_after_a_broken_connection_the_job_is_deleted_and_the_first_error_is_shown(
    shell: _Shell, kube: FilesKube, monkeypatch: pytest.MonkeyPatch, *, gone: bool
) -> None:
    monkeypatch.setattr(files, "_END", timedelta(milliseconds=1))
    if gone:
        monkeypatch.setattr(files, "check_end", AsyncMock(side_effect=UnreachableError("the API server is gone")))
    kube.send(DIRECTORY, pack(first=b"1" * 9000))
    kube.played = kube.played[:4]
    done = shell.run("cp", "night:data/etc", "new")
    assert done.code == 1
    assert "the connection ended before the process did" in done.err
    assert "is gone" not in done.err
    assert list(Path("new").iterdir()) == []
    assert kube.objects(JOBS) == []


def test_a_pod_that_fails_with_its_connection_says_why(
    shell: _Shell, kube: FilesKube, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def break_off() -> AsyncIterator[bytes]:
        for message in kube.played[:4]:
            yield message
        kube.end(137, "the node has no memory left")
        (pod,) = kube.objects(PODS)
        kube.put(pod | {"status": kube.pod})
        raise UnreachableError("the connection was reset")

    monkeypatch.setattr(kube, "_play", break_off)
    kube.send(DIRECTORY, pack(first=b"1" * 9000))
    done = shell.run("cp", "night:data/etc", "new")
    assert done.code == 1
    assert re.search(r"error: Pod \S+ of the copy failed: .*the node has no memory left\n", done.err)
    assert kube.objects(JOBS) == []


@pytest.mark.parametrize("first", [False, True])
def test_a_copy_ends_with_its_result_and_not_with_the_process(
    shell: _Shell, kube: FilesKube, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    async def stay() -> AsyncIterator[bytes]:
        for message in sorted(messages, key=lambda message: first and message[0] != ERRORS):
            yield message
        pytest.fail("it waits for the end of the process")

    kube.send(DIRECTORY, pack(first=b"1" * 9000))
    *messages, _ = kube.played
    monkeypatch.setattr(kube, "_play", stay)
    assert shell.run("cp", "night:data/etc", "new").code == 0
    assert Path("new/first").read_bytes() == b"1" * 9000


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("arrived", [0, 1, 10, _PIECES - 1, _PIECES, _PIECES + 1])
def test_a_connection_may_end_before_the_result_arrives(
    shell: _Shell, kube: FilesKube, monkeypatch: pytest.MonkeyPatch, arrived: int, broken: bool
) -> None:
    """An API server says Success when its connection to a kubelet breaks. The pod says how many bytes it sent."""

    async def lose() -> AsyncIterator[bytes]:
        kube.end(0, said.decode())
        (pod,) = kube.objects(PODS)
        kube.put(pod | {"status": kube.pod})
        for message in (*kube.played[:arrived], *([] if broken else [SUCCESS])):
            yield message

    kube.send(DIRECTORY, pack(first=b"1" * 9000))
    said = b"".join(message[1:] for message in kube.played if message[0] == ERRORS)
    monkeypatch.setattr(kube, "_play", lose)
    done = shell.run("cp", "night:data/etc", "new")
    complete = arrived >= _PIECES
    assert (done.code, "bytes arrived" in done.err) == (int(not complete), not complete), done.err
    assert not complete or Path("new/first").read_bytes() == b"1" * 9000
    assert kube.objects(JOBS) == []


@pytest.mark.parametrize("seen", ["before", "then"])
def test_a_missing_permission_is_one_line(shell: _Shell, kube: FilesKube, seen: str) -> None:
    kube.allowed, kube.forbids_exec = seen != "before", True
    done = shell.run("cp", "night:data/etc", "new")
    assert (done.code, done.out) == (1, "")
    assert re.search(r"error: .*missing permission: create and get pods/exec in namespace velero\n", done.err)
    assert kube.objects(JOBS) == []
    created = [one for one in kube.requests if one.method == "POST" and one.path.endswith("/jobs")]
    assert bool(created) is (seen == "then")


def test_an_interrupted_copy_deletes_its_job(shell: _Shell, kube: FilesKube, monkeypatch: pytest.MonkeyPatch) -> None:
    async def interrupt(*_: object, **__: object) -> None:
        assert kube.objects(JOBS)
        raise KeyboardInterrupt

    monkeypatch.setattr(files, "wait_for_start", interrupt)
    assert shell.run("cp", "night:data/etc", "new").code == 130
    assert kube.objects(JOBS) == []


def test_a_python_without_the_filters_is_an_error(shell: _Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(tarfile, "data_filter")
    done = shell.run("cp", "night:data/etc", "x")
    assert done.code == 2
    assert "use Python 3.11.4 or newer" in done.err


@pytest.mark.parametrize(
    ("text", "path", "shown"),
    [("data", None, "app/data"), ("data/", "/", "app/data/"), ("app/data/etc/x/", "/etc/x", "app/data/etc/x")],
)
def test_a_block_volume_is_a_device_or_its_files(
    shell: _Shell, kube: FilesKube, text: str, path: str | None, shown: str
) -> None:
    for one in kube.objects(DATA_UPLOADS):
        if one["spec"]["sourcePVC"] == "data":
            saved = json.loads(one["metadata"]["annotations"][CLAIM_ANNOTATION])
            one["metadata"]["annotations"][CLAIM_ANNOTATION] = json.dumps(saved | {"volumeMode": "Block"})
            kube.put(one)
    result = FileListing(type=FileType.DIRECTORY, entries=1, listed=1, note="its journal was not replayed")
    lines = [ENTRY_LINE.format(_ENTRIES[0])]
    kube.end(0, seal(result, *lines), *lines)
    done = shell.run("ls", "night", text, "-o", "json")
    assert done.code == 0, done.err
    found = FileList.from_json(done.out)
    assert (found.place, found.notes) == (shown, ["its journal was not replayed"])
    assert "--device" in _args(kube)
    assert [one for one in _args(kube) if one.startswith("--path")] == ([f"--path={path}"] if path else [])


def test_cp_copies_the_device_of_a_volume_with_a_file_system(shell: _Shell, kube: FilesKube) -> None:
    kube.send(FileEntry(name="disk", type=FileType.FILE, size_bytes=3), pack(disk=b"abc"))
    words = ("cp", "night:data", "image", "--device")
    done = shell.run(*words)
    assert (done.code, kube.objects(JOBS)) == (1, [])
    assert "app/data was backed up as files: the backup has no device of it" in done.err
    for one in kube.objects(DATA_UPLOADS):
        kube.put(one | {"spec": one["spec"] | {"datamover": BLOCK_DATA_MOVER}})
    done = shell.run(*words)
    assert (done.code, Path("image").read_bytes()) == (0, b"abc")
    assert "--device" in _args(kube)
