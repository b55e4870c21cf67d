"""A watch on the custom resource of one transfer, for as long as its data mover runs.

Knows that InProgress starts the data path of the attempt that runs, that `spec.cancel`, a deletion or a final phase
cancels it, and that a later attempt ends it.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from core.clock import Clock
from core.errors import AgentError, ContractError, DataPathError, FencedError
from core.kube.client import KubeClient, Selection
from core.kube.errors import KubeError
from core.kube.retry import Retry
from core.kube.types import Object
from core.kube.watch import ChangeKind, WatchChange, watch_objects
from core.models.phases import Attempts, AttemptStage, Phase
from core.models.transfers import Transfer
from datamover.kinds import MoverKind
from datamover.runtime.cancellation import Canceler

__all__ = ["TransferFollower", "WatchedTransfer"]

_log = logging.getLogger(__name__)

_CHECK_SECONDS: Final = 15.0


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
        """Watch it forever; fail the transfer if the API server rejects the watch."""
        try:
            async with aclosing(watch_objects(self._client, self._watched.selection, clock=self._clock)) as changes:
                async for change in changes:
                    self.take(change)
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

        It is a quorum read: a watch may be behind what another agent has announced.

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
            self._canceler.cancel(f"{self._watched.description} no longer exists")
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
            _log.warning("cannot find out whether another attempt has begun: %s", cause)
        if self._canceler.error is not None:
            raise self._canceler.error

    def take(self, change: WatchChange) -> None:
        """Observe one change."""
        match change.kind:
            case ChangeKind.LISTING:
                self._listed = False
            case ChangeKind.LISTED if not self._listed:
                self._canceler.cancel(f"{self._watched.description} no longer exists")
            case ChangeKind.DELETED:
                self._canceler.cancel(f"{self._watched.description} no longer exists")
            case ChangeKind.MALFORMED:
                self._listed = True
            case ChangeKind.ADDED | ChangeKind.MODIFIED:
                self._listed = True
                self._read(change.obj)

    def _read(self, raw: Object) -> None:
        """Observe the custom resource, unless an edit has made it invalid: that ends no data path."""
        try:
            cr = self._watched.kind.model.parse(raw)
        except ContractError as e:
            _log.warning("ignored until it is corrected: %s", e)
            if raw["metadata"].get("deletionTimestamp"):
                self._canceler.cancel(f"{self._watched.description} is being deleted")
            self._compare(_attempts_of(raw))
            return
        self._observe(cr)

    def _observe(self, cr: Transfer) -> None:
        self._uid = self._uid or cr.uid
        if cr.uid != self._uid:
            self._canceler.cancel(f"{self._watched.description} no longer exists")
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
    return Attempts.of(raw["metadata"].get("annotations") or {})
