"""The means that confine kopia, one at a time, on a kernel that may have both."""

from collections.abc import Callable

import pytest

from core.landlock import landlock_abi
from datamover.runtime.confinement import Means, find_means
from tests.datamover.support.mounts import need_root

__all__ = ["MEANS", "use_means"]


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


MEANS: dict[str, Callable[[], Means]] = {"landlock": _landlock, "jail": _jail, "default": find_means}
"""Keyed by the name for parameters."""


def use_means(name: str, monkeypatch: pytest.MonkeyPatch) -> Means:
    """Let data movers in this process use these means only.

    `chroot` is the jail of a mover pod, without mounts.
    """
    means = _chroot() if name == "chroot" else MEANS[name]()
    for module in ("datamover.kopia.process", "datamover.pod.transfer"):
        monkeypatch.setattr(f"{module}.find_means", lambda: means)
    return means
