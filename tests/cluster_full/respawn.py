"""Components of the test bed, and its second node, that are killed, and started again as they were."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Self

from tests.cluster.bed import Bed
from tests.cluster.processes import Process, find_all, wait_for_one
from tests.testbed.othernode import lay_cable
from tests.testbed.processes import wait_for

_SECONDS = 300
"""A node that returns to a busy machine takes minutes: its kubelet asks for all of its pods first."""


class Component:
    """A program of the control plane or of a node, and what it takes to start it again."""

    def __init__(self, process: Process, log: Path) -> None:
        self._process = process
        self._environment = process.environment()
        self._folder = Path(f"/proc/{process.pid}/cwd").readlink()
        self._log = log

    @classmethod
    def find(cls, what: str, matches: Callable[[Process], bool], log: Path) -> Self:
        """The one running program of a kind; its output goes on to `log`."""
        return cls(wait_for_one(what, matches), log)

    def kill(self) -> None:
        self._process.kill()

    def start(self) -> None:
        """Start it as it was; it belongs to the test bed's first process then."""
        with self._log.open("ab") as output:
            subprocess.run(
                ["setsid", "--fork", *self._process.argv],
                check=True,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
                cwd=self._folder,
            )


def is_kubelet(node: str) -> Callable[[Process], bool]:
    return lambda process: Path(process.argv[0]).name == "kubelet" and node in process.argv


def kill_node() -> None:
    """End everything of the second node at once: its namespaces end with their first process."""
    for process in find_all(_is_node):
        process.kill()


class LostNode:
    """The second node, from its loss to its return: it ends as by a power cut, and its disks keep what they have."""

    name = "bed-2"

    def __init__(self, bed: Bed) -> None:
        """End everything of it at once."""
        self._bed = bed
        self._first = Component.find("the node's first process", _is_node, bed.folder / "logs" / "node-2.log")
        self._first.kill()
        wait_for("the end of the kubelet", lambda: not find_all(is_kubelet(self.name)), seconds=_SECONDS)

    def start(self) -> None:
        """Start it again; returns when it is Ready."""
        self._first.start()
        pid = wait_for_one("the node's first process", _is_node).pid
        ours, theirs = Path("/proc/self/ns/net"), Path(f"/proc/{pid}/ns/net")
        wait_for("the node's network", lambda: theirs.readlink() != ours.readlink(), seconds=_SECONDS)
        lay_cable(2, pid)
        wait_for("the kubelet", lambda: find_all(is_kubelet(self.name)), seconds=_SECONDS)
        self._bed.user.kubectl("wait", f"node/{self.name}", "--for=condition=Ready", f"--timeout={_SECONDS}s")


def _is_node(process: Process) -> bool:
    return process.argv[0] == "unshare" and "tests.testbed.othernode" in process.argv
