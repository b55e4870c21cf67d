"""What tests that run in several processes at the same time share of one cluster, and which of them may use it.

Knows files that are locked. Does not know the tests: each declares what it relies on, and what it
needs to have alone.
"""

import fcntl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from typing import Final

from tests.cluster.bed import Bed

WITH_LOCKS: Final = 2400
"""The limit of a test that takes a lock, in seconds: it includes the wait for tests of all other lanes."""


class Shared(StrEnum):
    """What one test can disturb for others. A test that needs several locks them in this order."""

    INSTALLATION = "installation"
    """The agent's objects in the cluster, as they are created once for all tests."""

    AGENTS = "agents"
    """That agents run, how many transfers each has accepted, and how soon it reconciles one."""

    GROUND = "ground"
    """Nodes that take pods, and the parts of the configuration that apply to every transfer."""


@contextmanager
def has_alone(bed: Bed, what: Shared) -> Iterator[None]:
    """Lock something exclusively: waits for all tests that rely on it; later ones wait for this one."""
    with _locked(bed, f"{what}-next", fcntl.LOCK_EX), _locked(bed, what, fcntl.LOCK_EX):
        yield


@contextmanager
def relies_on(bed: Bed, what: Shared) -> Iterator[None]:
    """Share something unchanged: waits for a test that has it alone, or that is next to have it alone."""
    with ExitStack() as mine:
        with _locked(bed, f"{what}-next", fcntl.LOCK_SH):
            mine.enter_context(_locked(bed, what, fcntl.LOCK_SH))
        yield


@contextmanager
def _locked(bed: Bed, name: str, mode: int) -> Iterator[None]:
    with (bed.folder / f"{name}.lock").open("w") as file:
        # The lock ends with the file, and so with the process.
        fcntl.flock(file, mode)
        yield
