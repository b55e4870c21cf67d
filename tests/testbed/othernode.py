"""A further node: containerd and a kubelet in namespaces nested in the test bed's, joined by a cable.

Two ends. `start` runs beside the control plane: it writes what the node needs into the node's
folder, starts `python -m tests.testbed.othernode FOLDER` in new namespaces and lays the cable. The
other end is that module's main: it makes its namespaces a machine and runs the two programs.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

from tests.support.seccomp import LANDLOCK, deny
from tests.testbed import cgroups, machine
from tests.testbed.firstprocess import run_as_first_process
from tests.testbed.node import Node
from tests.testbed.processes import BedError, Supervisor
from tests.testbed.settings import node_address, pod_subnet

_UPLINK = "uplink"
_CHECK_SECONDS = 1.0
_CONTAINERD_READY = b"Start streaming server"
"""It has found the pods that it had. Source: containerd 1.6, pkg/cri/server/service.go, Run."""


def start(node: Node, archives: list[Path], supervisor: Supervisor, driver: list[str]) -> None:
    """Start a further node; it registers itself with the API server.

    Args:
        node: Which one; its index is 2 or more.
        archives: Images to import.
        supervisor: Watches over its first process.
        driver: The command of its CSI driver.
    """
    task = {
        "index": node.index,
        "cgroup": node.cgroup,
        "containerd": node.containerd,
        "kubelet": node.kubelet,
        "driver": driver,
        "imports": [node.ctr("images", "import", str(archive)) for archive in archives],
        "logs": str(supervisor.logs),
    }
    (node.folder / "task.json").write_text(json.dumps(task))
    argv = ["unshare", "--kill-child", "--mount", "--propagation", "slave", "--net", "--pid", "--fork", "--mount-proc"]
    argv += [sys.executable, "-m", "tests.testbed.othernode", str(node.folder)]
    component = supervisor.start(f"node-{node.index}", argv)
    ours, theirs = Path("/proc/self/ns/net"), Path(f"/proc/{component.process.pid}/ns/net")
    supervisor.wait("the node's network", lambda: theirs.readlink() != ours.readlink())
    lay_cable(node.index, component.process.pid)


def lay_cable(index: int, pid: int) -> None:
    """Join this network namespace with that of a process; the far end is configured in the other one."""
    cable = f"to-node-{index}"
    # That of a node that ended: the kernel removes it when it comes to it.
    subprocess.run(["ip", "link", "delete", cable], capture_output=True, check=False)
    machine.run("ip", "link", "add", cable, "type", "veth", "peer", "name", _UPLINK, "netns", str(pid))
    machine.run("ip", "link", "set", cable, "up")
    machine.run("ip", "route", "add", node_address(index), "dev", cable, "src", node_address(1))
    machine.run("ip", "route", "add", pod_subnet(index), "via", node_address(index), "dev", cable, "onlink")


def main(folder: Path) -> int:
    """Be a node until one of its programs ends; it has a kernel without Landlock, unlike the first one."""
    deny(LANDLOCK)()
    task = json.loads((folder / "task.json").read_text())
    supervisor = Supervisor(Path(task["logs"]))
    index = task["index"]
    try:
        machine.prepare_mounts(folder)
        # A kubelet looks for seconds at each group of a pod that ended with the node.
        cgroups.remove_below(task["cgroup"])
        machine.add_addresses(node_address(index))
        supervisor.wait("the cable", _has_uplink)
        _connect(node_address(index))
        log = supervisor.logs / f"containerd-{index}.log"
        past = log.stat().st_size if log.exists() else 0
        supervisor.start(f"containerd-{index}", task["containerd"])
        # A kubelet that asks before ends.
        supervisor.wait("containerd", lambda: _CONTAINERD_READY in log.read_bytes()[past:])
        imported = folder / "imported"
        for argv in task["imports"] if not imported.exists() else ():
            machine.run(*argv)
        imported.touch()
        supervisor.start(f"driver-{index}", task["driver"])
        supervisor.start(f"kubelet-{index}", task["kubelet"])
        while True:
            supervisor.check()
            time.sleep(_CHECK_SECONDS)
    except BedError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1


def _has_uplink() -> bool:
    argv = ["ip", "link", "show", _UPLINK]
    return subprocess.run(argv, capture_output=True, check=False).returncode == 0


def _connect(own_address: str) -> None:
    """Reach everything through the cable, so that what the first node drops is dropped for this one too."""
    first = node_address(1)
    machine.run("ip", "link", "set", _UPLINK, "up")
    machine.run("ip", "route", "add", first, "dev", _UPLINK, "src", own_address)
    machine.run("ip", "route", "add", "default", "via", first, "dev", _UPLINK, "onlink", "src", own_address)


if __name__ == "__main__":
    sys.exit(run_as_first_process(lambda: main(Path(sys.argv[1]))))
