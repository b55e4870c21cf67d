"""A transfer of each kind, held while data moves, and what holds when they have ended."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from core.kube.resources import (
    PERSISTENT_VOLUME_CLAIMS,
    PERSISTENT_VOLUMES,
    PODS,
    VOLUME_SNAPSHOT_CONTENTS,
    VOLUME_SNAPSHOTS,
    Resource,
)
from tests.cluster.bed import Bed, new_namespace
from tests.cluster.followed import Followed
from tests.cluster.gate import Gate, open_gate
from tests.cluster.scenes import RESOURCES, is_final
from tests.cluster.site import DATA_BYTES, Site
from tests.testbed.api import Json
from tests.testbed.demonstration.manifests import NAMESPACE
from tests.testbed.processes import LIMIT_SECONDS

_OWNER_LABEL = "nodeagent.io/owner-uid"
_END_SECONDS = 120
_CLEAN_SECONDS = 90
_LOOK_SECONDS = 0.3


@dataclass
class Seed:
    """Volumes behind a gate, and Completed backups of them to restore, by words of `Quartet`."""

    site: Site
    gate: Gate
    kept: dict[str, Followed]


@contextmanager
def open_seed(bed: Bed, *, node: str, shared: bool = True, devices: bool = False) -> Iterator[Seed]:
    """A seed with a namespace of its own; the rest is as for `Site`."""
    with new_namespace(bed) as space, open_gate() as gate:
        site = Site(bed, space, gate.url, node=node, devices=devices, shared=shared)
        site.prepare()
        location = site.open_place("kept")
        kept = {"du": site.upload("du", location=location), "pvb": site.backup("pvb", location=location)}
        if devices:
            kept["bu"] = site.upload("bu", location=location, block=True)
        for each in kept.values():
            each.start()
        for each in kept.values():
            each.wait_phase("Completed")
        yield Seed(site, gate, kept)
        site.remove(kept.values(), location)


class Quartet:
    """A transfer of each kind, and two more of a device where the seed has one."""

    def __init__(self, seed: Seed, word: str) -> None:
        """Make what they are about, but do not start them."""
        site = self.site = seed.site
        self.bed, self.gate = site.bed, seed.gate
        self.location = location = site.open_place(word)
        self.transfers = [
            site.upload(f"du-{word}", location=location),
            site.backup(f"pvb-{word}", location=location),
            site.download(f"dd-{word}", of=seed.kept["du"]),
            site.restore(f"pvr-{word}", of=seed.kept["pvb"]),
        ]
        if site.devices:
            self.transfers.append(site.upload(f"bu-{word}", location=location, block=True))
            self.transfers.append(site.download(f"bd-{word}", of=seed.kept["bu"]))

    def start(self) -> None:
        for each in self.transfers:
            each.start()

    def hold(self, percent: int | None = None) -> None:
        """Start them; returns when each has moved that share of its data, or some, and is held."""
        if percent is None:
            self.gate.shut()
        else:
            self.gate.shut(passes_bytes=DATA_BYTES * percent // 100, together=True)
        self.start()
        self.wait("InProgress", seconds=LIMIT_SECONDS)
        self.gate.wait_held(*(str(pod["status"]["podIP"]) for pod in self.pods()))

    def wait(self, *phases: str, seconds: float = _END_SECONDS) -> None:
        for each in self.transfers:
            each.wait(f"phase of {phases}", lambda one: one.phase in phases, seconds=seconds)

    def pods(self) -> list[Json]:
        return [each.pod() for each in self.transfers]

    def cancel(self) -> None:
        for each in self.transfers:
            each.cancel()

    def expect_completed(self, *, seconds: float = _END_SECONDS) -> None:
        """Wait until all are Completed, and check that nothing is left, and that the data is as it was."""
        self.wait("Completed", seconds=seconds)
        for each in self.transfers:
            assert "message" not in each.last["status"], each.last["status"]
        assert wait_leaked(self.bed) == []
        assert [line for each in self.transfers for line in self.site.differences(each)] == []

    def remove(self) -> None:
        """Have them deleted; nothing may block that."""
        names = [f"{each.transfer['kind'].lower()}/{each.name}" for each in self.transfers]
        self.bed.user.kubectl("delete", *names, "-n", NAMESPACE, "--ignore-not-found", "--timeout=60s")
        self.site.remove([], self.location)


def wait_leaked(bed: Bed, *, seconds: float = _CLEAN_SECONDS) -> list[str]:
    """The leaked objects of transfers, after so many seconds for their cleanup at most."""
    deadline = time.monotonic() + seconds
    while (left := _leaked(bed)) and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
    return left


def _leaked(bed: Bed) -> list[str]:
    """Objects that carry an owner, and volumes and snapshots of the agents' namespace or of no claim."""
    tests: list[tuple[Resource, Callable[[Json], bool]]] = [
        (PODS, _is_owned),
        (PERSISTENT_VOLUME_CLAIMS, _is_owned),
        (VOLUME_SNAPSHOTS, _is_owned),
        (
            VOLUME_SNAPSHOT_CONTENTS,
            lambda each: _is_owned(each) or each["spec"]["volumeSnapshotRef"]["namespace"] == NAMESPACE,
        ),
        (PERSISTENT_VOLUMES, lambda each: each.get("status", {}).get("phase") == "Released"),
        (PERSISTENT_VOLUMES, lambda each: each["spec"].get("claimRef", {}).get("namespace") == NAMESPACE),
    ]
    found = [f"{r.plural} {each['metadata']['name']}" for r, test in tests for each in bed.api.objects(r) if test(each)]
    for resource in RESOURCES.values():
        held = [each for each in bed.api.objects(resource) if is_final(each) and each["metadata"].get("finalizers")]
        found += [f"{resource.plural} {each['metadata']['name']}" for each in held]
    return found


def _is_owned(item: Json) -> bool:
    return _OWNER_LABEL in (item["metadata"].get("labels") or {})
