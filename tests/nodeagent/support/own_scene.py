"""A fake cluster and one part of an agent that reports about itself, with all that it works with."""

from dataclasses import dataclass, field
from typing import Self

from core.kube.client import KubeClient
from nodeagent.config.current import CurrentConfig
from nodeagent.config.parse import ParsedConfig
from nodeagent.metrics import Metrics
from nodeagent.runtime.own_pod import AgentReport
from tests.nodeagent.support.board import FakeBoard
from tests.support.fakekube import FakeKube


@dataclass
class OwnScene:
    """Where one part of an agent is at work with the configuration `current`."""

    kube: FakeKube
    client: KubeClient
    current: CurrentConfig
    board: FakeBoard = field(default_factory=FakeBoard)
    metrics: Metrics = field(default_factory=lambda: Metrics("node-1"))

    @classmethod
    def build(cls, parsed: ParsedConfig) -> Self:
        kube = FakeKube()
        return cls(kube, kube.client, CurrentConfig(parsed))

    @property
    def report(self) -> AgentReport:
        return AgentReport(self.board, self.metrics)
