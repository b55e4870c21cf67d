"""Configuration and priority classes against a real API server: its admission and messages."""

import asyncio
import json
from pathlib import Path

import pytest
import yaml

from core.kube.client import KubeClient
from core.kube.errors import ForbiddenError
from core.kube.resources import CONFIG_MAPS, DAEMON_SETS, PODS, PRIORITY_CLASSES
from core.models.names import CONFIG_ANNOTATION
from exposer.ownership import create_pod
from nodeagent.config.check import CheckRequest, check_config
from nodeagent.config.parse import parse_config
from nodeagent.runtime.connection import ClusterAccess
from tests.support.apiserver import ApiServer
from tests.support.objects import JsonDict, build_object

pytestmark = pytest.mark.integration

_CLASSES = Path(__file__).parents[2] / "deploy" / "priority" / "priority-classes.yaml"
_NAME = "node-agent-config"


async def test_admission_fills_in_the_priority_of_the_shipped_classes(client: KubeClient, namespace: str) -> None:
    for manifest in yaml.safe_load_all(_CLASSES.read_text(encoding="utf-8")):
        await client.create(PRIORITY_CLASSES, manifest)
        await _wait_admitted(client, namespace, manifest["metadata"]["name"])
    created: JsonDict = await create_pod(client, _pod(namespace, "mover", "velero-data-mover"))
    assert (created["spec"]["priority"], created["spec"]["preemptionPolicy"]) == (10, "Never")
    agent: JsonDict = await create_pod(client, _pod(namespace, "agent", "velero-node-agent"))
    assert (agent["spec"]["priority"], agent["spec"]["preemptionPolicy"]) == (50, "PreemptLowerPriority")


async def test_a_deleted_class_costs_the_pod_only_its_priority(client: KubeClient, namespace: str) -> None:
    with pytest.raises(ForbiddenError, match="no PriorityClass with name gone"):
        await client.create(PODS, _pod(namespace, "mover", "gone"))
    created: JsonDict = await create_pod(client, _pod(namespace, "mover", "gone"))
    assert "priorityClassName" not in created["spec"]
    assert created["spec"]["priority"] == 0


async def test_the_clusters_default_class_is_what_a_mover_without_one_gets(client: KubeClient, namespace: str) -> None:
    name = f"default-{namespace}"
    await client.create(PRIORITY_CLASSES, build_object(PRIORITY_CLASSES, name, value=3, globalDefault=True))
    try:
        await _wait_admitted(client, namespace, name)
        created: JsonDict = await create_pod(client, _pod(namespace, "mover", "gone"))
        assert (created["spec"]["priorityClassName"], created["spec"]["priority"]) == (name, 3)
    finally:
        await client.delete(PRIORITY_CLASSES, "", name)


async def test_check_config_finds_the_config_map_and_the_names_in_the_cluster(
    apiserver: ApiServer, client: KubeClient, namespace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    document = {"priorityClassName": "system-node-criticl", "podLabels": {"a": 1}}
    data = {"any.json": json.dumps(document)}
    await client.create(CONFIG_MAPS, build_object(CONFIG_MAPS, _NAME, namespace, data=data))
    await client.create(DAEMON_SETS, _daemonset(namespace))
    agent = _pod(namespace, "node-agent-x7k2p", "")
    agent["metadata"] |= {"labels": {"role": "node-agent"}, "annotations": {CONFIG_ANNOTATION: "abc"}}
    await client.create(PODS, agent | {"spec": agent["spec"] | {"nodeName": "node-1"}})
    code = await check_config(CheckRequest("", ClusterAccess(str(apiserver.kubeconfig), namespace=namespace)))
    assert code == 1
    assert capsys.readouterr().out.splitlines() == [
        'error: podLabels.a: expected a string, found the number 1 (did you mean "1"?)',
        (
            "warning: priorityClassName: PriorityClass system-node-criticl does not exist: data movers get the "
            "default priority (did you mean system-node-critical?)"
        ),
        f"warning: 1 of 1 agents use abc instead of this document ({parse_config(data['any.json']).digest}): node-1",
        f"ConfigMap {namespace}/{_NAME}: 1 error, 2 warnings",
    ]


@pytest.mark.parametrize(("strict", "code"), [(False, 0), (True, 1)], ids=["tolerant", "strict"])
async def test_the_names_in_a_file_are_checked_where_there_is_a_way_to_a_cluster(
    apiserver: ApiServer, capsys: pytest.CaptureFixture[str], tmp_path: Path, *, strict: bool, code: int
) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"cachePVC": {"storageClass": "none-such"}}')
    request = CheckRequest(str(path), ClusterAccess(str(apiserver.kubeconfig)), strict=strict)
    assert await check_config(request) == code
    warning, count = capsys.readouterr().out.splitlines()
    assert warning == "warning: cachePVC.storageClass: StorageClass none-such does not exist"
    assert count == f"{path}: no errors, 1 warning"


async def _wait_admitted(client: KubeClient, namespace: str, priority_class: str) -> None:
    """Wait until the server's own cache of classes has it."""
    async with asyncio.timeout(300):
        while True:
            try:
                await client.create(PODS, _pod(namespace, f"try-{priority_class}", priority_class))
            except ForbiddenError:
                await asyncio.sleep(0.05)
            else:
                return


def _pod(namespace: str, name: str, priority_class: str) -> JsonDict:
    spec = {"containers": [{"name": "main", "image": "none"}], "priorityClassName": priority_class}
    return build_object(PODS, name, namespace, spec=spec)


def _daemonset(namespace: str) -> JsonDict:
    labels = {"name": "node-agent"}
    container = {"name": "node-agent", "image": "none", "args": ["serve", f"--node-agent-configmap={_NAME}"]}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [container]}}
    spec = {"selector": {"matchLabels": labels}, "template": template}
    return build_object(DAEMON_SETS, "node-agent", namespace, spec=spec)
