"""One pass of the dispatcher over all transfers, in stages, and which interrupted transfers begin their next attempt.

The order of the stages is the contract: what accepted transfers use of the quota is known before
another is admitted, interrupted ones come before New ones, reservations are written before an accept or a resumption,
and reports come last. Each stage takes a frozen `Pass` and returns the next one.

Interrupted transfers come the oldest first, and each agent prepares one at a time: a node that returns with many
of them must not keep the quota from all others.
"""

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import islice, takewhile
from typing import Final

from core.models.phases import AttemptStage, InterruptionCause, Phase, in_order
from core.models.reasons import PendingReason
from core.models.units import format_duration
from exposer.model import Pending
from nodeagent.leader.admission.examiner import Checked, Examiner
from nodeagent.leader.admission.pending_records import RETRY_SECONDS, PendingTransfers
from nodeagent.leader.admission.quota import AdmissionLedger, Reservations, free_quota, settle
from nodeagent.leader.admission.writer import AdmissionWriter
from nodeagent.leader.context import DispatchRules
from nodeagent.leader.index import Entry
from nodeagent.leader.live_agents import LiveAgents, choose_node, count_idle
from nodeagent.runtime.workqueue import attempt, work_in_parallel
from nodeagent.transfers.kinds.base import AdmissionState


@dataclass
class Resumptions:
    """What is done about the transfers whose next attempt may begin.

    `start` begin now, in this order, with a reservation each, on the nodes of their labels, which may be other ones
    than before. `release` have a reservation that they cannot use. `waiting` is what the next attempt of each of the
    others waits for, by uid.
    """

    start: list[Entry] = field(default_factory=list)
    release: list[Entry] = field(default_factory=list)
    waiting: dict[str, Pending] = field(default_factory=dict)


def awaited_locations(entries: Iterable[Entry]) -> set[str]:
    """Return the backup storage locations whose answer interrupted transfers wait for."""
    waiting = (entry.location for entry in entries if _waits_for_location(entry) and not entry.stop)
    return set(filter(None, waiting))


def plan_resumptions(
    entries: Iterable[Entry],
    reserved: AbstractSet[str],
    *,
    limit: int | None,
    agents: Mapping[str, str],
    answering: AbstractSet[str],
    passed_over: AbstractSet[str] = frozenset(),
    rejected: AbstractSet[str] = frozenset(),
) -> Resumptions:
    """Return what is done about interrupted transfers.

    Args:
        entries: all transfers.
        reserved: the uids that use the quota.
        limit: the `prepareQueueLength`; None: there is none.
        agents: the live agents' nodes by node label: a transfer of any other is left to recovery.
        answering: the backup storage locations of `awaited_locations` that answer.
        passed_over: the node labels that no transfer is moved to.
        rejected: the uids of transfers whose resumption the API server has just rejected, which is reported.
    """
    known = [entry for entry in entries if entry.managed]
    free = free_quota(reserved, limit)
    nodes = _Nodes(known, {label: name for label, name in agents.items() if label not in passed_over})
    plan = Resumptions()
    # A reservation comes first: its attempt may have begun.
    ready = (entry for entry in known if entry.stage is AttemptStage.READY)
    for entry in sorted(ready, key=lambda entry: (entry.uid not in reserved, entry.created, entry.name)):
        held = entry.uid in reserved
        node = agents.get(entry.node_label, "")
        # A canceled transfer is ended by its agent.
        usable = bool(node) and not entry.stop and entry.uid not in rejected
        label = nodes.place(entry) if usable else None
        if not usable:
            message = None
        elif label is None:
            message = f"begins after another transfer's on node {node}"
        elif not held and free <= 0:
            message = f"is queued before all New transfers: prepareQueueLength ({limit}) reached"
        elif _waits_for_location(entry) and entry.location not in answering:
            message = f"begins once BackupStorageLocation {entry.location} answers"
        else:
            plan.start.append(replace(entry, node_label=label))
            nodes.busy.add(label)
            free -= not held
            continue
        if held:
            plan.release.append(entry)
        if message:
            plan.waiting[entry.uid] = Pending(PendingReason.RESUMING, message)
    return plan


class _Nodes:
    """Where attempts can begin: `busy` are the node labels of agents that expose one."""

    def __init__(self, known: Sequence[Entry], preferred: Mapping[str, str]) -> None:
        """Derive it from all transfers; `preferred` are the agents that others are moved to."""
        exposing = [entry for entry in known if entry.stage is AttemptStage.EXPOSING]
        # On a full node, an exposed one waits for a slot.
        self._full = {entry.node_label for entry in exposing if entry.reason == PendingReason.WAITING_FOR_SLOT}
        self.busy = {entry.node_label for entry in exposing if entry.reason != PendingReason.WAITING_FOR_SLOT}
        self._preferred = preferred
        self._idle = count_idle(known)

    def place(self, entry: Entry) -> str | None:
        """Return the node label of the agent that can prepare the next attempt now; None where none can.

        What can run on any node does not wait for its own agent, which may have one that finds no place.
        """
        label = entry.node_label
        if entry.bound:
            # Only a slot of this node helps, and the one before waits for that already.
            return None if label in self.busy | self._full else label
        if label not in self.busy:
            return label
        free = {other: name for other, name in self._preferred.items() if other not in self.busy}
        return choose_node(free, self._idle)


def _waits_for_location(entry: Entry) -> bool:
    outage = entry.interrupted_by is InterruptionCause.STORAGE_UNAVAILABLE
    return entry.stage is AttemptStage.READY and outage


_AT_A_TIME: Final = 16
"""Checks, each with a few reads."""

_CHECKS_PER_PASS: Final = 500
"""So that a pass takes seconds at most and later transfers are not delayed, and so that few passes cover
the whole queue, and write the whole ledger, where thousands may start."""

_REPORTS_PER_PASS: Final = 50
"""Transfers behind the quota are checked a few at a time: those that can be admitted come first."""

PAUSE_SECONDS: Final = 0.1
"""Between passes: changes that come together share a pass, and its ledger write."""

_BUSY_SECONDS: Final = 5.0
_IDLE_SECONDS: Final = 60.0
"""The longest pause between passes, with and without transfers to be admitted."""


@dataclass(frozen=True)
class Pass:
    """What the stages of one pass know.

    `new` are the New transfers to be admitted. `reserved` are the uids that use the quota. `ready` are
    those to be accepted in this pass: first the ones with a reservation from before, then `picked`.
    `resuming` are the interrupted ones that begin their next attempt, with uids among `reserved`; `waiting` is what the
    other interrupted ones wait for, by uid.
    `checks_left` and `reports_left` say how much more may be done; at 0 another pass follows at once.
    """

    entries: Sequence[Entry]
    new: Sequence[Entry] = ()
    reserved: frozenset[str] = frozenset()
    ready: Sequence[Checked] = ()
    picked: Sequence[Checked] = ()
    resuming: Sequence[Checked] = ()
    waiting: Mapping[str, Pending] = field(default_factory=dict)
    checks_left: int = _CHECKS_PER_PASS
    reports_left: int = _REPORTS_PER_PASS

    @property
    def unreserved(self) -> list[Entry]:
        """The New transfers that use no quota yet."""
        picked = {checked.entry.uid for checked in self.picked}
        return [entry for entry in self.new if entry.uid not in self.reserved and entry.uid not in picked]


@dataclass(eq=False)
class AdmissionPass:
    """Runs passes."""

    rules: DispatchRules
    ledger: AdmissionLedger
    agents: LiveAgents
    _: KW_ONLY
    examiner: Examiner
    pending: PendingTransfers
    writer: AdmissionWriter
    _not_ready: set[str] = field(default_factory=set, init=False)
    _not_queued: set[str] = field(default_factory=set, init=False)

    async def run(self, entries: Sequence[Entry]) -> float:
        """Return the seconds until the next pass; AgentError: leadership is lost, or the ledger cannot be written."""
        await self.writer.resolve_accepts(entries)
        current = await self._wake(entries)
        current = await self._check_reserved(current)
        current = await self._check_interrupted(current)
        current = await self._pick(current)
        current = await self._reserve(current)
        await self.writer.resume(current.resuming)
        await self._accept(current)
        current = await self._report_queued(current)
        current = await self._report_waiting(current)
        if current.checks_left <= 0 or current.reports_left <= 0:
            return 0.0
        if self._unusable() & self.ledger.reservations.uids:
            return PAUSE_SECONDS
        busy = current.new or current.resuming or current.waiting
        latest_seconds = _BUSY_SECONDS if busy else _IDLE_SECONDS
        return max(PAUSE_SECONDS, min(latest_seconds, self.pending.seconds_to_next()))

    async def _wake(self, entries: Sequence[Entry]) -> Pass:
        """Begin: forget transfers that are not to be admitted any more; make those due whose reason may be over.

        New ones that are to be canceled are ended. Then find out which transfers use the quota.
        """
        known = [entry for entry in entries if entry.managed and entry.admission_phase is Phase.NEW]
        self.pending.retain({entry.uid for entry in known})
        self.pending.wake(self.examiner.begin_pass(entries, self.pending.held()))
        self.pending.wake_changed()
        new = [entry for entry in known if entry.phase is Phase.NEW]
        await self._check(list(self.pending.due(entry for entry in new if entry.stop)))
        reserved = settle_entries(self.ledger, entries) - self._unusable()
        return Pass(entries, new=[entry for entry in new if not entry.stop], reserved=reserved)

    async def _check_reserved(self, current: Pass) -> Pass:
        """Check New transfers with a reservation; release, behind a fence, those that may not start any more."""
        reserved = [entry for entry in current.new if entry.uid in current.reserved]
        results = await self._check(list(self._in_order(reserved)))
        released = await self._release([checked for checked in results if not checked.ready])
        ready = [checked for checked in results if checked.ready]
        return replace(current, ready=ready, reserved=current.reserved - released)

    async def _check_interrupted(self, current: Pass) -> Pass:
        """Choose the interrupted transfers that begin their next attempt; release reservations that they cannot use."""
        plan = plan_resumptions(
            current.entries,
            current.reserved,
            limit=self.rules.queue_length,
            agents=self.agents.nodes(),
            answering=set(filter(self.rules.location_answers, awaited_locations(current.entries))),
            passed_over=self.agents.backoff.labels(),
            rejected={uid for uid in self.pending.rejected() if not self.pending.is_due(uid)},
        )
        released = await self._release(await self._check(plan.release, resumes=True))
        resuming = [checked for checked in await self._check(plan.start, resumes=True) if checked.ready]
        reserved = (current.reserved - released) | {checked.entry.uid for checked in resuming}
        return replace(current, resuming=resuming, waiting=plan.waiting, reserved=reserved)

    async def _pick(self, current: Pass) -> Pass:
        """Choose the next transfers of the queue that may start, as many as the quota has left.

        Each is checked once until the whole queue was: one that is not ready may be due again before, also where it
        takes several passes, and must not hold back what is ready.
        """
        free = free_quota(current.reserved, self.rules.queue_length)
        queue, left, number = current.unreserved, current.checks_left, free
        head: list[Entry] = []
        ready: dict[str, Checked] = {}
        while free > 0:
            queue = [entry for entry in queue if entry.uid not in self._not_ready]
            head = list(islice(self._in_order(queue), number))
            unchecked = [entry for entry in head if entry.uid not in ready][:left]
            if not unchecked or all(entry.uid in ready for entry in head[:free]):
                # As many as may start are ready, or the checks of this pass are used up.
                break
            left -= len(unchecked)
            ready |= {checked.entry.uid: checked for checked in await self._check(unchecked) if checked.ready}
            self._not_ready |= {entry.uid for entry in unchecked} - ready.keys()
            # One by one, hundreds that are not ready would take minutes.
            number = max(free, min(2 * number, _AT_A_TIME))
        if left > 0:
            self._not_ready.clear()
        # No transfer is admitted before one ahead of it was checked.
        picked = [ready[entry.uid] for entry in takewhile(lambda entry: entry.uid in ready, head[:free])]
        return replace(current, picked=picked, checks_left=left)

    async def _reserve(self, current: Pass) -> Pass:
        """Write the reservations, if they change or a transfer is to begin: this stops every other leader."""
        stored = self.ledger.reservations
        begins = current.picked or current.ready or current.resuming
        if not begins and current.reserved == stored.uids:
            return current
        last = current.picked[-1].entry.queue if current.picked else stored.last_namespace
        uids = current.reserved | {checked.entry.uid for checked in current.picked}
        await self.ledger.write(Reservations(uids, last))
        return replace(current, ready=[*current.ready, *current.picked])

    async def _accept(self, current: Pass) -> None:
        for checked in current.ready:
            self.pending.postpone(checked.entry.uid, RETRY_SECONDS)
        await self.writer.accept(current.ready, count_idle(current.entries))

    async def _report_queued(self, current: Pass) -> Pass:
        """Report the transfers that are pending for the queue alone, once for each, if they could start."""
        limit, most = self.rules.queue_length, min(current.checks_left, current.reports_left)
        # As in `_pick`, one that was not ready is checked again after the others.
        behind = [entry for entry in current.unreserved if entry.uid not in self._not_queued]
        needs_report = self.pending.needs_queue_report
        # To find out whether one is missing costs less than to bring all of them into order.
        if limit is None or not any(map(needs_report, self.pending.due(behind))):
            self._not_queued.clear()
            return current
        queue = enumerate(self._in_order(behind), start=1)
        chosen = list(islice(((position, entry) for position, entry in queue if needs_report(entry)), most))
        positions = {entry.uid: position for position, entry in chosen}
        ready = [checked for checked in await self._check([entry for _, entry in chosen]) if checked.ready]
        self._not_queued |= positions.keys() - {checked.entry.uid for checked in ready}
        for checked in ready:
            uid = checked.entry.uid
            # A report that fails is repeated, but not at once.
            self.pending.postpone(uid)
            report = self.writer.report_queued(checked, limit=limit, position=positions[uid])
            await attempt(checked.entry.log_fields, report)
        if len(chosen) < most:
            self._not_queued.clear()
        return replace(current, reports_left=most - len(chosen))

    async def _report_waiting(self, current: Pass) -> Pass:
        waiting = (entry for entry in self.pending.due(current.entries) if entry.uid in current.waiting)
        missing = (entry for entry in waiting if self._needs_report(entry, current.waiting[entry.uid]))
        chosen = list(islice(missing, current.reports_left))
        for entry in chosen:
            self.pending.postpone(entry.uid)
        for checked in await self._check(chosen, resumes=True):
            report = self.writer.report_waiting(checked, current.waiting[checked.entry.uid])
            await attempt(checked.entry.log_fields, report)
        return replace(current, reports_left=current.reports_left - len(chosen))

    def _needs_report(self, entry: Entry, pending: Pending) -> bool:
        self.pending.reports.compare_report(entry.uid, entry.reason)
        return self.pending.decide_report(entry.uid, pending).message

    async def _check(self, entries: Sequence[Entry], *, resumes: bool = False) -> list[Checked]:
        """Check New transfers; return those ready or pending, in order. What fails is checked again after a while.

        With `resumes`, read interrupted transfers, and return those whose next attempt has not begun.
        """
        check = self.examiner.check_interrupted if resumes else self._check_one

        async def check_one(entry: Entry) -> Checked | None:
            return await attempt(entry.log_fields, check(entry))

        results = await work_in_parallel(entries, check_one, at_a_time=_AT_A_TIME, name="admission check")
        return [checked for checked in results if checked is not None]

    async def _check_one(self, entry: Entry) -> Checked | None:
        self.pending.postpone(entry.uid)
        checked = await self.examiner.check(entry)
        if checked is None:
            return None
        match checked.admission.decision:
            case AdmissionState.READY:
                self.pending.ready(entry.uid)
                return checked
            case AdmissionState.PENDING:
                return await self._keep_pending(checked)
            case AdmissionState.FAILED:
                phase = Phase.CANCELED if checked.canceled else Phase.FAILED
                await self.writer.end(checked, phase, checked.admission.message)
                return None

    async def _keep_pending(self, checked: Checked) -> Checked | None:
        """Report and postpone a pending transfer; end one that is overdue, and return None for it."""
        cr, admission = checked.cr, checked.admission
        self.pending.observe(checked)
        if exceeded := self.pending.find_exceeded(cr.uid, admission, self.rules.prepare_timeout):
            message = f"could not start within {format_duration(exceeded)}: {admission.message}"
            await self.writer.end(checked, Phase.FAILED, message)
            return None
        await self.writer.report(checked, Pending(admission.reason, admission.message, blocked=admission.blocked))
        self.pending.schedule(cr.uid, admission)
        return checked

    def _in_order(self, entries: Iterable[Entry]) -> Iterable[Entry]:
        """Return the `entries` that are due, in the order of the queue."""
        return in_order(
            self.pending.due(entries), after=self.ledger.reservations.last_namespace, first=self.rules.first
        )

    def _unusable(self) -> frozenset[str]:
        """Return the uids that only this leader has reserved, and whose accept the API server rejects."""
        return self.pending.rejected() - self.ledger.found

    async def _release(self, unusable: Iterable[Checked]) -> set[str]:
        """Fence transfers that cannot use their reservations; return the uids of those that were."""
        fences = [(one.entry.uid, await attempt(one.entry.log_fields, self.writer.fence(one))) for one in unusable]
        return {uid for uid, stored in fences if stored is not None}


def settle_entries(ledger: AdmissionLedger, entries: Iterable[Entry]) -> frozenset[str]:
    """Return the uids that use the quota, by the ledger and by what is observed now."""
    phases = {entry.uid: entry.admission_phase for entry in entries if entry.managed or entry.phase is Phase.NEW}
    return settle(ledger.reservations.uids, phases)
