"""Faults that affect all workers: agents, a kubelet, the API server, the storage's controller, the Lease."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from core.kube.resources import LEASES
from tests.cluster.bed import Bed
from tests.cluster.processes import find_all, is_agent, is_program
from tests.cluster_full.respawn import Component, is_kubelet
from tests.testbed.demonstration.manifests import NAMESPACE

_DOWN_SECONDS = 2.0


def build_chaos(bed: Bed) -> Mapping[str, Callable[[], None]]:
    """Each fault by its name; it is over when its function returns, or ends by itself."""
    logs = bed.folder / "logs"

    def kill_agent(node: str) -> None:
        for process in find_all(is_agent(node)):
            process.kill()

    matches = {
        "kubelet": is_kubelet("bed-1"),
        "API server": is_program("kube-apiserver"),
        "provisioner": is_program("csi-provisioner"),
    }

    def kill_for_a_while(what: str, log: Path) -> None:
        component = Component.find(what, matches[what], log)
        component.kill()
        time.sleep(_DOWN_SECONDS)
        component.start()
        # No other component could be started again without the API server.
        bed.api.text("GET", "/readyz")

    return {
        "agent of bed-1 killed": lambda: kill_agent("bed-1"),
        "agent of bed-2 killed": lambda: kill_agent("bed-2"),
        "kubelet killed": lambda: kill_for_a_while("kubelet", logs / "kubelet-1.log"),
        "API server killed": lambda: kill_for_a_while("API server", logs / "kube-apiserver.log"),
        "provisioner killed": lambda: kill_for_a_while("provisioner", logs / "csi-provisioner.log"),
        "Lease deleted": lambda: bed.api.delete(LEASES, NAMESPACE, "node-agent-dispatcher"),
    }
