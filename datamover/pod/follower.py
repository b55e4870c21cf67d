"""A watch on the custom resource of one transfer, and the fence that ends its data mover before another one may write.

The next attempt starts a fixed time after it is announced in the custom resource, whether or not this mover, cut off
from the API server or frozen, can know of it.
Source: Linux, clock_gettime(2): CLOCK_BOOTTIME also counts while the machine is suspended.
"""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, NoReturn, TypeVar

from core.clock import Clock
from core.contract import FENCE_TIMEOUT
from core.errors import AgentError, ContractError, DataPathError, FencedError
from core.kube.client import KubeClient, Selection
from core.kube.errors import KubeError
from core.kube.transport import Retry
from core.kube.types import Object
from core.kube.watch import ChangeKind, WatchChange, WatchState, watch_objects
from core.models.phases import Attempts, AttemptStage, Phase
from core.models.transfers import Transfer
from core.models.units import format_duration
from datamover.kinds import MoverKind
from datamover.kopia.stalls import read_duration
from datamover.runtime.cancellation import Canceler, run_beside
from datamover.runtime.child import kill_children

_logger = logging.getLogger(__name__)

_CHECK_SECONDS: Final = 15.0

_FIRST_ANSWER: Final = timedelta(minutes=10)
"""A mover that cannot reach the API server at all, such as behind a network policy, is neither started nor canceled."""


@dataclass(frozen=True)
class WatchedTransfer:
    """Which custom resource is watched, and the number of the attempt that follows it."""

    kind: MoverKind
    namespace: str
    name: str
    attempt: int = 1

    @property
    def selection(self) -> Selection:
        """The selection of this object alone."""
        return Selection(self.kind.resource, self.namespace, field_selector=f"metadata.name={self.name}")

    @property
    def description(self) -> str:
        """Kind, namespace and name, for messages."""
        return f"{self.kind.resource.kind} {self.namespace}/{self.name}"


class TransferFollower:
    """Watches one custom resource for its start and for cancel requests."""

    def __init__(self, client: KubeClient, watched: WatchedTransfer, *, clock: Clock, canceler: Canceler) -> None:
        """Follow `watched`; `canceler` gets its cancel requests."""
        self._client = client
        # The next question needs the age of the answer.
        self._once = KubeClient(client.transport, Retry(clock, attempts=1))
        self._watched = watched
        self._clock = clock
        self._canceler = canceler
        self._uid = ""
        self._listed = False
        self._started: asyncio.Future[Transfer] = asyncio.get_running_loop().create_future()
        self._listener: Callable[[Transfer], None] | None = None

    async def run(self) -> None:
        """Watch it forever; fail if the API server rejects the watch; end the attempt if it has never answered."""
        state, watched = WatchState(self._clock), self._watched.selection
        try:
            async with (
                asyncio.timeout(_FIRST_ANSWER.total_seconds()) as first,
                aclosing(watch_objects(self._client, watched, clock=self._clock, state=state)) as changes,
            ):
                async for change in changes:
                    if change.kind is not ChangeKind.LISTING:
                        first.reschedule(None)
                    self.take(change)
        except TimeoutError:
            text = f"no answer from the API server for {format_duration(_FIRST_ANSWER)}: {state.error}"
            self._canceler.fail(FencedError(text))
        except AgentError as e:
            self._canceler.fail(e)
        except Exception as e:
            # Without the watch a mover would wait for its start, or ignore a cancel request, forever.
            self._canceler.fail(DataPathError(f"{self._watched.description} cannot be watched: {e!r}"))
            raise

    def listen(self, listener: Callable[[Transfer], None]) -> None:
        """Call `listener` with each later version of the custom resource."""
        self._listener = listener

    async def wait_in_progress(self) -> Transfer:
        """Return the custom resource once the attempt may move data; never, if it is canceled before."""
        return await self._started

    async def confirm(self) -> bool:
        """Read the custom resource, and return whether this attempt is still the one that runs.

        A watch may be behind what another agent has announced, a quorum read is not.

        Raises:
            KubeError: the API server did not answer, or with an error.
        """
        found: list[Object] = []
        async with aclosing(self._once.pages(self._watched.selection)) as pages:
            async for page in pages:
                if page.malformed:
                    return False
                found += page.items
        if not found:
            self._cancel_gone()
        for raw in found:
            self._read(raw)
        return not self._canceler.requested and _attempts_of(found[0]).number == self._watched.attempt

    async def check(self) -> None:
        """Ask the API server once more whether this attempt may go on; it may if there is no answer.

        Raises:
            AgentError: it is to end, because of another attempt or a cancel request.
        """
        try:
            async with asyncio.timeout(_CHECK_SECONDS):
                await self.confirm()
        except (KubeError, TimeoutError) as e:
            cause = e if isinstance(e, KubeError) else "timed out"
            _logger.warning("cannot find out whether another attempt has begun: %s", cause)
        if self._canceler.error is not None:
            raise self._canceler.error

    def take(self, change: WatchChange) -> None:
        """Observe one change."""
        match change.kind:
            case ChangeKind.LISTING:
                self._listed = False
            case ChangeKind.LISTED if not self._listed:
                self._cancel_gone()
            case ChangeKind.DELETED:
                self._cancel_gone()
            case ChangeKind.MALFORMED:
                self._listed = True
            case ChangeKind.ADDED | ChangeKind.MODIFIED:
                self._listed = True
                self._read(change.obj)

    def _cancel_gone(self) -> None:
        self._canceler.cancel(f"{self._watched.description} no longer exists")

    def _read(self, raw: Object) -> None:
        """Observe the custom resource, unless an edit has made it invalid: that ends no data path."""
        try:
            cr = self._watched.kind.model.parse(raw)
        except ContractError as e:
            _logger.warning("ignored until it is corrected: %s", e)
            if raw["metadata"].get("deletionTimestamp"):
                self._canceler.cancel(f"{self._watched.description} is being deleted")
            self._compare(_attempts_of(raw))
            return
        self._observe(cr)

    def _observe(self, cr: Transfer) -> None:
        self._uid = self._uid or cr.uid
        if cr.uid != self._uid:
            self._cancel_gone()
        elif cr.deleting:
            self._canceler.cancel(f"{self._watched.description} is being deleted")
        elif cr.spec.cancel or cr.phase is Phase.CANCELING:
            self._canceler.cancel(f"{self._watched.description} was canceled")
        elif cr.phase.final:
            self._canceler.cancel(f"{self._watched.description} is already {cr.phase}")
        else:
            self._compare(cr.attempts)
            if self._listener is not None:
                self._listener(cr)
            runs = cr.stage is AttemptStage.RUNNING and cr.attempts.number == self._watched.attempt
            if runs and not self._started.done():
                self._started.set_result(cr)

    def _compare(self, attempts: Attempts) -> None:
        """End this attempt if a later one has begun; an earlier one is what a watch that is behind shows."""
        if attempts.number > self._watched.attempt:
            text = f"another attempt ({attempts.number}) has begun: attempt {self._watched.attempt} of "
            self._canceler.fail(FencedError(f"{text}{self._watched.description} ended itself"))


def _attempts_of(raw: Object) -> Attempts:
    """Return the attempts of a transfer that may be invalid otherwise."""
    return Attempts.from_annotations(raw["metadata"].get("annotations") or {}) or Attempts()


_T = TypeVar("_T")

_VARIABLE: Final = "DATA_MOVER_FENCE_TIMEOUT"
"""Inherited by mover pods from the node agent's DaemonSet."""

_SHORTEST: Final = timedelta(seconds=2)

_CHECKS: Final = 4
"""The API server is asked so often in the time of the fence: with the default, by each mover twice a minute."""

_RETRIES: Final = 24
"""So often while it does not answer."""

_ANSWER_PART: Final = 8
"""An answer may take so small a part of the time."""

_LOOK_SECONDS: Final = 1.0
"""How often the thread reads the clock: also the longest time that a mover goes on after it was suspended."""

_LAST_WORDS_SECONDS: Final = 1.0
"""A log or a disk that hangs must not delay the end."""


def read_fence_timeout(environment: Mapping[str, str]) -> timedelta:
    """Return how long a mover may write without an answer, from `DATA_MOVER_FENCE_TIMEOUT`, such as 1m.

    Raises:
        ConfigError: its value is not a duration, or the next attempt could start before it is over.
    """
    return read_duration(environment, _VARIABLE, FENCE_TIMEOUT, (_SHORTEST, FENCE_TIMEOUT))


def _boot_seconds() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Fence:
    """Ends the process unless the attempt is confirmed again and again while it works: `timeout` without is too long.

    A thread reads the clock, so that a busy event loop delays nothing. `confirm` asks the API server, and returns
    whether this is still the attempt that runs. `expire` ends the process; it is called in the thread. `clock` measures
    the pauses between two questions; `now` is the time in seconds, which also counts while the machine is suspended.
    """

    def __init__(
        self,
        timeout: timedelta,
        confirm: Callable[[], Awaitable[bool]],
        expire: Callable[[], None],
        *,
        clock: Clock,
        now: Callable[[], float] = _boot_seconds,
    ) -> None:
        self._seconds = timeout.total_seconds()
        self._confirm = confirm
        self._expire = expire
        self._clock = clock
        self._now = now
        self._confirmed_at = now()

    async def run(self, work: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Return what `work` returns, which begins once the attempt is confirmed."""
        self._confirmed_at = self._now()
        ended = threading.Event()
        threading.Thread(target=self._look, args=(ended,), name="fence", daemon=True).start()
        try:
            while not await self._ask():
                await self._clock.sleep(self._seconds / _RETRIES)
            return await run_beside(self._keep_asking, work(), name="fence")
        finally:
            ended.set()

    async def _keep_asking(self) -> None:
        confirmed = True
        while True:
            await self._clock.sleep(self._seconds / (_CHECKS if confirmed else _RETRIES))
            confirmed = await self._ask()

    async def _ask(self) -> bool:
        """Ask the API server; its answer is as old as the question."""
        asked_at = self._now()
        try:
            async with asyncio.timeout(self._seconds / _ANSWER_PART):
                confirmed = await self._confirm()
        except (KubeError, TimeoutError) as e:
            cause = e if isinstance(e, KubeError) else "timed out"
            _logger.warning("attempt not confirmed for %.0f s: %s", self._idle_seconds, cause)
            return False
        if confirmed:
            self._confirmed_at = asked_at
        return confirmed

    @property
    def _idle_seconds(self) -> float:
        return self._now() - self._confirmed_at

    def _look(self, ended: threading.Event) -> None:
        """End the process once the last confirmation is too old; runs in the thread."""
        while not ended.wait(min(_LOOK_SECONDS, self._seconds / _RETRIES)):
            if self._idle_seconds >= self._seconds:
                self._expire()
                return


def exit_fenced(leave_message: Callable[[], None]) -> NoReturn:
    """Kill all children and end the process at once, whatever its other threads do, after a moment for the message."""
    try:
        kill_children()
        # It cannot be started where the pod has as many threads as it may have.
        writing = threading.Thread(target=leave_message, name="fence-message", daemon=True)
        writing.start()
        writing.join(_LAST_WORDS_SECONDS)
    finally:
        # The kernel kills a child that was started since.
        os._exit(FencedError.exit_code)
