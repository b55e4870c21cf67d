"""What the pages show of single objects, read when a page needs it, and not more often than it changes."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Final, Generic, TypeVar

from client.repositories import RepositoryReader
from client.repository_view import NextMaintenance, RepositoryDetails
from client.status.describe import TransferDetails, TransferReader
from client.status.records import RepositoryRecord, Target, TransferRecord
from core.aio import run_for_many
from core.clock import Clock
from core.kube.client import KubeClient
from core.kube.errors import ForbiddenError, KubeError, NotFoundError, UnreachableError
from core.kube.resources import CONFIG_MAPS
from core.models.names import HISTORY_CONFIGMAPS
from nodeagent.coverage.history import VolumeHistory, content_of

__all__ = ["Details", "KnownHistory", "Observed"]

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

_BYTES_PER_VOLUME: Final = 100
_KEPT: Final = 50
"""How many objects' last answers are kept: more pages are not open."""


@dataclass(frozen=True)
class Observed(Generic[_R]):
    """What the watches have of an object, None: nothing; and why the cluster does not answer, empty: it does."""

    record: _R | None
    lost: str = ""


@dataclass(frozen=True)
class KnownHistory:
    """The history of backups; `why` it is not known, or not all of it; empty: it is."""

    days: VolumeHistory
    why: str = ""


@dataclass(frozen=True)
class _Kept:
    answer: object
    record: object
    at: float


class Details:
    """Reads with the permissions of the person; pages that show the same object share the answer.

    An object that cannot be read is shown as it was read last, or else as far as the watches have it, with a note. One
    that may not be read is shown as far as the watches have it.
    """

    def __init__(self, client: KubeClient, namespace: str, *, now: Callable[[], datetime], clock: Clock) -> None:
        """Read through `client`."""
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

        def read() -> Awaitable[TransferDetails]:
            return TransferReader(self._client, self._namespace).describe(target)

        return await self._get((target.kind.name, target.name), known, still, (read, _watched_transfer))

    async def repository(self, name: str, known: Observed[RepositoryRecord]) -> RepositoryDetails:
        """Return everything about one repository; `created` is None where only what the watches have is shown.

        Raises:
            NotFoundError: there is none of that name.
            ContractError: it is invalid.
            KubeError: it cannot be read, and nothing is known of it.
        """

        def read() -> Awaitable[RepositoryDetails]:
            reader = RepositoryReader(self._client, self._namespace, now=self._now)
            return reader.describe(name)

        reading = (read, partial(_watched_repository, self._namespace))
        return await self._get(("BackupRepository", name), known, _REPOSITORY_SECONDS, reading)

    async def history(self, lost: str) -> KnownHistory:
        """Return the history of backups; `lost` is why the cluster does not answer, empty: it does."""
        reading = (self._read_history, self._no_history)
        known: Observed[None] = Observed(None, lost)
        try:
            return await self._get("history", known, _HISTORY_SECONDS, reading)
        except KubeError as e:
            return self._no_history(None, e)

    async def _read_history(self) -> KnownHistory:
        contents = []
        try:
            for name in HISTORY_CONFIGMAPS:
                stored = await self._client.read(CONFIG_MAPS, self._namespace, name)
                if (content := content_of(stored)) is not None:
                    contents.append(content)
        except ForbiddenError as e:
            # Not asked for again with each update of a page.
            return self._no_history(None, e)
        number = sum(map(len, contents)) // _BYTES_PER_VOLUME
        return KnownHistory(await run_for_many(number, VolumeHistory, contents, self._now().toordinal()))

    def _no_history(self, _: None, why: KubeError) -> KnownHistory:
        return KnownHistory(VolumeHistory((), self._now().toordinal()), str(why))

    async def _get(self, key: object, known: Observed[_R], still: float, reading: _Reading[_T, _R]) -> _T:
        """Return the last answer while it is young enough; one of an object that has changed is old sooner.

        `reading` has what reads it, and what makes an answer of the record and the reason why that is all.
        """
        _, make = reading
        kept, now = self._kept.get(key), self._clock.monotonic()
        last: _T = kept.answer if kept is not None else None  # type: ignore[assignment]
        if kept is not None and now - kept.at < (still if kept.record == known.record else _AGAIN_SECONDS):
            return last
        try:
            answer = await _read(known, reading)
        except NotFoundError:
            self._kept.pop(key, None)
            raise
        except KubeError as e:
            if kept is not None and not isinstance(e, ForbiddenError):
                return last
            if known.record is None:
                raise
            return make(known.record, e)
        self._kept.pop(key, None)
        self._kept[key] = _Kept(answer, known.record, now)
        while len(self._kept) > _KEPT:
            del self._kept[next(iter(self._kept))]
        return answer


async def _read(known: Observed[_R], reading: _Reading[_T, _R]) -> _T:
    """Return what is read; what the watches have, where the person may not read it."""
    read, make = reading
    if known.lost:
        raise UnreachableError(known.lost)
    try:
        return await read()
    except ForbiddenError as e:
        if known.record is None:
            raise
        return make(known.record, e)


def _watched_transfer(record: TransferRecord, why: KubeError) -> TransferDetails:
    return TransferDetails.of(record, notes=[f"its history, Events, pods and log could not be read: {why}"])


def _watched_repository(namespace: str, record: RepositoryRecord, why: KubeError) -> RepositoryDetails:
    return RepositoryDetails(
        name=record.name,
        namespace=namespace,
        volume_namespace=record.volume_namespace,
        location=record.location,
        phase=record.phase,
        message=record.message,
        last_maintenance=record.maintained,
        next=NextMaintenance(),
        notes=[f"its maintenance, contents and Events could not be read: {why}"],
    )
