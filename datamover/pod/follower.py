"""What a load's custom resource says about it, as long as the load lives.

Knows that InProgress starts a load, and that `spec.cancel`, a deletion or a final phase end
it. Does not know what the load does.
"""

import asyncio
from contextlib import aclosing
from dataclasses import dataclass

from core.clock import Clock
from core.errors import AgentError, DataPathError
from core.kube.client import KubeClient, Selection
from core.kube.watch import ChangeKind, WatchChange, watch_objects
from core.models.phases import Phase
from core.models.transfers import Transfer
from datamover.kinds import TransferKind
from datamover.runtime.cancellation import Canceller

__all__ = ["Followed", "TransferFollower"]


@dataclass(frozen=True)
class Followed:
    """Which custom resource is followed."""

    kind: TransferKind
    namespace: str
    name: str

    @property
    def selection(self) -> Selection:
        """What finds it, and nothing else."""
        return Selection(self.kind.resource, self.namespace, field_selector=f"metadata.name={self.name}")

    @property
    def shown(self) -> str:
        """What messages call it."""
        return f"{self.kind.resource.kind} {self.namespace}/{self.name}"


class TransferFollower:
    """Watches one custom resource for as long as its load lives."""

    def __init__(self, client: KubeClient, followed: Followed, *, clock: Clock, canceller: Canceller) -> None:
        """Follow the resource; `canceller` hears of an end."""
        self._client = client
        self._followed = followed
        self._clock = clock
        self._canceller = canceller
        self._uid = ""
        self._listed = False
        self._started: asyncio.Future[Transfer] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Follow it forever; where the API server refuses that for good, the load fails."""
        try:
            async with aclosing(watch_objects(self._client, self._followed.selection, clock=self._clock)) as changes:
                async for change in changes:
                    self.take(change)
        except AgentError as e:
            self._canceller.fail(e)
        except Exception as e:
            # Without its resource a load would wait for its start, or run on after a cancel, for ever.
            self._canceller.fail(DataPathError(f"{self._followed.shown} cannot be followed: {e!r}"))
            raise

    async def wait_in_progress(self) -> Transfer:
        """Return the load once its phase is InProgress; never, if it is to end before."""
        return await self._started

    def take(self, change: WatchChange) -> None:
        """Look at one change."""
        match change.kind:
            case ChangeKind.LISTING:
                self._listed = False
            case ChangeKind.LISTED if not self._listed:
                self._canceller.request(f"{self._followed.shown} is gone")
            case ChangeKind.DELETED:
                self._canceller.request(f"{self._followed.shown} is gone")
            case ChangeKind.ADDED | ChangeKind.MODIFIED:
                self._listed = True
                self._look(self._followed.kind.model.parse(change.obj))

    def _look(self, cr: Transfer) -> None:
        self._uid = self._uid or cr.uid
        if cr.uid != self._uid:
            self._canceller.request(f"{self._followed.shown} is gone")
        elif cr.deleting:
            self._canceller.request(f"{self._followed.shown} is being deleted")
        elif cr.spec.cancel or cr.phase is Phase.CANCELING:
            self._canceller.request(f"{self._followed.shown} was canceled")
        elif cr.phase.final:
            self._canceller.request(f"{self._followed.shown} is already {cr.phase}")
        elif cr.phase is Phase.IN_PROGRESS and not self._started.done():
            self._started.set_result(cr)
