"""The means that confine kopia, one at a time, on a kernel that may have both."""

from collections.abc import Callable

import pytest

from core.landlock import landlock_abi
from datamover.runtime.confinement import Means, find_means
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
