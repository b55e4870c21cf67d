"""`nodeagent check-config`, also of maintenance Jobs: every error by its path, names in a cluster, exit codes."""

import io
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from core.errors import ConfigError
from core.kube.resources import CONFIG_MAPS, DAEMON_SETS, NODES, PRIORITY_CLASSES, STORAGE_CLASSES
from core.kube.transport import Request, Response
from nodeagent.__main__ import main
from nodeagent.config.check import CheckRequest, check_config, check_maintenance_names, check_names, check_queue_length
from nodeagent.config.parse import document_in, parse_config, read_document
from nodeagent.config.repositories import parse_maintenance
from nodeagent.config.schema import ConfigFinding
from nodeagent.runtime import connection
from nodeagent.runtime.connection import ClusterAccess
from tests.support.fakekube import FakeKube
from tests.support.scripted import ScriptedTransport, answer, rejection, scripted_client, stored
from tests.support.versions import load_definitions

_ROOT = Path(__file__).parents[3]
_TEN = _ROOT / "tests" / "data" / "ten-mistakes.yaml"
_PATHS = [
    "loadConcurrency.globalConfig",
    "loadConcurrency.perNodeConfig[1].nodeSelector.matchLabels.disk",
    "loadConcurrency.prepareQueueLength",
    "loadAffinity[1].nodeSelector.matchExpressions[0].operator",
    'backupPVC["fast.ssd"].readOnly',
    "restorePVC",
    "cachePVC.residentThresholdInMB",
    "podResources.memoryLimit",
    "priorityClassName",
    "podLabels.team",
]


@dataclass(frozen=True)
class _Done:
    code: int
    out: str
    err: str


_Command = Callable[..., _Done]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> _Command:
    """Runs the command without a cluster."""
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST", "VELERO_NAMESPACE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))

    def command(*arguments: str, stdin: str = "") -> _Done:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = main(["check-config", *arguments])
        captured = capsys.readouterr()
        return _Done(code, captured.out, captured.err)

    return command


def test_ten_errors_are_reported_by_ten_paths_also_as_json(run: _Command) -> None:
    done = run(str(_TEN))
    assert (done.code, done.err) == (1, "")
    expected = re.findall(r"(?m)^error: (.*?): ", done.out)
    assert sorted(expected) == sorted(_PATHS)
    assert done.out.endswith("ten-mistakes.yaml: 10 errors, no warnings\n")
    assert "(did you mean NotIn?)" in done.out
    assert "(did you mean 512M?)" in done.out
    found = json.loads(run("--json", str(_TEN)).out)
    assert sorted(error["path"] for error in found["errors"]) == sorted(_PATHS)
    hints = {error["hint"] for error in found["errors"]}
    assert hints >= {"", "did you mean NotIn?"}
    assert None not in hints
    assert found["warnings"] == []


@pytest.mark.parametrize(
    ("arguments", "document", "code", "expected"),
    [
        ([], '{"priorityClassName": "low"}', 0, "-: no errors, no warnings"),
        ([], '{"priorityClass": "low"}', 0, "warning: priorityClass: unknown key"),
        (["--strict"], '{"priorityClass": "low"}', 1, "-: no errors, 1 warning"),
        ([], '{"priorityClassName": 1}', 1, "-: 1 error, no warnings"),
        ([], "[]", 1, "error: the configuration is not a JSON object"),
        ([], "no: json", 1, "error: the configuration is not JSON"),
        (["--offline"], "{}", 0, "no errors"),
        (["--kubeconfig=/absent"], "{}", 0, "warning: names were not checked against a cluster: kubeconfig /absent"),
    ],
    ids=["valid", "unknown", "strict", "invalid", "list", "no JSON", "offline", "no cluster"],
)
def test_the_exit_code_depends_on_the_findings(
    run: _Command, arguments: list[str], document: str, code: int, expected: str
) -> None:
    done = run(*arguments, "-", stdin=document)
    assert (done.code, done.err) == (code, "")
    assert expected in done.out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "need either a PATH or --from-cluster"),
        (["a", "--from-cluster"], "need either a PATH or --from-cluster"),
        (["--from-cluster", "--offline"], "mutually exclusive"),
        (["/absent/file"], "/absent/file cannot be read"),
        (["--from-cluster", "--kubeconfig=/absent"], "kubeconfig /absent does not exist"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_start_exits_with_two_and_one_line(run: _Command, arguments: list[str], expected: str) -> None:
    done = run(*arguments)
    assert (done.code, done.out) == (2, "")
    assert re.fullmatch(rf"error: .*{expected}.*\n", done.err)


@pytest.mark.parametrize(
    ("text", "document"),
    [
        ('{"a": 1}', '{"a": 1}'),
        ("not json", "not json"),
        ('{"kind": "ConfigMap", "data": {"x": "{}"}}', "{}"),
        ("kind: ConfigMap\ndata:\n  x: '{}'\n", "{}"),
        ("kind: Namespace\n---\nkind: ConfigMap\ndata:\n  x: '{}'\n", "{}"),
        ('{"kind": "List", "items": [{"kind": "ConfigMap", "data": {"x": "{}"}}]}', "{}"),
        ("a: [", "a: ["),
        ("\x00", "\x00"),
    ],
    ids=["document", "neither", "JSON manifest", "YAML manifest", "among others", "list", "broken", "binary"],
)
def test_a_file_is_a_document_or_a_manifest(text: str, document: str) -> None:
    assert document_in(text) == document


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"kind: ConfigMap\n---\nkind: ConfigMap\n", "contains 2 ConfigMaps"),
        (b"kind: ConfigMap\n", "exactly one key"),
        (b"kind: ConfigMap\ndata: {a: {loadConcurrency: {}}}\n", "the keys and values of data are not all strings"),
        (b"\xff\xfe", "cannot be read"),
    ],
    ids=["two", "empty", "object", "binary"],
)
def test_a_file_without_a_single_document_is_rejected(content: bytes, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=expected):
        read_document(str(path))


_NAMES = {
    "loadAffinity": [{"storageClass": "fasst", "nodeSelector": {"matchLabels": {"pool": "backup"}}}],
    "loadConcurrency": {
        "perNodeConfig": [
            {"number": 1, "nodeSelector": {"matchLabels": {"pool": "db"}}},
            {"number": 1, "nodeSelector": {"matchLabels": {"pool": "none"}}},
        ]
    },
    "backupPVC": {"fast": {"storageClass": "slow"}, "gone.ssd": {}},
    "cachePVC": {"storageClass": "kept"},
    "priorityClassName": "data-moverr",
    "nodeagent.io": {
        "compression": {"perStorageClass": {"fast": "zstd", "fasst": "zstd"}},
        "exclude": {"rules": [{"storageClasses": ["fast", "slow"], "sets": ["caches"]}]},
        "blockStorageClasses": ["block"],
        "verification": {"restoreTestStorageClass": "scratch"},
    },
}


def _cluster(request: Request) -> Response:
    items = {
        "storageclasses": [
            stored(STORAGE_CLASSES, metadata={"name": "fast"}, reclaimPolicy="Delete"),
            stored(STORAGE_CLASSES, metadata={"name": "kept"}, reclaimPolicy="Retain"),
        ],
        "priorityclasses": [stored(PRIORITY_CLASSES, metadata={"name": "data-mover"})],
        "nodes": [
            stored(NODES, metadata={"name": "a", "labels": {"pool": "db"}}),
            stored(NODES, metadata={"name": "b"}),
        ],
    }
    return answer({"metadata": {}, "items": items[request.path.rpartition("/")[2]]})


async def test_names_missing_in_the_cluster_are_reported_with_a_hint() -> None:
    config = parse_config(json.dumps(_NAMES)).config
    assert [str(finding) for finding in await check_names(scripted_client(_cluster), config)] == [
        "loadAffinity[0].storageClass: StorageClass fasst does not exist (did you mean fast?)",
        "backupPVC.fast.storageClass: StorageClass slow does not exist",
        'backupPVC["gone.ssd"]: StorageClass gone.ssd does not exist',
        ('["nodeagent.io"].compression.perStorageClass.fasst: StorageClass fasst does not exist (did you mean fast?)'),
        '["nodeagent.io"].exclude.rules[0].storageClasses: StorageClass slow does not exist',
        '["nodeagent.io"].blockStorageClasses: StorageClass block does not exist',
        '["nodeagent.io"].verification.restoreTestStorageClass: StorageClass scratch does not exist',
        "cachePVC.storageClass: StorageClass kept has reclaimPolicy Retain: no cache volume without Delete",
        (
            "priorityClassName: PriorityClass data-moverr does not exist: data movers get the default priority "
            "(did you mean data-mover?)"
        ),
        "loadConcurrency.perNodeConfig[1].nodeSelector: matches none of the 2 nodes",
        "loadAffinity[0].nodeSelector: matches none of the 2 nodes",
    ]


async def test_a_resource_that_cannot_be_listed_is_reported_if_something_names_it() -> None:
    client = scripted_client(lambda _: rejection(403, "not you"))
    findings = await check_names(client, parse_config(json.dumps(_NAMES)).config)
    listed = [finding.problem.split(" could")[0] for finding in findings]
    assert listed == ["storage classes", "priority classes", "nodes"]
    assert all(finding == ConfigFinding("", finding.problem) for finding in findings)
    assert await check_names(client, parse_config("{}").config) == []


@pytest.mark.parametrize(
    ("version", "text", "found"),
    [
        pytest.param("main", "{}", ["loadConcurrency.prepareQueueLength"], id="not set beside 1.19"),
        pytest.param("main", '{"loadConcurrency": {"prepareQueueLength": 9}}', [], id="set"),
        pytest.param("1.18.3", "{}", [], id="not set beside 1.18"),
    ],
)
async def test_an_unset_queue_length_is_reported_beside_velero_1_19(version: str, text: str, found: list[str]) -> None:
    kube = FakeKube()
    for definition in load_definitions(version).values():
        kube.put(definition)
    config = parse_config(text).config
    findings = await check_queue_length(kube.client, config)
    assert [finding.path for finding in findings] == found
    # Definitions that cannot be read are no finding.
    assert await check_queue_length(scripted_client(lambda _: rejection(403, "not you")), config) == []
    assert all("Velero 1.19 prepares 5" in finding.problem for finding in findings)


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


def test_a_manifest_of_maintenance_is_checked(run: _Command) -> None:
    done = run("--repo-maintenance", "-", stdin=_MANIFEST)
    assert (done.code, done.err) == (1, "")
    assert done.out.splitlines() == [
        f"error: app2-default-kopia: the value is not JSON: {_JSON_ERROR}",
        f"error: global.windows[0].schedule: expected {_SCHEDULE} (25 is not from 0 to 23), {_FOUND}",
        *(
            f"warning: app1-default-kopia.podResources.{name}: missing, counts as 0; a Velero server starts no Job "
            "without it"
            for name in ("cpuRequest", "memoryRequest", "cpuLimit")
        ),
        "warning: global.window: unknown key; ignored (did you mean windows?)",
        "-: 2 errors, 4 warnings",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{}", "contains 0 ConfigMaps, expected one"),
        ("kind: ConfigMap\n---\nkind: ConfigMap\n", "contains 2 ConfigMaps, expected one"),
        ("kind: ConfigMap\ndata: {1: '{}', a: '{}'}\n", "the keys and values of data are not all strings"),
        ("kind: ConfigMap\ndata: []\n", ""),
        ("kind: ConfigMap\ndata: [a]\n", "the keys and values of data are not all strings"),
    ],
)
def test_what_is_no_manifest_is_not_checked(run: _Command, text: str, problem: str) -> None:
    done = run("--repo-maintenance", "-", stdin=text)
    expected = _Done(2, "", f"error: -: {problem}\n") if problem else _Done(0, "-: no errors, no warnings\n", "")
    assert done == expected


_FLAG = "--repo-maintenance-job-configmap"


def _entries(**entries: Any) -> dict[str, Any]:
    return {"data": {key: json.dumps(value) for key, value in entries.items()}}


async def test_names_of_maintenance_missing_in_the_cluster_are_reported() -> None:
    affinity = [{"nodeSelector": {"matchLabels": {"pool": pool}}} for pool in ("db", "web")]
    config_map = _entries(**{"global": {"priorityClassName": "data-moverr", "loadAffinity": affinity}, "x-y-kopia": {}})
    findings = await check_maintenance_names(scripted_client(_cluster), parse_maintenance(config_map))
    assert list(map(str, findings)) == [
        (
            "global.priorityClassName: PriorityClass data-moverr does not exist: Jobs get the default priority "
            "(did you mean data-mover?)"
        ),
        "global.loadAffinity[1].nodeSelector: matches none of the 2 nodes",
    ]


@pytest.mark.parametrize(
    ("flags", "config_map", "expected"),
    [
        ([], None, (0, "no ConfigMap: no errors, no warnings")),
        ([f"{_FLAG}=m"], None, (1, "ConfigMap velero/m does not exist: create it, or start")),
        ([f"{_FLAG}=m"], {"data": {}}, (1, "ConfigMap velero/m has no data")),
        ([_FLAG, "m", "--log-level=info"], _entries(**{"global": {}}), (0, "ConfigMap velero/m: no errors")),
        ([_FLAG], None, (0, "no ConfigMap: no errors, no warnings")),
        ([f"{_FLAG}=m"], _entries(**{"global": {"windows": 1}}), (1, "error: global.windows: ")),
    ],
    ids=["no flag", "absent", "empty", "valid", "no value", "invalid"],
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
