"""What the commands for people print and write, in a cluster that has something of everything, and in an empty one."""

from __future__ import annotations

import asyncio
import json
import shlex
from typing import TYPE_CHECKING, Any

import pytest

from core.clock import SystemClock
from core.kube.resources import PODS
from nodeagent.runtime import connection
from tests.client.support.commands import Shell, mask
from tests.client.support.schedule_scene import ScheduleScene
from tests.client.support.status_scene import StatusScene
from tests.client.support.user_scene import LEADER_POD, UserScene
from tests.support.golden import assert_golden_text

if TYPE_CHECKING:
    from pathlib import Path

    from core.kube.transport import Request
    from core.models.base import JsonDict

_LINES = """
version
version -o yaml
status
status -o yaml
describe du/moving
describe du/moving -o yaml
repo get
repo get -o wide
repo get -o yaml
repo describe app-default-kopia
repo describe app-default-kopia -o yaml
repo connect-command app-default-kopia
backup get
backup get -o wide
backup get -o yaml
backup describe night
backup describe night -o yaml
backup ls night
backup acknowledge night
backup verify night
backup verify night -o yaml
backup create new --pvc app/data --pvc app/files --ttl 24h
backup create new --pvc app/data --pvc app/files --ttl 24h
backup cancel new
backup cancel new
restore create back --from-backup night --namespace-mappings app:copy
restore create back --from-backup night --namespace-mappings app:copy
restore get
restore get -o wide
restore get -o yaml
restore describe back
restore describe back -o yaml
restore cancel back
schedule create daily --schedule "0 2 * * *" --pvc app/data --ttl 24h
schedule create daily --schedule "0 2 * * *" --pvc app/data --ttl 48h --suspend
schedule get
schedule get -o wide
schedule get -o yaml
schedule run daily --dry-run
schedule renew daily
backup delete old --dry-run
backup delete old --dry-run -o yaml
backup delete old --yes
backup delete old --yes
backup delete --expired --dry-run
schedule delete daily
schedule delete daily
support-bundle --list
check-config good.json --offline
check-config bad.json --offline
check-config bad.json --offline --json
check-config --from-cluster
"""


def _fill(scene: ScheduleScene) -> None:
    """Store agents with their leader, transfers of all kinds, backups, and a restored volume."""
    user = UserScene(kube=scene.kube)
    StatusScene(kube=scene.kube).put_transfers()
    user.put_repository()
    asyncio.run(user.client.delete(PODS, "velero", LEADER_POD))
    scene.old.put_backup("night", 1)
    scene.old.put_backup("old", 9, "data", "gone")
    target: JsonDict = {
        "targetVolume": {"pvc": "data", "namespace": "app"},
        "snapshotID": "s",
        "sourceNamespace": "app",
    }
    target |= {"backupStorageLocation": "default", "operationTimeout": "10m0s"}
    mark = {"nodeagent.io/restore": "before"}
    meta = {"labels": mark, "annotations": mark}
    scene.old.put(
        "DataDownload", "before-1", "velero.io/v2alpha1", meta=meta, spec=target, status={"phase": "Completed"}
    )


@pytest.mark.parametrize("content", ["full", "empty"])
def test_what_commands_print(
    content: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scene = ScheduleScene()
    kube = scene.kube if content == "full" else type(scene.kube)(scene.clock)
    if content == "full":
        _fill(scene)

    async def load(*_: object) -> tuple[object, str]:
        return kube, "velero"

    async def sleep(*_: object) -> None:
        task = asyncio.current_task()
        if task is not None and task.get_name().startswith("renewal"):
            await asyncio.Event().wait()
        # It stays noon: retries come after random times.
        await asyncio.sleep(0)

    monkeypatch.setattr(connection, "load_transport", load)
    monkeypatch.setattr(SystemClock, "now", lambda _: scene.clock.now())
    monkeypatch.setattr(SystemClock, "monotonic", lambda _: scene.clock.monotonic())
    monkeypatch.setattr(SystemClock, "sleep", sleep)
    monkeypatch.delenv("VELERO_NAMESPACE", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.json").write_text('{"loadConcurrency": {"globalConfig": 2}}')
    (tmp_path / "bad.json").write_text('{"loadConcurency": {}, "backupPVC": {"fast": {"readOnly": "yes"}}}')
    shell = Shell(capsys)
    shown = []
    for line in _LINES.strip().splitlines():
        before = len(kube.requests)
        shown += [shell.tell(*shlex.split(line)), *map(_describe, filter(_is_write, kube.requests[before:])), "\n"]
    assert_golden_text(f"commands/{content}", "".join(shown))


def _is_write(request: Request) -> bool:
    return request.method != "GET" and "/leases/" not in request.path


def _describe(request: Request) -> str:
    """Return a line about a request, with the arguments of the container that it creates."""
    body = json.loads(request.body or b"{}")
    about = [body.get("metadata", {}).get("name", ""), body.get("reason", ""), body.get("message", "")]
    words = [request.method, request.path, *about, *_arguments(body)]
    return mask(f"> {' '.join(filter(None, words))}{' (dry run)' if request.query.get('dryRun') else ''}\n")


def _arguments(value: Any) -> list[str]:
    """Return the arguments of the first container in a manifest."""
    if isinstance(value, dict):
        found = value.get("args")
        return found if isinstance(found, list) else _arguments(list(value.values()))
    return next(filter(None, map(_arguments, value)), []) if isinstance(value, list) else []
