"""The processes behind pods and components of the test bed: found, held, killed.

All nodes' processes are visible from the test bed's own namespace, whatever namespaces they are in.
"""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.testbed.api import Json
from tests.testbed.demonstration.manifests import NAMESPACE
from tests.testbed.processes import LIMIT_SECONDS, BedError, wait_for

_MOVING = {"create", "restore", "mover-backup", "mover-restore", "block-write", "block-read"}
_SHOWN = {"blob", "content", "manifest", "policy"}
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Process:
    """A process as it was observed: its id and its command line."""

    pid: int
    argv: tuple[str, ...]

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once; returns when it is gone."""
        self.send(signal.SIGKILL)
        self.wait_gone()

    def wait_gone(self) -> None:
        """Return when it has ended."""
        self._wait_state("ZX")

    def hold(self) -> None:
        """Stop it; returns when it does nothing anymore."""
        self.send(signal.SIGSTOP)
        self._wait_state("T")

    def go_on(self) -> None:
        self.send(signal.SIGCONT)

    def environment(self) -> dict[str, str]:
        """Its environment as it was started."""
        text = Path(f"/proc/{self.pid}/environ").read_bytes().decode(errors="replace")
        return dict(line.split("=", 1) for line in text.split("\0") if "=" in line)

    def _wait_state(self, wanted: str) -> None:
        deadline = time.monotonic() + LIMIT_SECONDS
        while (state := _state(self.pid)) not in wanted:
            if state in "ZX" or time.monotonic() > deadline:
                raise BedError(f"process {self.pid} ({self.argv[0]}) is {state}, not {wanted}")
            time.sleep(_POLL_SECONDS)


def find_all(matches: Callable[[Process], bool]) -> list[Process]:
    """All running processes of a kind."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            argv = tuple((folder / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1])
        except OSError:
            # It has just ended.
            continue
        process = Process(int(folder.name), argv)
        if argv and _state(process.pid) not in "ZX" and matches(process):
            found.append(process)
    return found


def wait_for_one(what: str, matches: Callable[[Process], bool]) -> Process:
    """The one process of a kind, once there is one, and not several."""
    (found,) = wait_for(
        lambda: f"one process that is {what}, not {find_all(matches)}",
        lambda: all_found if len(all_found := find_all(matches)) == 1 else [],
    )
    return found


def of_pod(pod: Json) -> Callable[[Process], bool]:
    """Whether a process belongs to a pod."""
    uid = pod["metadata"]["uid"]
    # In the name of a group of systemd's the dashes are underscores; the test bed's groups are the kubelet's own.
    return lambda process: f"pod{uid}" in _read(f"/proc/{process.pid}/cgroup")


def is_program(name: str) -> Callable[[Process], bool]:
    return lambda process: Path(process.argv[0]).name == name


def is_agent(node: str) -> Callable[[Process], bool]:
    """Whether a process is a node's agent of the test bed: tests of other lanes install agents of their own."""

    def matches(process: Process) -> bool:
        if "nodeagent" not in process.argv or "serve" not in process.argv:
            return False
        try:
            environment = process.environment()
        except OSError:
            return False
        return (environment.get("NODE_NAME"), environment.get("VELERO_NAMESPACE")) == (node, NAMESPACE)

    return matches


def is_mover(process: Process) -> bool:
    return "datamover" in process.argv


def is_kopia(process: Process) -> bool:
    """Whether a process is a kopia that moves data."""
    words = set(process.argv)
    # Of a device it shows the only file.
    moves = words & _MOVING or ("show" in words and not words & _SHOWN)
    return Path(process.argv[0]).name == "kopia" and bool(moves)


def _state(pid: int) -> str:
    """The state of a process as one letter; X when it is gone."""
    # After the name, which may hold anything. Source: proc_pid_stat(5).
    words = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return words[0] if words else "X"


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
