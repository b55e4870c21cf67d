"""The agent's checks before it starts, against a real API server with the roles of `deploy/`."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path

import pytest

from core.errors import ConfigError, ExposeError
from core.kube.client import KubeClient
from core.kube.resources import CONFIG_MAPS, SECRETS
from core.models.names import COPY_LABEL
from exposer.expose_run import ExposeRun, check_copies, delete_copies, ensure_copies
from exposer.leaked_objects import list_leaked_objects
from exposer.model import CopyPlan, Owner, PendingError
from nodeagent.runtime.permissions import COPY_PERMISSIONS, MOVER_PERMISSIONS, Permission, agent_permissions
from nodeagent.runtime.preflight import check_cluster, check_permissions, judge_definitions, read_definitions
from nodeagent.runtime.settings import Settings
from nodeagent.startup import read_spec
from tests.crash.worlds import open_client
from tests.exposer.support.world import no_guard
from tests.support.access import access_of_event, not_permitted
from tests.support.apiserver import ApiServer
from tests.support.objects import JsonDict, build_object

pytestmark = pytest.mark.integration

_ROOT = Path(__file__).parents[2]
_USER = "system:serviceaccount:velero:node-agent"
_PERMISSIONS = agent_permissions("node-agent-config")


def _acting_as(server: ApiServer, account: str, folder: Path) -> AbstractAsyncContextManager[KubeClient]:
    return open_client(server, kubeconfig=server.account_kubeconfig("velero", account, folder))


@pytest.fixture(scope="session")
def installed(apiserver: ApiServer) -> ApiServer:
    """An API server that accepted everything that `kubectl apply -k deploy` sends."""
    apiserver.kubectl("apply", "-k", str(_ROOT / "deploy"))
    return apiserver


async def test_the_agents_account_has_all_permissions_it_needs(installed: ApiServer, tmp_path: Path) -> None:
    before = len(installed.audit_events())  # other tests have used the account
    async with _acting_as(installed, "node-agent", tmp_path) as client:
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
    async with _acting_as(installed, "node-agent-mover", tmp_path) as client:
        await check_permissions(client, "velero", MOVER_PERMISSIONS)
        with pytest.raises(ConfigError, match="permissions missing"):
            await check_permissions(client, "velero", _PERMISSIONS)


@pytest.fixture
def creates_no_repositories(installed: ApiServer) -> Iterator[None]:
    """The agent's role without the permission to create BackupRepositories, which it needs only for its movers."""
    of_role = ("-n", "velero", "role/node-agent")
    rules = json.loads(installed.kubectl("get", *of_role, "--output=json"))["rules"]
    kept = [rule for rule in rules if (rule["resources"], rule["verbs"]) != (["backuprepositories"], ["create"])]
    assert len(kept) == len(rules) - 1
    installed.kubectl("patch", *of_role, "--type=merge", f"--patch={json.dumps({'rules': kept})}")
    yield
    installed.kubectl("patch", *of_role, "--type=merge", f"--patch={json.dumps({'rules': rules})}")


@pytest.mark.usefixtures("creates_no_repositories")
async def test_an_agent_whose_account_movers_share_needs_their_permissions(
    installed: ApiServer, tmp_path: Path
) -> None:
    missing = "permissions missing: create backuprepositories in its namespace: "
    async with _acting_as(installed, "node-agent", tmp_path) as client, asyncio.timeout(300):
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
    installed.kubectl("create", "namespace", "app")
    installed.create_account("app", "default")
    installed.kubectl("apply", "-f", str(_ROOT / "examples"), "--dry-run=server", "--validate=strict")


def _serve(kubeconfig: Path, *flags: str) -> list[str]:
    """Return the lines that an agent writes which does not start."""
    argv = [sys.executable, "-m", "nodeagent", "serve", "--node-name=node-a", f"--kubeconfig={kubeconfig}", *flags]
    done = subprocess.run(argv, cwd=_ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2
    return done.stderr.splitlines()


def _serve_in_vain(kubeconfig: Path, *flags: str) -> str:
    """Return the only line that an agent writes which does not start."""
    (line,) = _serve(kubeconfig, *flags)
    return line


def test_serve_ends_with_one_line_without_permissions(installed: ApiServer, namespace: str, tmp_path: Path) -> None:
    kubeconfig = installed.account_kubeconfig(namespace, "default", tmp_path)
    line = _serve_in_vain(kubeconfig, f"--namespace={namespace}")
    assert line.startswith("error: permissions missing: get,list,watch,patch datauploads ")


@pytest.mark.sample("podvolumerestores")
@pytest.mark.parametrize("kind", ["podvolumerestores", "backupstoragelocations"])
def test_serve_ends_with_one_line_without_a_definition(installed: ApiServer, tmp_path: Path, kind: str) -> None:
    kubeconfig = installed.account_kubeconfig("velero", "node-agent", tmp_path)
    installed.kubectl("delete", "crd", f"{kind}.velero.io")
    try:
        line = _serve_in_vain(kubeconfig, "--namespace=velero")
    finally:
        installed.kubectl("apply", "-f", str(_ROOT / "deploy" / "crds"))
        installed.kubectl("wait", f"crd/{kind}.velero.io", "--for=condition=Established")
    missing = f"custom resource definitions missing: {kind}.velero.io/v1"
    assert line == f"error: {missing}: run nodeagent install --crds-only"


def test_serve_ends_with_one_line_where_its_configuration_is_missing(installed: ApiServer, tmp_path: Path) -> None:
    kubeconfig = installed.account_kubeconfig("velero", "node-agent", tmp_path)
    installed.kubectl("delete", "configmap", "node-agent-config", "--namespace=velero")
    try:
        line = _serve_in_vain(kubeconfig, "--namespace=velero", "--node-agent-configmap=node-agent-config")
    finally:
        installed.kubectl("apply", "-f", str(_ROOT / "deploy" / "config.yaml"))
    assert line.startswith("error: ConfigMap velero/node-agent-config does not exist")


def test_serve_ends_with_one_line_where_its_role_does_not_name_the_configuration(
    installed: ApiServer, tmp_path: Path
) -> None:
    kubeconfig = installed.account_kubeconfig("velero", "node-agent", tmp_path)
    line = _serve_in_vain(kubeconfig, "--namespace=velero", "--node-agent-configmap=other")
    assert line.startswith("error: permissions missing: get,list,watch configmaps (only other) in its namespace: ")


def _put_config(server: ApiServer, data: dict[str, str]) -> None:
    server.kubectl("-n", "velero", "delete", "configmap", "start-config", "--ignore-not-found")
    literals = [f"--from-literal={key}={value}" for key, value in data.items()]
    server.kubectl("-n", "velero", "create", "configmap", "start-config", *literals)


def test_serve_ends_with_one_line_where_veleros_agent_would(installed: ApiServer) -> None:
    _put_config(installed, {"a": '{"loadConcurrency": {"globalConfig": "3"}}'})
    line = _serve_in_vain(installed.kubeconfig, "--namespace=velero", "--node-agent-configmap=start-config")
    assert line.startswith("error: ConfigMap velero/start-config: ")
    assert "loadConcurrency.globalConfig: expected a whole" in line


def test_serve_only_warns_where_veleros_agent_would(installed: ApiServer) -> None:
    """It then ends for want of the other ConfigMap, which is read next."""
    _put_config(installed, {"a": '{"loadConcurrencie": {}}'})
    names = ("--node-agent-configmap=start-config", "--backup-repository-configmap=absent")
    *warnings, error = _serve(installed.kubeconfig, "--namespace=velero", *names)
    assert error.startswith("error: ConfigMap velero/absent does not exist")
    assert [line for line in warnings if "configuration: " in line]


def test_serve_ends_where_the_repository_configuration_has_no_data(installed: ApiServer) -> None:
    _put_config(installed, {})
    *_, line = _serve(installed.kubeconfig, "--namespace=velero", "--backup-repository-configmap=start-config")
    assert line.startswith("error: ConfigMap velero/start-config has no data")


async def _has_permissions(client: KubeClient, permissions: tuple[Permission, ...]) -> None:
    """Return once the API server's authorizer has observed the role."""
    required = [replace(permission, without="") for permission in permissions]
    async with asyncio.timeout(30):
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
    yield lambda: installed.kubectl("apply", "-f", manifest)
    installed.kubectl("delete", "--ignore-not-found", "-f", manifest)


async def test_the_optional_role_lets_the_agent_copy_and_delete_what_a_volume_needs(
    installed: ApiServer, namespace: str, tmp_path: Path, volume_secrets: Callable[[], object]
) -> None:
    name = f"token-{namespace}"
    secret = {"type": "example.com/key", "data": {"key": "c2VjcmV0"}}
    config = {"data": {"a": "b"}, "binaryData": {"c": "ZA=="}}
    for resource, content in ((SECRETS, secret), (CONFIG_MAPS, config)):
        meta = {"annotations": {"of": "a-tenant"}}
        installed.api.create(resource, build_object(resource, name, namespace, metadata=meta) | content)
    owner = Owner("velero.io/v2alpha1", "DataUpload", "velero", name, f"uid-of-{namespace}")
    plan = CopyPlan(owner, namespace, (f"Secret/{name}", f"ConfigMap/{name}"))
    async with _acting_as(installed, "node-agent", tmp_path) as client:
        with pytest.raises(ExposeError, match=f"^no permission to get secrets in namespace {namespace}, to copy"):
            await check_copies(client, plan)
        volume_secrets()
        await _has_permissions(client, COPY_PERMISSIONS)
        await check_copies(client, plan)
        for _ in range(2):
            async with ExposeRun(client, owner, no_guard) as run:
                await ensure_copies(run, plan)
        copied: JsonDict = await client.get(SECRETS, "velero", name)
        assert {key: copied[key] for key in secret} == secret
        assert copied["metadata"]["labels"][COPY_LABEL] == owner.uid
        assert "annotations" not in copied["metadata"]
        other = replace(plan, owner=replace(owner, uid="uid-of-another"))
        assert await delete_copies(client, other) is None
        with pytest.raises(PendingError):
            await check_copies(client, other)
        listed = (await list_leaked_objects(client, "velero", copies=True))[owner.uid]
        assert [len(listed.of(resource)) for resource in (SECRETS, CONFIG_MAPS)] == [1, 1]
        assert await delete_copies(client, plan) is None
        assert [await client.read(resource, "velero", name) for resource in (SECRETS, CONFIG_MAPS)] == [None, None]
