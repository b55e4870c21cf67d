"""What the parts of the leader share: the cluster, and the settings and timeouts of the dispatcher."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from core.clock import Clock
from core.kube.client import KubeClient
from core.models.phases import RetryRules
from core.models.transfers import Transfer
from nodeagent.config.keys import AgentConfig
from nodeagent.metrics import Metrics
from nodeagent.transfers.kinds.base import Kind
from nodeagent.transfers.status import EventLog, StatusWriter


@dataclass(frozen=True)
class Cluster:
    """The cluster as the leader reads and changes it.

    `check_leading` is called before each write, and raises unless this agent is the leader. `now` returns the API
    server's time.
    """

    client: KubeClient
    clock: Clock
    status: StatusWriter
    events: EventLog
    metrics: Metrics
    check_leading: Callable[[], None]
    now: Callable[[], datetime]


@dataclass(frozen=True)
class DispatchRules:
    """The kinds, settings and timeouts of the dispatcher.

    `config` returns the active configuration. `resource_timeout` is how long a cleanup may last before it is reported
    as blocked, `node_gone_after` how long a node may be not Ready before it counts as lost. `retry_rules` returns the
    active limits of retries of a transfer, `location_answers` whether the backup storage location of that name does.
    """

    namespace: str
    kinds: Sequence[Kind[Any]]
    config: Callable[[], AgentConfig]
    prepare_timeout: timedelta = timedelta(minutes=30)
    resource_timeout: timedelta = timedelta(minutes=10)
    node_gone_after: timedelta = timedelta(minutes=5)
    retry_rules: Callable[[Transfer], RetryRules] = lambda _: RetryRules()
    location_answers: Callable[[str], bool] = lambda _: True

    @property
    def queue_length(self) -> int | None:
        """The active `prepareQueueLength`, None where there is no limit."""
        return self.config().load_concurrency.prepare_queue_length

    @property
    def first(self) -> frozenset[str]:
        """The kinds whose transfers go before all others."""
        kinds = self.kinds if self.config().load_concurrency.restores_first else ()
        return frozenset(kind.spec.name for kind in kinds if kind.spec.restores)
