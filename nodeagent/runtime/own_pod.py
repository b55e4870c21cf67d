"""The agent's own pod: Events and annotations that concern the agent itself. Outside of a cluster, it only logs."""

import logging
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Final

from core.kube.client import KubeClient, Selection
from core.kube.errors import KubeError
from core.kube.events import EventRecorder, ObjectRef
from core.kube.resources import PODS
from core.kube.types import Pod
from core.models.names import AGENT_LABELS, AGENT_SELECTOR
from core.text import some_of
from nodeagent.metrics import Metrics

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class OwnPod:
    """The agent's own pod, read when there is something to report, unless it is known.

    It is the pod of the agent of `node`; in a pod, `hostname` is the pod's name. `pod` is what is known of it.
    """

    client: KubeClient
    recorder: EventRecorder
    pod: Pod | None = None
    _: KW_ONLY
    namespace: str
    node: str
    hostname: str

    async def report(self, reason: str, message: str, *, warning: bool = False) -> None:
        """Log `message` and record it as an Event on the pod; an Event that cannot be recorded is only logged."""
        _log.log(logging.WARNING if warning else logging.INFO, "%s", message, extra={"reason": reason})
        try:
            pod = await self._find()
            if pod is not None:
                await self.recorder.record(ObjectRef.of(pod), reason, message, warning=warning)
        except KubeError as e:
            _log.warning("could not record an Event on the agent's pod: %s", e)

    async def annotate(self, annotations: Mapping[str, str]) -> None:
        """Ensure that the pod has the annotations."""
        pod = await self._find()
        if pod is None or (pod["metadata"].get("annotations") or {}).items() >= annotations.items():
            return
        meta = pod["metadata"]
        change = {"metadata": {"uid": meta["uid"], "annotations": dict(annotations)}}
        self.pod = None
        self.pod = await self.client.patch(PODS, self.namespace, meta["name"], change)

    async def _find(self) -> Pod | None:
        if self.pod is None:
            self.pod = await find_own_pod(self.client, self.namespace, node=self.node, hostname=self.hostname)
        return self.pod


@dataclass(frozen=True)
class AgentReport:
    """Where the agent's own state is reported: on its pod, in its log and in its metrics."""

    pod: OwnPod
    metrics: Metrics


async def find_own_pod(client: KubeClient, namespace: str, *, node: str, hostname: str) -> Pod | None:
    """Return the pod of the agent of `node` on the machine `hostname`; None if there is none, or it is not clear which.

    Pods are listed only if none has the hostname (host network): all agents of a large cluster may start at once.
    """
    named = await client.read(PODS, namespace, hostname)
    if named is not None and (named["metadata"].get("labels") or {}).items() >= AGENT_LABELS.items():
        return named
    selection = Selection(PODS, namespace, label_selector=AGENT_SELECTOR, field_selector=f"spec.nodeName={node}")
    pods = await client.list(selection)
    # With host network a pod has the node's hostname: the only agent on the node is this one.
    alive = [pod for pod in pods if not pod["metadata"].get("deletionTimestamp")]
    return alive[0] if len(alive) == 1 else None


_NODES_SHOWN: Final = 3


def shown(names: list[str]) -> str:
    """Return the first few of `names`, sorted and joined, and how many more there are."""
    return some_of(sorted(names), _NODES_SHOWN)
