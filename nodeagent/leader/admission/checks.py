"""The checks of a pass: several at a time, each followed by what its result asks for.

A transfer that was canceled or can never start is ended, a pending one is reported and postponed, and
one that is ready is returned to be admitted.
"""

from collections.abc import Sequence
from typing import Final

from core.models.phases import Phase
from core.models.units import format_duration
from exposer.model import Pending
from nodeagent.leader.admission.examiner import Checked, CheckState, Examiner
from nodeagent.leader.admission.pending import PendingTransfers
from nodeagent.leader.admission.writer import AdmissionWriter
from nodeagent.leader.context import DispatchRules
from nodeagent.leader.index import Entry
from nodeagent.runtime.tasks import attempt, work_in_parallel

__all__ = ["AdmissionChecks"]

_AT_A_TIME: Final = 16


class AdmissionChecks:
    """Checks transfers and carries out what the results ask for."""

    def __init__(
        self, rules: DispatchRules, examiner: Examiner, pending: PendingTransfers, writer: AdmissionWriter
    ) -> None:
        """Check through `examiner`, schedule by `pending`, write through `writer`."""
        self._rules = rules
        self._examiner = examiner
        self._pending = pending
        self._writer = writer

    async def run(self, entries: Sequence[Entry]) -> list[Checked]:
        """Check `entries`; return those that are ready or pending, in order.

        A check that fails is logged, and repeated after a while.
        """

        async def check(entry: Entry) -> Checked | None:
            return await attempt(entry.log_fields, self._check(entry))

        results = await work_in_parallel(entries, check, at_a_time=_AT_A_TIME, name="admission check")
        return [checked for checked in results if checked is not None]

    async def run_interrupted(self, entries: Sequence[Entry]) -> list[Checked]:
        """Read `entries`, which are interrupted; return those whose next attempt has not begun, in order."""

        async def check(entry: Entry) -> Checked | None:
            return await attempt(entry.log_fields, self._examiner.check_interrupted(entry))

        results = await work_in_parallel(entries, check, at_a_time=_AT_A_TIME, name="resumption check")
        return [checked for checked in results if checked is not None]

    async def _check(self, entry: Entry) -> Checked | None:
        self._pending.postpone_check(entry.uid)
        checked = await self._examiner.check(entry)
        if checked is None:
            return None
        match checked.state:
            case CheckState.READY:
                self._pending.ready(entry.uid)
                return checked
            case CheckState.PENDING:
                return await self._keep_pending(checked)
            case CheckState.FAILED:
                await self._writer.end(checked, Phase.FAILED, checked.admission.message)
            case CheckState.CANCELED:
                await self._writer.end(checked, Phase.CANCELED, checked.admission.message)
        return None

    async def _keep_pending(self, checked: Checked) -> Checked | None:
        """Report and postpone a pending transfer; end one that is overdue, and return None for it."""
        cr, admission = checked.cr, checked.admission
        self._pending.observe(checked)
        limit = min(admission.limit or self._rules.prepare_timeout, self._rules.prepare_timeout)
        if self._pending.is_overdue(cr.uid, limit):
            message = f"could not start within {format_duration(limit)}: {admission.message}"
            await self._writer.end(checked, Phase.FAILED, message)
            return None
        await self._writer.report(checked, Pending(admission.reason, admission.message, blocked=admission.blocked))
        self._pending.schedule(cr.uid, admission)
        return checked
