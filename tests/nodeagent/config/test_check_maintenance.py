"""`nodeagent check-config --repo-maintenance`: the ConfigMap of maintenance Jobs."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from core.kube.resources import CONFIG_MAPS, DAEMON_SETS, NODES, PRIORITY_CLASSES
from core.kube.transport import Request, Response
from nodeagent.__main__ import main
from nodeagent.config.check import CheckRequest, check_config, check_maintenance_names
from nodeagent.config.repositories import parse_maintenance
from nodeagent.runtime import connection
from nodeagent.runtime.connection import ClusterAccess
from tests.support.scripted import ScriptedTransport, answer, rejection, scripted_client, stored

_MANIFEST = """\
apiVersion: v1
kind: ConfigMap
metadata: {name: maintenance, namespace: velero}
data:
  global: '{"windows": [{"schedule": "0 25 * * *", "duration": "6h"}], "window": 1}'
  app1-default-kopia: '{"podResources": {"memoryLimit": "1Gi"}}'
  app2-default-kopia: '{'
"""


_JSON_ERROR = "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"
_FOUND = 'found the string "0 25 * * *"'
_SCHEDULE = 'a schedule of a CronJob such as "0 22 * * *"'


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["check-config", "--offline", "--repo-maintenance", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_manifest_is_checked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "maintenance.yaml"
    path.write_text(_MANIFEST)
    code, out, err = _run(capsys, str(path))
    assert (code, err) == (1, "")
    assert out.splitlines() == [
        f"error: app2-default-kopia: the value is not JSON: {_JSON_ERROR}",
        f"error: global.windows[0].schedule: expected {_SCHEDULE} (25 is not from 0 to 23), {_FOUND}",
        *(
            f"warning: app1-default-kopia.podResources.{name}: missing, counts as 0; a Velero server starts no Job "
            "without it"
            for name in ("cpuRequest", "memoryRequest", "cpuLimit")
        ),
        "warning: global.window: unknown key; ignored (did you mean windows?)",
        f"{path}: 2 errors, 4 warnings",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{}", "contains 0 ConfigMaps, expected one"),
        ("kind: ConfigMap\n---\nkind: ConfigMap\n", "contains 2 ConfigMaps, expected one"),
        ("kind: ConfigMap\ndata: {global: {}}\n", "the values of data are not strings"),
        ("kind: ConfigMap\ndata: []\n", ""),
        ("kind: ConfigMap\ndata: [a]\n", "the values of data are not strings"),
    ],
)
def test_what_is_no_manifest_is_not_checked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, text: str, problem: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    code, out, err = _run(capsys, "-")
    if problem:
        assert (code, out, err) == (2, "", f"error: -: {problem}\n")
    else:
        assert (code, out) == (0, "-: no errors, no warnings\n")


def _entries(**entries: Any) -> dict[str, Any]:
    return {"data": {key: json.dumps(value) for key, value in entries.items()}}


def _cluster(request: Request) -> Response:
    items = {
        "priorityclasses": [stored(PRIORITY_CLASSES, metadata={"name": "low"})],
        "nodes": [stored(NODES, metadata={"name": "a", "labels": {"pool": "db"}})],
    }
    return answer({"metadata": {}, "items": items[request.path.rpartition("/")[2]]})


async def test_names_missing_in_the_cluster_are_reported() -> None:
    affinity = [{"nodeSelector": {"matchLabels": {"pool": pool}}} for pool in ("db", "web")]
    config_map = _entries(**{"global": {"priorityClassName": "lo", "loadAffinity": affinity}, "x-y-kopia": {}})
    findings = await check_maintenance_names(scripted_client(_cluster), parse_maintenance(config_map))
    assert list(map(str, findings)) == [
        "global.priorityClassName: PriorityClass lo does not exist: Jobs get the default priority (did you mean low?)",
        "global.loadAffinity[1].nodeSelector: matches none of the 1 nodes",
    ]


@pytest.mark.parametrize(
    ("flags", "config_map", "expected"),
    [
        ([], None, (0, "no ConfigMap: no errors, no warnings")),
        (["--repo-maintenance-job-configmap=m"], None, (1, "ConfigMap velero/m does not exist: create it, or start")),
        (["--repo-maintenance-job-configmap=m"], {"data": {}}, (1, "ConfigMap velero/m has no data")),
        (["--repo-maintenance-job-configmap", "m"], _entries(**{"global": {}}), (0, "ConfigMap velero/m: no errors")),
        (
            ["--repo-maintenance-job-configmap=m"],
            _entries(**{"global": {"windows": 1}}),
            (1, "error: global.windows: "),
        ),
    ],
    ids=["no flag", "absent", "empty", "valid", "invalid"],
)
async def test_the_config_map_of_the_installed_agent_is_checked(
    *,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    flags: list[str],
    config_map: dict[str, Any] | None,
    expected: tuple[int, str],
) -> None:
    def script(request: Request) -> Response:
        if "daemonsets" in request.path:
            container = {"name": "node-agent", "args": ["serve", *flags]}
            spec = {"template": {"spec": {"containers": [container]}}}
            return answer(stored(DAEMON_SETS, metadata={"name": "node-agent"}, spec=spec))
        if config_map is None:
            return rejection(404, "absent")
        return answer(stored(CONFIG_MAPS, metadata={"name": "m"}, **config_map))

    async def load(*_: object) -> tuple[ScriptedTransport, str]:
        return ScriptedTransport(script), ""

    monkeypatch.setattr(connection, "load_transport", load)
    code, line = expected
    assert await check_config(CheckRequest("", ClusterAccess(), maintenance=True)) == code
    assert line in capsys.readouterr().out
