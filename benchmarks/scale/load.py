"""What the components of a scene use: processor time and memory.

Knows where each of them reports it. Does not know what they were doing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from benchmarks.scale.counts import find_metric
from benchmarks.scale.doors import Doors
from benchmarks.scale.scene import Scene

__all__ = ["AGENTS", "Load", "read_load", "read_server_mib"]

AGENTS: Final = "agents"
_AGENTS_SERVER: Final = "API server of the agents"
_OTHERS_SERVER: Final = "API server of everything simulated"
_ETCD: Final = "etcd"
_CHILDREN: Final = {
    "agents": AGENTS,
    "world": "storage, scheduler, kubelets and movers",
    "watcher": "observer of the limits",
}
_CPU: Final = "process_cpu_seconds_total"
_BYTES_A_MIB: Final = 1 << 20


@dataclass(frozen=True)
class Load:
    """Processor time by component, in seconds, so far or of a time; an agent that is a process of its own is none."""

    cpu_seconds: Mapping[str, float]

    def since(self, before: "Load") -> "Load":
        """Return what was used since `before`."""
        return Load({name: used - before.cpu_seconds.get(name, 0.0) for name, used in self.cpu_seconds.items()})


def read_load(scene: Scene) -> Load:
    """Return the processor time that each component of `scene` has used so far."""
    doors = scene.stage.doors
    used = {
        _AGENTS_SERVER: doors.count().cpu_seconds,
        _OTHERS_SERVER: find_metric(doors.server.api.text("GET", "/metrics"), _CPU),
        _ETCD: doors.read_store().cpu_seconds,
    }
    for child in scene.children:
        if (name := _CHILDREN.get(child.name)) is not None:
            used[name] = used.get(name, 0.0) + child.cpu_seconds
    return Load(used)


def read_server_mib(doors: Doors) -> float:
    """Return the resident memory of the agents' API server."""
    return find_metric(doors.agents_api.text("GET", "/metrics"), "process_resident_memory_bytes") / _BYTES_A_MIB
