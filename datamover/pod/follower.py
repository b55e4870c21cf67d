"""A watch on the custom resource of one transfer, for as long as its data mover runs.

Knows that InProgress starts the data path, and that `spec.cancel`, a deletion or a final phase
cancels it.
"""

import asyncio
import logging
from contextlib import aclosing
from dataclasses import dataclass

from core.clock import Clock
from core.errors import AgentError, ContractError, DataPathError
from core.kube.client import KubeClient, Selection
from core.kube.watch import ChangeKind, WatchChange, watch_objects
from core.models.base import JsonDict
from core.models.phases import Phase
from core.models.transfers import Transfer
from datamover.kinds import TransferKind
from datamover.runtime.cancellation import Canceler

__all__ = ["TransferFollower", "WatchedTransfer"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WatchedTransfer:
    """Which custom resource is watched."""

    kind: TransferKind
    namespace: str
    name: str

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
        self._watched = watched
        self._clock = clock
        self._canceler = canceler
        self._uid = ""
        self._listed = False
        self._started: asyncio.Future[Transfer] = asyncio.get_running_loop().create_future()

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

    async def wait_in_progress(self) -> Transfer:
        """Return the custom resource once its phase is InProgress; never, if it is canceled before."""
        return await self._started

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

    def _read(self, raw: JsonDict) -> None:
        """Observe the custom resource, unless an edit has made it invalid: that ends no data path."""
        try:
            cr = self._watched.kind.model.parse(raw)
        except ContractError as e:
            _log.warning("ignored until it is corrected: %s", e)
            if raw["metadata"].get("deletionTimestamp"):
                self._canceler.cancel(f"{self._watched.description} is being deleted")
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
        elif cr.phase is Phase.IN_PROGRESS and not self._started.done():
            self._started.set_result(cr)
