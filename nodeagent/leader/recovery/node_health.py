"""Lost nodes: deleted, or not Ready for `--node-gone-after`."""

import logging
from collections.abc import Mapping
from datetime import timedelta
from typing import Final, NamedTuple, cast

from core.clock import Clock
from core.kube.client import KubeClient, Selection
from core.kube.errors import KubeError
from core.kube.resources import NODES
from core.kube.types import Condition, NodeObject
from core.models.names import label_value
from core.models.units import format_duration
from nodeagent.runtime.informer import Informer
from nodeagent.runtime.timers import Timers

__all__ = ["NodeHealth", "NodeLoss", "explain_node_loss"]

_log = logging.getLogger(__name__)


def explain_node_loss(name: str, condition: Condition | None, *, seconds: float, gone_after: timedelta) -> str:
    """Return why the node `name` is lost, or an empty string.

    Args:
        name: the node's name.
        condition: the Node's condition Ready as JSON dict, empty if it has none; None if there is
            no such Node.
        seconds: how long this process has observed that condition.
        gone_after: how long a node may be not Ready.

    Source: Kubernetes v1.34, API reference, NodeCondition.
    """
    if condition is None:
        return f"node {name} does not exist"
    if _is_ready(condition) or seconds < gone_after.total_seconds():
        return ""
    cause = ": ".join(part for part in (condition.get("reason", ""), condition.get("message", "")) if part)
    return f"node {name} is not Ready for {format_duration(gone_after)}" + (f": {cause}" if cause else "")


def _is_ready(condition: Condition) -> bool:
    return bool(condition.get("status", "True") == "True") or not condition.get("lastTransitionTime")


class NodeLoss(NamedTuple):
    """Why a node is lost, and whether its Node was deleted; otherwise it may be back at any time."""

    why: str
    deleted: bool


class _Node(NamedTuple):
    """The cached part of a Node: its label value, and its condition Ready, empty if it has none."""

    label: str
    ready: Condition


class NodeHealth:
    """The nodes of the cluster, kept by list and watch."""

    def __init__(self, client: KubeClient, clock: Clock, *, gone_after: timedelta) -> None:
        """Treat a node as lost after `gone_after` without Ready."""
        self._client = client
        self._gone_after = gone_after
        self._not_ready = Timers(clock)
        self._by_label: Mapping[str, Condition] | None = None
        self._warned = False
        self._informer = Informer(client, Selection(NODES), clock=clock, trim=_trim, on_change=self._take)

    async def run(self) -> None:
        """List and watch until canceled; while the list is rejected, no node is lost."""
        await self._informer.run_despite_rejections(self._warn)

    def explain_loss(self, label: str, name: str) -> str:
        """Return why the node with that label value is lost, or an empty string.

        No node is lost before the first list, or while the list is empty: this process itself runs
        on a node.

        Args:
            label: the node's name as a label value.
            name: the node's name in the message.
        """
        if not self._informer.synced.is_set() or not len(self._informer):
            return ""
        return self._explain(label, name, self._conditions().get(label))

    async def confirm_loss(self, name: str) -> NodeLoss | None:
        """Read the node, and return why it is lost; None if it is not.

        Raises:
            KubeError: the API server rejected the request.
        """
        node = await self._client.read(NODES, "", name)
        why = self._explain(label_value(name), name, None if node is None else _trim(node).ready)
        return NodeLoss(why, deleted=node is None) if why else None

    def _explain(self, label: str, name: str, condition: Condition | None) -> str:
        seconds = 0.0 if condition is None else self._measure(label, condition)
        return explain_node_loss(name, condition, seconds=seconds, gone_after=self._gone_after)

    def _measure(self, label: str, condition: Condition) -> float:
        """Return how long the node has been observed not Ready since its last transition, 0.0 if it is Ready."""
        if _is_ready(condition):
            self._not_ready.forget(label)
            return 0.0
        return self._not_ready.seconds(label, condition["lastTransitionTime"])

    def _warn(self, error: KubeError) -> None:
        # Logged once; a permission that is missing for good would fill the log.
        _log.log(logging.DEBUG if self._warned else logging.WARNING, "cannot detect lost nodes, will retry: %s", error)
        self._warned = True

    def _conditions(self) -> Mapping[str, Condition]:
        if self._by_label is None:
            self._by_label = {node.label: node.ready for node in self._informer.items()}
            self._not_ready.retain(self._by_label.keys())
        return self._by_label

    def _take(self, node: _Node) -> None:
        self._by_label = None
        self._measure(node.label, node.ready)


_KEPT: Final = ("status", "reason", "message", "lastTransitionTime")


def _trim(node: NodeObject) -> _Node:
    conditions = (node.get("status") or {}).get("conditions") or []
    ready = next((entry for entry in conditions if entry.get("type") == "Ready"), Condition())
    kept = {key: ready[key] for key in _KEPT if key in ready}
    return _Node(label_value(node["metadata"]["name"]), cast("Condition", kept))
