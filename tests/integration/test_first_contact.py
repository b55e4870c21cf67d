"""The agent's checks before it starts, against a real API server with the roles of `deploy/`."""

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from core.clock import SystemClock
from core.errors import ConfigError, ExposeError
from core.kube.client import KubeClient
from core.kube.resources import CONFIG_MAPS, PODS, SECRETS
from core.kube.transport import Retry
from core.models.names import COPY_LABEL
from exposer.expose_run import Copies, ExposeRun
from exposer.leaked_objects import list_leaked_objects
from exposer.model import CopyPlan, Owner, Pending
from nodeagent.runtime.permissions import COPY_PERMISSIONS, MOVER_PERMISSIONS, Permission, agent_permissions
from nodeagent.runtime.preflight import (
    check_cluster,
    check_host_pods,
    check_permissions,
    judge_definitions,
    read_definitions,
)
from nodeagent.runtime.settings import Settings
from nodeagent.runtime.transport import load_transport
from nodeagent.startup import read_spec
from tests.exposer.support.world import no_guard
from tests.support.access import access_of_event, not_permitted
from tests.support.apiserver import ApiServer
from tests.support.objects import JsonDict
from tests.support.tools import tool

pytestmark = pytest.mark.integration

_ROOT = Path(__file__).parents[2]
_USER = "system:serviceaccount:velero:node-agent"
_PERMISSIONS = agent_permissions("node-agent-config")


def _kubectl(server: ApiServer, *arguments: str) -> str:
    argv = [str(tool("kubernetes", "kubectl")), "--kubeconfig", str(server.kubeconfig), *arguments]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout


@asynccontextmanager
async def _acting_as(server: ApiServer, namespace: str, account: str, folder: Path) -> AsyncIterator[KubeClient]:
    kubeconfig = server.account_kubeconfig(namespace, account, folder)
    transport, _ = await load_transport(str(kubeconfig))
    try:
        yield KubeClient(transport, Retry(SystemClock()))
    finally:
        await transport.close()


@pytest.fixture(scope="session")
def installed(apiserver: ApiServer) -> ApiServer:
    """An API server that accepted everything that `kubectl apply -k deploy` sends."""
    _kubectl(apiserver, "apply", "-k", str(_ROOT / "deploy"))
    return apiserver


async def test_the_agents_account_has_all_permissions_it_needs(installed: ApiServer, tmp_path: Path) -> None:
    before = len(installed.audit_events())  # other tests have used the account
    async with _acting_as(installed, "velero", "node-agent", tmp_path) as client:
        await check_cluster(client, "velero", _PERMISSIONS)
        assert judge_definitions(await read_definitions(client)).message == ""
    events = [event for event in installed.audit_events()[before:] if event["user"].get("username") == _USER]
    assert events
    assert not_permitted(map(access_of_event, events), _PERMISSIONS, "velero") == []
    assert not [event for event in events if event.get("responseStatus", {}).get("code") == 403]
    asked = [event["objectRef"]["resource"] for event in events if event["verb"] == "create"]
    # Thousands of agents may start at the same time.
    assert asked == ["selfsubjectrulesreviews"] * 2


async def test_the_movers_account_has_all_permissions_that_a_mover_needs(installed: ApiServer, tmp_path: Path) -> None:
    async with _acting_as(installed, "velero", "node-agent-mover", tmp_path) as client:
        await check_permissions(client, "velero", MOVER_PERMISSIONS)
        with pytest.raises(ConfigError, match="permissions missing"):
            await check_permissions(client, "velero", _PERMISSIONS)


@pytest.fixture
def creates_no_repositories(installed: ApiServer) -> Iterator[None]:
    """The agent's role without the permission to create BackupRepositories, which it needs only for its movers."""
    of_role = ("-n", "velero", "role/node-agent")
    rules = json.loads(_kubectl(installed, "get", *of_role, "--output=json"))["rules"]
    kept = [rule for rule in rules if (rule["resources"], rule["verbs"]) != (["backuprepositories"], ["create"])]
    assert len(kept) == len(rules) - 1
    _kubectl(installed, "patch", *of_role, "--type=merge", f"--patch={json.dumps({'rules': kept})}")
    yield
    _kubectl(installed, "patch", *of_role, "--type=merge", f"--patch={json.dumps({'rules': rules})}")


@pytest.mark.usefixtures("creates_no_repositories")
async def test_an_agent_whose_account_movers_share_needs_their_permissions(
    installed: ApiServer, tmp_path: Path
) -> None:
    missing = "permissions missing: create backuprepositories in its namespace: "
    async with _acting_as(installed, "velero", "node-agent", tmp_path) as client, asyncio.timeout(30):
        # The API server applies a changed role a moment later.
        while True:
            try:
                await read_spec(client, Settings("node-a", config_map_name="node-agent-config"), "velero")
            except ConfigError as e:
                assert str(e).startswith(missing)  # noqa: PT017 - it is not raised at first
                break
            await asyncio.sleep(0.1)
        await read_spec(client, Settings("node-a", mover_service_account="node-agent-mover"), "velero")


def test_the_examples_are_accepted(installed: ApiServer) -> None:
    _kubectl(installed, "create", "namespace", "app")
    installed.create_account("app", "default")
    _kubectl(installed, "apply", "-f", str(_ROOT / "examples"), "--dry-run=server", "--validate=strict")


async def test_an_account_without_roles_names_its_missing_permissions(
    installed: ApiServer, namespace: str, tmp_path: Path
) -> None:
    async with _acting_as(installed, namespace, "default", tmp_path) as client:
        with pytest.raises(ConfigError, match=r"permissions missing: get,list,watch,patch datauploads"):
            await check_cluster(client, namespace, _PERMISSIONS)


def _serve(kubeconfig: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "nodeagent", "serve", "--node-name=node-a", f"--kubeconfig={kubeconfig}", *flags]
    return subprocess.run(argv, cwd=_ROOT, capture_output=True, text=True, timeout=120, check=False)


def test_serve_ends_with_one_line_without_permissions(installed: ApiServer, namespace: str, tmp_path: Path) -> None:
    kubeconfig = installed.account_kubeconfig(namespace, "default", tmp_path)
    done = _serve(kubeconfig, f"--namespace={namespace}")
    assert done.returncode == 2
    assert re.fullmatch(r"error: permissions missing: get,list,watch,patch datauploads [^\n]+\n", done.stderr)


@pytest.mark.sample("podvolumerestores")
@pytest.mark.parametrize("kind", ["podvolumerestores", "backupstoragelocations"])
def test_serve_ends_with_one_line_without_a_definition(installed: ApiServer, tmp_path: Path, kind: str) -> None:
    kubeconfig = installed.account_kubeconfig("velero", "node-agent", tmp_path)
    _kubectl(installed, "delete", "crd", f"{kind}.velero.io")
    try:
        done = _serve(kubeconfig, "--namespace=velero")
    finally:
        _kubectl(installed, "apply", "-f", str(_ROOT / "deploy" / "crds"))
        _kubectl(installed, "wait", f"crd/{kind}.velero.io", "--for=condition=Established")
    assert done.returncode == 2
    missing = f"custom resource definitions missing: {kind}.velero.io/v1"
    assert done.stderr == f"error: {missing}: run nodeagent install --crds-only\n"


def test_serve_ends_with_one_line_where_its_configuration_is_missing(installed: ApiServer, tmp_path: Path) -> None:
    kubeconfig = installed.account_kubeconfig("velero", "node-agent", tmp_path)
    _kubectl(installed, "delete", "configmap", "node-agent-config", "--namespace=velero")
    try:
        done = _serve(kubeconfig, "--namespace=velero", "--node-agent-configmap=node-agent-config")
    finally:
        _kubectl(installed, "apply", "-f", str(_ROOT / "deploy" / "config.yaml"))
    assert done.returncode == 2
    assert done.stderr.startswith("error: ConfigMap velero/node-agent-config does not exist")
    assert done.stderr.count("\n") == 1


def test_serve_ends_with_one_line_where_its_role_does_not_name_the_configuration(
    installed: ApiServer, tmp_path: Path
) -> None:
    kubeconfig = installed.account_kubeconfig("velero", "node-agent", tmp_path)
    done = _serve(kubeconfig, "--namespace=velero", "--node-agent-configmap=other")
    assert done.returncode == 2
    missing = "error: permissions missing: get,list,watch configmaps (only other) in its namespace: "
    assert done.stderr.startswith(missing)
    assert done.stderr.count("\n") == 1


_EXITS = {
    "wrong type": (
        {"a": '{"loadConcurrency": {"globalConfig": "3"}}'},
        "loadConcurrency.globalConfig: expected a whole",
    ),
    "operator": (
        {"a": '{"loadAffinity": [{"nodeSelector": {"matchExpressions": [{"key": "a", "operator": "Is"}]}}]}'},
        "loadAffinity[0].nodeSelector.matchExpressions[0].operator: expected",
    ),
    "no JSON": ({"a": "{"}, "the configuration is not JSON"),
    "no data": ({}, "must have exactly one key"),
    "two keys": ({"a": "{}", "b": "{}"}, "must have exactly one key"),
}

_WARNS = {
    "resources": '{"podResources": {"memoryLimit": "500MB"}}',
    "number": '{"loadConcurrency": {"globalConfig": 0}}',
    "cache": '{"cachePVC": {"residentThresholdInMB": 5}}',
    "unknown key": '{"loadConcurrencie": {}}',
}


def _put_config(server: ApiServer, data: dict[str, str]) -> None:
    _kubectl(server, "-n", "velero", "delete", "configmap", "start-config", "--ignore-not-found")
    literals = [f"--from-literal={key}={value}" for key, value in data.items()]
    _kubectl(server, "-n", "velero", "create", "configmap", "start-config", *literals)


@pytest.mark.sample("wrong type")
@pytest.mark.parametrize("case", _EXITS)
def test_serve_ends_with_one_line_where_veleros_agent_would(installed: ApiServer, case: str) -> None:
    data, expected = _EXITS[case]
    _put_config(installed, data)
    done = _serve(installed.kubeconfig, "--namespace=velero", "--node-agent-configmap=start-config")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ConfigMap velero/start-config: ")
    assert expected in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.sample("unknown key")
@pytest.mark.parametrize("case", _WARNS)
def test_serve_only_warns_where_veleros_agent_would(installed: ApiServer, case: str) -> None:
    """It then ends for want of the other ConfigMap, which is read next."""
    _put_config(installed, {"a": _WARNS[case]})
    names = ("--node-agent-configmap=start-config", "--backup-repository-configmap=absent")
    done = _serve(installed.kubeconfig, "--namespace=velero", *names)
    assert done.returncode == 2
    *warnings, error = done.stderr.splitlines()
    assert error.startswith("error: ConfigMap velero/absent does not exist")
    assert [line for line in warnings if "configuration: " in line]


def test_serve_ends_where_the_repository_configuration_has_no_data(installed: ApiServer) -> None:
    _put_config(installed, {})
    done = _serve(installed.kubeconfig, "--namespace=velero", "--backup-repository-configmap=start-config")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ConfigMap velero/start-config has no data")


def _patch_daemonset(server: ApiServer, patch: str) -> None:
    _kubectl(server, "-n", "velero", "patch", "daemonset", "node-agent", "--patch", patch)


@pytest.fixture
def host_pods(installed: ApiServer, tmp_path: Path) -> Iterator[Path]:
    """A folder that the DaemonSet mounts as `host-pods`, on a node of its own with one Running pod."""
    mount = '{{"spec": {{"template": {{"spec": {{"containers": [{{"name": "node-agent", "volumeMounts": {0}}}]}}}}}}}}'
    shown = f'[{{"$patch": "delete", "mountPath": "/host_pods"}}, {{"name": "host-pods", "mountPath": "{tmp_path}"}}]'
    hidden = f'[{{"$patch": "delete", "mountPath": "{tmp_path}"}}, {{"name": "host-pods", "mountPath": "/host_pods"}}]'
    overrides = '{"spec": {"nodeName": "node-pods", "serviceAccountName": "node-agent"}}'
    _kubectl(installed, "-n", "velero", "run", "web", "--image=none", f"--overrides={overrides}")
    running = ("--subresource=status", '--patch={"status": {"phase": "Running"}}')
    _kubectl(installed, "-n", "velero", "patch", "pod", "web", *running)
    _patch_daemonset(installed, mount.format(shown))
    yield tmp_path
    _patch_daemonset(installed, mount.format(hidden))
    _kubectl(installed, "-n", "velero", "delete", "pod", "web", "--force", "--grace-period=0")


@pytest.mark.timeout(150)
def test_serve_ends_with_one_line_where_host_pods_is_another_folder(installed: ApiServer, host_pods: Path) -> None:
    flags = ("--node-name=node-pods", "--mover-service-account=node-agent-mover")
    done = _serve(installed.kubeconfig, "--namespace=velero", *flags)
    assert done.returncode == 2
    *_, error = done.stderr.splitlines()
    assert error.startswith(
        f"error: the volume host-pods is not the kubelet's pods directory: {host_pods} has no entry for 1 of 1 Running "
        "pods of node node-pods, such as velero/web: "
    )


async def test_the_agents_account_may_list_the_pods_of_its_node(
    installed: ApiServer, host_pods: Path, tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    async with _acting_as(installed, "velero", "node-agent", tmp_path_factory.mktemp("account")) as client:
        web = await client.get(PODS, "velero", "web")
        (host_pods / web["metadata"]["uid"]).mkdir()
        with caplog.at_level("INFO"):
            await check_host_pods(client, SystemClock(), "node-pods", str(host_pods))
    assert f"directory {host_pods} has an entry for each of the 1 Running pods of the node" in caplog.messages


async def test_an_unreachable_server_is_reported(installed: ApiServer, namespace: str, tmp_path: Path) -> None:
    kubeconfig = installed.account_kubeconfig(namespace, "default", tmp_path)
    kubeconfig.write_text(kubeconfig.read_text().replace(installed.url, "https://127.0.0.1:1"))
    transport, _ = await load_transport(str(kubeconfig))
    client = KubeClient(transport, Retry(SystemClock(), attempts=1))
    with pytest.raises(ConfigError, match="cannot check the cluster"):
        await check_cluster(client, namespace, _PERMISSIONS)
    await transport.close()


async def _has_permissions(client: KubeClient, permissions: tuple[Permission, ...], seconds: float = 30.0) -> None:
    """Return once the API server's authorizer has observed the role."""
    required = [replace(permission, without="") for permission in permissions]
    async with asyncio.timeout(seconds):
        while True:
            try:
                await check_permissions(client, "velero", required)
            except ConfigError:
                await asyncio.sleep(0.1)
            else:
                return


@pytest.fixture
def volume_secrets(installed: ApiServer) -> Iterator[Callable[[], object]]:
    """Installs `deploy/volume-secrets` when it is called, for one test."""
    manifest = str(_ROOT / "deploy" / "volume-secrets" / "rbac.yaml")
    yield lambda: _kubectl(installed, "apply", "-f", manifest)
    _kubectl(installed, "delete", "--ignore-not-found", "-f", manifest)


async def test_the_optional_role_lets_the_agent_copy_and_delete_what_a_volume_needs(
    installed: ApiServer, namespace: str, tmp_path: Path, volume_secrets: Callable[[], object]
) -> None:
    name = f"token-{namespace}"
    secret = {"type": "example.com/key", "data": {"key": "c2VjcmV0"}}
    config = {"data": {"a": "b"}, "binaryData": {"c": "ZA=="}}
    for resource, content in ((SECRETS, secret), (CONFIG_MAPS, config)):
        meta = {"metadata": {"name": name, "namespace": namespace, "annotations": {"of": "a-tenant"}}}
        installed.api.request(
            "POST", resource.path(namespace), body={"kind": resource.kind, "apiVersion": "v1"} | meta | content
        )
    owner = Owner("velero.io/v2alpha1", "DataUpload", "velero", name, f"uid-of-{namespace}")
    plan = CopyPlan(owner, namespace, (f"Secret/{name}", f"ConfigMap/{name}"))

    async with _acting_as(installed, "velero", "node-agent", tmp_path) as client:
        copies = Copies(client)
        with pytest.raises(ExposeError, match=f"^no permission to get secrets in namespace {namespace}, to copy"):
            await copies.check(plan, client)
        volume_secrets()
        await _has_permissions(client, COPY_PERMISSIONS)
        assert await copies.check(plan, client) is None
        for _ in range(2):
            async with ExposeRun(client, owner, no_guard) as run:
                assert await copies.ensure(run, plan) is None
        copied: JsonDict = await client.get(SECRETS, "velero", name)
        assert {key: copied[key] for key in secret} == secret
        assert copied["metadata"]["labels"][COPY_LABEL] == owner.uid
        assert "annotations" not in copied["metadata"]
        other = replace(plan, owner=replace(owner, uid="uid-of-another"))
        assert await copies.delete(other) is None
        assert isinstance(await copies.check(other, client), Pending)
        listed = (await list_leaked_objects(client, "velero", copies=True))[owner.uid]
        assert [len(listed.of(resource)) for resource in (SECRETS, CONFIG_MAPS)] == [1, 1]
        assert await copies.delete(plan) is None
        assert [await client.read(resource, "velero", name) for resource in (SECRETS, CONFIG_MAPS)] == [None, None]
