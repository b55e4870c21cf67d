"""The end of a backup that is stopped by a signal: kopia gets some time to save a checkpoint.

Knows how much time, and what the signal does with and without a kopia that can save one. A cancel request needs
nothing of this: it cancels the transfer at once, also during that time.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Final

from core.contract import CANCELED_ENDING, MOVER_GRACE
from core.errors import CanceledError, ConfigError, FencedError, KopiaError
from core.models.units import format_duration
from datamover.kopia.process import Kopia, KopiaAnswer
from datamover.kopia.snapshots import unpin_snapshot
from datamover.kopia.stalls import read_duration
from datamover.runtime.cancellation import Canceler
from datamover.runtime.signals import StopSignal

__all__ = ["GracefulStop", "keep_checkpoint", "read_checkpoint_grace"]

_logger = logging.getLogger(__name__)

_VARIABLE: Final = "DATA_MOVER_CHECKPOINT_GRACE"
"""Inherited by mover pods from the node agent's DaemonSet."""

_DEFAULT: Final = timedelta(seconds=25)
"""kopia writes out what it holds: up to 21 MB for each file that it reads in parallel, and the index blobs. The rest of
the pod's grace period is for the end of the mover itself."""


def read_checkpoint_grace(environment: Mapping[str, str]) -> timedelta:
    """Return how long kopia may save a checkpoint, from `DATA_MOVER_CHECKPOINT_GRACE`, such as 10s; 0 means not at all.

    Raises:
        ConfigError: its value is not a duration, negative, or not less than the grace period of a mover pod.
    """
    grace = read_duration(environment, _VARIABLE, _DEFAULT)
    if grace >= MOVER_GRACE:
        limit = f"must be less than the grace period of the pod, {format_duration(MOVER_GRACE)}"
        raise ConfigError(f'{_VARIABLE}: {limit}: "{environment[_VARIABLE]}"')
    return grace


class GracefulStop:
    """What a signal does to a transfer: cancels it, after `grace` if a kopia runs that can save a checkpoint."""

    def __init__(self, canceler: Canceler, grace: timedelta, announce: Callable[[CanceledError], None]) -> None:
        """Cancel the transfer through `canceler`.

        Args:
            canceler: takes the request when there is nothing to wait for, or the time is over.
            grace: how long kopia gets; zero: no time.
            announce: is called with the error to end with, should this process be killed before.
        """
        self._canceler = canceler
        self._grace = grace
        self._announce = announce
        self._running = False
        self._signaled = asyncio.Event()
        self._interrupted = False
        self._stopped = ""

    @property
    def signaled(self) -> bool:
        """Whether a signal arrived while kopia could save a checkpoint."""
        return self._signaled.is_set()

    @property
    def interrupted(self) -> bool:
        """Whether the transfer ends without a cancel request or a failure, so that another attempt may follow."""
        return self._interrupted or isinstance(self._canceler.error, FencedError)

    def listen(self, stop: StopSignal) -> None:
        """Take the signals of this process; the first one counts."""
        loop = asyncio.get_running_loop()

        def on_signal() -> None:
            loop.call_soon_threadsafe(self._take, stop.reason)

        stop.listen(on_signal)

    @property
    def terminate(self) -> asyncio.Event:
        """What is set when kopia is to save a checkpoint, within a block of `saving`."""
        return self._signaled

    @contextmanager
    def saving(self) -> Iterator[asyncio.Event]:
        """Let a kopia that runs within the block save a checkpoint; yield `terminate`."""
        self._running = True
        try:
            yield self._signaled
        finally:
            self._running = False

    def error(self, detail: str) -> CanceledError:
        """Return the error that ends a transfer after a signal; `detail` is about the checkpoint."""
        return CanceledError(f"{self._stopped}; {detail}: {CANCELED_ENDING}")

    def _take(self, reason: str) -> None:
        if self.signaled or self._canceler.requested:
            return
        self._interrupted = True
        if not self._running or not self._grace:
            self._canceler.cancel(reason)
            return
        self._stopped = reason
        within = format_duration(self._grace)
        _logger.info("%s; kopia may save a checkpoint within %s", self._stopped, within)
        self._signaled.set()
        self._announce(self.error("it was killed before kopia had saved a checkpoint"))
        late = self.error(f"kopia did not save a checkpoint within {within}")
        asyncio.get_running_loop().call_later(self._grace.total_seconds(), self._canceler.fail, late)


async def keep_checkpoint(kopia: Kopia, answer: KopiaAnswer, stop: GracefulStop) -> None:
    """Unpin the incomplete snapshot that kopia left after a signal; nothing is done if it left a complete one.

    The incomplete one refers to the files that were read completely, so that maintenance keeps their data. kopia
    prints it before it writes the last indexes: exit code 0 says that it was saved, or that it is found afterwards.
    For kopia does not wait for a checkpoint that it is writing when it closes the repository, and crashes then.
    `kopia mover-backup` pins none that is incomplete, and prints it after that.
    Source: kopia 0.23.1, cli/app.go (repositoryWriterAction), snapshot/upload/upload.go (periodicallyCheckpoint).

    Raises:
        CanceledError: there is no complete snapshot; says whether a checkpoint was saved.
    """
    unsaved = stop.error(f"kopia saved no checkpoint: {answer.exit_status}")
    try:
        document = answer.document()
    except KopiaError as e:
        raise unsaved from e
    if not document.get("incomplete"):
        return
    try:
        if document.get("pins"):
            await unpin_snapshot(kopia, str(document["id"]))
    except KopiaError as e:
        _logger.warning("%s", e)
        if not answer.succeeded:
            raise unsaved from e
    raise stop.error("kopia saved a checkpoint, so the next backup of the volume does not send again what was sent")
