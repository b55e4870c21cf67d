"""When a repository is maintained next, and why not before: as the leader says, or as its resource shows.

Pure: what a user sees of a decision that `nodeagent.maintenance.rules` makes.
"""

import dataclasses
from datetime import datetime
from typing import Final, Self

from msgspec.structs import replace

from client.leader_page import LeaderDecision
from core.contract import MaintenanceMode
from core.errors import ContractError
from core.models.base import Time, WireModel, parse_time
from nodeagent.maintenance.record import MaintenanceRecord
from nodeagent.maintenance.rules import Decision, Hold, MaintenanceView, decide_maintenance

__all__ = ["NextMaintenance", "compute_next"]

_REASONS: Final = {
    Hold.OFF: "maintenance is switched off (serve --repo-maintenance=off)",
    Hold.SERVER: "the Velero server in the namespace maintains it",
    Hold.SERVER_SEEN: "a Velero server was there less than an hour ago, or the leader has not looked for as long",
    Hold.JOB_UNFINISHED: "a Job runs",
    Hold.NEVER_READY: "the repository was never Ready: its message says why",
    Hold.LOCATION_MISSING: "its backup storage location does not exist",
    Hold.LOCATION_READ_ONLY: "its backup storage location is ReadOnly, so nothing may be written",
    Hold.LOCATION_UNAVAILABLE: "its backup storage location is Unavailable: its status.message says why",
    Hold.FOREIGN: "another cluster, or a user, maintains the repository; serve --repo-maintenance=on ignores that",
    Hold.BLOCKED: "the last run failed, and the next one would too until location, credentials or password change",
    Hold.BACK_OFF: "the last run failed",
    Hold.IDLE: "nothing has changed since the last run",
    Hold.NOT_OBSERVED: "the leader waits for the answers of its watches",
    Hold.NOT_DUE: "it is maintained",
    Hold.WINDOW: "no window is open",
    Hold.CONCURRENCY: "as many Jobs run as maxConcurrentJobs allows",
    Hold.REJECTED: "the API server rejects the pod of the Job: see the Event MaintenanceRejected",
}


class NextMaintenance(WireModel):
    """The next maintenance of one repository.

    `hold` says why nothing runs now, as on the leader's status page; empty: a run is due. `due` is when it is or was
    due; None: not known, since it would not run then either. `until` is when time alone may end the hold. `mode` is
    what kopia's schedule asks for then, as recorded by the last run: quick or full; empty: not known. `from_leader`:
    the leader said so; otherwise it follows from what this command could read, and `due` is the earliest time.
    """

    hold: str = ""
    reason: str = ""
    mode: str = ""
    due: Time | None = None
    until: Time | None = None
    overdue: bool = False
    from_leader: bool = False

    @classmethod
    def of_leader(cls, said: LeaderDecision, record: MaintenanceRecord, now: datetime) -> Self:
        """Return what the leader said; a later version may know holds that have no explanation here."""
        try:
            due = parse_time(said.due) if said.due else None
        except ContractError:
            due = None
        decided = cls(hold=said.hold, due=due, overdue=said.overdue, from_leader=True)
        return decided._explained(record, now)

    @classmethod
    def of_decision(cls, decision: Decision, record: MaintenanceRecord, now: datetime) -> Self:
        """Return what was decided here."""
        decided = cls(
            hold=str(decision.hold or ""), due=decision.due_at, until=decision.wait_until, overdue=decision.overdue
        )
        return decided._explained(record, now)

    def _explained(self, record: MaintenanceRecord, now: datetime) -> Self:
        reason = _REASONS[Hold(self.hold)] if self.hold in set(Hold) else self.hold
        return replace(self, reason=reason, mode=_mode_at(record, max(self.due or now, now)))


def _mode_at(record: MaintenanceRecord, moment: datetime) -> str:
    """Return what a run at that time would do, by kopia's schedule; empty if it is not known."""
    if record.at is None:
        return ""
    full = record.next_full is not None and record.next_full <= moment
    return str(MaintenanceMode.FULL if full else MaintenanceMode.QUICK)


def compute_next(view: MaintenanceView) -> NextMaintenance:
    """Return the next maintenance without the leader.

    Two facts of `view` are unknown outside of the leader, and assumed: that something has been backed up since the last
    run, so that no time is too late; and that what a failure depends on has not changed.
    """
    record = view.record
    assumed = dataclasses.replace(view, fingerprint=f"since {record.fingerprint}", inputs=record.blocked_inputs)
    try:
        decision = decide_maintenance(assumed)
    except OverflowError:
        return NextMaintenance(hold="invalid", reason="a time or duration of its maintenance is out of range")
    return NextMaintenance.of_decision(decision, record, view.now)
