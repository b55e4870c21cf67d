"""Every command for users where all of them may be: no cluster, no permission, a wrong name, Ctrl-C."""

import json
import re
import shlex
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pytest
from click.shell_completion import ShellComplete

from client import session
from client.cli.user_commands import _root
from core.kube.transport import Request, Response
from core.models.base import JsonDict
from nodeagent.__main__ import main
from nodeagent.runtime import connection
from tests.client.support.commands import Shell, open_shell, reach, walk_commands
from tests.client.support.schedule_scene import ScheduleScene
from tests.support.golden import assert_golden_text
from tests.support.sockets import free_port
from tests.support.terminal import open_terminal

_WORDS: Final[Mapping[str, Sequence[str]]] = {
    **{f"backup {verb}": ("night",) for verb in ("acknowledge", "cancel", "describe", "get", "ls", "verify")},
    "backup cp": ("night:data/file", "."),
    "backup create": ("other", "--pvc=app/data"),
    "backup delete": ("night", "--confirm"),
    "describe": ("du/night-data",),
    "install": ("--no-default-backup-location", "--no-secret"),
    **{f"repo {verb}": ("app-default-kopia",) for verb in ("connect-command", "describe", "get", "report")},
    **{f"restore {verb}": ("back",) for verb in ("cancel", "describe", "get")},
    "restore create": ("new", "--from-backup=night"),
    **{f"schedule {verb}": ("daily",) for verb in ("delete", "get", "renew", "retention", "run")},
    "schedule create": ("weekly", "--schedule=@weekly", "--pvc=app/data"),
    "ui": ("--no-browser",),
    **dict.fromkeys(("preflight", "status", "support-bundle", "uninstall", "version", "volumes"), ()),
}
"""Of each command, words that it accepts."""

_SERVES: Final = "ui"
"""It shows what it may for as long as it runs (`tests/client/ui`)."""

_MISSPELLED: Final = {
    **{f"backup {verb}": "nigth" for verb in ("acknowledge", "cancel", "describe", "get", "ls", "verify")},
    "backup cp": "nigth:data/file .",
    "backup create": "other --pvc=app/dta",
    "backup delete": "nigth --confirm",
    "describe": "du/night-dta",
    **{f"repo {verb}": "app-defalt-kopia" for verb in ("connect-command", "describe", "get", "report")},
    **{f"restore {verb}": "bakc" for verb in ("cancel", "describe", "get")},
    "restore create": "new --from-backup=nigth",
    **{f"schedule {verb}": "dialy" for verb in ("delete", "get", "renew", "retention", "run")},
    "schedule create": "weekly --schedule=@weekly --pvc=app/data --storage-location=defalt",
}
"""Words with a wrong name."""

_WRONG: Final = """
backup acknowledge
backup cp night x
backup cp night: x
backup cp night:data/etc x --device
backup create new
backup create new --pvc data
backup create new --pvc a/b/c
backup create new --pvc a/b -l ''
backup create new -l a=b
backup create new --pvc app/data --labels a
backup create new --pvc app/data --labels velero.io/a=b
backup create new --pvc app/data --ttl soon
backup create new --pvc app/data --method best
backup delete --confirm
backup delete night --expired --confirm
backup delete night --at-most 3 --confirm
backup get --agent-namespace a/../b
backup ls night dat/etc
backup ls night app/dta
backup ls night zzz
backup ls night data --limit=0
backup verify night --pvc app/dat
backup verify night --pvc data
backup verify night -n app
backup verify night --percent x
backup verify night --percent 0
backup verify night --percent 101
backup verify night --percent nan
backup verify night --restore --percent 10
backup verify night --timeout 0
describe dux/long
describe long
preflight --size=lots
preflight --size=1Mi
restore create
restore create --from-backup a --from-snapshot b
restore create --from-backup night --cluster u
restore create --from-backup night --namespace-mappings app
restore create --from-backup night --namespace-mappings app:a,app:b
restore create --from-backup night --size -1
restore create --from-backup night --pvc data
restore create A --from-backup night
restore create --from-backup night --incremental
restore create --from-backup night --delete-extra-files
restore create --from-backup night --no-snapshot
restore create --from-backup night --dry-run
restore create --from-backup night --in-place --yes --size 1Gi
restore create --from-backup night --in-place --yes --namespace-mappings a:b
restore create --from-backup night --in-place --yes --method restore-wait
restore create --from-backup night --in-place
restore create --from-backup night --in-place -o json
schedule create new --schedule @daily
schedule create New --schedule @daily --pvc app/data
schedule create new --schedule soon --pvc app/data
schedule create new --schedule @daily --pvc app/data --time-zone Mars
schedule create new --schedule @daily --pvc data
schedule create new --schedule @daily --pvc app/data --keep-daily 0
status -w -o json
status --timeout 5m
status --wait-idle --timeout soon
support-bundle -o jsn
support-bundle -o a.gz --output b.gz
run-schedule
run-schedule new
run-schedule new --pvc app/data --ttl 0s
run-schedule new --pvc app/data --keep-daily 1 --time-zone Mars
run-restore-test DataUpload x --agent-namespace=velero --timeout=soon
"""

_every_command = pytest.mark.parametrize("command", sorted(_WORDS))


def test_no_command_is_left_out() -> None:
    assert sorted(dict(walk_commands(_root))) == sorted(_WORDS)
    named = {one for one in _WORDS if any(not word.startswith("-") for word in _WORDS[one])}
    assert _MISSPELLED.keys() == named


def _write_kubeconfig(folder: Path, port: int) -> str:
    cluster = {"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}
    context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
    config = {"apiVersion": "v1", "kind": "Config", "clusters": [cluster], "contexts": [context]}
    path = folder / "kubeconfig"
    path.write_text(json.dumps(config | {"users": [{"name": "u", "user": {}}], "current-context": "c"}))
    return str(path)


@_every_command
def test_without_a_cluster_one_line_says_so(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    monkeypatch.chdir(tmp_path)
    kubeconfig = _write_kubeconfig(tmp_path, port)
    assert main([*command.split(), *_WORDS[command], f"--kubeconfig={kubeconfig}"]) == 2
    errors = re.findall("^error: .*$", capsys.readouterr().err, re.MULTILINE)
    assert len(errors) == 1
    assert errors[0].startswith("error: the cluster cannot be reached: ")
    assert f"127.0.0.1:{port}" in errors[0]
    assert [one.name for one in tmp_path.iterdir()] == ["kubeconfig"]


class _Refusing:
    """The API server as it is for somebody without any permission."""

    async def request(self, request: Request) -> Response:
        if "selfsubjectaccessreviews" in request.path:
            review = json.loads(request.body or b"{}") | {"status": {"allowed": False}}
            return Response(201, json.dumps(review).encode(), None)
        message = f'User "jane" cannot {request.method.lower()} {request.path}'
        status = {"kind": "Status", "apiVersion": "v1", "reason": "Forbidden", "code": 403, "message": message}
        return Response(403, json.dumps(status).encode(), None)

    @asynccontextmanager
    async def stream(self, request: Request) -> AsyncIterator[AsyncIterator[bytes]]:
        raise AssertionError(request)
        yield  # pragma: no cover - makes this a generator

    async def close(self) -> None:
        """Nothing is open."""


def test_the_missing_permission_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shell = open_shell(_Refusing(), capsys, monkeypatch)
    shown = [shell.tell(*command.split(), *words) for command, words in sorted(_WORDS.items()) if command != _SERVES]
    assert_golden_text("commands/forbidden", "\n".join(shown))


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> ScheduleScene:
    """A cluster with a backup, a repository, a restore and a schedule."""
    scene = ScheduleScene()
    reach(lambda: scene.kube, monkeypatch)
    for module in (session, connection):
        monkeypatch.setattr(module, "SystemClock", lambda: scene.clock)
    monkeypatch.chdir(tmp_path)
    scene.old.put_backup("night", 1)
    spec = {"volumeNamespace": "app", "backupStorageLocation": "default", "repositoryType": "kopia"}
    scene.old.put("BackupRepository", "app-default-kopia", spec=spec | {"maintenanceFrequency": "1h"})
    target: JsonDict = {
        "targetVolume": {"pvc": "data", "namespace": "app"},
        "snapshotID": "s",
        "sourceNamespace": "app",
    }
    meta = {"labels": {"nodeagent.io/restore": "back"}, "annotations": {"nodeagent.io/restore": "back"}}
    target |= {"backupStorageLocation": "default"}
    scene.old.put("DataDownload", "back-1", "velero.io/v2alpha1", meta=meta, spec=target, status={"phase": "Completed"})
    assert main(["schedule", "create", "daily", "--schedule=@daily", "--pvc=app/data"]) == 0
    capsys.readouterr()
    return scene


def test_a_wrong_name_has_a_hint(scene: ScheduleScene, capsys: pytest.CaptureFixture[str]) -> None:
    before = [one.path for one in scene.kube.requests if one.method != "GET"]
    shell = Shell(capsys)
    shown = [shell.tell(*command.split(), *words.split()) for command, words in sorted(_MISSPELLED.items())]
    assert_golden_text("commands/misspelled", "\n".join(shown))
    assert [one for one in shown if "(did you mean " not in one] == []
    assert [one.path for one in scene.kube.requests if one.method != "GET"] == before


def test_a_wrong_command_line_is_an_error_in_one_line(scene: ScheduleScene, capsys: pytest.CaptureFixture[str]) -> None:
    before = [one.path for one in scene.kube.requests if one.method != "GET"]
    shell = Shell(capsys)
    shown = [shell.tell(*shlex.split(line)) for line in _WRONG.strip().splitlines()]
    assert [one for one in shown if len(re.findall("(?m)^error: ", one)) != 1 or "exit code: 0" in one] == []
    assert_golden_text("commands/wrong", "\n".join(shown))
    assert [one.path for one in scene.kube.requests if one.method != "GET"] == before


@pytest.mark.usefixtures("scene")
def test_a_shell_completes_each_name_of_what_exists() -> None:
    complete = ShellComplete(_root, {}, "nodeagent", "_NODEAGENT_COMPLETE")
    for command in _MISSPELLED.keys() - {"backup cp", "backup create", "restore create", "schedule create"}:
        (name, *_) = _WORDS[command]
        found = complete.get_completions(command.split(), name[:4])
        assert [one.value for one in found] == [name], command
    assert complete.get_completions(["backup", "get", "--agent-namespace", "other"], "") == []


@pytest.mark.sample("restore create", "repo report", "install")
@pytest.mark.processes
@_every_command
def test_ctrl_c_ends_it_at_once_and_without_a_traceback(command: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        kubeconfig = _write_kubeconfig(tmp_path, listener.getsockname()[1])
        with open_terminal([*command.split(), *_WORDS[command], f"--kubeconfig={kubeconfig}"]) as terminal:
            answered, _ = listener.accept()
            with answered:
                terminal.interrupt()
                code, text = terminal.finish()
    assert code == 130
    assert "Traceback" not in text
    assert "error: " not in text
