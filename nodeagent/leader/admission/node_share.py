"""Node shares: how many transfers of one node may be in preparation at a time.

Applies to the kinds that only one node can carry out, so that one node cannot fill the admission queue
of the cluster. The queue itself is in `nodeagent.leader.admission.queue_reports`.
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
from nodeagent.config.keys import LoadConcurrency
from nodeagent.leader.index import Entry
from nodeagent.transfers.kinds.base import Admission, AdmissionState

__all__ = ["NodeShares", "NodeSlots"]


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

        Args:
            entries: all transfers.
            held: the node labels of the transfers that are pending for a node share, by uid.

        Returns:
            The uids of those in `held` that are due: the oldest for each free share, and those to be canceled.
        """
        bound = [entry for entry in entries if entry.kind in self._bound]
        self._in_preparation = Counter(entry.node_label for entry in bound if entry.admission_phase in HOLDING_PHASES)
        self._chosen.clear()
        pending = [entry for entry in bound if entry.phase is Phase.NEW and entry.uid in held]
        free = {label: self._free(label) for label in held.values()}
        woken = []
        for entry in sorted(pending, key=lambda entry: (entry.created, entry.name)):
            label = held[entry.uid]
            if entry.stop:
                woken.append(entry.uid)
            elif free[label] > 0:
                free[label] -= 1
                woken.append(entry.uid)
        return woken

    def counts(self, entry: Entry) -> bool:
        """Return whether the transfer is of a kind that only one node can carry out."""
        return entry.kind in self._bound

    def admit(self, entry: Entry, admission: Admission, *, slots: int) -> Admission:
        """Return `admission`, or that the transfer is pending because its node has no free share.

        Args:
            entry: the transfer.
            admission: the result of its kind's check.
            slots: the `loadConcurrency` of the node that `admission` names.
        """
        ready = admission.decision is AdmissionState.READY
        if not ready or entry.kind not in self._bound or entry.uid in self._chosen:
            return admission
        label = label_value(admission.node)
        self._slots[label] = slots
        if self._free(label) <= 0:
            message = (
                f"node {admission.node} already has {self._in_preparation[label]} pod volume transfers"
                f" in preparation (limit {_limit(slots)})"
            )
            return Admission(
                AdmissionState.PENDING, PendingReason.NODE_BUSY, message, node=admission.node, indefinite=True
            )
        self._in_preparation[label] += 1
        self._chosen.add(entry.uid)
        return admission

    def _free(self, label: str) -> int:
        """Return how many more transfers the node may have in preparation."""
        return _limit(self._slots.get(label, 0)) - self._in_preparation[label]


def _limit(slots: int) -> int:
    return _SHARE_PER_SLOT * slots + 1


_FRESH_SECONDS: Final = 60.0
"""How long the labels of another node are used: they only decide how large its share is."""


class NodeSlots:
    """The number of slots of each node, read when it is needed."""

    def __init__(self, client: KubeClient, clock: Clock, concurrency: Callable[[], LoadConcurrency]) -> None:
        """Read nodes through `client`; `concurrency` returns the active `loadConcurrency`."""
        self._client = client
        self._clock = clock
        self._concurrency = concurrency
        self._labels: dict[str, tuple[float, Mapping[str, str]]] = {}

    async def of(self, node: str) -> int:
        """Return how many transfers may be InProgress on `node`.

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
