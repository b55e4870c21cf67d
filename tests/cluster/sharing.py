"""What tests that run in several processes at the same time share of one cluster, and who has it when.

Knows files that are locked. Does not know the tests: each says itself what it needs, and that
nobody may disturb, or that it disturbs.
"""

from __future__ import annotations

import fcntl
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.conftest import Bed

__all__ = ["Shared", "has_alone", "relies_on"]


class Shared(StrEnum):
    """What one test can take away from others. Whoever needs several takes them in this order."""

    INSTALLATION = "installation"
    """The agent's objects in the cluster, as they are made once for all."""

    AGENTS = "agents"
    """That agents run, how many loads each has accepted, and how soon it gets round to one."""

    GROUND = "ground"
    """Nodes that take pods, and the parts of the configuration that count for every load."""


@contextmanager
def has_alone(bed: Bed, what: Shared) -> Iterator[None]:
    """Have something for oneself: waits for all who rely on it, and lets them wait; others come later."""
    with _locked(bed, f"{what}-next", fcntl.LOCK_EX), _locked(bed, what, fcntl.LOCK_EX):
        yield


@contextmanager
def relies_on(bed: Bed, what: Shared) -> Iterator[None]:
    """Be one of those who need something as it is: waits for whoever has it alone, or is to have it next."""
    with ExitStack() as mine:
        with _locked(bed, f"{what}-next", fcntl.LOCK_SH):
            mine.enter_context(_locked(bed, what, fcntl.LOCK_SH))
        yield


@contextmanager
def _locked(bed: Bed, name: str, mode: int) -> Iterator[None]:
    with (bed.folder / f"{name}.lock").open("w") as file:
        # It goes with the file, and so with the process.
        fcntl.flock(file, mode)
        yield
