"""A chroot jail: a root directory with nothing in it but what a program may open, under the same absolute paths.

With CAP_SYS_ADMIN the jail is an empty directory into which a mount namespace of the child's own brings the trees.
With CAP_SYS_CHROOT alone it is the directory that holds the volume, if that holds nothing else.
Source: Linux, chroot(2), unshare(2), mount(2), Documentation/filesystems/sharedsubtree.rst.
"""

import ctypes
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from core.errors import DataPathError

__all__ = ["Jail", "Step", "below", "build_jail", "share_nothing", "use_as_jail"]

_CLONE_NEWNS: Final = 0x00020000
_MS_RDONLY: Final = 0x1
_MS_NOSUID: Final = 0x2
_MS_NODEV: Final = 0x4
_MS_NOEXEC: Final = 0x8
_MS_REMOUNT: Final = 0x20
_MS_BIND: Final = 0x1000
_MS_REC: Final = 0x4000
_MS_SLAVE: Final = 0x80000

Step = tuple[str, Callable[[], int]]
"""A system call between fork and exec: its name, and the call, which returns a negative number if it failed."""


@dataclass(frozen=True)
class Jail:
    """The root of a jail, and the trees that its mount namespace brings into it, some of them to be read only."""

    root: Path
    trees: tuple[Path, ...] = ()
    read_only: tuple[Path, ...] = ()

    def steps(self) -> list[Step]:
        """Return what the child does to enter it."""
        # PyDLL keeps the interpreter's lock, which could not be reacquired between fork and exec.
        libc = ctypes.PyDLL(None, use_errno=True)
        root = os.fsencode(self.root)
        steps = share_nothing() if self.trees else []
        # A tree may lie in another one.
        for tree in sorted(self.trees, key=lambda one: len(one.parts)):
            source, target = os.fsencode(tree), os.fsencode(below(self.root, tree))
            flags = ctypes.c_ulong(_MS_BIND | _MS_REC)
            steps.append((f"mount {tree}", partial(libc.mount, source, target, None, flags, None)))
            limits = ctypes.c_ulong(_MS_REMOUNT | _MS_BIND | self._limits(tree))
            steps.append((f"remount {tree}", partial(libc.mount, None, target, None, limits, None)))
        return [*steps, ("chroot", partial(libc.chroot, root)), ("chdir", partial(libc.chdir, b"/"))]

    def _limits(self, tree: Path) -> int:
        """Return the flags of a mount: a tenant's device nodes must not lead to the devices of the node."""
        # A remount would make a tree writable that is mounted read-only.
        read_only = tree in self.read_only or os.statvfs(tree).f_flag & os.ST_RDONLY
        return _MS_NOSUID | _MS_NODEV | _MS_NOEXEC | (_MS_RDONLY if read_only else 0)


def share_nothing() -> list[Step]:
    """Return the steps into a mount namespace of its own, which still takes over what the node unmounts."""
    libc = ctypes.PyDLL(None, use_errno=True)
    flags = ctypes.c_ulong(_MS_SLAVE | _MS_REC)
    return [
        ("unshare", partial(libc.unshare, ctypes.c_int(_CLONE_NEWNS))),
        ("mount / as slave", partial(libc.mount, b"none", b"/", None, flags, None)),
    ]


def below(root: Path, path: Path) -> Path:
    """Return where the absolute path lies in the jail."""
    return root / path.relative_to("/")


class _Skeleton:
    """Directories, files and links, removed in reverse order: never with content of others."""

    def __init__(self) -> None:
        self._made: list[Path] = []

    def root(self, home: Path) -> Path:
        path = Path(tempfile.mkdtemp(prefix="jail-", dir=home))
        self._made.append(path)
        return path

    def directory(self, path: Path) -> None:
        if path.is_dir():
            return
        self.directory(path.parent)
        path.mkdir(mode=0o700)
        self._made.append(path)

    def copy(self, source: Path, target: Path) -> None:
        if source.is_dir():
            for file in source.iterdir():
                self.copy(file, target / file.name)
            return
        self.directory(target.parent)
        if source.is_file() and not target.exists():
            self._made.append(target)
            shutil.copyfile(source, target)

    def link(self, path: Path, target: str) -> None:
        self.directory(path.parent)
        path.symlink_to(target)
        self._made.append(path)

    def remove(self) -> None:
        for path in reversed(self._made):
            with suppress(OSError):
                if path.is_dir() and not path.is_symlink():
                    path.rmdir()
                else:
                    path.unlink()


@contextmanager
def _skeleton() -> Iterator[_Skeleton]:
    skeleton = _Skeleton()
    try:
        yield skeleton
    except OSError as e:
        raise DataPathError(f"cannot confine kopia: cannot build its jail: {e}") from e
    finally:
        skeleton.remove()


@contextmanager
def build_jail(
    home: Path, trees: Sequence[Path], copies: Sequence[Path], *, read_only: Sequence[Path] = ()
) -> Iterator[Jail]:
    """Yield a jail with mounts, in a new directory in `home`.

    Args:
        trees: absolute paths of directories that exist.
        read_only: the ones that cannot be written to in the jail.
        copies: files, and directories of files, that are copied into it.

    Raises:
        DataPathError: it cannot be built.
    """
    with _skeleton() as skeleton:
        root = skeleton.root(home)
        for tree in trees:
            skeleton.directory(below(root, tree))
        for file in copies:
            skeleton.copy(file, below(root, file))
        yield Jail(root, tuple(trees), tuple(read_only))


@contextmanager
def use_as_jail(root: Path, trees: Sequence[Path], copies: Sequence[Path]) -> Iterator[Jail]:
    """Yield a jail without mounts: the directory `root`, which holds the trees.

    A link in it makes absolute paths valid.

    Raises:
        DataPathError: it is not suitable: a tree is elsewhere, or it holds something else.
    """
    _check(root, trees)
    with _skeleton() as skeleton:
        skeleton.link(below(root, root), "/")
        for file in copies:
            skeleton.copy(file, below(root, file))
        yield Jail(root)


def _check(root: Path, trees: Sequence[Path]) -> None:
    if root == Path("/"):
        raise DataPathError("cannot confine kopia: the volume is not mounted in a directory of its own")
    expected = set()
    for tree in trees:
        if not tree.is_relative_to(root):
            raise DataPathError(f"cannot confine kopia: {tree} is not in {root}, which would be its jail")
        if tree == root:
            return
        expected.add(tree.relative_to(root).parts[0])
    if others := sorted({entry.name for entry in root.iterdir()} - expected):
        raise DataPathError(f'cannot confine kopia: {root} would be its jail, and also holds "{others[0]}"')
