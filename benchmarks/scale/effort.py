"""How much a scenario does, what all scenarios begin with, and what one comes to."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.scale.judge import Verdict
from benchmarks.scale.manifests import Volume
from benchmarks.scale.scene import Scene

QUEUE_LENGTH: Final = 100
SLOTS: Final = 2

LEAST_SECONDS: Final = 300.0
_SECONDS_A_TRANSFER: Final = 1.0
"""The limit of all waits: a fixed part, and a part for each transfer."""

SETTLE_SECONDS: Final = 10.0
LEADER_NODE: Final = "no-live-agent"
"""A node without a live agent's pod: its agent may be the leader, and gets no transfer."""

Log = Callable[[str], None]


@dataclass(frozen=True)
class Effort:
    """How much is done: agents, transfers, the admission quota, and how long a mover moves data."""

    agents: int
    transfers: int
    mover_seconds: float = 1.0
    processes: int = 4
    queue_length: int = QUEUE_LENGTH

    @property
    def limit_seconds(self) -> float:
        """How long to wait for all of it."""
        return LEAST_SECONDS + self.transfers * _SECONDS_A_TRANSFER


@dataclass(frozen=True)
class Result:
    """What one scenario came to: rows below a title, figures of the last line, and lines that explain them."""

    title: str
    rows: Sequence[tuple[str, str]]
    summary: dict[str, float]
    verdict: Verdict
    details: Sequence[str] = ()


async def prepare(scene: Scene, effort: Effort) -> Sequence[Volume]:
    """Have everything watched and simulated, and make the volumes that transfers are about."""
    await scene.watch()
    await scene.stage.add_workloads()
    volumes = await scene.stage.add_volumes(effort.transfers)
    await scene.simulate(seconds=effort.mover_seconds)
    return volumes
