"""What interrupts a transfer: to its process, its pod, its node, or its storage.

Each is what happens in a cluster, and not a simulation of it: the kernel kills for lack of memory, the API server
evicts, the storage does not answer.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from core.kube.resources import PODS
from tests.cluster.bed import Bed
from tests.cluster.followed import Followed
from tests.cluster.gate import Gate
from tests.cluster.processes import Process, find_all, is_kopia, is_mover, of_pod, wait_for_one
from tests.testbed.api import Json
from tests.testbed.demonstration.manifests import NAMESPACE
from tests.testbed.processes import LIMIT_SECONDS, BedError, wait_for

_POLL_SECONDS = 0.1
_MIB = 1 << 20
_ROOM_BYTES = 24 * _MIB
"""What a mover may use more, when its limit is set: the kernel refuses a limit below what is in use."""

_HOG = """
import sys, time
open(sys.argv[1], "w").write("0")
kept = []
while True:
    kept.append(bytearray(b"x") * (1 << 20))
    time.sleep(0.002)
"""
_LIMITS = ("memory.limit_in_bytes", "memory.max")
_USAGES = ("memory.usage_in_bytes", "memory.current")
"""Of cgroup v1 and v2."""

_CHECKPOINT = "kopia may save a checkpoint"


def movers_of(pod: Json) -> list[Process]:
    """The data mover's processes in a pod; none once its container has ended."""
    belongs = of_pod(pod)
    return find_all(lambda process: is_mover(process) and belongs(process))


def kill_mover(pod: Json) -> None:
    belongs = of_pod(pod)
    wait_for_one("the mover", lambda process: is_mover(process) and belongs(process)).kill()


def kill_kopia(pod: Json) -> None:
    belongs = of_pod(pod)
    wait_for_one("kopia", lambda process: is_kopia(process) and belongs(process)).kill()


def evict(bed: Bed, pod: Json) -> None:
    """Have a pod evicted, as a drain does."""
    meta = {key: pod["metadata"][key] for key in ("namespace", "name")}
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": meta}
    bed.api.request("POST", PODS.path(**meta, subresource="eviction"), body=body)


def exhaust_memory(pod: Json) -> None:
    """Have the kernel kill a mover's container for lack of memory; returns when its process is gone.

    Its group gets a limit just above what it uses, and a process that takes the rest. The kernel prefers the mover's
    processes, as the kubelet has made it: those of a pod without guaranteed memory have the highest scores.
    """
    belongs = of_pod(pod)
    mover = wait_for_one("the mover", lambda process: is_mover(process) and belongs(process))
    group = _memory_group(mover.pid)
    limit, usage = (next(group / name for name in names if (group / name).exists()) for names in (_LIMITS, _USAGES))
    limit.write_text(str(int(usage.read_text()) + _ROOM_BYTES))
    argv = [sys.executable, "-c", _HOG, str(group / "cgroup.procs")]
    hogs = [subprocess.Popen(argv)]
    deadline = time.monotonic() + LIMIT_SECONDS
    try:
        while movers_of(pod):
            if hogs[-1].poll() is not None:
                # It was killed instead.
                hogs.append(subprocess.Popen(argv))
            if time.monotonic() > deadline:
                raise BedError(f"{len(hogs)} processes in {group} did not exhaust its memory")
            time.sleep(_POLL_SECONDS)
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


def _memory_group(pid: int) -> Path:
    """The group that limits a process's memory. Source: cgroups(7); v1 has a line for each controller."""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return Path("/sys/fs/cgroup/memory") / path.lstrip("/")
    return Path("/sys/fs/cgroup") / path.lstrip("/")


@dataclass(frozen=True)
class Interruption:
    """A kind of interruption.

    Attributes:
        causes: The causes that the attempts may give, of `core.models.phases.InterruptionCause`.
        strike: Interrupts transfers that a gate holds; it may open the gate.
        graceful: Whether a backup gets some time, in which one that has read everything completes.
    """

    name: str
    causes: tuple[str, ...]
    strike: Callable[[Bed, Gate, Sequence[Followed]], None]
    graceful: bool = False

    def wait_done(self, each: Followed) -> None:
        """Return once a transfer that it has struck is interrupted, or has made use of its time."""
        if not self.graceful or not each.transfer["kind"].endswith(("Upload", "Backup")):
            each.wait_interrupted()
            return
        each.wait("interruption or end", lambda one: one.number > 1 or one.phase == "Completed")


def _each(strike: Callable[[Json], None]) -> Callable[[Bed, Gate, Sequence[Followed]], None]:
    def strike_all(_bed: Bed, _gate: Gate, transfers: Sequence[Followed]) -> None:
        for pod in [each.pod() for each in transfers]:
            strike(pod)

    return strike_all


def _evict_all(bed: Bed, gate: Gate, transfers: Sequence[Followed]) -> None:
    """Evict the movers; the gate is opened once each has ended or saves its checkpoint."""
    pods = [each.pod() for each in transfers]
    for pod in pods:
        evict(bed, pod)
    names = [pod["metadata"]["name"] for pod in pods]
    wait_for(
        f"movers to end that were evicted: {names}",
        lambda: not any(movers_of(pod) and not _saves(bed, pod) for pod in pods),
    )
    gate.open()


def _saves(bed: Bed, pod: Json) -> bool:
    try:
        return _CHECKPOINT in bed.user.kubectl("logs", pod["metadata"]["name"], "-n", NAMESPACE)
    except BedError:
        # It no longer exists.
        return True


def _drain(bed: Bed, gate: Gate, transfers: Sequence[Followed]) -> None:
    nodes = {str(each.pod()["spec"]["nodeName"]) for each in transfers}
    with cordoned(bed, *nodes):
        _evict_all(bed, gate, transfers)
        for each in transfers:
            INTERRUPTIONS["drain"].wait_done(each)


@contextmanager
def cordoned(bed: Bed, *nodes: str) -> Iterator[None]:
    """Keep new pods off some nodes while the context lasts."""
    bed.user.kubectl("cordon", *nodes)
    try:
        yield
    finally:
        bed.user.kubectl("uncordon", *nodes)


def _cut_storage(_bed: Bed, gate: Gate, transfers: Sequence[Followed]) -> None:
    """Let nothing through until each transfer is interrupted."""
    gate.shut(passes_bytes=0, together=True)
    for each in transfers:
        each.wait_interrupted()
        if each.stage == "Running":
            raise BedError(f"{each.name} has begun again without its storage: {each.attempts}")


INTERRUPTIONS = {
    each.name: each
    for each in (
        Interruption("kill-mover", ("Killed", "Crashed"), _each(kill_mover)),
        Interruption("kill-kopia", ("Killed", "Crashed"), _each(kill_kopia)),
        Interruption("memory", ("OOMKilled",), _each(exhaust_memory)),
        Interruption("eviction", ("Evicted", "Stopped", "Deleted"), _evict_all, graceful=True),
        Interruption("drain", ("Evicted", "Stopped", "Deleted"), _drain, graceful=True),
        Interruption("outage", ("StorageUnavailable",), _cut_storage),
    )
}
"""All but the loss of a node (`tests.cluster_full.respawn`), by their names."""
