"""What the pages show: the last state of the cluster by one watch for each kind, and single objects when needed."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property, partial
from typing import Final, Generic, TypeVar

from msgspec.structs import replace

from client.repositories import RepositoryReader
from client.repository_view import NextMaintenance, RepositoryDetails
from client.status.describe import TransferDetails, TransferReader
from client.status.follow import ProgressRates, StatusFollower, pause_after
from client.status.health import Finding, Health, Rule, worst
from client.status.read import StatusReader
from client.status.records import ClusterSnapshot, RepositoryRecord, Target, TransferRecord
from client.status.view import RateOf, StatusView, build_view
from client.ui.tables import VolumeRow, list_volumes
from core.aio import run_for_many, wait_for_event
from core.clock import Clock
from core.errors import AgentError
from core.kube.client import KubeClient
from core.kube.errors import ForbiddenError, KubeError, NotFoundError, UnreachableError
from core.kube.resources import CONFIG_MAPS
from core.models.names import HISTORY_CONFIGMAPS
from nodeagent.coverage.history import VolumeHistory, content_of, count_volumes

_UPDATE_SECONDS: Final = 0.5
"""Between two views, whatever changes."""

_QUIET_SECONDS: Final = 5.0
"""Rates and ages change although nothing is observed."""

_RETRY_SECONDS: Final = 3.0

_OLD_SECONDS: Final = 5.0
"""What was observed is old after that: a watch that ends is usually open again within a second."""


@dataclass(frozen=True)
class State:
    """The last snapshot; `rate_of` are the rates then. `error` is why the cluster is not followed; None: it is.

    `since` is the last moment at which all of it was current, by the API server's clock.
    """

    snapshot: ClusterSnapshot
    rate_of: RateOf
    since: datetime
    error: str | None = None

    @property
    def lost(self) -> str | None:
        """Why it is not current; None: it is."""
        seconds = (self.snapshot.at - self.since).total_seconds()
        return self.error or (f"no watch for {seconds:.0f} s" if seconds >= _OLD_SECONDS else None)

    @cached_property
    def view(self) -> StatusView:
        """What it shows, built on demand; how a cluster is that does not answer is not known."""
        view = build_view(self.snapshot, self.rate_of)
        if not self.lost:
            return view
        message = f"the cluster does not answer: {self.lost}"
        findings = [*view.findings, Finding(health=Health.UNKNOWN, rule=Rule.NOT_READ, message=message)]
        return replace(view, findings=findings, health=worst(findings))

    @cached_property
    def moving(self) -> frozenset[tuple[str, str]]:
        """The transfers that have slots, by kind and name."""
        return frozenset((one.kind, one.name) for one in self.snapshot.transfers if one.moving)

    @cached_property
    def volumes(self) -> Sequence[VolumeRow]:
        """All volumes, those that need attention first."""
        coverage = self.snapshot.coverage
        return list_volumes(self.snapshot.transfers, coverage.volumes if coverage is not None else ())


class Live:
    """Follows the cluster while `run` is running; `state` is None until it was read once."""

    def __init__(self, client: KubeClient, namespace: str, reader: StatusReader, clock: Clock) -> None:
        self._client = client
        self._namespace = namespace
        self._reader = reader
        self._clock = clock
        self._rates = ProgressRates()
        self._changed = asyncio.Condition()
        self.state: State | None = None
        self.error: str | None = None
        self.number = 0

    async def run(self) -> None:
        """Follow until canceled; a cluster that does not answer is asked again."""
        while True:
            follower = StatusFollower(self._client, self._namespace, self._reader, self._clock)
            try:
                await follower.run(partial(self._keep, follower))
            except AgentError as e:
                self.error = str(e)
                if self.state is not None:
                    self.state = dataclasses.replace(self.state, error=self.error)
                await self._announce()
                await self._clock.sleep(_RETRY_SECONDS)

    async def wait(self, number: int, seconds: float) -> int:
        """Return the number of the state once it is another one than `number`, or after so many seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(lambda: self.number != number)
        return self.number

    async def _keep(self, follower: StatusFollower) -> None:
        while True:
            follower.changed.clear()
            snapshot = follower.snapshot()
            self._rates.observe(snapshot.transfers, snapshot.at)
            since = snapshot.at - timedelta(seconds=follower.outdated_seconds)
            self.state, self.error = State(snapshot, self._rates.rate_of, since), None
            await self._announce()
            await self._clock.sleep(pause_after(snapshot, _UPDATE_SECONDS))
            await wait_for_event(follower.changed, _QUIET_SECONDS)

    async def _announce(self) -> None:
        async with self._changed:
            self.number += 1
            self._changed.notify_all()


_T = TypeVar("_T")
_R = TypeVar("_R")

_Reading = tuple[Callable[[], Awaitable[_T]], Callable[[_R, KubeError], _T]]

_AGAIN_SECONDS: Final = 2.0
"""Between two reads of a transfer that changes."""

_STILL_SECONDS: Final = 15.0
"""Between two reads of one that does not: Events, pods and the log may."""

_REPOSITORY_SECONDS: Final = 30.0
_HISTORY_SECONDS: Final = 300.0
"""Between two reads of the history: up to a megabyte, to which the leader adds once a minute at most."""

_KEPT: Final = 50
"""How many objects' last answers are kept: more pages are not open."""


@dataclass(frozen=True)
class Observed(Generic[_R]):
    """What the watches have of an object, None: nothing; and why the cluster does not answer, None: it does."""

    record: _R | None
    lost: str | None = None


@dataclass(frozen=True)
class KnownHistory:
    """The history of backups; `why` it is not known, or not all of it; None: it is."""

    days: VolumeHistory
    why: str | None = None


@dataclass(frozen=True)
class _Kept:
    answer: object
    record: object
    at: float


class Details:
    """Reads with the permissions of the person; pages that show the same object share the answer.

    An object that cannot be read is shown as it was read last, or else as far as the watches have it, with a note. One
    that may not be read is shown as far as the watches have it, and is not read with each update of a page.
    """

    def __init__(self, client: KubeClient, namespace: str, *, now: Callable[[], datetime], clock: Clock) -> None:
        self._client = client
        self._namespace = namespace
        self._now = now
        self._clock = clock
        self._kept: dict[object, _Kept] = {}

    async def transfer(self, target: Target, known: Observed[TransferRecord]) -> TransferDetails:
        """Return everything about one transfer; a change is noticed by what is known of it.

        Raises:
            NotFoundError: it does not exist; the message has the name that may be meant.
            KubeError: it cannot be read, and nothing is known of it.
        """
        record = known.record
        still = _REPOSITORY_SECONDS if record is not None and record.phase.final else _STILL_SECONDS
        read = partial(TransferReader(self._client, self._namespace).describe, target)
        return await self._get((target.kind.name, target.name), known, still, (read, _watched_transfer))

    async def repository(self, name: str, known: Observed[RepositoryRecord]) -> RepositoryDetails:
        """Return everything about one repository; `created` is None where only what the watches have is shown.

        Raises:
            NotFoundError: there is none of that name.
            ContractError: it is invalid.
            KubeError: it cannot be read, and nothing is known of it.
        """
        reader = RepositoryReader(self._client, self._namespace, now=self._now)
        reading = (partial(reader.describe, name), partial(_watched_repository, self._namespace))
        return await self._get(("BackupRepository", name), known, _REPOSITORY_SECONDS, reading)

    async def history(self, lost: str | None) -> KnownHistory:
        """Return the history of backups; `lost` is why the cluster does not answer, None: it does."""
        reading = (self._read_history, self._no_history)
        return await self._get("history", Observed("history", lost), _HISTORY_SECONDS, reading)

    async def _read_history(self) -> KnownHistory:
        stored = [await self._client.read(CONFIG_MAPS, self._namespace, name) for name in HISTORY_CONFIGMAPS]
        contents = [content for one in stored if (content := content_of(one)) is not None]
        return KnownHistory(
            await run_for_many(count_volumes(*contents), VolumeHistory, contents, self._now().toordinal())
        )

    def _no_history(self, _: str, why: KubeError) -> KnownHistory:
        return KnownHistory(VolumeHistory((), self._now().toordinal()), str(why))

    async def _get(self, key: object, known: Observed[_R], still: float, reading: _Reading[_T, _R]) -> _T:
        """Return the last answer while it is young enough; one of an object that has changed is old sooner.

        `reading` has what reads it, and what makes an answer of the record and the reason why that is all.
        """
        read, make = reading
        kept, now = self._kept.get(key), self._clock.monotonic()
        last: _T | NotFoundError = kept.answer if kept is not None else None  # type: ignore[assignment]
        if kept is not None and now - kept.at < (still if kept.record == known.record else _AGAIN_SECONDS):
            return _give(last)
        answer: _T | NotFoundError
        try:
            if known.lost:
                raise UnreachableError(known.lost)
            answer = await read()
        except NotFoundError as e:
            # The page of a deleted object may stay open, and to find a similar name all objects are listed.
            answer = e
        except KubeError as e:
            permitted = not isinstance(e, ForbiddenError)
            if kept is not None and permitted and not isinstance(last, NotFoundError):
                return _give(last)
            if known.record is None:
                raise
            answer = make(known.record, e)
            if permitted:
                return answer
        self._kept.pop(key, None)
        self._kept[key] = _Kept(answer, known.record, now)
        while len(self._kept) > _KEPT:
            del self._kept[next(iter(self._kept))]
        return _give(answer)


def _give(answer: _T | NotFoundError) -> _T:
    if isinstance(answer, NotFoundError):
        raise answer.with_traceback(None)
    return answer


def _watched_transfer(record: TransferRecord, why: KubeError) -> TransferDetails:
    return TransferDetails.of(record, notes=[f"its history, Events, pods and log could not be read: {why}"])


def _watched_repository(namespace: str, record: RepositoryRecord, why: KubeError) -> RepositoryDetails:
    return RepositoryDetails.like(
        record,
        namespace=namespace,
        last_maintenance=record.maintained,
        next=NextMaintenance(),
        notes=[f"its maintenance, contents and Events could not be read: {why}"],
    )
