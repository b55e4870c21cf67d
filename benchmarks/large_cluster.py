"""A large cluster as `nodeagent status`, `volumes` and `ui` find it: agents, a leader with its page, PVCs, transfers.

A real kube-apiserver with etcd holds it. Nothing carries a transfer out: each is created in the phase that it keeps.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml

from benchmarks.figures import Summary, print_report
from benchmarks.processes import BenchmarkError
from benchmarks.scale.manifests import APPS, KINDS, app_namespace, build_claim, build_location, build_node, node_name
from benchmarks.scale.stage import open_client
from core.kube.client import KubeClient
from core.kube.resources import (
    BACKUP_REPOSITORIES,
    BACKUP_STORAGE_LOCATIONS,
    CONFIG_MAPS,
    CRON_JOBS,
    DAEMON_SETS,
    DEPLOYMENTS,
    LEASES,
    NAMESPACES,
    NODES,
    PERSISTENT_VOLUME_CLAIMS,
    PERSISTENT_VOLUMES,
    PODS,
    SCHEDULES,
    SERVICE_ACCOUNTS,
    Resource,
)
from core.models.names import (
    AGENT_LABELS,
    CONFIG_ANNOTATION,
    NODE_LABEL,
    PENDING_REASON_ANNOTATION,
    PVC_NAME_ANNOTATION,
    SERVICE_ACCOUNT,
)
from nodeagent.config.parse import parse_config
from nodeagent.runtime.permissions import Permission
from nodeagent.runtime.workqueue import work_in_parallel
from tests.client.support.volumes_scene import a_cron_job
from tests.crash.controllers import set_status
from tests.nodeagent.support.simulation import TRANSFER_RESOURCES
from tests.nodeagent.support.transfers import TRANSFERS
from tests.nodeagent.support.volume_scene import a_pod, a_schedule, a_volume, an_object
from tests.support.apiserver import ApiServer, run_apiserver, serve_schedules
from tests.support.objects import JsonDict
from tests.support.rbac import grant
from tests.support.status_page import forwarded_address, serve_status_page

_PERSON: Final = "person"
_DAEMONSET: Final = Path(__file__).parents[1] / "deploy" / "agent" / "daemonset.yaml"
_AT_A_TIME: Final = 16
_REPOSITORIES: Final = 50
_LISTED: Final = 1000
"""Places of the queue on the leader's page."""

_CONFIG: Final = json.dumps(
    {
        "loadConcurrency": {
            "globalConfig": 2,
            "prepareQueueLength": 400,
            "perNodeConfig": [{"nodeSelector": {"matchLabels": {"kubernetes.io/hostname": "node-000"}}, "number": 4}],
        }
    }
)
_PHASES: Final = (
    *["Completed"] * 74,
    "Failed",
    *["New"] * 11,
    *["Accepted"] * 2,
    *["Prepared"] * 2,
    *["InProgress"] * 10,
)
"""How many of each hundred transfers: most have ended, and the nodes are busy."""

_TIME: Final = "2026-11-21T11:00:00Z"


@dataclass(frozen=True)
class Size:
    """How large the cluster is."""

    nodes: int
    transfers: int
    claims: int


class Person:
    """An account of the API server with the permissions of some commands; `flags` lead a command to the cluster."""

    def __init__(self, server: ApiServer, namespace: str, folder: Path, permissions: tuple[Permission, ...]) -> None:
        """Create the account in the namespace; its kubeconfig is in `folder`."""
        self._server, self._user = server, f"system:serviceaccount:{namespace}:{_PERSON}"
        server.create_account(namespace, _PERSON)
        self.kubeconfig = str(server.account_kubeconfig(namespace, _PERSON, folder))
        grant(server.api, namespace, _PERSON, permissions)
        self.folder = folder
        self.namespace = namespace
        self.flags = ("--namespace", namespace, "--kubeconfig", self.kubeconfig)

    def count_requests(self) -> int:
        """Return how many requests there were so far, as the audit log of the API server has them."""
        return len({one["auditID"] for one in self._server.audit_events() if one["user"]["username"] == self._user})


def run_in_large_cluster(
    parser: argparse.ArgumentParser,
    permissions: tuple[Permission, ...],
    measure: Callable[[argparse.Namespace, Person], Awaitable[tuple[Iterable[str], Summary]]],
) -> int:
    """Parse the command line, measure as a person with these permissions, and print the report; return the exit code.

    `measure` returns the table and the figures.
    """
    parser.add_argument("--nodes", type=int, default=500, help="nodes with an agent (default: 500)")
    parser.add_argument("--transfers", type=int, default=10_000, help="transfers in all phases (default: 10000)")
    parser.add_argument("--claims", type=int, default=5_000, help="bound PVCs, each with a pod (default: 5000)")
    parser.add_argument("--runs", type=int, default=7, help="how often everything is run (default: 7)")
    arguments = parser.parse_args()
    size = Size(arguments.nodes, arguments.transfers, arguments.claims)

    async def run(folder: Path) -> tuple[Iterable[str], Summary]:
        try:
            address = forwarded_address()
        except OSError as e:
            raise BenchmarkError(f"this machine has no address but loopback: {e}") from e
        body = json.dumps(_page(size), indent=2).encode()
        with run_apiserver() as server, serve_status_page(address, body) as port:
            namespace = server.create_namespace()
            server.create_account(namespace, SERVICE_ACCOUNT)
            serve_schedules(server)
            client = await open_client(server.kubeconfig)
            try:
                await _fill(client, namespace, size, port, address)
            finally:
                await client.transport.close()
            return await measure(arguments, Person(server, namespace, folder, permissions))

    try:
        with tempfile.TemporaryDirectory(prefix=f"{parser.prog.replace('_', '-')}-") as folder:
            lines, summary = asyncio.run(run(Path(folder)))
    except BenchmarkError as e:
        sys.stderr.write(f"error: {e}\n")
        return 1
    conditions = f"{size.transfers} transfers on {size.nodes} nodes, {size.claims} PVCs; {arguments.runs} runs"
    print_report(conditions, lines, summary)
    return 0


async def _fill(client: KubeClient, namespace: str, size: Size, port: int, address: str) -> None:
    """Create everything in the namespace, which exists; the leader serves its page on `address` and `port`."""
    await _install(client, namespace, port)
    await _add_schedules(client, namespace)
    numbers = range(size.nodes)

    async def add_node(number: int) -> None:
        await client.create(NODES, build_node(node_name(number)))
        stored = await client.create(PODS, _agent_pod(namespace, node_name(number)))
        ip = address if number == 0 else "192.0.2.1"
        conditions = [{"type": "Ready", "status": "True"}]
        status = {"phase": "Running", "conditions": conditions, "podIP": ip, "podIPs": [{"ip": ip}]}
        await set_status(client, PODS, stored, status)

    async def add_claim(number: int) -> None:
        name, app = claim_name(number), app_namespace(namespace, number)
        claim = await client.create(PERSISTENT_VOLUME_CLAIMS, build_claim(app, name, volume=f"pv-{app}-{name}"))
        await set_status(client, PERSISTENT_VOLUME_CLAIMS, claim, {"phase": "Bound"})
        await client.create(PERSISTENT_VOLUMES, a_volume(name, app))
        # fs-backup covers each second one.
        annotations = {"backup.velero.io/backup-volumes": name} if number % 2 else {}
        workload = a_pod(f"app-{number:05}", app, claims=[name], annotations=annotations)
        workload["spec"]["containers"][0]["image"] = "none"
        pod = await client.create(PODS, workload)
        await set_status(client, PODS, pod, {"phase": "Running"})

    async def add_transfer(number: int) -> None:
        transfer = _transfer(namespace, number, size)
        await client.create(TRANSFER_RESOURCES[transfer["kind"]], transfer)

    await work_in_parallel(list(numbers), add_node, at_a_time=_AT_A_TIME, name="nodes")
    # A backup that is older than its PVC counts for another volume.
    await work_in_parallel(list(range(size.claims)), add_claim, at_a_time=_AT_A_TIME, name="PVCs")
    await work_in_parallel(list(range(size.transfers)), add_transfer, at_a_time=_AT_A_TIME, name="transfers")


async def _install(client: KubeClient, namespace: str, port: int) -> None:
    daemonset = yaml.safe_load(_DAEMONSET.read_text(encoding="utf-8"))
    daemonset["metadata"]["namespace"] = namespace
    (container,) = daemonset["spec"]["template"]["spec"]["containers"]
    container["args"] = ["serve", f"--status-address=:{port}", "--node-agent-configmap=node-agent-config"]
    lease = {
        "holderIdentity": f"{node_name(0)}_1",
        "leaseDurationSeconds": 1_000_000,
        "renewTime": "2026-11-21T11:00:00.000000Z",
    }
    named: list[tuple[Resource, str, JsonDict]] = [
        (CONFIG_MAPS, "node-agent-config", {"data": {"config.json": _CONFIG}}),
        (LEASES, "node-agent-dispatcher", {"spec": lease}),
        *((BACKUP_REPOSITORIES, f"app-{number}-default-kopia", _repository(number)) for number in range(_REPOSITORIES)),
    ]
    await client.create(DAEMON_SETS, daemonset)
    await client.create(BACKUP_STORAGE_LOCATIONS, build_location(namespace))
    for resource, name, content in named:
        await client.create(resource, an_object(resource.kind, name, namespace, resource.api_version, **content))


async def _add_schedules(client: KubeClient, namespace: str) -> None:
    """Create the namespaces of the PVCs, and what backs these up: three CronJobs, and three Schedules of Velero."""
    for number in range(APPS):
        app = app_namespace(namespace, number)
        await client.create(NAMESPACES, an_object("Namespace", app))
        await client.create(SERVICE_ACCOUNTS, an_object("ServiceAccount", "default", app))
    server = {"containers": [{"name": "velero", "image": "none", "args": ["server"]}]}
    labels = {"app": "velero"}
    spec = {"selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels}, "spec": server}}
    await client.create(DEPLOYMENTS, an_object("Deployment", "velero", namespace, "apps/v1", spec=spec))
    for number in range(3):
        cron_job = a_cron_job(f"night-{number}", f"--namespace={app_namespace(namespace, number)}", "--selector=")
        cron_job["metadata"]["namespace"] = namespace
        cron_job["spec"]["jobTemplate"]["spec"]["template"]["spec"]["restartPolicy"] = "Never"
        await client.create(CRON_JOBS, cron_job)
    matched: list[JsonDict] = [{"includedNamespaces": [f"{namespace}-app-*"]}, {"excludedNamespaces": ["kube-*"]}]
    for number, chosen in enumerate((*matched, {"labelSelector": {"matchLabels": {"app": "none"}}})):
        schedule = a_schedule(f"velero-{number}", snapshotMoveData=True, **chosen)
        schedule["metadata"]["namespace"] = namespace
        await client.create(SCHEDULES, schedule)


def _repository(number: int) -> JsonDict:
    spec = {"volumeNamespace": f"app-{number}", "backupStorageLocation": "default", "repositoryType": "kopia"}
    status = {"phase": "Ready", "lastMaintenanceTime": _TIME}
    return {"spec": spec | {"maintenanceFrequency": "1h0m0s"}, "status": status}


def _agent_pod(namespace: str, node: str) -> JsonDict:
    """Return an agent's pod as large as a real one: it has the template of the DaemonSet."""
    template = yaml.safe_load(_DAEMONSET.read_text(encoding="utf-8"))["spec"]["template"]
    annotations = {CONFIG_ANNOTATION: parse_config(_CONFIG).digest}
    meta = {"name": f"node-agent-{node}", "namespace": namespace, "labels": dict(AGENT_LABELS)}
    spec = template["spec"] | {"nodeName": node}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta | {"annotations": annotations}, "spec": spec}


def _transfer(namespace: str, number: int, size: Size) -> JsonDict:
    """Return one transfer, as large as a recorded one, in its phase: of a PVC a backup, then a restore."""
    kind, phase = KINDS[number % len(KINDS)], _PHASES[number // len(KINDS) % len(_PHASES)]
    claim = number // 2 % size.claims
    name, node, app = f"transfer-{number:05}", node_name(number % size.nodes), app_namespace(namespace, claim)
    transfer: JsonDict = TRANSFERS[kind](name)
    _point_to(transfer["spec"], app, claim_name(claim))
    labels, annotations = dict(transfer["metadata"]["labels"]), dict[str, str]()
    if kind == "PodVolumeBackup":
        annotations[PVC_NAME_ANNOTATION] = claim_name(claim)
    status: JsonDict = {"phase": phase, "progress": {"totalBytes": 2**34, "bytesDone": 2**33}}
    if phase == "New":
        annotations[PENDING_REASON_ANNOTATION] = "Queued"
        status = {"phase": phase, "message": f"queued at position {number}: prepareQueueLength (400) reached"}
    else:
        labels[NODE_LABEL] = node
        status |= {"node": node, "acceptedTimestamp": _TIME, "startTimestamp": _TIME}
    if phase in {"Completed", "Failed"}:
        status["completionTimestamp"] = _TIME
    transfer["metadata"] = {"name": name, "namespace": namespace, "labels": labels, "annotations": annotations}
    return transfer | {"status": status}


def claim_name(number: int) -> str:
    """Return the name of the PVC with that number."""
    return f"data-{number:05}"


def _point_to(spec: JsonDict, app: str, claim: str) -> None:
    """Let the transfer be about that PVC, or a pod of its namespace."""
    if "pod" in spec:
        spec["pod"] |= {"namespace": app}
    elif "targetVolume" in spec:
        spec["targetVolume"] |= {"namespace": app, "pvc": claim}
    else:
        spec |= {"sourceNamespace": app, "sourcePVC": claim}


def _page(size: Size) -> JsonDict:
    """Return the leader's status page."""
    kinds = Counter(_PHASES[number // len(KINDS) % len(_PHASES)] for number in range(size.transfers))
    queued = [
        {"kind": KINDS[number % len(KINDS)], "name": f"transfer-{number:05}"}
        for number in range(size.transfers)
        if _PHASES[number // len(KINDS) % len(_PHASES)] == "New"
    ]
    queue = [one | {"position": position} for position, one in enumerate(queued[:_LISTED], start=1)]
    return {
        "version": "0.1.0",
        "dispatcher": {"holder": f"{node_name(0)}_1", "leading": True},
        "queue": {"queued": len(queued), "queue": queue, "lastError": "", "phases": dict(kinds)},
        "config": {"hash": parse_config(_CONFIG).digest, "rejected": [], "warnings": []},
        "maintenance": {},
    }
