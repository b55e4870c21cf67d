"""Whether limits and order were kept, by everything that was seen.

Knows what may never be: more transfers Accepted or Prepared than `prepareQueueLength`, more in
progress on a node than `loadConcurrency`, a transfer that goes back, one that ends twice. Does not
know the agents; pure.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from benchmarks.scale.history import FINAL, HELD, RUNNING, LimitChange, Sight

_RANK: Final = {"New": 0, "Accepted": 1, "Prepared": 2, "InProgress": 3, "Canceling": 4} | dict.fromkeys(FINAL, 5)


@dataclass
class Verdict:
    """The results of all transfers.

    `violations` names each resourceVersion at which something was not as it must be. `admissions` are the
    first sights of accepted transfers, in order.
    """

    violations: list[str] = field(default_factory=list)
    most_held: int = 0
    most_running: int = 0
    admissions: list[Sight] = field(default_factory=list)
    final_phases: Counter[str] = field(default_factory=Counter)


class _Ceiling:
    """A limit, and how far a number may be above it since the limit was lowered."""

    def __init__(self) -> None:
        self._limit: int | None = None
        self._exempt = 0

    def set(self, limit: int | None, now: int) -> None:
        """Apply `limit`; what is above it already may stay, and only sink."""
        self._limit, self._exempt = limit, now

    def exceeded_by(self, number: int) -> bool:
        """Whether `number` is too much; one that sinks is exempt for less from then on."""
        if self._limit is None:
            return False
        most = max(self._limit, self._exempt)
        self._exempt = min(self._exempt, number)
        return number > most


class _Observer:
    """The state of all transfers at one resourceVersion."""

    def __init__(self) -> None:
        self.verdict = Verdict()
        self._newest: dict[str, Sight] = {}
        self._held: set[str] = set()
        self._running: dict[str, set[str]] = defaultdict(set)
        self._queue = _Ceiling()
        self._slots: dict[str, _Ceiling] = {}
        self._slot_limit = 1

    def change(self, limits: LimitChange) -> None:
        """Apply other limits."""
        self._queue.set(limits.queue_length, len(self._held))
        self._slot_limit = limits.slots
        for node, ceiling in self._slots.items():
            ceiling.set(limits.slots, len(self._running[node]))

    def see(self, sight: Sight) -> None:
        """Take one version of a transfer."""
        before = self._newest.get(sight.uid)
        self._check_phase(before, sight)
        self._newest[sight.uid] = sight
        self._count_held(sight)
        self._count_running(before, sight)

    def _check_phase(self, before: Sight | None, sight: Sight) -> None:
        was = before.phase if before else "New"
        if _RANK[sight.phase] < _RANK[was] or (was in FINAL and sight.phase != was):
            self._report(sight, f"went from {was} to {sight.phase}")
        if was == "New" and sight.phase == "Accepted":
            self.verdict.admissions.append(sight)
        if was not in FINAL and sight.phase in FINAL:
            self.verdict.final_phases[sight.phase] += 1

    def _count_held(self, sight: Sight) -> None:
        holds = sight.phase in HELD and not sight.deleted
        (self._held.add if holds else self._held.discard)(sight.uid)
        number = len(self._held)
        self.verdict.most_held = max(self.verdict.most_held, number)
        if self._queue.exceeded_by(number):
            self._report(sight, f"{number} transfers are Accepted or Prepared")

    def _count_running(self, before: Sight | None, sight: Sight) -> None:
        if before is not None:
            self._running[before.node].discard(sight.uid)
        if sight.phase not in RUNNING or sight.deleted:
            return
        running = self._running[sight.node]
        running.add(sight.uid)
        self.verdict.most_running = max(self.verdict.most_running, len(running))
        ceiling = self._slots.get(sight.node)
        if ceiling is None:
            self._slots[sight.node] = ceiling = _Ceiling()
            ceiling.set(self._slot_limit, 0)
        if ceiling.exceeded_by(len(running)):
            self._report(sight, f"{len(running)} transfers run on node {sight.node}")

    def _report(self, sight: Sight, what: str) -> None:
        self.verdict.violations.append(f"at {sight.version}: {what} ({sight.kind} {sight.name})")


def judge(sights: Iterable[Sight], limits: Iterable[LimitChange]) -> Verdict:
    """Return the results of the transfers, going through every resourceVersion in order."""
    observer = _Observer()
    everything: list[Sight | LimitChange] = [*limits, *sights]
    for seen in sorted(everything, key=lambda seen: seen.version):
        if isinstance(seen, Sight):
            observer.see(seen)
        else:
            observer.change(seen)
    return observer.verdict


def count_disorder(waiting: Iterable[Sight], admissions: Sequence[Sight], *, after: str = "") -> int:
    """Return how many of `admissions` were not the next in the admission queue.

    Namespaces alternate; inside one the oldest goes first, then by name.

    Args:
        waiting: all transfers that were pending when the first of `admissions` was accepted; none came later.
        admissions: the accepted ones of them, in order.
        after: the namespace that was served before; empty where that is not known.
    """
    queues: dict[str, list[Sight]] = defaultdict(list)
    for sight in waiting:
        queues[sight.queue].append(sight)
    for queue in queues.values():
        queue.sort(key=lambda sight: (sight.created, sight.name))
    wrong = 0
    for sight in admissions:
        names = sorted(name for name, queue in queues.items() if queue)
        following = names[bisect_right(names, after) % len(names)] if after else sight.queue
        queue = queues[sight.queue]
        if sight.queue != following or queue[0].uid != sight.uid:
            wrong += 1
        queues[sight.queue] = [other for other in queue if other.uid != sight.uid]
        after = sight.queue
    return wrong
