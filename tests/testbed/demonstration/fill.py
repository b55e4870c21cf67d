"""Fills a folder with real files. Runs inside a pod, so it needs nothing but Python.

`python3 fill.py SOURCE TARGET BYTES`: trees are taken from below SOURCE, the machine's `/usr`.
"""

import os
import shutil
import stat
import sys
from pathlib import Path

_TREES = ("lib", "share", "local")
_TREE_SHARE = 0.17
_SPARSE_SHARE = 0.13
"""The rest is one large file, which also replaces what the trees of a small machine lack."""
_TREE_FILE_BYTES = 4_000_000
"""No larger file is taken from a tree: a few would leave too few bytes for the many."""
_CHUNK_BYTES = 1 << 20
_ISLAND_BYTES = 1 << 18
_ISLANDS = (0.0, 0.37, 0.98)
"""Where in the sparse file there is data."""

_ODD_NAMES = (
    " leading and trailing ",
    "-rf",
    "...",
    "quote'and\"double",
    "back\\slash",
    "new\nline and\ttab",
    "percent%2Fescape",
    "star*query?[brackets]",
    "ünïcödé-é (composed) e\u0301 (decomposed)",
    "日本語-Ελληνικά-العربية",
    "emoji-🚚-📦",
    "control-\x01-\x7f",
    "n" * 255,
)
_ODD_MODES = (0o000, 0o400, 0o444, 0o600, 0o640, 0o755, 0o777, 0o2755, 0o4755, 0o1666)
_OWNERS = ((0, 0), (1000, 1000), (33, 0), (65534, 65534), (123456, 654321))
_OLD_NS = 981_173_106_123_456_789
"""A time with all its digits, in 2001."""


def main(source: Path, target: Path, size_bytes: int) -> None:
    """Fill `target`, which exists and is empty, with about as many bytes."""
    os.umask(0)
    sparse_bytes = int(_SPARSE_SHARE * size_bytes)
    copied_bytes = _copy_trees(source, target / "trees", int(_TREE_SHARE * size_bytes))
    _write_large(target / "large.bin", size_bytes - sparse_bytes - copied_bytes)
    _write_sparse(target / "sparse.img", sparse_bytes)
    _write_odd_names(target / "odd names")
    _write_odd_modes(target / "odd modes")
    _write_links(target / "links")
    (target / "empty folder").mkdir()
    (target / "empty file").touch()
    deep = target / "deep" / Path(*(f"level {level}" for level in range(60)))
    deep.mkdir(parents=True)
    (deep / "bottom").write_text("the end")
    os.utime(target / "empty file", ns=(_OLD_NS, _OLD_NS))


def _copy_trees(source: Path, target: Path, wanted_bytes: int) -> int:
    """Copy trees with modes, owners, times and symbolic links until there is enough."""
    copied_bytes = 0
    for tree in _TREES:
        for folder, folders, files in os.walk(source / tree):
            folders.sort()
            here = Path(folder)
            there = target / here.relative_to(source)
            there.mkdir(parents=True, exist_ok=True)
            links = [name for name in folders if (here / name).is_symlink()]
            for name in (*sorted(files), *links):
                copied_bytes += _copy(here / name, there / name)
            shutil.copystat(here, there)
            if copied_bytes >= wanted_bytes:
                return copied_bytes
    return copied_bytes


def _copy(source: Path, target: Path) -> int:
    status = source.lstat()
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode)) or status.st_size > _TREE_FILE_BYTES:
        return 0
    shutil.copy2(source, target, follow_symlinks=False)
    os.chown(target, status.st_uid, status.st_gid, follow_symlinks=False)
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def _write_large(path: Path, size_bytes: int) -> None:
    """Random bytes: nothing in them can be compressed or found twice."""
    with path.open("wb") as file:
        for done in range(0, size_bytes, _CHUNK_BYTES):
            file.write(os.urandom(min(_CHUNK_BYTES, size_bytes - done)))


def _write_sparse(path: Path, size_bytes: int) -> None:
    with path.open("wb") as file:
        for share in _ISLANDS:
            file.seek(int(share * size_bytes))
            file.write(os.urandom(_ISLAND_BYTES))
        file.truncate(size_bytes)


def _write_odd_names(folder: Path) -> None:
    folder.mkdir()
    for name in _ODD_NAMES:
        (folder / name).write_text(f"content of {name!r}\n")
    inside = folder / "folder: with a colon, and a dot."
    inside.mkdir()
    (inside / "ö").write_text("inside\n")


def _write_odd_modes(folder: Path) -> None:
    folder.mkdir()
    for number, mode in enumerate(_ODD_MODES):
        file, inner = folder / f"file {mode:04o}", folder / f"folder {mode:04o}"
        file.write_text(f"{mode:o}\n")
        inner.mkdir()
        (inner / "inside").write_text(f"{mode:o}\n")
        owner, group = _OWNERS[number % len(_OWNERS)]
        for path in (file, inner):
            os.chown(path, owner, group)
            path.chmod(mode)
            os.utime(path, ns=(_OLD_NS, _OLD_NS))


def _write_links(folder: Path) -> None:
    folder.mkdir()
    (folder / "to a file").symlink_to("../large.bin")
    (folder / "to a folder").symlink_to("../odd names")
    (folder / "to nothing").symlink_to("no/such/place")
    (folder / "absolute").symlink_to("/etc/hostname")
    (folder / "to itself").symlink_to("to itself")
    (folder / "to an odd name").symlink_to("../odd names/emoji-🚚-📦")
    os.lchown(folder / "to nothing", 1000, 1000)
    os.utime(folder / "to nothing", ns=(_OLD_NS, _OLD_NS), follow_symlinks=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
