"""Transfers that are under way while the agents are replaced, and every version of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby

from tests.cluster.followed import PHASES, Followed
from tests.cluster.gate import HELD_BYTES
from tests.cluster.workloads import Workload
from tests.cluster_full.quartet import Quartet, Seed

SLOTS = 4
"""Of each node: as many as transfers that move, so that the others wait."""

_FAR_NODE = "bed-2"
_SECONDS = 400


@dataclass
class Scene:
    """Transfers of all kinds: four that move data on one node, four that wait for its slots, one on the other node."""

    moving: Quartet
    waiting: Quartet
    far: Followed

    @property
    def transfers(self) -> list[Followed]:
        return [*self.moving.transfers, *self.waiting.transfers, self.far]

    def start(self) -> None:
        """Return when those that move are held while data moves, and the others are Prepared."""
        self.moving.hold()
        self.far.start()
        self.far.wait_phase("InProgress")
        self.moving.gate.wait_held(str(self.far.pod()["status"]["podIP"]))
        self.waiting.start()
        self.expect_unchanged()

    def mover_uids(self) -> set[str]:
        """The UIDs of all mover pods of the transfers."""
        return {each.pod()["metadata"]["uid"] for each in self.transfers}

    def expect_unchanged(self) -> None:
        self.moving.wait("InProgress")
        self.waiting.wait("Prepared")

    def finish(self) -> None:
        """Let data move, and check that every transfer completes with its data, and that no phase moved back."""
        self.moving.gate.open()
        for each in self.transfers:
            each.wait_phase("Completed", seconds=_SECONDS)
        for quartet in (self.moving, self.waiting):
            quartet.expect_completed()
        good = ["New", *filter(None, PHASES)]
        for each in self.transfers:
            assert [phase for phase, _ in groupby(phase or "New" for phase in each.phases)] == good, each.name


@contextmanager
def play(seed: Seed, name: str) -> Iterator[Scene]:
    moving, waiting = Quartet(seed, f"{name}-moving"), Quartet(seed, f"{name}-waiting")
    bed, space, volumes = seed.site.bed, seed.site.space, {"scratch": HELD_BYTES + (8 << 20)}
    far = Workload(bed, space, f"{name}-far", volumes, on=_FAR_NODE, location=moving.location)
    far.start()
    far.wait_ready()
    scene = Scene(moving, waiting, Followed(bed, far.backup("scratch")))
    try:
        scene.start()
        yield scene
    finally:
        seed.gate.open()
        moving.remove()
        waiting.remove()
        far.delete()
