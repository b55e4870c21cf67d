"""When a real API server rejects a mover pod, its transfer reports why; it fails only where retries cannot help.

An agent for each cause, wired as `serve` does it, each in a namespace of its own and all at the
same time. Their nodes and workloads are only objects: no mover pod is ever accepted.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import pytest

from core.kube.client import KubeClient, Selection
from core.kube.resources import BACKUP_STORAGE_LOCATIONS, EVENTS, NODES, POD_VOLUME_BACKUPS, PODS, Resource
from exposer.template import AgentTemplate
from nodeagent.config.parse import ParsedConfig
from nodeagent.runtime.settings import RepositoryControllerMode, Settings
from nodeagent.startup import AgentSpec
from tests.crash.worlds import open_client, running
from tests.nodeagent.support.dispatching import agent_pod
from tests.support.apiserver import ApiServer
from tests.support.objects import build_object
from tests.testbed.api import Api, ApiError, Json
from tests.testbed.processes import wait_for

pytestmark = pytest.mark.integration

_NODE = "rejecting-node"
_QUOTAS = Resource("ResourceQuota", "resourcequotas")
_POLICIES, _BINDINGS, _WEBHOOKS = (
    Resource(kind, plural, "admissionregistration.k8s.io", namespaced=False)
    for kind, plural in (
        ("ValidatingAdmissionPolicy", "validatingadmissionpolicies"),
        ("ValidatingAdmissionPolicyBinding", "validatingadmissionpolicybindings"),
        ("ValidatingWebhookConfiguration", "validatingwebhookconfigurations"),
    )
)
_WAIT_SECONDS = 300
_POLL_SECONDS = 0.1


def _set_quota(api: Api, namespace: str) -> None:
    """Set a full quota; no controller counts what is in the namespace."""
    hard = {"hard": {"pods": "2"}}
    api.create(_QUOTAS, {"metadata": {"namespace": namespace, "name": "full"}, "spec": hard})
    api.patch(_QUOTAS, {"status": {**hard, "used": {"pods": "2"}}}, name="full", namespace=namespace, sub="status")


def _create_policy(api: Api, namespace: str) -> None:
    """Create a policy that denies every new pod of the namespace."""
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
    selector = {"matchLabels": {"kubernetes.io/metadata.name": namespace}}
    spec = {
        "matchConstraints": {"resourceRules": [rule], "namespaceSelector": selector},
        "validations": [{"expression": "false", "message": "no pods today"}],
    }
    api.create(_POLICIES, {"metadata": {"name": namespace}, "spec": spec})
    bound = {"policyName": namespace, "validationActions": ["Deny"]}
    api.create(_BINDINGS, {"metadata": {"name": namespace}, "spec": bound})


def _create_webhook(api: Api, namespace: str) -> None:
    """Make every new pod of the namespace depend on an unreachable webhook."""
    webhook = {
        "name": "pods.example.com",
        "clientConfig": {"url": "https://127.0.0.1:1/"},
        "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}],
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
    }
    api.create(_WEBHOOKS, {"metadata": {"name": namespace}, "webhooks": [webhook]})


_PLAIN = partial(AgentTemplate, "mover:1", host_pods="/host_pods")


@dataclass(frozen=True)
class Case:
    """One rejection: the reported message, the reason of its Event, and what causes it."""

    message: str
    reason: str
    reject: Callable[[Api, str], None] | None = None
    template: AgentTemplate = field(default_factory=_PLAIN)
    agent_ready: bool = True


_CASES = {
    "quota": Case(r"pods \"transfer\" is forbidden: exceeded quota: full, ", "QuotaExceeded", _set_quota),
    "service-account-missing": Case(
        r"error looking up service account \S+/missing: serviceaccount \"missing\" not found",
        "ServiceAccountMissing",
        template=_PLAIN(pod_fields={"serviceAccountName": "missing"}),
    ),
    "webhook-unreachable": Case(
        r"failed calling webhook \"pods.example.com\": .*connection refused", "ApiServerError", _create_webhook
    ),
    "no-node-agent": Case(f"^no node agent is ready on node {_NODE}$", "NoNodeAgent", agent_ready=False),
    "object-denied": Case("denied request: no pods today", "Failed", _create_policy),
    "object-invalid": Case(
        r"Pod \"transfer\" is invalid: spec.dnsPolicy: Unsupported value",
        "Failed",
        template=_PLAIN(pod_fields={"dnsPolicy": "Sometimes"}),
    ),
}


def _create_pod(api: Api, pod: Json, namespace: str) -> Json:
    """Create a pod with the status that its kubelet would report."""
    status = pod.pop("status")
    pod["metadata"]["namespace"] = namespace
    pod["spec"].setdefault("containers", [{"name": "c", "image": "none"}])
    created = api.create(PODS, pod)
    api.patch(PODS, {"status": status}, name=created["metadata"]["name"], namespace=namespace, sub="status")
    return created


def _prepare(api: Api, namespace: str, case: Case) -> None:
    """Create location, agent, workload and transfer of a case, and what rejects its mover."""
    location = {"provider": "aws", "objectStorage": {"bucket": "b"}}
    api.create(BACKUP_STORAGE_LOCATIONS, build_object(BACKUP_STORAGE_LOCATIONS, "default", namespace, spec=location))
    _create_pod(api, agent_pod(_NODE, ready=case.agent_ready), namespace)
    mount = {"name": "c", "image": "none", "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}]}
    spec = {"nodeName": _NODE, "containers": [mount], "volumes": [{"name": "scratch", "emptyDir": {}}]}
    workload = {"metadata": {"name": "workload"}, "spec": spec, "status": {"phase": "Running"}}
    uid = _create_pod(api, workload, namespace)["metadata"]["uid"]
    if case.reject is not None:
        case.reject(api, namespace)
        _wait_rejected(api, namespace)
    transfer = {
        "pod": {"kind": "Pod", "name": "workload", "uid": uid, "namespace": namespace},
        "node": _NODE,
        "volume": "scratch",
        "backupStorageLocation": "default",
        "repoIdentifier": "",
        "uploaderType": "kopia",
    }
    api.create(POD_VOLUME_BACKUPS, build_object(POD_VOLUME_BACKUPS, "transfer", namespace, spec=transfer))


def _wait_rejected(api: Api, namespace: str) -> None:
    """Return once the server rejects pods."""
    body = {"metadata": {"name": "try"}, "spec": {"containers": [{"name": "c", "image": "none"}]}}

    def is_rejected() -> bool:
        try:
            api.request("POST", f"{PODS.path(namespace)}?dryRun=All", body=body)
        except ApiError:
            return True
        return False

    wait_for("the rejection of pods", is_rejected, seconds=_WAIT_SECONDS)


@asynccontextmanager
async def _agent(apiserver: ApiServer, namespace: str, case: Case) -> AsyncIterator[KubeClient]:
    settings = Settings(_NODE, namespace, repository_controller=RepositoryControllerMode.OFF)
    spec = AgentSpec(settings, namespace, ParsedConfig(), case.template)
    async with open_client(apiserver) as client, running(client, spec):
        yield client


async def _wait_reported(client: KubeClient, namespace: str, case: Case) -> None:
    """Return once message and Event report the cause."""
    observed: object = None
    try:
        async with asyncio.timeout(_WAIT_SECONDS):
            while True:
                transfer = await client.get(POD_VOLUME_BACKUPS, namespace, "transfer")
                events = await client.list(Selection(EVENTS, namespace, field_selector=f"reason={case.reason}"))
                observed = (transfer.get("status"), [event["message"] for event in events])
                message = (transfer.get("status") or {}).get("message", "")
                if re.search(case.message, message) and any(re.search(case.message, each) for each in observed[1]):
                    return
                await asyncio.sleep(_POLL_SECONDS)
    except TimeoutError:
        pytest.fail(f"not reported: {observed}")


@pytest.fixture
def node(apiserver: ApiServer) -> None:
    if apiserver.api.get(NODES, "", _NODE) is None:
        apiserver.api.create(NODES, {"metadata": {"name": _NODE}})


@pytest.mark.usefixtures("node")
@pytest.mark.cause(*_CASES)
async def test_every_rejection_is_reported_and_only_permanent_ones_fail(apiserver: ApiServer) -> None:
    spaces = {name: apiserver.create_namespace() for name in _CASES}
    for name, case in _CASES.items():
        _prepare(apiserver.api, spaces[name], case)
    phases = {}
    async with AsyncExitStack() as stack:
        clients = {
            name: await stack.enter_async_context(_agent(apiserver, spaces[name], case))
            for name, case in _CASES.items()
        }
        async with asyncio.TaskGroup() as group:
            for name, case in _CASES.items():
                group.create_task(_wait_reported(clients[name], spaces[name], case), name=name)
        for name, client in clients.items():
            transfer = await client.get(POD_VOLUME_BACKUPS, spaces[name], "transfer")
            phases[name] = (transfer.get("status") or {}).get("phase", "New")
    ended = {"object-denied": "Failed", "object-invalid": "Failed", "no-node-agent": "New"}
    assert phases == dict.fromkeys(_CASES, "Accepted") | ended
