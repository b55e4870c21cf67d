"""Every command for users where all of them may be: no cluster, no permission, a wrong name, Ctrl-C."""

import json
import re
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import click
import pytest

from client import mover_jobs
from client.cli.user_commands import _root
from core.kube.transport import Request, Response
from core.models.base import JsonDict
from nodeagent.__main__ import main
from nodeagent.runtime import connection
from tests.client.support.commands import Shell, open_shell
from tests.client.support.schedule_scene import ScheduleScene
from tests.support.golden import assert_golden_text
from tests.support.sockets import free_port
from tests.support.terminal import open_terminal

_WORDS: Final = {
    "backup acknowledge": ("night",),
    "backup cancel": ("night",),
    "backup cp": ("night:data/file", "."),
    "backup create": ("other", "--pvc=app/data"),
    "backup delete": ("night", "--confirm"),
    "backup describe": ("night",),
    "backup get": ("night",),
    "backup ls": ("night",),
    "backup verify": ("night",),
    "describe": ("du/night-data",),
    "install": ("--no-default-backup-location", "--no-secret"),
    "preflight": (),
    "repo connect-command": ("app-default-kopia",),
    "repo describe": ("app-default-kopia",),
    "repo get": ("app-default-kopia",),
    "repo report": ("app-default-kopia",),
    "restore cancel": ("back",),
    "restore create": ("new", "--from-backup=night"),
    "restore describe": ("back",),
    "restore get": ("back",),
    "schedule create": ("weekly", "--schedule=@weekly", "--pvc=app/data"),
    "schedule delete": ("daily",),
    "schedule get": ("daily",),
    "schedule renew": ("daily",),
    "schedule retention": ("daily",),
    "schedule run": ("daily",),
    "status": (),
    "support-bundle": (),
    "ui": ("--no-browser",),
    "uninstall": (),
    "version": (),
    "volumes": (),
}
"""Of each command, words that it accepts."""

_SERVES: Final = "ui"
"""It shows what it may for as long as it runs (`tests/client/ui`)."""

_MISSPELLED: Final = {
    "backup acknowledge": "nigth",
    "backup cancel": "nigth",
    "backup cp": "nigth:data/file .",
    "backup create": "other --pvc=app/dta",
    "backup delete": "nigth --confirm",
    "backup describe": "nigth",
    "backup get": "nigth",
    "backup ls": "nigth",
    "backup verify": "nigth",
    "describe": "du/night-dta",
    "repo connect-command": "app-defalt-kopia",
    "repo describe": "app-defalt-kopia",
    "repo get": "app-defalt-kopia",
    "repo report": "app-defalt-kopia",
    "restore cancel": "bakc",
    "restore create": "new --from-backup=nigth",
    "restore describe": "bakc",
    "restore get": "bakc",
    "schedule create": "weekly --schedule=@weekly --pvc=app/data --storage-location=defalt",
    "schedule delete": "dialy",
    "schedule get": "dialy",
    "schedule renew": "dialy",
    "schedule retention": "dialy",
    "schedule run": "dialy",
}
"""Words with a wrong name."""

_every_command = pytest.mark.parametrize("command", _WORDS)


def _walk(command: click.Command, path: str = "") -> Iterator[str]:
    if not isinstance(command, click.Group):
        yield path
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        found = command.get_command(context, name)
        assert found is not None
        yield from _walk(found, f"{path} {name}".strip())


def test_no_command_is_left_out() -> None:
    assert sorted(_walk(_root)) == sorted(_WORDS)
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


def test_without_permissions_the_missing_one_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shell = open_shell(_Refusing(), capsys, monkeypatch)
    shown = [shell.tell(*command.split(), *words) for command, words in _WORDS.items() if command != _SERVES]
    assert_golden_text("commands/forbidden", "\n".join(shown))


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> ScheduleScene:
    """A cluster with a backup, a repository, a restore and a schedule."""
    scene = ScheduleScene()

    async def load(*_: object) -> tuple[object, str]:
        return scene.kube, "velero"

    monkeypatch.setattr(connection, "load_transport", load)
    for module in (mover_jobs, connection):
        monkeypatch.setattr(module, "SystemClock", lambda: scene.clock)
    monkeypatch.delenv("VELERO_NAMESPACE", raising=False)
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
    shown = [shell.tell(*command.split(), *words.split()) for command, words in _MISSPELLED.items()]
    assert_golden_text("commands/misspelled", "\n".join(shown))
    assert [one for one in shown if "(did you mean " not in one] == []
    assert [one.path for one in scene.kube.requests if one.method != "GET"] == before


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
