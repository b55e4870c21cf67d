"""The cluster as a leader of the tests has it."""

from collections.abc import Callable

from core.clock import Clock
from core.kube.client import KubeClient
from core.kube.events import EventRecorder
from nodeagent.leader.context import Cluster
from nodeagent.metrics import Metrics
from nodeagent.transfers.status import EventLog, StatusWriter


def build_cluster(
    client: KubeClient,
    clock: Clock,
    *,
    node: str = "node-a",
    metrics: Metrics | None = None,
    check_leading: Callable[[], None] = lambda: None,
) -> Cluster:
    """Return what an agent of `node` has while it leads, which ends when `check_leading` raises."""
    return Cluster(
        client=client,
        clock=clock,
        status=StatusWriter(client, clock.now),
        events=EventLog(EventRecorder(client, clock, component="node-agent", host=node)),
        metrics=metrics or Metrics(node),
        check_leading=check_leading,
        now=clock.now,
    )
