"""The child processes of this process, found through /proc."""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Running:
    pid: int
    arguments: str


def children_of(parent: int) -> list[Running]:
    """Return the children except zombies, with their arguments joined by spaces."""
    found: list[int] = []
    # Not by the parent of each process of the machine: that takes 10 ms, around each test and in loops that wait.
    with suppress(OSError):
        for thread in Path(f"/proc/{parent}/task").iterdir():
            with suppress(OSError):
                found += map(int, (thread / "children").read_text().split())
    return [child for pid in found if (child := _running(pid)) is not None]


def _running(pid: int) -> Running | None:
    folder = Path(f"/proc/{pid}")
    try:
        state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        arguments = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return None
    return Running(pid, arguments) if state != "Z" else None


def moves_data(arguments: str) -> bool:
    """Return whether a kopia with these arguments moves the data of a volume."""
    return any(f" {one} " in f"{arguments} " for one in ("--progress", "mover-backup", "mover-restore"))


def running_kopia(verb: str, parent: int | None = None) -> list[Running]:
    """Return the children that are kopia with the command `verb`, such as `snapshot create`."""
    return [
        child
        for child in children_of(parent or os.getpid())
        if Path(child.arguments.split(" ")[0]).name == "kopia" and f" {verb} " in child.arguments
    ]
