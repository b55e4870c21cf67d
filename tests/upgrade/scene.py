"""Transfers that are under way while the agents are replaced, and every version of them."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from core.kube.resources import POD_VOLUME_BACKUPS, PODS, Resource
from tests.cluster.gate import HELD_BYTES
from tests.cluster.scenes import RESOURCES, follow
from tests.cluster.workloads import Workload, wait_held
from tests.cluster_full.quartet import Quartet, Seed, wait_leaked
from tests.testbed.api import Json
from tests.testbed.demonstration.manifests import NAMESPACE

SLOTS = 4
"""Of each node: as many as transfers that move, so that the others wait."""

_FAR_NODE = "bed-2"
_SECONDS = 400
_GOOD_PATH = ["New", "Accepted", "Prepared", "InProgress", "Completed"]


@dataclass
class Scene:
    """Transfers of all kinds: four that move data on one node, four that wait for its slots, one on the other node.

    `seen` has the phases of each transfer, by its name, in the order of its versions.
    """

    seed: Seed
    name: str
    moving: Quartet = field(init=False)
    waiting: Quartet = field(init=False)
    far: Workload = field(init=False)
    seen: dict[str, list[str]] = field(default_factory=dict)
    _far_backup: Json = field(init=False)

    def __post_init__(self) -> None:
        """Name everything."""
        seed = self.seed
        self.moving, self.waiting = Quartet(seed, f"{self.name}-moving"), Quartet(seed, f"{self.name}-waiting")
        volumes = {"scratch": HELD_BYTES + (8 << 20)}
        location = self.moving.place.name
        self.far = Workload(seed.bed, seed.space, f"{self.name}-far", volumes, on=_FAR_NODE, location=location)

    def start(self) -> None:
        """Make all transfers; return when those that move are held while data moves, and the others are Prepared."""
        self.far.start()
        self.far.wait_ready()
        self.moving.hold()
        self._far_backup = self.far.backup("scratch")
        self.seed.bed.user.apply(self._far_backup)
        wait_held(self.seed.bed, self.seed.gate, self._far_backup)
        self.waiting.make()
        self.waiting.wait("Prepared")

    def mover_uids(self) -> set[str]:
        """The UIDs of all mover pods of the transfers."""
        found = [self.seed.bed.api.get(PODS, NAMESPACE, name) or {"metadata": {}} for name in self._names()]
        return {pod["metadata"].get("uid", "") for pod in found}

    def expect_unchanged(self) -> None:
        """Check that each transfer is where it was when `start` returned."""
        self.moving.wait("InProgress")
        self.waiting.wait("Prepared")

    def finish(self, recording: dict[str, Future[None]], folder: Path) -> None:
        """Let data move, and check that every transfer completes with its data, and that no phase moved back."""
        self.seed.gate.open()
        for future in recording.values():
            future.result()
        seen = {name: [phase for phase, _ in groupby(self.seen[name])] for name in self._names()}
        assert seen == dict.fromkeys(self._names(), _GOOD_PATH)
        for quartet in (self.moving, self.waiting):
            ended = quartet.wait("Completed")
            assert [transfer["status"].get("message", "") for transfer in ended.values()] == [""] * len(ended)
            copies = folder / quartet.name
            copies.mkdir()
            assert quartet.differences(ended, copies) == []
        assert wait_leaked(self.seed.bed) == []

    def record(self, resource: Resource, names: list[str], since: str) -> None:
        """Follow transfers from a resource version on, until all of them are final."""
        for transfer in follow(self.seed.bed, resource, names, seconds=_SECONDS, since=since):
            phase = transfer.get("status", {}).get("phase") or "New"
            self.seen.setdefault(transfer["metadata"]["name"], []).append(phase)

    def names_of(self, kind: str) -> list[str]:
        """The names of its transfers of a kind."""
        quartets = [quartet.transfers[kind]["metadata"]["name"] for quartet in (self.moving, self.waiting)]
        return [*quartets, self._far_backup["metadata"]["name"]] if RESOURCES[kind] is POD_VOLUME_BACKUPS else quartets

    def remove(self) -> None:
        """Have everything deleted."""
        self.seed.gate.open()
        self.moving.remove()
        self.waiting.remove()
        self.far.delete()

    def _names(self) -> list[str]:
        return [name for kind in RESOURCES for name in self.names_of(kind)]


@contextmanager
def play(scene: Scene) -> Iterator[dict[str, Future[None]]]:
    """Start a scene, and record every version of its transfers; the futures, by kind, end when all are final."""
    since = {kind: scene.seed.bed.api.snapshot(resource)[1] for kind, resource in RESOURCES.items()}
    with ThreadPoolExecutor(max_workers=len(RESOURCES)) as pool:
        try:
            scene.start()
            yield {
                kind: pool.submit(scene.record, resource, scene.names_of(kind), since[kind])
                for kind, resource in RESOURCES.items()
            }
        finally:
            scene.remove()
