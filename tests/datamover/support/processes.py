"""The child processes of this process, found through /proc."""

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Running", "children_of", "running_kopia"]


@dataclass(frozen=True)
class Running:
    pid: int
    arguments: str


def children_of(parent: int) -> list[Running]:
    """Return the children except zombies, with their arguments joined by spaces."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, owner = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            arguments = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if owner == str(parent) and state != "Z":
            found.append(Running(int(folder.name), arguments))
    return found


def running_kopia(verb: str, parent: int | None = None) -> list[Running]:
    """Return the children that are kopia with the command `verb`, such as `snapshot create`."""
    return [
        child
        for child in children_of(parent or os.getpid())
        if Path(child.arguments.split(" ")[0]).name == "kopia" and f" {verb} " in child.arguments
    ]
