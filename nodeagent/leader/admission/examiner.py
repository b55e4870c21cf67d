"""The check of one New or interrupted transfer: ready, pending, failed or canceled.

Reads the custom resource and what its kind checks, and writes nothing. What follows from the answer is
done elsewhere: `nodeagent.leader.admission.pending` schedules the next check, and
`nodeagent.leader.admission.writer` writes.
"""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum
from typing import Any

from core.kube.errors import ForbiddenError, MalformedObjectError
from core.models.attempts import AttemptStage
from core.models.names import label_value
from core.models.phases import Phase
from core.models.reasons import PendingReason
from core.models.transfers import Transfer
from nodeagent.leader.admission.copy_holders import CopyHolders
from nodeagent.leader.admission.node_share import NodeShares, NodeSlots
from nodeagent.leader.admission.shared_reader import SharedReader
from nodeagent.leader.context import Agents, Cluster, DispatchRules
from nodeagent.leader.index import Entry
from nodeagent.transfers.events import cancel_cause
from nodeagent.transfers.kinds.base import Admission, AdmissionState, Admits

__all__ = ["CheckState", "Checked", "Examiner"]


class CheckState(Enum):
    """The result of a check."""

    READY = "ready"
    PENDING = "pending"
    FAILED = "failed"
    CANCELED = "canceled"


_STATES = {
    AdmissionState.READY: CheckState.READY,
    AdmissionState.PENDING: CheckState.PENDING,
    AdmissionState.FAILED: CheckState.FAILED,
}


@dataclass(frozen=True)
class Checked:
    """A New or interrupted transfer as it was just read, with the result of its check.

    `admission` holds the reason and message, and the only node that can carry the transfer out, if any.
    """

    entry: Entry
    kind: Admits[Any]
    cr: Transfer
    state: CheckState
    admission: Admission

    @property
    def ready(self) -> bool:
        """Whether the transfer may be accepted."""
        return self.state is CheckState.READY


class Examiner:
    """Checks New and interrupted transfers."""

    def __init__(
        self,
        cluster: Cluster,
        rules: DispatchRules,
        *,
        agents: Agents,
        velero_nodes: Callable[[], AbstractSet[str]],
    ) -> None:
        """Check transfers of the kinds in `rules`.

        `agents` returns the live agents' nodes by node label, `velero_nodes` the node labels of Velero's agents.
        """
        self._cluster = cluster
        self._rules = rules
        self.agents = agents
        self._velero_nodes = velero_nodes
        self._slots = NodeSlots(cluster.client, cluster.clock, rules.concurrency)
        self._kinds = {kind.spec.name: kind for kind in rules.kinds}
        self._reader = SharedReader(cluster.client, cluster.clock)
        self._copies = CopyHolders()
        self._shares = NodeShares(frozenset(kind.spec.name for kind in rules.kinds if kind.spec.bound_to_node))

    def begin_pass(self, entries: Sequence[Entry], held: Mapping[str, str]) -> list[str]:
        """Count the transfers in preparation on each node, and find out who holds which copy.

        Args:
            entries: all transfers.
            held: the node labels of the transfers that are pending for a node share, by uid.

        Returns:
            The uids of those that are due: their node has a free share, a copy is free, or they are to end.
        """
        return [*self._shares.count(entries, held), *self._copies.count(entries)]

    async def check(self, entry: Entry) -> Checked | None:
        """Read a transfer and return whether it may start; None where it is not New or not ours any more.

        Raises:
            AgentError: it could not be read or checked.
        """
        kind, cr = self._kinds[entry.kind], await self._read(entry)
        if cr is None or cr.phase is not Phase.NEW:
            return None
        self._copies.release(entry.uid)
        if cr.cancel_requested:
            canceled = Admission(AdmissionState.FAILED, message=f"canceled before admission: {cancel_cause(cr)}")
            return Checked(entry, kind, cr, CheckState.CANCELED, canceled)
        admission = self._check_agents(await self._check_kind(kind, cr), cr.required_feature)
        admission = self._copies.admit(entry, admission)
        if self._shares.counts(entry) and admission.decision is AdmissionState.READY:
            slots = await self._slots.of(admission.node)
            admission = self._shares.admit(entry, admission, slots=slots)
        return Checked(entry, kind, cr, _STATES[admission.decision], admission)

    async def check_interrupted(self, entry: Entry) -> Checked | None:
        """Read an interrupted transfer; None unless its next attempt may begin, as far as it alone shows.

        It begins on the node of the label that `entry` has, which may be another one than is stored.

        Raises:
            AgentError: it could not be read.
        """
        cr = await self._read(entry)
        if cr is None or cr.stage is not AttemptStage.READY:
            return None
        node = self.agents().get(entry.node_label, "")
        state = CheckState.READY if node and not cr.cancel_requested else CheckState.PENDING
        return Checked(entry, self._kinds[entry.kind], cr, state, Admission(AdmissionState.READY, node=node))

    async def _read(self, entry: Entry) -> Transfer | None:
        """Return the transfer; None where it no longer exists, or is not ours any more."""
        kind = self._kinds[entry.kind]
        raw = await self._cluster.client.read(kind.spec.resource, entry.namespace, entry.name)
        cr: Transfer | None = None if raw is None else kind.parse(raw)
        return cr if cr is not None and cr.uid == entry.uid and kind.managed(cr) else None

    async def _check_kind(self, kind: Admits[Any], cr: Transfer) -> Admission:
        try:
            return await kind.check_admission(cr, self._reader)
        except ForbiddenError as e:
            return _blocked(PendingReason.FORBIDDEN, str(e))
        except MalformedObjectError as e:
            return _blocked(PendingReason.OBJECT_MALFORMED, str(e))

    def _check_agents(self, admission: Admission, feature: str) -> Admission:
        if admission.decision is not AdmissionState.READY:
            return admission
        agents, label = self.agents(), label_value(admission.node)
        able = self.agents(feature) if feature else agents
        if admission.node and label not in agents:
            if label in self._velero_nodes():
                message = f"left to Velero's node agent on node {admission.node}"
                return Admission(AdmissionState.PENDING, PendingReason.LEFT_TO_VELERO, message, indefinite=True)
            return _blocked(PendingReason.NO_NODE_AGENT, f"no node agent is ready on node {admission.node}")
        if not agents:
            message = f"no node agent is ready in namespace {self._rules.namespace}"
            return _blocked(PendingReason.NO_NODE_AGENT, message)
        if not able or (admission.node and label not in able):
            where = f"on node {admission.node}" if admission.node else f"in namespace {self._rules.namespace}"
            message = f"no node agent {where} has {feature}: earlier versions cannot carry it out"
            return _blocked(PendingReason.AGENT_OUTDATED, message)
        return admission


def _blocked(reason: PendingReason, message: str) -> Admission:
    return Admission(AdmissionState.PENDING, reason, message, blocked=True)
