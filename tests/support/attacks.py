"""What a tenant can do to a volume while kopia walks it: put a link in the place of one of its directories."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

IN_OPEN: Final = 0x20
IN_CREATE: Final = 0x100
_ISDIR: Final = 0x40000000

_ATTACKER: Final = """
import contextlib, ctypes, os, struct, sys
with contextlib.suppress(PermissionError):
    os.setpriority(os.PRIO_PROCESS, 0, -10)
watched, mask, directory, target, ignored = sys.argv[1:]
libc = ctypes.CDLL(None)
queue = libc.inotify_init()
assert libc.inotify_add_watch(queue, watched.encode(), int(mask)) > 0
print("ready", flush=True)
done = set()
while directory not in done:
    events = os.read(queue, 65536)
    while events:
        _, mask, _, length = struct.unpack_from("iIII", events)
        name = events[16:16 + length].rstrip(b"\\0").decode()
        path = directory or watched + "/" + name
        events = events[16 + length:]
        if path not in done and not mask & int(ignored) and not name.startswith(".nodeagent-"):
            done.add(path)
            os.rename(path, path + ".away")
            os.symlink(target, path)
"""


@dataclass(frozen=True)
class Swap:
    """One exchange of `directory` for a link to `target`, at the first event of `mask` in `watched`.

    Without `directory`, everything in `watched` is exchanged at its first event. An event of `ignored` does not count,
    nor one of the probe files of a restore, which come before kopia.
    """

    directory: Path | None
    target: Path
    watched: Path
    mask: int = IN_OPEN
    ignored: int = _ISDIR


def attacker_command(swap: Swap, python: str) -> list[str]:
    """Return the command of the attacker: a process of its own, so that it reacts within microseconds, as root first.

    It prints `ready` once it watches, and ends after the exchange of `directory`.
    """
    arguments = [swap.watched, swap.mask, swap.directory or "", swap.target, swap.ignored]
    return [python, "-I", "-S", "-c", _ATTACKER, *map(str, arguments)]


@contextmanager
def swapping(swap: Swap) -> Iterator[None]:
    """Run the attacker."""
    attacker = subprocess.Popen(attacker_command(swap, sys.executable), stdout=subprocess.PIPE)
    with attacker:
        assert attacker.stdout is not None
        try:
            assert attacker.stdout.readline() == b"ready\n"
            yield
        finally:
            attacker.kill()


def describe(root: Path) -> dict[str, tuple[object, ...]]:
    """Return names, content, modes, owners and modification times of everything outside of a volume."""
    found: dict[str, tuple[object, ...]] = {}
    for path in (root, *sorted(root.rglob("*"))):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        found[str(path)] = (content, status.st_mode, status.st_uid, status.st_gid, status.st_mtime_ns)
    return found
