"""What the pages show of single objects, read when a page needs it, and not more often than it changes."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, TypeVar

from core.clock import Clock
from core.kube.client import KubeClient
from nodeagent.operations.repositories import RepositoryReader
from nodeagent.operations.repository_view import RepositoryDetails
from nodeagent.operations.status.describe import TransferDetails, TransferReader
from nodeagent.operations.status.kinds import Target
from nodeagent.operations.status.records import TransferRecord
from nodeagent.runtime.settings import Settings

__all__ = ["Details"]

_T = TypeVar("_T")

_AGAIN_SECONDS: Final = 2.0
"""Between two reads of a transfer that changes."""

_STILL_SECONDS: Final = 15.0
"""Between two reads of one that does not: Events, pods and the log may."""

_REPOSITORY_SECONDS: Final = 30.0
_KEPT: Final = 50
"""Objects of which the last answer is kept: more pages are not open."""


@dataclass(frozen=True)
class _Kept:
    answer: object
    record: object
    at: float


class Details:
    """Reads with the permissions of the person; pages that show the same object share the answer."""

    def __init__(
        self,
        client: KubeClient,
        namespace: str,
        *,
        parse_serve: Callable[[Sequence[str]], Settings],
        now: Callable[[], datetime],
        clock: Clock,
    ) -> None:
        """Read through `client`; `parse_serve` reads the arguments of an agent's command `serve`."""
        self._client = client
        self._namespace = namespace
        self._parse_serve = parse_serve
        self._now = now
        self._clock = clock
        self._kept: dict[object, _Kept] = {}

    async def transfer(self, target: Target, known: TransferRecord | None) -> TransferDetails:
        """Return everything about one transfer; `known` is what was observed of it, by which a change is noticed.

        Raises:
            NotFoundError: it does not exist; the message has the name that may be meant.
            KubeError: it cannot be read.
        """
        reader = TransferReader(self._client, self._namespace)
        ended = known is not None and known.phase.final
        still = _REPOSITORY_SECONDS if ended else _STILL_SECONDS
        return await self._get((target.kind.name, target.name), known, still, lambda: reader.describe(target))

    async def repository(self, name: str) -> RepositoryDetails:
        """Return everything about one repository.

        Raises:
            NotFoundError: there is none of that name.
            ContractError: it is invalid.
            KubeError: it cannot be read.
        """
        reader = RepositoryReader(self._client, self._namespace, parse_serve=self._parse_serve, now=self._now)
        return await self._get(("BackupRepository", name), None, _REPOSITORY_SECONDS, lambda: reader.describe(name))

    async def _get(self, key: object, record: object, still: float, read: Callable[[], Awaitable[_T]]) -> _T:
        """Return the last answer while it is young enough; one of an object that has changed is old sooner."""
        kept, now = self._kept.get(key), self._clock.monotonic()
        if kept is not None and now - kept.at < (still if kept.record == record else _AGAIN_SECONDS):
            answer: _T = kept.answer  # type: ignore[assignment]
            return answer
        answer = await read()
        self._kept.pop(key, None)
        self._kept[key] = _Kept(answer, record, now)
        while len(self._kept) > _KEPT:
            del self._kept[next(iter(self._kept))]
        return answer
