"""The means that confine kopia, one at a time, on a kernel that may have both; and what a child can do then."""

import errno
import os
from collections.abc import Callable, Iterable

import pytest

from core.landlock import landlock_abi
from datamover.runtime.confinement import Means, find_means
from datamover.runtime.sandbox import Step
from tests.datamover.support.mounts import need_root


def _landlock() -> Means:
    try:
        return Means(landlock_abi())
    except OSError as e:
        pytest.skip(f"NOT TESTED: this kernel has no Landlock ({e.strerror})")


def _jail() -> Means:
    need_root("jails")
    return Means(missing="switched off by a test", mounts=True, chroot=True)


def _chroot() -> Means:
    need_root("jails")
    return Means(missing="switched off by a test", chroot=True)


def _nothing() -> Means:
    need_root("a failure for lack of means")
    return Means(missing="Operation not permitted")


MEANS: dict[str, Callable[[], Means]] = {"landlock": _landlock, "jail": _jail, "default": find_means}
"""Keyed by the name for parameters."""

_OF_PODS: dict[str, Callable[[], Means]] = {"chroot": _chroot, "nothing": _nothing}


def use_means(name: str, monkeypatch: pytest.MonkeyPatch) -> Means:
    """Let data movers in this process use these means only.

    `chroot` is the jail of a mover pod, without mounts, and `nothing` one that lacks the capability for it.
    """
    means = (MEANS | _OF_PODS)[name]()
    for module in ("datamover.kopia.process", "datamover.pod.device_files", "datamover.pod.transfer"):
        monkeypatch.setattr(f"{module}.find_means", lambda: means)
    return means


def try_in_child(steps: Iterable[Step], tried: Iterable[Callable[[], object]]) -> list[str]:
    """Return the error of each call in a forked child after these steps, empty for none; nothing if a step fails."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        if any(step() < 0 for _, step in steps):
            os._exit(1)
        for call in tried:
            error = ""
            try:
                call()
            except OSError as e:
                error = errno.errorcode[e.errno or 0]
            os.write(writing, f"{error}\n".encode())
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(writing)
    with os.fdopen(reading) as answers:
        return answers.read().splitlines()
