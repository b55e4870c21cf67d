"""Confinement of a child process to the files that it needs, by Landlock and a chroot jail.

A tenant who controls a volume can put a link in the place of any of its files at any moment, and kopia follows links.
So the kernel must limit what kopia opens. Landlock does, wherever the kernel has it. A jail also hides other files from
chmod, chown and utimes, which no version of Landlock governs: it is used too where mounts are permitted, and alone
where the kernel has no Landlock.

All of it is prepared before the fork: a Python program between fork and exec would slow down each call of kopia.
"""

import ctypes
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Final

from core.errors import DataPathError
from core.landlock import landlock_abi
from datamover.runtime import sandbox

_logger = logging.getLogger(__name__)

_PR_SET_NO_NEW_PRIVS: Final = 38
"""Source: linux/prctl.h."""

_FAILED: Final = 126
"""The exit code of a child that could not be confined; shells use it for a program that cannot be run."""

_RESOLVER: Final = ("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf")

_AUTHORITIES: Final = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/pki/tls/cacert.pem",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/ssl/cert.pem",
)
"""Source: Go, crypto/x509/root_linux.go."""


@dataclass(frozen=True)
class Bounds:
    """What a confined program may open: directories, and public files or directories that a jail has copies of.

    `volume` is the one of `read` and `write` that a tenant controls, None if there is none. Without `flushes`, what it
    writes need not be on the disk when it has flushed it.
    """

    volume: Path | None = None
    read: tuple[Path, ...] = ()
    write: tuple[Path, ...] = ()
    files: tuple[Path, ...] = ()
    flushes: bool = True


@dataclass(frozen=True)
class Means:
    """What confines a child of this process: the ABI of Landlock (None: `missing` says why), mounts, and chroot."""

    abi: int | None = None
    missing: str | None = None
    mounts: bool = False
    chroot: bool = False

    @property
    def description(self) -> str | None:
        """The means for a message; None if there are none."""
        jail = "a chroot jail" if self.jailed else None
        return " and ".join(filter(None, [f"Landlock ABI {self.abi}" if self.abi else None, jail])) or None

    @property
    def jailed(self) -> bool:
        """Whether a jail hides all other files."""
        return self.mounts or self.in_place

    @property
    def in_place(self) -> bool:
        """Whether the jail is the directory that holds the volume."""
        return self.chroot and not self.abi and not self.mounts


@cache
def find_means() -> Means:
    """Return what confines a child of this process, as a child that tries it reports."""
    try:
        abi, missing = landlock_abi(), None
    except OSError as e:
        abi, missing = None, e.strerror
    chroot = [("chroot", partial(sandbox.LIBC.chroot, b"/"))]
    return Means(abi, missing, mounts=_works(sandbox.share_nothing()), chroot=_works(chroot))


def report_means(means: Means) -> None:
    """Log the means of confinement; the first line of a data mover's log."""
    if means.description:
        _logger.info("kopia is confined to its volume by %s", means.description)
    else:
        _logger.warning("kopia cannot be confined to its volume: no Landlock (%s), and no chroot", means.missing)


def _works(steps: Sequence[sandbox.Step]) -> bool:
    pid = os.fork()
    if pid == 0:
        os._exit(any(call() < 0 for _, call in steps))
    return os.waitpid(pid, 0)[1] == 0


@dataclass(frozen=True)
class Confinement:
    """A prepared confinement of one child; `program` is open if a jail hides the program's path."""

    steps: tuple[sandbox.Step, ...]
    program: int | None = None

    def enter(self, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        """Confine this process, a child between fork and exec, or end it with a message."""
        for name, call in self.steps:
            if call() < 0:
                _give_up(f"{name}: {os.strerror(ctypes.get_errno())}")
        if self.program is not None:
            try:
                os.execve(self.program, list(argv), dict(environment))  # noqa: S606 - arguments of this package
            except OSError as e:
                _give_up(f"{argv[0]}: {e.strerror}")


def _give_up(cause: str) -> None:
    os.write(2, f"cannot confine {cause}\n".encode())
    os._exit(_FAILED)


@contextmanager
def confine(program: Path, bounds: Bounds, means: Means, home: Path) -> Iterator[Confinement | None]:
    """Prepare the confinement of a child that runs `program`, whose own files are in `home`; None: an ordinary user's.

    Raises:
        DataPathError: it cannot be confined, and this process is root.
    """
    if not means.description:
        if os.geteuid() == 0:
            raise DataPathError(
                f"cannot confine kopia to its volume: no Landlock ({means.missing}), and no chroot: "
                "permit the system calls of Landlock, or the capability SYS_CHROOT"
            )
        yield None
        return
    files = [file for file in (*map(Path, (*_RESOLVER, *_AUTHORITIES)), *bounds.files) if file.exists()]
    with ExitStack() as stack:
        steps: list[sandbox.Step] = []
        if (jail := stack.enter_context(_open_jail(bounds, files, means, home))) is not None:
            steps += jail.steps()
        if means.abi or not bounds.flushes:
            steps.append(_no_new_privs())
        if means.abi:
            rules = _rules(program, bounds, files, jail)
            ruleset = stack.enter_context(sandbox.open_ruleset(means.abi, rules))
            steps.append(_restrict(ruleset))
        if not bounds.flushes:
            steps += sandbox.no_flushes()
        opened = None
        if jail is not None:
            opened = os.open(program, os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, opened)
        yield Confinement(tuple(steps), opened)


def _open_jail(
    bounds: Bounds, files: Sequence[Path], means: Means, home: Path
) -> AbstractContextManager[sandbox.Jail | None]:
    trees = [*bounds.read, *bounds.write]
    if means.mounts:
        # kopia removes a file beside its target, which succeeds if there is none, except in a read-only tree.
        read_only = [tree for tree in bounds.read if not any(each.is_relative_to(tree) for each in bounds.write)]
        return sandbox.build_jail(home, trees, files, read_only=read_only)
    if means.in_place:
        return sandbox.use_as_jail(bounds.volume.parent if bounds.volume else home, trees, files)
    return nullcontext()


def _rules(
    program: Path, bounds: Bounds, files: Sequence[Path], jail: sandbox.Jail | None
) -> Iterator[tuple[Path, sandbox.Rights]]:
    yield program, sandbox.Rights.EXECUTE | sandbox.Rights.READ_FILE
    yield from ((tree, sandbox.TO_READ) for tree in bounds.read)
    yield from ((tree, sandbox.TO_WRITE) for tree in bounds.write)
    yield from ((sandbox.below(jail.root, file) if jail else file, sandbox.TO_READ) for file in files)


def _no_new_privs() -> sandbox.Step:
    """Return the step that the following ones require without a capability."""
    zero, one = ctypes.c_ulong(0), ctypes.c_ulong(1)
    return "no_new_privs", partial(sandbox.LIBC.prctl, ctypes.c_int(_PR_SET_NO_NEW_PRIVS), one, zero, zero, zero)


def _restrict(ruleset: int) -> sandbox.Step:
    return "Landlock", partial(
        sandbox.LIBC.syscall, ctypes.c_long(sandbox.SYS_RESTRICT_SELF), ctypes.c_long(ruleset), ctypes.c_long(0)
    )
