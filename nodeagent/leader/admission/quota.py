"""How many transfers may be admitted: the quota, whose ledger is a ConfigMap, and the share of each node.

The ledger, `node-agent-admissions`, lists the UIDs of all transfers that are, or may become, Accepted or Prepared, and
of those whose next attempt is, or may become, exposed. Only the agent that wrote it last may accept or resume: a write
carries the version that was read, so a former leader can reserve nothing more.

Node shares apply to the kinds that only one node can carry out, so that one node cannot fill the admission queue of the
cluster.
"""

import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

from core.clock import Clock
from core.errors import AgentError
from core.kube.client import KubeClient
from core.kube.errors import ConflictError, NotFoundError, ServerError, UnreachableError
from core.kube.resources import CONFIG_MAPS, NODES
from core.kube.types import ConfigObject
from core.models.names import ADMISSIONS_CONFIGMAP, label_value
from core.models.phases import HOLDING_PHASES, Phase
from core.models.reasons import PendingReason
from nodeagent.config.current import labels_of, resolve_slots
from nodeagent.config.keys import LARGEST_PREPARE_QUEUE, LoadConcurrency
from nodeagent.leader.index import Entry
from nodeagent.transfers.kinds.base import Admission, AdmissionState

_UIDS: Final = "uids"
_TURN: Final = "turn"
_WRITE: Final = "write"


class LedgerLostError(AgentError):
    """Another leader wrote the ledger: it and all transfers must be read again before anything else."""

    retry = True


@dataclass(frozen=True)
class Reservations:
    """The uids that use the admission quota, and the namespace that was served last."""

    uids: frozenset[str] = frozenset()
    last_namespace: str = ""


def settle(uids: AbstractSet[str], phases: Mapping[str, Phase]) -> frozenset[str]:
    """Return the uids that use the quota, given what is observed.

    Each Accepted or Prepared transfer does, however it got there. One in a later phase, or deleted,
    does not: phases never go back and UIDs never return. A New one keeps its reservation, since an
    accept may be under way. An attempt after the first begins again with New: what was sent for an earlier
    attempt conflicts with the write that ended it. `uids` are the reservations so far, `phases` the phases of all
    transfers as admission counts them, by uid.
    """
    holding = {uid for uid, phase in phases.items() if phase in HOLDING_PHASES}
    reserved = {uid for uid in uids if phases.get(uid) is Phase.NEW}
    return frozenset(holding | reserved)


def free_quota(uids: AbstractSet[str], limit: int | None) -> int:
    """Return how many more reservations fit; a `limit` of None is the most that the ledger can hold."""
    most = LARGEST_PREPARE_QUEUE if limit is None else min(limit, LARGEST_PREPARE_QUEUE)
    return max(0, most - len(uids))


class AdmissionLedger:
    """The ledger as last read or written; `found` were in it when it was read: other leaders may have accepted them."""

    def __init__(self, client: KubeClient, namespace: str, *, check_leading: Callable[[], None]) -> None:
        self._client = client
        self._namespace = namespace
        self._check_leading = check_leading
        self._stored: ConfigObject | None = None
        self.reservations = Reservations()
        self.found: frozenset[str] = frozenset()

    async def load(self) -> None:
        """Read the ledger by a quorum read."""
        await self._read()
        self.found = self.reservations.uids

    async def write(self, reservations: Reservations) -> None:
        """Write `reservations`, provided that the ledger was not written by another agent since.

        Raises:
            LedgerLostError: it was, or it cannot be determined whether this write was stored.
            NotLeaderError: this agent is not the leader.
            KubeError: the API server rejected the write; nothing was stored.
        """
        self._check_leading()
        mark = uuid.uuid4().hex
        before = _version(self._stored)
        data = {_UIDS: "\n".join(sorted(reservations.uids)), _TURN: reservations.last_namespace, _WRITE: mark}
        try:
            self._keep(await self._send(data))
        except (ConflictError, NotFoundError, ServerError) as e:
            # A write whose answer was lost conflicts with itself when it is sent again.
            try:
                await self._read()
            except ServerError as unread:
                raise LedgerLostError(f"{e}; {unread}") from e
            if _data(self._stored).get(_WRITE) == mark:
                return
            rejected = isinstance(e, ServerError) and not isinstance(e, UnreachableError)
            if rejected and _version(self._stored) == before:
                # Should an attempt without an answer still be stored, then the next write conflicts.
                raise
            raise LedgerLostError(str(e)) from e

    async def _read(self) -> None:
        self._keep(await self._client.read(CONFIG_MAPS, self._namespace, ADMISSIONS_CONFIGMAP))

    async def _send(self, data: dict[str, str]) -> ConfigObject:
        if self._stored is None:
            meta = {"name": ADMISSIONS_CONFIGMAP, "namespace": self._namespace}
            return await self._client.create(CONFIG_MAPS, CONFIG_MAPS.build(meta, data=data))
        return await self._client.patch_if_unchanged(CONFIG_MAPS, self._stored, {"data": data})

    def _keep(self, stored: ConfigObject | None) -> None:
        self._stored = stored
        data = _data(stored)
        self.reservations = Reservations(frozenset(data.get(_UIDS, "").split()), data.get(_TURN, ""))


def _data(stored: ConfigObject | None) -> dict[str, str]:
    return (stored.get("data") or {}) if stored else {}


def _version(stored: ConfigObject | None) -> str | None:
    return None if stored is None else str(stored["metadata"]["resourceVersion"])


_SHARE_PER_SLOT: Final = 2
"""A node may have so many transfers in preparation per slot, and one more: enough to keep the slots busy."""


class NodeShares:
    """The numbers of transfers in preparation, by node label."""

    def __init__(self, bound: AbstractSet[str]) -> None:
        """Count transfers of the kinds named in `bound`."""
        self._bound = bound
        self._slots: dict[str, int] = {}
        self._in_preparation: Counter[str] = Counter()
        self._chosen: set[str] = set()

    def count(self, entries: Iterable[Entry], held: Mapping[str, str]) -> list[str]:
        """Count again what is in preparation on each node.

        `held` are the node labels of the transfers that are pending for a node share, by uid. Return the uids of those
        that are due: the oldest for each free share, and those to be canceled.
        """
        bound = [entry for entry in entries if entry.kind in self._bound]
        self._in_preparation = Counter(entry.node_label for entry in bound if entry.admission_phase in HOLDING_PHASES)
        self._chosen.clear()
        pending = [entry for entry in bound if entry.phase is Phase.NEW and entry.uid in held]
        free = {label: self._free(label) for label in held.values()}
        woken = []
        for entry in sorted(pending, key=lambda entry: (entry.created, entry.name)):
            label = held[entry.uid]
            if entry.stop or free[label] > 0:
                free[label] -= not entry.stop
                woken.append(entry.uid)
        return woken

    def admit(self, entry: Entry, admission: Admission, *, slots: int) -> Admission:
        """Return `admission`, or that its node, which has so many `slots`, has no free share."""
        node = admission.node
        if node is None or entry.kind not in self._bound or entry.uid in self._chosen:
            return admission
        label = label_value(node)
        self._slots[label] = slots
        if self._free(label) <= 0:
            number, limit = self._in_preparation[label], _limit(slots)
            message = f"node {node} already has {number} pod volume transfers in preparation (limit {limit})"
            return Admission(AdmissionState.PENDING, PendingReason.NODE_BUSY, message, node=node, indefinite=True)
        self._in_preparation[label] += 1
        self._chosen.add(entry.uid)
        return admission

    def _free(self, label: str) -> int:
        return _limit(self._slots.get(label, 0)) - self._in_preparation[label]


def _limit(slots: int) -> int:
    return _SHARE_PER_SLOT * slots + 1


_FRESH_SECONDS: Final = 60.0
"""How long the labels of another node are used: they only decide how large its share is."""


class NodeSlots:
    """The number of slots of each node, read when it is needed."""

    def __init__(self, client: KubeClient, clock: Clock, concurrency: Callable[[], LoadConcurrency]) -> None:
        self._client = client
        self._clock = clock
        self._concurrency = concurrency
        self._labels: dict[str, tuple[float, Mapping[str, str]]] = {}

    async def of(self, node: str) -> int:
        """Return how many transfers may be InProgress on `node`."""
        concurrency = self._concurrency()
        if not concurrency.per_node_config:
            return concurrency.global_config
        now = self._clock.monotonic()
        # Nodes come and go.
        self._labels = {name: kept for name, kept in self._labels.items() if now - kept[0] < _FRESH_SECONDS}
        if node not in self._labels:
            self._labels[node] = (now, labels_of(await self._client.read(NODES, "", node)))
        return resolve_slots(self._labels[node][1], concurrency)
