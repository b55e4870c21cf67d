"""What a tenant can do to a volume while kopia walks it: put a link in the place of one of its directories."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["IN_CREATE", "IN_OPEN", "Swap", "describe", "swapping"]

IN_OPEN: Final = 0x20
IN_CREATE: Final = 0x100
_ISDIR: Final = 0x40000000

_ATTACKER: Final = """
import ctypes, os, struct, sys
watched, mask, directory, target, ignored = sys.argv[1:]
libc = ctypes.CDLL(None)
queue = libc.inotify_init()
assert libc.inotify_add_watch(queue, watched.encode(), int(mask)) > 0
print("ready", flush=True)
waiting = True
while waiting:
    events = os.read(queue, 65536)
    while events:
        _, mask, _, length = struct.unpack_from("iIII", events)
        if not mask & int(ignored):
            waiting = False
            break
        events = events[16 + length:]
os.rename(directory, directory + ".away")
os.symlink(target, directory)
"""


@dataclass(frozen=True)
class Swap:
    """One exchange of `directory` for a link to `target`, at the first event of `mask` in `watched`.

    An event of `ignored` does not count.
    """

    directory: Path
    target: Path
    watched: Path
    mask: int = IN_OPEN
    ignored: int = _ISDIR


@contextmanager
def swapping(swap: Swap) -> Iterator[None]:
    """Run the attacker: a process of its own, so that it reacts within microseconds."""
    arguments = [swap.watched, swap.mask, swap.directory, swap.target, swap.ignored]
    attacker = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _ATTACKER, *map(str, arguments)], stdout=subprocess.PIPE
    )
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
