"""How many loads are on their way on each node, for the kinds that only one node can carry out.

Knows who is held back because a node has enough of them, so that one node cannot fill the
queue of the whole cluster, and who is next when it has room again. Does not know the queue.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Final

from core.clock import Clock
from core.kube.client import KubeClient
from core.kube.resources import NODES
from core.models.names import label_value
from core.models.phases import HOLDING_PHASES, Phase
from core.models.reasons import PendingReason
from nodeagent.config.current import labels_of, resolve_slots
from nodeagent.config.models import LoadConcurrency
from nodeagent.leader.index import Entry
from nodeagent.transfers.kinds.base import Admission, AdmissionState

__all__ = ["NodeShares", "NodeSlots"]


_SHARE_A_SLOT: Final = 2
"""A load is held back while its node has more than so many for each of its slots: enough to
keep the slots busy while the next ones are prepared."""


class NodeShares:
    """The loads of bound kinds, by node label."""

    def __init__(self, bound: AbstractSet[str]) -> None:
        """Count loads of the kinds named in `bound`."""
        self._bound = bound
        self._slots: dict[str, int] = {}
        self._on_the_way: Counter[str] = Counter()
        self._chosen: set[str] = set()
        self._held: dict[str, tuple[str, Entry]] = {}

    def count(self, entries: Iterable[Entry]) -> list[str]:
        """Count anew by what is seen now; return the uids of those who may be looked at again.

        These are the first in line for each place a node has, and whoever is to end.
        """
        bound = [entry for entry in entries if entry.kind in self._bound]
        self._on_the_way = Counter(entry.node_label for entry in bound if entry.phase in HOLDING_PHASES)
        self._chosen.clear()
        waiting = {entry.uid: entry for entry in bound if entry.phase is Phase.NEW}
        self._held = {uid: (label, waiting[uid]) for uid, (label, _) in self._held.items() if uid in waiting}
        woken = []
        room = {label: self._room(label) for label, _ in self._held.values()}
        for uid, (label, entry) in sorted(self._held.items(), key=lambda item: (item[1][1].created, item[1][1].name)):
            if entry.stop:
                woken.append(uid)
            elif room[label] > 0:
                room[label] -= 1
                woken.append(uid)
        for uid in woken:
            del self._held[uid]
        return woken

    def counts(self, entry: Entry) -> bool:
        """Whether the load is of a kind that only one node can carry out."""
        return entry.kind in self._bound

    def admit(self, entry: Entry, admission: Admission, *, slots: int) -> Admission:
        """Return `admission`; for a load that may start on a node which has enough, why it waits.

        Args:
            entry: the load.
            admission: what its kind says.
            slots: the `loadConcurrency` of the node that `admission` names.
        """
        self._held.pop(entry.uid, None)
        ready = admission.verdict is AdmissionState.READY
        if not ready or entry.kind not in self._bound or entry.uid in self._chosen:
            return admission
        label = label_value(admission.node)
        self._slots[label] = slots
        if self._room(label) <= 0:
            self._held[entry.uid] = (label, entry)
            message = f"node {admission.node} has {self._on_the_way[label]} pod volumes on their way already"
            return Admission(AdmissionState.PENDING, PendingReason.NODE_BUSY, message, indefinite=True)
        self._on_the_way[label] += 1
        self._chosen.add(entry.uid)
        return admission

    def holds(self, uid: str) -> bool:
        """Whether the load of that uid waits for room on its node."""
        return uid in self._held

    def _room(self, label: str) -> int:
        """Return how many more the node takes."""
        return _SHARE_A_SLOT * self._slots[label] + 1 - self._on_the_way[label]


_FRESH_SECONDS: Final = 60.0
"""How long another node's labels count as known: they only decide how long its line may be."""


class NodeSlots:
    """The numbers of all nodes, for the dispatcher, who asks for few of them."""

    def __init__(self, client: KubeClient, clock: Clock, concurrency: Callable[[], LoadConcurrency]) -> None:
        """Read nodes through `client`; `concurrency` returns what is in force."""
        self._client = client
        self._clock = clock
        self._concurrency = concurrency
        self._labels: dict[str, tuple[float, Mapping[str, str]]] = {}

    async def of(self, node: str) -> int:
        """Return how many loads `node` may move data of at a time.

        Raises:
            KubeError: its labels could not be read.
        """
        concurrency = self._concurrency()
        if not concurrency.per_node_config:
            return concurrency.global_config
        return resolve_slots(await self._read_labels(node), concurrency)

    async def _read_labels(self, node: str) -> Mapping[str, str]:
        now = self._clock.monotonic()
        read_at, labels = self._labels.get(node, (-_FRESH_SECONDS, {}))
        if now - read_at >= _FRESH_SECONDS:
            labels = labels_of(await self._client.read(NODES, "", node))
            self._labels[node] = (now, labels)
        return labels
