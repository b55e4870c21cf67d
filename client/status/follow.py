"""Follows a cluster by one watch for each kind; a snapshot of it costs no request.

What has no watch, or changes with each renewal, is read again after a pause by a handful of requests, whatever the
number of transfers: the leader's Lease and status page, the settings of the agents.
"""

import asyncio
import dataclasses
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, Final

from client.status.parse import agent_record, location_record, repository_record, transfer_record
from client.status.read import StatusReader
from client.status.records import TRANSFER_KINDS, ClusterSnapshot, TransferRecord, Unread, UnreadPart
from client.status.view import average_rate
from core.clock import Clock
from core.errors import ContractError
from core.kube.client import KubeClient, Selection
from core.kube.errors import KubeError, UnauthorizedError, UnreachableError
from core.kube.resources import BACKUP_REPOSITORIES, BACKUP_STORAGE_LOCATIONS, PODS
from core.kube.types import Object
from core.models.names import AGENT_SELECTOR
from nodeagent.coverage.read import ObservedVolumes, PlannedVolumes
from nodeagent.runtime.informer import Informer

_RULES_SECONDS: Final = 10.0
"""Between two reads of what has no watch, while something changes."""

_IDLE_PAUSES: Final = 6
"""So many of them while nothing does."""

_VOLUMES_SECONDS: Final = 120.0
"""Between two reads of all PVCs, pods and volumes, which take a megabyte for some hundred of them;"""

_CLAIMS_PER_SECOND: Final = 20
"""longer for more of them, so that 5,000 take about two requests a minute."""

_TRANSFERS_PER_SECOND: Final = 10_000
"""A view of 100,000 transfers takes some seconds of a core, in which nothing else is done."""

_OUTDATED_SECONDS: Final = 15.0
"""A watch that has been closed for longer shows a past state: reconnecting takes less."""

_WINDOW_SECONDS: Final = 30.0
"""The rate of a transfer is of the last half minute: movers report about every 10 seconds."""


@dataclass
class _Watched:
    """One watch, the part that it shows, and why the API server rejects it; None: it does not."""

    part: UnreadPart
    informer: Informer[Any]
    restores: bool = False
    rejected: str | None = None

    @property
    def settled(self) -> bool:
        """Whether waiting for it is of no more use."""
        return self.informer.synced.is_set() or bool(self.rejected)

    @property
    def unread(self) -> str | None:
        """Why what it shows is not known; None: it is."""
        if not self.informer.synced.is_set():
            return self.rejected or "it was not listed yet"
        seconds = self.informer.outdated_seconds
        if seconds < _OUTDATED_SECONDS:
            return None
        return self.rejected or f"no watch for {seconds:.0f} s"

    @property
    def passing(self) -> bool:
        """Whether it is too soon to give up: an API server that restarts answers again."""
        return self.informer.synced.is_set() and not self.rejected and not self.informer.explain_outage()

    @property
    def faults(self) -> list[str]:
        """What is wrong with single objects."""
        malformed = [f"{name} does not have the form of its kind" for name in self.informer.malformed]
        return malformed + [str(one) for one in self.informer.items() if isinstance(one, ContractError)]

    @property
    def records(self) -> tuple[Any, ...]:
        """The records of all other objects."""
        return tuple(one for one in self.informer.items() if not isinstance(one, ContractError))


class StatusFollower:
    """The last observed state of everything that `status` shows."""

    def __init__(
        self, client: KubeClient, namespace: str, reader: StatusReader, clock: Clock, *, patient: bool = False
    ) -> None:
        """Watch through `client` once `run` is called; `reader` reads what has no watch.

        `patient`: once that was read, it is no error if the cluster does not answer.
        """
        self._patient = patient
        self.changed = asyncio.Event()
        self._moved = asyncio.Event()
        self._reader = reader
        self._clock = clock
        self._rules: ClusterSnapshot | None = None
        self._volumes: ObservedVolumes | None = None
        self._planned: tuple[tuple[str, ...] | None, PlannedVolumes] | None = None

        def watched(
            part: UnreadPart, selection: Selection, parse: Callable[[Any], object], *, restores: bool = False
        ) -> _Watched:
            trim = partial(_or_fault, parse)
            informer = Informer(client, selection, clock=clock, trim=trim, on_change=self._note_change)
            return _Watched(part, informer, restores)

        self._transfers = [
            watched(
                UnreadPart.TRANSFERS,
                Selection(kind.resource, namespace),
                partial(transfer_record, kind),
                restores=kind.restores,
            )
            for kind in TRANSFER_KINDS
        ]
        self._agents = watched(UnreadPart.AGENTS, Selection(PODS, namespace, AGENT_SELECTOR), agent_record)
        repositories, places = Selection(BACKUP_REPOSITORIES, namespace), Selection(BACKUP_STORAGE_LOCATIONS, namespace)
        self._repositories = watched(UnreadPart.REPOSITORIES, repositories, repository_record)
        self._locations = watched(UnreadPart.LOCATIONS, places, location_record)

    @property
    def _all(self) -> list[_Watched]:
        return [*self._transfers, self._agents, self._repositories, self._locations]

    async def run(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `work` beside the watches once everything was observed or rejected; return when it does.

        Raises:
            AgentError: what `work` raised, or the cluster does not answer; see `patient`.
        """
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._follow(one), name=one.part) for one in self._all]
                tasks.append(group.create_task(self._read_rules(), name="rules"))
                tasks.append(group.create_task(self._read_volumes(), name="volumes"))
                await self._until(lambda: self._rules is not None and all(one.settled for one in self._all))
                await work()
                for task in tasks:
                    task.cancel()
        except ExceptionGroup as e:
            raise _first_of(e) from e

    @property
    def outdated_seconds(self) -> float:
        """For how long a part of what was observed may have changed without notice; 0.0: all watches are open.

        What may not be read is named in the snapshot, and does not count.
        """
        observed = (one.informer for one in self._all if one.informer.synced.is_set() and not one.rejected)
        return max((each.outdated_seconds for each in observed), default=0.0)

    def snapshot(self) -> ClusterSnapshot:
        """Return what is known now; what is outdated, or not permitted, counts as not read."""
        if self._rules is None:
            raise RuntimeError("nothing was read yet")
        lost = [
            Unread(one.part, one.unread, passing=one.passing, restores=one.restores) for one in self._all if one.unread
        ]
        faults = [Unread(one.part, why, restores=one.restores) for one in self._all for why in one.faults]
        return dataclasses.replace(
            self._rules,
            at=self._reader.now(),
            transfers=tuple(record for one in self._transfers for record in one.records),
            volumes=self._plan_volumes(self._rules.config.leave_out_namespaces),
            agents=self._agents.records,
            repositories=self._repositories.records,
            locations=self._locations.records,
            unread=(*self._rules.unread, *lost, *faults),
        )

    def _note_change(self, _: object) -> None:
        self._moved.set()
        self.changed.set()

    async def _until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            self.changed.clear()
            await self.changed.wait()

    async def _follow(self, one: _Watched) -> None:
        def reject(error: KubeError) -> None:
            one.rejected = str(error)
            self.changed.set()

        async def announce() -> None:
            await one.informer.synced.wait()
            one.rejected = None
            self.changed.set()

        async with asyncio.TaskGroup() as group:
            group.create_task(announce(), name=f"first {one.part}")
            group.create_task(one.informer.run_despite_rejections(reject), name=f"watch of {one.part}")

    async def _read_rules(self) -> None:
        await self._until(lambda: self._agents.settled)
        last: ClusterSnapshot | None = None
        while True:
            self._moved.clear()
            try:
                self._rules = last = await self._reader.read_rules(self._agents.records)
            except (UnreachableError, UnauthorizedError) as e:
                if last is None or not self._patient:
                    raise
                self._rules = dataclasses.replace(last, unread=(*last.unread, Unread(UnreadPart.LEASE, str(e))))
            self.changed.set()
            await self._pause()

    async def _read_volumes(self) -> None:
        # The large lists do not delay what is shown first.
        await self._until(lambda: self._rules is not None)
        while True:
            try:
                self._volumes, self._planned = await self._reader.observe_volumes(), None
            except (UnreachableError, UnauthorizedError):
                if not self._patient:
                    raise
            self.changed.set()
            cluster = self._volumes.cluster if self._volumes is not None else None
            number = len(cluster.claims) if cluster is not None else 0
            await self._clock.sleep(_VOLUMES_SECONDS + number / _CLAIMS_PER_SECOND)

    def _plan_volumes(self, leave_out_namespaces: tuple[str, ...] | None) -> PlannedVolumes | None:
        """Return the plans of the volumes that were read last, computed once."""
        if self._volumes is None:
            return None
        if self._planned is None or self._planned[0] != leave_out_namespaces:
            self._planned = (leave_out_namespaces, self._volumes.plan(leave_out_namespaces))
        return self._planned[1]

    async def _pause(self) -> None:
        """Wait until what has no watch may differ: for longer while nothing changes, and all watches are open."""
        for _ in range(_IDLE_PAUSES):
            await self._clock.sleep(_RULES_SECONDS)
            if self._moved.is_set() or any(one.unread for one in self._all):
                return


def pause_after(snapshot: ClusterSnapshot, least_seconds: float) -> float:
    """Return for how long a view of the snapshot stays, whatever changes."""
    return least_seconds + len(snapshot.transfers) / _TRANSFERS_PER_SECOND


def _first_of(group: ExceptionGroup[Exception]) -> Exception:
    first = group.exceptions[0]
    return _first_of(first) if isinstance(first, ExceptionGroup) else first


def _or_fault(parse: Callable[[Any], object], raw: Object) -> object:
    try:
        return parse(raw)
    except ContractError as e:
        return e


class ProgressRates:
    """The rates of transfers by what was observed of them in the last half minute."""

    def __init__(self) -> None:
        self._seen: dict[str, deque[tuple[datetime, int]]] = {}

    def observe(self, transfers: Iterable[TransferRecord], now: datetime) -> None:
        """Record how many bytes each transfer has moved at `now`, and forget those that move none."""
        before, self._seen = self._seen, {}
        for one in transfers:
            if not one.moving:
                continue
            seen = before.get(one.uid, deque())
            if seen and one.bytes_done < seen[-1][1]:
                # Another attempt counts from the beginning.
                seen.clear()
            if not seen or one.bytes_done != seen[-1][1]:
                seen.append((now, one.bytes_done))
            while len(seen) > 2 and (now - seen[0][0]).total_seconds() > _WINDOW_SECONDS:  # noqa: PLR2004 - two give a rate
                seen.popleft()
            self._seen[one.uid] = seen

    def rate_of(self, transfer: TransferRecord, now: datetime) -> float | None:
        """Return the rate in bytes per second; the average since the start before two observations."""
        seen = self._seen.get(transfer.uid)
        if seen is None or len(seen) < 2:  # noqa: PLR2004 - as above
            return average_rate(transfer, now)
        seconds = (now - seen[0][0]).total_seconds()
        return (seen[-1][1] - seen[0][1]) / seconds if seconds >= 1.0 else average_rate(transfer, now)
