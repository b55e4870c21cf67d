"""What all parts of the dispatcher share: what they work with, and what they go by.

Knows no rule itself; the configuration in force comes by a callable.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

from core.clock import Clock
from core.kube.client import KubeClient
from nodeagent.config.models import LoadConcurrency
from nodeagent.runtime.metrics import Metrics
from nodeagent.transfers.events import EventLog
from nodeagent.transfers.kinds.base import Kind
from nodeagent.transfers.status import StatusWriter

__all__ = ["DispatchRules", "DispatchTools"]


@dataclass(frozen=True)
class DispatchTools:
    """What the dispatcher works with; `check_leading` raises unless it may write now."""

    client: KubeClient
    clock: Clock
    status: StatusWriter
    events: EventLog
    metrics: Metrics
    check_leading: Callable[[], None]


@dataclass(frozen=True)
class DispatchRules:
    """What the dispatcher goes by.

    `concurrency` returns the `loadConcurrency` in force. `resource_timeout` is how long a
    clean-up may last untold, `node_gone_after` how long a node may be not Ready.
    """

    namespace: str
    kinds: Sequence[Kind]
    concurrency: Callable[[], LoadConcurrency]
    prepare_timeout: timedelta = timedelta(minutes=30)
    resource_timeout: timedelta = timedelta(minutes=10)
    node_gone_after: timedelta = timedelta(minutes=5)

    @property
    def queue_length(self) -> int | None:
        """The `prepareQueueLength` in force, None where there is no limit."""
        return self.concurrency().prepare_queue_length

    @property
    def first(self) -> frozenset[str]:
        """The kinds whose loads go before all others."""
        kinds = self.kinds if self.concurrency().restores_first else ()
        return frozenset(kind.name for kind in kinds if kind.restores)
