"""Why each copy that a schedule has made stays, or goes with its next run."""

from collections.abc import Iterator
from typing import Final

from msgspec import field

from client.backups.copies import UTC_ZONE, Copy
from client.backups.delete import DeletionError, DeletionTools, plan_expired
from client.backups.retention import KeepReason, RetentionDecision, limit_deletions
from client.schedules.request import ScheduleRequest
from core.models.base import Int64, Time, WireModel
from core.models.units import format_duration

__all__ = ["ExplainedCopy", "RetentionExplanation", "explain_retention"]

_NO_RULE: Final = "no rule keeps it"


class ExplainedCopy(WireModel):
    """One volume of a backup: it stays for all of `reasons`, or goes; `rules` are the names of those that keep it."""

    backup: str
    namespace: str
    claim: str
    location: str
    transfer: str
    created: Time | None
    bytes: Int64
    stays: bool
    rules: list[str]
    reasons: list[str]


class RetentionExplanation(WireModel):
    """What a schedule keeps, and its copies by volume, the newest first.

    An empty `ttl`: it has none. `keep` has the counts by their rules, whose periods are of `time_zone`.
    """

    schedule: str
    ttl: str
    keep: dict[str, int]
    time_zone: str
    copies: list[ExplainedCopy] = field(default_factory=list)


async def explain_retention(tools: DeletionTools, request: ScheduleRequest) -> RetentionExplanation:
    """Return what would become of the copies of a schedule, as far as is known without Jobs that read the snapshots.

    Raises:
        DeletionError: nothing may be deleted here, or what would be needed to decide is not known.
        KubeError: the API server rejected a request.
    """
    plan = await plan_expired(tools, policies=request.policies)
    if plan.now is None:
        raise DeletionError("the time is not known")
    existing = {copy.uid for one in plan.judgments for copy in one.copies}
    judged = limit_deletions(plan.judgments, plan.record.find_gone(existing, plan.now), plan.now)
    copies = [(copy, one) for one in judged for copy in one.copies if copy.schedule == request.label]
    copies.sort(key=lambda one: one[0].age_key, reverse=True)
    copies.sort(key=lambda one: one[0].series)
    return RetentionExplanation(
        schedule=request.name,
        ttl=format_duration(request.ttl) if request.ttl is not None else "",
        keep=request.keep.by_name if request.keep else {},
        time_zone=request.keep.zone if request.keep else UTC_ZONE,
        copies=[_explain(copy, one) for copy, one in copies],
    )


def _explain(copy: Copy, decision: RetentionDecision) -> ExplainedCopy:
    namespace, claim = copy.volume
    holds = list(_find_holds(copy, decision))
    return ExplainedCopy(
        backup=copy.backup,
        namespace=namespace,
        claim=claim,
        location=copy.location,
        transfer=f"{copy.kind}/{copy.transfer}",
        created=copy.created,
        bytes=copy.bytes,
        stays=bool(holds),
        rules=list(dict.fromkeys(str(hold.rule) for hold in holds)),
        reasons=[hold.text for hold in holds] or [_NO_RULE],
    )


def _find_holds(copy: Copy, decision: RetentionDecision) -> Iterator[KeepReason]:
    """Yield what keeps the copy itself; else, what keeps another one of its backup."""
    own = [hold for hold in decision.holds if hold.uid in {copy.uid, None}]
    yield from own
    for hold in decision.holds[:1] if not own else ():
        other = next(one for one in decision.copies if one.uid == hold.uid)
        yield KeepReason(hold.rule, f"it goes only with {other.shown_volume}: {hold.text}", hold.uid)
