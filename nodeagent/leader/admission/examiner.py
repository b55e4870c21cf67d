"""The check of one New or interrupted transfer: ready, pending, failed or canceled.

Reads the custom resource and what its kind checks, and writes nothing.

Only one copy of a Secret or ConfigMap of a name can exist in the agent's namespace. A transfer that needs one stays New
while another holds the name, so that it does not use the admission quota meanwhile.

Reads of resources that many transfers name alike are shared, for a short time. An object that was not found is read
again by the next check.
"""

import asyncio
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, cast

from core.clock import Clock
from core.kube import resources as kube
from core.kube.client import KubeClient, Selection
from core.kube.errors import ForbiddenError, MalformedObjectError
from core.kube.types import Object, ObjectT
from core.models.names import label_value
from core.models.phases import AttemptStage, Phase
from core.models.reasons import PendingReason
from core.models.transfers import Transfer
from exposer.ownership import copy_in_use
from nodeagent.leader.admission.quota import NodeShares, NodeSlots
from nodeagent.leader.context import Cluster, DispatchRules
from nodeagent.leader.index import Entry
from nodeagent.leader.live_agents import LiveAgents
from nodeagent.transfers.kinds.base import Admission, AdmissionState, Kind
from nodeagent.transfers.status import cancel_cause


class CopyHolders:
    """The holders, by the object's kind and name, such as `Secret/token`."""

    def __init__(self) -> None:
        self._holders: dict[str, Entry] = {}
        self._pending: dict[str, tuple[str, ...]] = {}

    def count(self, entries: Sequence[Entry]) -> list[str]:
        """Find out again who holds what; return the uids of the pending transfers that are due: a copy is free.

        A transfer that is not New holds what it was accepted with until it is cleaned up; one that was ready when
        it was last checked holds its names while it is New, since its accept may be under way.
        """
        new = {entry.uid for entry in entries if entry.phase is Phase.NEW and entry.managed}
        begun = (one for one in entries if one.phase is not Phase.NEW and (one.finalizer or not one.phase.final))
        holders = {name: entry for name, entry in self._holders.items() if entry.uid in new}
        holders |= {name: entry for entry in begun for name in entry.copies}
        free = self._holders.keys() - holders.keys()
        woken = [uid for uid, names in self._pending.items() if uid in new and not free.isdisjoint(names)]
        self._holders = holders
        self._pending = {uid: names for uid, names in self._pending.items() if uid in new and uid not in woken}
        return woken

    def release(self, uid: str) -> None:
        """Forget what a New transfer holds: it is checked again."""
        self._holders = {name: entry for name, entry in self._holders.items() if entry.uid != uid}
        self._pending.pop(uid, None)

    def admit(self, entry: Entry, admission: Admission) -> Admission:
        """Return `admission`, its kind's, or that the transfer is pending because another one holds what it needs."""
        if admission.reason == PendingReason.COPY_IN_USE:
            # The copy itself was found: its holder may have been accepted by another leader.
            self._pending[entry.uid] = admission.copies
        if admission.decision is not AdmissionState.READY or not admission.copies:
            return admission
        for name in admission.copies:
            holder = self._holders.get(name)
            if holder is not None and holder.uid != entry.uid:
                self._pending[entry.uid] = admission.copies
                in_use = copy_in_use(*name.split("/", 1))
                return Admission(AdmissionState.PENDING, in_use.reason, in_use.message, indefinite=True)
        self._holders |= dict.fromkeys(admission.copies, entry)
        return admission


_SHARED_SECONDS: Final = 1.0
"""How long an answer is shared; a transfer is admitted seconds after its check anyway."""

_SHARED: Final = frozenset(
    {kube.BACKUP_STORAGE_LOCATIONS, kube.SECRETS, kube.STORAGE_CLASSES, kube.PERSISTENT_VOLUME_CLAIMS}
)
"""What thousands of transfers name alike; one check reads a PVC twice. No pods: a change of a workload
pod makes its transfer due, and that check must observe the change."""

_LISTED_SECONDS: Final = 5.0
"""How long a list of the whole cluster is shared; the agent lists again before it takes a volume."""

_LISTED: Final[Mapping[kube.Resource, tuple[str, ...]]] = {
    kube.PERSISTENT_VOLUMES: ("csi", "nfs", "claimRef"),
    kube.VOLUME_ATTACHMENTS: ("source", "nodeName"),
}
"""Lists that are shared, and the fields of `spec` that are kept beside the names: there may be thousands."""

_Key = tuple[kube.Resource, str, str]


class SharedReader:
    """Reads objects for admission checks, and shares each answer among them for a second."""

    def __init__(self, client: KubeClient, clock: Clock) -> None:
        self._client = client
        self._clock = clock
        self._found: dict[_Key, Object] = {}
        self._ages: deque[tuple[float, _Key]] = deque()
        self._in_flight: dict[_Key, asyncio.Event] = {}
        self._lists: dict[kube.Resource, tuple[float, list[Any]]] = {}
        self._locks: defaultdict[kube.Resource, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def read(self, resource: kube.Resource[ObjectT], namespace: str, name: str) -> ObjectT | None:
        """Return the object, at most a second old, or None; a read that fails is repeated by the next caller."""
        if resource not in _SHARED:
            return await self._client.read(resource, namespace, name)
        key = (resource, namespace, name)
        while (found := self._find(key)) is None and key in self._in_flight:
            await self._in_flight[key].wait()
        return cast("ObjectT | None", found or await self._read(key))

    async def list(self, selection: Selection[ObjectT]) -> list[ObjectT]:
        """Return the selected objects; a list of the whole cluster is at most some seconds old, and reduced."""
        resource = selection.resource
        if selection != Selection(resource) or (kept := _LISTED.get(resource)) is None:
            return await self._client.list(selection)
        async with self._locks[resource]:
            listed_at, found = self._lists.get(resource, (None, []))
            if listed_at is None or self._clock.monotonic() - listed_at >= _LISTED_SECONDS:
                found = [_reduce(one, kept) async for page in self._client.pages(selection) for one in page.items]
                self._lists[resource] = (self._clock.monotonic(), found)
            return found

    def _find(self, key: _Key) -> Object | None:
        oldest = self._clock.monotonic() - _SHARED_SECONDS
        while self._ages and self._ages[0][0] <= oldest:
            del self._found[self._ages.popleft()[1]]
        return self._found.get(key)

    async def _read(self, key: _Key) -> Object | None:
        """Read the object; concurrent callers with the same key wait for this answer."""
        answered = self._in_flight[key] = asyncio.Event()
        try:
            found = await self._client.read(*key)
            if found is not None:
                self._found[key] = found
                self._ages.append((self._clock.monotonic(), key))
            return found
        finally:
            del self._in_flight[key]
            answered.set()


def _reduce(obj: Any, kept: tuple[str, ...]) -> dict[str, Any]:  # noqa: ANN401 - of several kinds
    spec = {name: obj["spec"][name] for name in kept if name in obj["spec"]}
    return {"metadata": {"name": obj["metadata"]["name"]}, "spec": spec}


@dataclass(frozen=True)
class Checked:
    """A New or interrupted transfer as just read, with its check's result; `canceled`: it fails by a cancel request."""

    entry: Entry
    kind: Kind[Any]
    cr: Transfer
    admission: Admission
    canceled: bool = False

    @property
    def ready(self) -> bool:
        """Whether the transfer may be accepted."""
        return self.admission.decision is AdmissionState.READY


class Examiner:
    """Checks New and interrupted transfers."""

    def __init__(self, cluster: Cluster, rules: DispatchRules, agents: LiveAgents) -> None:
        self._cluster = cluster
        self._rules = rules
        self._agents = agents
        self._slots = NodeSlots(cluster.client, cluster.clock, lambda: rules.config().load_concurrency)
        self._kinds = {kind.spec.name: kind for kind in rules.kinds}
        self._reader = SharedReader(cluster.client, cluster.clock)
        self._copies = CopyHolders()
        self._shares = NodeShares(frozenset(kind.spec.name for kind in rules.kinds if kind.spec.bound_to_node))

    def begin_pass(self, entries: Sequence[Entry], held: Mapping[str, str]) -> list[str]:
        """Count the transfers in preparation on each node, and find out who holds which copy.

        `held` are the node labels of the transfers that are pending for a node share, by uid. Return the uids of those
        that are due: their node has a free share, a copy is free, or they are to end.
        """
        return [*self._shares.count(entries, held), *self._copies.count(entries)]

    async def check(self, entry: Entry) -> Checked | None:
        """Read a transfer and return whether it may start; None where it is not New or not ours any more."""
        kind, cr = self._kinds[entry.kind], await self._read(entry)
        if cr is None or cr.phase is not Phase.NEW:
            return None
        self._copies.release(entry.uid)
        if cr.cancel_requested:
            canceled = Admission(AdmissionState.FAILED, message=f"canceled before admission: {cancel_cause(cr)}")
            return Checked(entry, kind, cr, canceled, canceled=True)
        try:
            admission = await kind.check_admission(cr, self._reader)
        except ForbiddenError as e:
            admission = _blocked(PendingReason.FORBIDDEN, str(e))
        except MalformedObjectError as e:
            admission = _blocked(PendingReason.OBJECT_MALFORMED, str(e))
        if admission.datamover and not self._agents.nodes(admission.datamover):
            admission = replace(admission, datamover=None)
        admission = self._check_agents(admission, cr.required_feature or admission.datamover)
        admission = self._copies.admit(entry, admission)
        if admission.node and admission.decision is AdmissionState.READY:
            slots = await self._slots.of(admission.node)
            admission = self._shares.admit(entry, admission, slots=slots)
        return Checked(entry, kind, cr, admission)

    async def check_interrupted(self, entry: Entry) -> Checked | None:
        """Read an interrupted transfer; None unless its next attempt may begin, as far as it alone shows.

        It begins on the node of the label that `entry` has, which may be another one than is stored.
        """
        cr = await self._read(entry)
        if cr is None or cr.stage is not AttemptStage.READY:
            return None
        node = self._agents.nodes().get(entry.node_label)
        decision = AdmissionState.READY if node and not cr.cancel_requested else AdmissionState.PENDING
        return Checked(entry, self._kinds[entry.kind], cr, Admission(decision, node=node))

    async def _read(self, entry: Entry) -> Transfer | None:
        """Return the transfer; None where it no longer exists, or is not ours any more."""
        kind = self._kinds[entry.kind]
        raw = await self._cluster.client.read(kind.spec.resource, entry.namespace, entry.name)
        cr: Transfer | None = None if raw is None else kind.parse(raw)
        return cr if cr is not None and cr.uid == entry.uid and kind.managed(cr) else None

    def _check_agents(self, admission: Admission, feature: str | None) -> Admission:
        if admission.decision is not AdmissionState.READY:
            return admission
        agents = self._agents.nodes()
        label = label_value(admission.node) if admission.node else None
        able = self._agents.nodes(feature)
        if label is not None and label not in agents:
            if label in self._agents.velero_nodes():
                message = f"left to Velero's node agent on node {admission.node}"
                return Admission(AdmissionState.PENDING, PendingReason.LEFT_TO_VELERO, message, indefinite=True)
            return _blocked(PendingReason.NO_NODE_AGENT, f"no node agent is ready on node {admission.node}")
        if not agents:
            message = f"no node agent is ready in namespace {self._rules.namespace}"
            return _blocked(PendingReason.NO_NODE_AGENT, message)
        if not able or (label is not None and label not in able):
            where = f"on node {admission.node}" if admission.node else f"in namespace {self._rules.namespace}"
            message = f"no node agent {where} has {feature}: earlier versions cannot carry it out"
            return _blocked(PendingReason.AGENT_OUTDATED, message)
        return admission


def _blocked(reason: PendingReason, message: str) -> Admission:
    return Admission(AdmissionState.PENDING, reason, message, blocked=True)
