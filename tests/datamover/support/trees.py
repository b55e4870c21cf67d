"""Directory trees to back up, and their comparison."""

import os
import random
from pathlib import Path

_MTIME_NS = 1_600_000_000_123_456_789
_LINK_MTIME_NS = 1_600_000_000_123_456_000


def make_tree(root: Path) -> Path:
    """Create what a volume may contain: unusual names, modes and times, links, a hole, a cache."""
    root.mkdir()
    root.chmod(0o2770)
    rng = random.Random(1)
    (root / "empty folder").mkdir()
    deep = root / "a" / "b" / "c"
    deep.mkdir(parents=True)
    for number in range(20):
        (deep / f"file {number}").write_bytes(rng.randbytes(rng.randrange(5000)))
    (root / "größe ☃").write_text("name beyond ASCII")
    (root / "-dash").write_text("like a flag")
    (root / "setuid").write_text("x")
    (root / "setuid").chmod(0o4755)
    (root / "sticky").mkdir()
    (root / "sticky").chmod(0o1777)
    (root / "secret").write_text("unreadable")
    (root / "secret").chmod(0o000)
    (root / "link").symlink_to("a/b")
    (root / "dangling").symlink_to("/no/such/place")
    with (root / "sparse").open("wb") as file:
        file.seek(3_000_000)
        file.write(b"end")
    (root / "cache").mkdir()
    (root / "cache" / "CACHEDIR.TAG").write_text("Signature: 8a477f597d28d172789f06886806bc55\n")
    (root / "cache" / "kept").write_text("a cache is data too")
    os.utime(root / "secret", ns=(_MTIME_NS, _MTIME_NS))
    for link in ("link", "dangling"):
        # kopia rounds a link's time to microseconds.
        os.utime(root / link, ns=(_LINK_MTIME_NS, _LINK_MTIME_NS), follow_symlinks=False)
    return root


def make_large_file(path: Path, size_mib: int) -> Path:
    """Create a file of random data."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for _ in range(size_mib):
            file.write(os.urandom(1 << 20))
    return path


def describe_tree(root: Path) -> dict[str, tuple[object, ...]]:
    """Return what must be restored of each entry: type and mode, owner, time, and content or target.

    It includes the root: some programs reject a directory of theirs that others can read. A
    directory's time is excluded: kopia keeps the latest time of its contents instead.
    """
    found: dict[str, tuple[object, ...]] = {}
    for path in [root, *sorted(root.rglob("*"))]:
        status = path.lstat()
        name = str(path.relative_to(root))
        owner = (status.st_uid, status.st_gid)
        if path.is_symlink():
            found[name] = ("link", owner, status.st_mtime_ns, str(path.readlink()))
        elif path.is_dir():
            found[name] = (oct(status.st_mode), owner)
        else:
            found[name] = (oct(status.st_mode), owner, status.st_mtime_ns, path.read_bytes())
    return found
