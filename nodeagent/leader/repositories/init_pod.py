"""The pod that creates or connects one backup repository.

Knows its manifest's way into the cluster, what its state means and when it is given up. Does
not know the repository's phases (`nodeagent.leader.repositories.controller`). Creating a repository is not
atomic: the pod's name is fixed, and it is never deleted by force.
"""

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import Enum, auto
from typing import Final

from core.contract import InitResult, parse_result
from core.errors import ExposeError, ResultError
from core.kube.client import KubeClient
from core.kube.resources import PODS
from core.models.base import JsonDict
from core.models.names import OWNER_UID_LABEL, REPOSITORY_TYPE_LABEL
from core.models.storage import BackupRepository, repository_labels
from core.models.units import parse_quantity
from exposer.model import Owner, Pending
from exposer.ownership import create_pod
from exposer.pod_status import diagnose_pod, parse_pod_end
from exposer.pods import build_init_pod, init_pod_name
from exposer.settings import ExposeSettings
from exposer.workload import ONTO_ANY_NODE

__all__ = [
    "INIT_POD_SELECTOR",
    "InitState",
    "PodReport",
    "init_resources",
    "judge_init_pod",
    "let_onto_any_node",
    "read_init_pod",
    "start_init_pod",
]

INIT_POD_SELECTOR: Final = f"{OWNER_UID_LABEL},{REPOSITORY_TYPE_LABEL}"

_PENDING_LIMIT: Final = timedelta(seconds=90)
"""A pod that has not started by then tells its reason instead: loads wait for it."""

_MOST_REQUESTED: Final = {"cpu": "100m", "memory": "128Mi", "ephemeral-storage": "128Mi"}
"""What an init pod takes of its node at most: it connects, and writes one small file."""

_CHOOSY_LIMIT: Final = timedelta(seconds=10)
"""How long only nodes count that take new pods. On a cordoned or tainted one movers of pod
volumes run, and need their repository; but a better one comes first."""


class InitState(Enum):
    """What a repository's init pod comes to."""

    WORKING = auto()
    UNPLACED = auto()
    """No node takes it, as it is: it may be let onto one where nothing new is to be scheduled."""
    LEAVING = auto()
    """Being deleted without a result; another one may come once it is gone."""
    SUCCEEDED = auto()
    FAILED = auto()


@dataclass(frozen=True)
class PodReport:
    """The state of an init pod; `message` says why it failed."""

    state: InitState
    message: str = ""


def judge_init_pod(
    repository: BackupRepository, pod: JsonDict, now: datetime, *, waiting: Pending | None = None
) -> PodReport:
    """Return what `pod` (a v1 Pod as JSON dict), the one of that name, comes to at `now`.

    `waiting` is what others know about why it does not run yet.
    """
    meta = pod["metadata"]
    name = f"{meta['namespace']}/{meta['name']}"
    age = now - datetime.fromisoformat(meta["creationTimestamp"])
    late = age >= _PENDING_LIMIT
    if (meta.get("labels") or {}).get(OWNER_UID_LABEL) != repository.uid:
        if not late:
            # Most likely that of a repository of the same name which was just deleted.
            return PodReport(InitState.LEAVING)
        message = f"Pod {name} is in the way of this repository's init pod; delete it if nobody needs it"
        return PodReport(InitState.FAILED, message)
    end = parse_pod_end(pod)
    if end is not None:
        if end.exit_code != 0:
            why = end.message or end.reason or f"exit code {end.exit_code}"
            return PodReport(InitState.FAILED, why if end.message else f"init pod {name} ended: {why}")
        try:
            parse_result(InitResult, end.message)
        except ResultError as e:
            return PodReport(InitState.FAILED, f"init pod {name}: {e}")
        return PodReport(InitState.SUCCEEDED)
    if meta.get("deletionTimestamp"):
        return PodReport(InitState.LEAVING)
    try:
        found = diagnose_pod(pod)
    except ExposeError as e:
        return PodReport(InitState.FAILED, str(e))
    waiting = (waiting or found) if found is not None else None
    if waiting is not None and late:
        return PodReport(InitState.FAILED, waiting.message)
    refused = waiting is not None and waiting.blocked and not pod["spec"].get("nodeName")
    choosy = ONTO_ANY_NODE not in (pod["spec"].get("tolerations") or [])
    if refused and choosy and age >= _CHOOSY_LIMIT:
        return PodReport(InitState.UNPLACED)
    return PodReport(InitState.WORKING)


def init_resources(resources: JsonDict) -> JsonDict:
    """Return what an init pod asks for where movers ask for `resources` (of a container, as JSON dict).

    It moves no data, and loads wait for it: no node needs room for a mover to take it. The limits
    stay, and whatever is asked for stays asked for, as a ResourceQuota may insist on that; without a
    request of its own, a limit would be one.
    """
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    asked = {
        name: min(requests.get(name, limits.get(name, most)), most, key=parse_quantity)
        for name, most in _MOST_REQUESTED.items()
        if name in requests or name in limits
    }
    return resources | {"requests": asked} if asked else resources


async def read_init_pod(client: KubeClient, repository: BackupRepository) -> JsonDict | None:
    """Return the pod that has the name of the repository's init pod, None where there is none."""
    return await client.read(PODS, repository.metadata.namespace, init_pod_name(Owner.of(repository)))


async def let_onto_any_node(client: KubeClient, pod: JsonDict) -> None:
    """Let `pod`, as it was just read, be scheduled to a node where nothing new is to be.

    Source: Kubernetes v1.34, validation of pod updates: tolerations may be added to a pod.

    Raises:
        ConflictError: somebody else wrote to it meanwhile.
        NotFoundError: it is gone.
    """
    meta = pod["metadata"]
    tolerations = [*(pod["spec"].get("tolerations") or []), ONTO_ANY_NODE]
    held = {"uid": meta["uid"], "resourceVersion": meta["resourceVersion"]}
    patch: JsonDict = {"metadata": held, "spec": {"tolerations": tolerations}}
    await client.patch(PODS, meta["namespace"], meta["name"], patch)


async def start_init_pod(client: KubeClient, repository: BackupRepository, settings: ExposeSettings) -> None:
    """Create the repository's init pod.

    Raises:
        AlreadyExistsError: there is one by now.
        KubeError: the API server refused; InvalidError and ForbiddenError tell that it does
            not want the pod.
    """
    pod = replace(settings.pod, resources=init_resources(settings.pod.resources))
    manifest = build_init_pod(Owner.of(repository), replace(settings, pod=pod))
    spec = repository.spec
    manifest["metadata"]["labels"] |= repository_labels(spec.volume_namespace, spec.backup_storage_location)
    await create_pod(client, manifest)
