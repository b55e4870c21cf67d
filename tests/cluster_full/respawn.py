"""Components of the test bed that are killed, and started again as they were."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from tests.cluster.processes import find_all, wait_for_one

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

    from tests.cluster.processes import Process

__all__ = ["Component", "is_api_server", "is_kubelet", "kill_node"]


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
        """End it at once."""
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
    """Whether a process is the kubelet of a node."""
    return lambda process: Path(process.argv[0]).name == "kubelet" and node in process.argv


def is_api_server(process: Process) -> bool:
    """Whether a process is the API server."""
    return Path(process.argv[0]).name == "kube-apiserver"


def kill_node() -> None:
    """End everything of the second node at once: its namespaces end with their first process."""
    for process in find_all(lambda each: each.argv[0] == "unshare" and "tests.testbed.othernode" in each.argv):
        process.kill()
