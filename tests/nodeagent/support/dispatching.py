"""Dispatchers on the fake API server: New transfers, agent pods, a scripted kind.

`Gate` delays chosen requests of a dispatcher until a test opens it, as if the leader were paused.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from core.errors import ExposeError
from core.kube.client import KubeClient
from core.kube.resources import (
    CONFIG_MAPS,
    DATA_DOWNLOADS,
    DATA_UPLOADS,
    EVENTS,
    NODES,
    POD_VOLUME_BACKUPS,
    POD_VOLUME_RESTORES,
    PODS,
    Resource,
)
from core.kube.transport import Request, Response, Retry, Transport
from core.kube.types import UncheckedObject
from core.models.names import (
    AGENT_LABELS,
    ATTEMPTS_ANNOTATION,
    CONFIG_ANNOTATION,
    DATA_MOVER_FINALIZER,
    FEATURES_ANNOTATION,
    NODE_LABEL,
    PENDING_REASON_ANNOTATION,
    RESTORE_IN_PLACE,
)
from core.models.phases import Attempts, AttemptStage, Interruption, InterruptionCause, Phase, RetryRules
from core.models.transfers import DataDownload, DataUpload, PodVolumeBackup, PodVolumeRestore, Transfer
from exposer.model import Pending, Reader
from exposer.settings import ExposeSettings
from exposer.template import AgentTemplate
from nodeagent.config.keys import AgentConfig, LoadConcurrency, NodeRule, RestorePVC
from nodeagent.leader.context import DispatchRules
from nodeagent.leader.dispatcher import Dispatcher
from nodeagent.leader.index import Entry
from nodeagent.metrics import Metrics
from nodeagent.transfers.kinds.base import COMMON_STATUS_FIELDS, READY, Admission, Kind, KindSpec
from nodeagent.transfers.outcome import MoverResult, Outcome
from tests.nodeagent.support.clusters import build_cluster
from tests.nodeagent.support.transfers import NAMESPACE, TRANSFERS
from tests.support.clock import LoopClock
from tests.support.fakekube import FakeKube
from tests.support.objects import JsonDict, build_object
from tests.support.tasks import running, until
from tests.support.transports import Around

RESOURCES: Mapping[type[Transfer], Resource[UncheckedObject]] = {
    DataUpload: DATA_UPLOADS,
    DataDownload: DATA_DOWNLOADS,
    PodVolumeBackup: POD_VOLUME_BACKUPS,
    PodVolumeRestore: POD_VOLUME_RESTORES,
}


class ScriptedKind(Kind[Any]):
    """One kind whose admission a test decides, by name; READY by default.

    `checked` and `cleaned` are the names that were checked and cleaned up, in order. `nodes` are the
    nodes that transfers are bound to, `held` what their cleanup is pending for, `gone` those without their volume.
    """

    def __init__(
        self, model: type[Transfer] = DataUpload, *, bound_to_node: bool = False, nodes: dict[str, str] | None = None
    ) -> None:
        super().__init__(None, lambda: ExposeSettings(AgentTemplate("image")), frozenset({"", "velero"}))
        self.model = model
        self.bound_to_node = bound_to_node
        self.nodes = nodes or {}
        self.answers: dict[str, Admission] = {}
        self.checked: list[str] = []
        self.cleaned: list[str] = []
        self.held: dict[str, Pending] = {}
        self.gone: set[str] = set()

    @property
    def spec(self) -> KindSpec:
        return KindSpec(
            model=self.model,
            resource=RESOURCES[self.model],
            finalizer=DATA_MOVER_FINALIZER,
            status_fields=COMMON_STATUS_FIELDS | {"acceptedByNode", "node"},
            restores=self.model in {DataDownload, PodVolumeRestore},
            bound_to_node=self.bound_to_node,
        )

    def managed(self, cr: Transfer) -> bool:
        return getattr(cr.spec, "datamover", "") in self.datamovers

    def queue_namespace(self, cr: Transfer) -> str:
        if isinstance(cr, DataUpload):
            return cr.spec.source_namespace
        if isinstance(cr, DataDownload):
            return cr.spec.target_volume.namespace
        return cr.spec.pod.namespace if isinstance(cr, PodVolumeBackup | PodVolumeRestore) else ""

    async def check_admission(self, cr: Transfer, reader: Reader) -> Admission:
        self.checked.append(cr.name)
        await asyncio.sleep(0)
        return self.answers.get(cr.name, READY)

    async def clean_up(self, cr: Transfer) -> Pending | None:
        self.cleaned.append(cr.name)
        return self.held.get(cr.name)

    async def read_node(self, cr: Transfer) -> str:
        return self.nodes.get(cr.name, "")

    async def confirm_volume(self, cr: Transfer, *, moved: bool = False) -> None:
        if cr.name in self.gone:
            raise ExposeError("workload pod app/db no longer exists")

    def _request(self, cr: Transfer) -> Any:
        raise NotImplementedError

    async def _check_volume(self, cr: Transfer, reader: Reader, ready: Admission) -> Admission:
        raise NotImplementedError

    def parse_result(self, message: str) -> MoverResult:
        raise NotImplementedError

    def final_status(self, cr: Transfer, outcome: Outcome) -> JsonDict:
        raise NotImplementedError


@dataclass
class Gate(Around):
    """A transport that delays the requests chosen by `holds`, or their answers, until `open` is set.

    `waiting` counts them.
    """

    holds: Callable[[Request], bool]
    answers: bool = False
    open: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: int = 0

    async def request(self, request: Request) -> Response:
        answer = await self.inner.request(request) if self.answers else None
        if self.holds(request) and not self.open.is_set():
            self.waiting += 1
            await self.open.wait()
        return answer or await self.inner.request(request)


@dataclass
class Scene:
    """A fake API server, and dispatchers that use it."""

    kube: FakeKube
    kind: ScriptedKind = field(default_factory=ScriptedKind)
    limit: int | None = 2
    accepted: list[str] = field(default_factory=list)
    others: list[ScriptedKind] = field(default_factory=list)
    restores_first: bool = False
    per_node: tuple[NodeRule, ...] = ()
    skew: timedelta = timedelta()
    has_copies: bool = False
    retry: RetryRules = field(default_factory=RetryRules)
    metrics: Metrics = field(default_factory=lambda: Metrics("node-a"))
    silent: set[str] = field(default_factory=set)
    """The backup storage locations that do not answer."""

    @property
    def client(self) -> KubeClient:
        """A client of users, and of what else changes objects."""
        return self.kube.client

    def add(self, name: str, *, queue: str = "app", status: JsonDict | None = None, **meta: object) -> JsonDict:
        """Store a DataUpload; `queue` is the namespace of its volume."""
        return self.add_kind(DataUpload, name, queue=queue, status=status, **meta)

    def add_kind(
        self, model: type[Transfer], name: str, *, queue: str = "app", status: JsonDict | None = None, **meta: object
    ) -> JsonDict:
        """Store a transfer; `queue` is the namespace of its volume."""
        cr = TRANSFERS[model.__name__](name, status=status)
        cr["metadata"] |= {"creationTimestamp": "2026-11-21T12:00:00Z"} | meta
        spec = cr["spec"]
        spec["sourceNamespace"] = queue
        for part in ("pod", "targetVolume"):
            if part in spec:
                spec[part]["namespace"] = queue
        return self.kube.put(cr)

    def transfers(self) -> list[JsonDict]:
        return [cr for resource in RESOURCES.values() for cr in self.kube.objects(resource)]

    def transfer(self, name: str) -> JsonDict:
        return next(cr for cr in self.transfers() if cr["metadata"]["name"] == name)

    def phase(self, name: str) -> str:
        return self._status(name, "phase")

    def message(self, name: str) -> str:
        return self._status(name, "message")

    def label(self, name: str = "du") -> str:
        """Return the node label of a transfer; empty where there is none."""
        return str((self.transfer(name)["metadata"].get("labels") or {}).get(NODE_LABEL, ""))

    def reason(self, name: str) -> str:
        """Return the pending reason in the annotation; empty where there is none."""
        annotations = self.transfer(name)["metadata"].get("annotations") or {}
        return str(annotations.get(PENDING_REASON_ANNOTATION, ""))

    def _status(self, name: str, key: str) -> str:
        found = (self.kube._store.find(resource, NAMESPACE, name) for resource in RESOURCES.values())
        return str(next(cr for cr in found if cr is not None).get("status", {}).get(key, ""))

    def phases(self) -> Mapping[str, str]:
        # Called very often: without a copy of everything.
        transfers = [cr for resource in RESOURCES.values() for cr in self.kube._store.all(resource)]
        return {cr["metadata"]["name"]: str(cr.get("status", {}).get("phase", "")) for cr in transfers}

    def set_status(self, name: str, **status: object) -> None:
        """Write status fields, as the owning agent would."""
        cr = self.transfer(name)
        self.kube.put(cr | {"status": cr.get("status", {}) | status})

    def attempts(self, name: str) -> Attempts:
        annotations = self.transfer(name)["metadata"].get("annotations") or {}
        return Attempts.from_json(annotations.get(ATTEMPTS_ANNOTATION, "{}"))

    def set_attempts(self, name: str, attempts: Attempts) -> None:
        """Write the attempts of a transfer, as the owning agent would."""
        cr = self.transfer(name)
        annotations = (cr["metadata"].get("annotations") or {}) | {ATTEMPTS_ANNOTATION: attempts.to_json()}
        self.kube.put(cr | {"metadata": cr["metadata"] | {"annotations": annotations}})

    def set_stage(self, name: str, stage: AttemptStage) -> None:
        self.set_attempts(name, self.attempts(name).move(stage))

    def add_interrupted(
        self, name: str, *, stage: AttemptStage = AttemptStage.READY, node: str = "node-a", **meta: Any
    ) -> None:
        """Store a DataUpload of `node` whose first attempt was lost with the storage, and the second is in `stage`."""
        self.add(name, status={"phase": "InProgress"}, labels={NODE_LABEL: node}, **meta)
        self.set_attempts(name, interrupted(stage=stage))

    def ledger(self) -> set[str]:
        maps = self.kube.objects(CONFIG_MAPS)
        return set(maps[0]["data"]["uids"].split()) if maps else set()

    def reasons(self, name: str) -> list[str]:
        events = [e for e in self.kube.objects(EVENTS) if e["involvedObject"]["name"] == name]
        return [e["reason"] for e in sorted(events, key=lambda e: int(e["metadata"]["resourceVersion"]))]

    def dispatcher(
        self, transport: Transport | None = None, check_leading: Callable[[], None] = lambda: None
    ) -> Dispatcher:
        """Return a dispatcher that acts as the leader until `check_leading` raises."""
        clock = LoopClock(self.skew)
        client = KubeClient(transport or self.kube, Retry(clock))
        cluster = build_cluster(client, clock, metrics=self.metrics, check_leading=check_leading)
        rules = DispatchRules(
            NAMESPACE,
            [self.kind, *self.others],
            self._config,
            timedelta(minutes=30),
            retry_rules=lambda _: self.retry,
            location_answers=lambda name: name not in self.silent,
        )
        return Dispatcher(cluster, rules, on_accepted=lambda cr: self.accepted.append(cr.name))

    def _config(self) -> AgentConfig:
        concurrency = LoadConcurrency(
            prepare_queue_length=self.limit, restores_first=self.restores_first, per_node_config=self.per_node
        )
        copied = RestorePVC(secret_names=("token",) if self.has_copies else ())
        return AgentConfig(load_concurrency=concurrency, restore_pvc=copied)

    @asynccontextmanager
    async def dispatching(self, dispatcher: Dispatcher | None = None) -> AsyncIterator[Dispatcher]:
        dispatcher = dispatcher or self.dispatcher()
        async with running(dispatcher.run()):
            yield dispatcher

    @asynccontextmanager
    async def paused(self, holds: Callable[[Request], bool]) -> AsyncIterator[Gate]:
        """Run a dispatcher that is paused at its first request that `holds` chooses."""
        gate = Gate(self.kube, holds)
        async with self.dispatching(self.dispatcher(gate)):
            await self.until(lambda: gate.waiting == 1)
            yield gate

    async def until(self, condition: Callable[[], bool], *, seconds: float = 120.0) -> None:
        await until(condition, seconds=seconds, every=0.05 if seconds < 200 else 1.0)


def entry(name: str, queue: str = "app", created: str = "2026-11-21T11:00:00Z", **others: object) -> Entry:
    """Return what the index knows of a transfer, a New DataUpload where `others` do not say otherwise."""
    fields: dict[str, object] = {"kind": "DataUpload", "namespace": "velero", "name": name, "uid": name}
    fields |= {"phase": Phase.NEW, "queue": queue, "created": created, "stop": False, "managed": True}
    return Entry(**(fields | {"node_label": "", "finalizer": False, "reason": ""} | others))  # type: ignore[arg-type] # a table


def interrupted(
    cause: InterruptionCause = InterruptionCause.STORAGE_UNAVAILABLE, stage: AttemptStage = AttemptStage.READY
) -> Attempts:
    """Return the attempts of a transfer that was interrupted once."""
    at = datetime(2026, 11, 21, 11, 30, tzinfo=UTC)
    return Attempts().interrupt(Interruption(at=at, cause=cause, message="it ended")).move(stage)


def agent_pod(node: str, *, ready: bool = True, **meta: object) -> JsonDict:
    """Return the pod of the agent on `node`; one without annotations is Velero's."""
    own = {"labels": AGENT_LABELS, "annotations": {CONFIG_ANNOTATION: "abc", FEATURES_ANNOTATION: RESTORE_IN_PLACE}}
    status = {"phase": "Running", "conditions": [{"type": "Ready", "status": str(ready)}]}
    name = f"node-agent-{node}"
    return build_object(PODS, name, NAMESPACE, metadata=own | meta, spec={"nodeName": node}, status=status)


def cluster_node(name: str, *, ready: bool = True, since: str = "2026-11-21T11:00:00Z") -> JsonDict:
    """Return the Node of that name, which is Ready, or not, `since` a time."""
    condition = {"type": "Ready", "status": "True" if ready else "Unknown", "lastTransitionTime": since}
    if not ready:
        condition |= {"reason": "NodeStatusUnknown", "message": "Kubelet stopped posting node status."}
    return build_object(NODES, name, status={"conditions": [condition]})


def open_scene(*nodes: str, limit: int | None = 2, bound: bool = False) -> Scene:
    """Return a scene with a live agent on each of `nodes`; with `bound`, only one node can carry a transfer out."""
    kube = FakeKube()
    for node in nodes or ("node-a",):
        kube.put(agent_pod(node))
        kube.put(cluster_node(node))
    return Scene(kube, ScriptedKind(bound_to_node=bound), limit=limit)


def is_accept(request: Request) -> bool:
    return request.method == "PATCH" and b'"phase": "Accepted"' in (request.body or b"")


def _holds(transfer: JsonDict) -> bool:
    phase, annotations = transfer.get("status", {}).get("phase", ""), transfer["metadata"].get("annotations") or {}
    exposing = '"stage":"Exposing"' in annotations.get(ATTEMPTS_ANNOTATION, "").replace(" ", "")
    return phase in {"Accepted", "Prepared"} or (phase == "InProgress" and exposing)


def most_held(kube: FakeKube) -> int:
    """Return the maximum number of transfers that use the quota over all resourceVersions."""
    holding: set[str] = set()
    most = 0
    for happening in kube._store.history:
        if happening.resource in RESOURCES.values():
            obj = happening.after or happening.before or {}
            holds = happening.after is not None and _holds(happening.after)
            (holding.add if holds else holding.discard)(obj["metadata"]["uid"])
            most = max(most, len(holding))
    return most
