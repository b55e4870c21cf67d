"""The life of one transfer: its phases with their times, and the same in sentences. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from client.status.describe import TransferDetails
from client.text import format_bytes
from core.models.base import parse_time
from core.models.phases import Phase
from core.text import format_age

__all__ = ["Stage", "find_stages", "tell_story"]


@dataclass(frozen=True)
class Stage:
    """What the transfer did from `began` to `ended`: `pending`, `preparing` or `moving`."""

    name: str
    began: datetime
    ended: datetime

    @property
    def length(self) -> timedelta:
        """How long it took; a node's clock may differ from the API server's, and time does not run back."""
        return max(self.ended - self.began, timedelta())


def find_stages(one: TransferDetails, now: datetime) -> list[Stage]:
    """Return its stages up to its end, or to now; none if it is not known when it was created."""
    if not one.created:
        return []
    created = parse_time(one.created)
    started = next((moment.at for moment in one.history if moment.what == Phase.IN_PROGRESS), one.began)
    borders = [("pending", created), ("preparing", one.accepted), ("moving", started)]
    known = [(name, moment) for name, moment in borders if moment is not None]
    ends = [moment for _, moment in known[1:]] + [max(one.completed or now, created)]
    return [Stage(name, moment, end) for (name, moment), end in zip(known, ends, strict=True)]


def tell_story(one: TransferDetails, now: datetime) -> list[str]:
    """Return what has become of it, a sentence for each step; nothing if it is not known when it was created."""
    stages = {stage.name: stage for stage in find_stages(one, now)}
    if "pending" not in stages:
        return []
    return list(_tell(one, stages, now))


def _tell(one: TransferDetails, stages: dict[str, Stage], now: datetime) -> Iterator[str]:
    pending, preparing, moving = (stages.get(name) for name in ("pending", "preparing", "moving"))
    what = "back up" if one.is_backup else "restore"
    if pending is not None:
        yield f"It was created {format_age(now - pending.began)} ago to {what} {one.queue}/{one.volume}."
    where = f" on node {one.node}" if one.node else ""
    if preparing is not None and pending is not None:
        yield f"After {format_age(pending.length)} the leader accepted it."
    if moving is not None and preparing is not None:
        yield f"After {format_age(preparing.length)} more, its data mover{where} began to move data."
    for end in one.interruptions:
        there = f" on node {end.node}" if end.node else ""
        yield f"It was interrupted {format_age(now - end.at)} ago{there}: {end.cause}."
    if one.phase.final:
        yield _tell_end(one, moving)
    elif one.moving:
        share = f" of {format_bytes(one.total_bytes)}" if one.total_bytes else ""
        attempt = f" in attempt {one.number}" if one.number > 1 else ""
        yield f"It has moved {format_bytes(one.bytes_done)}{share}{attempt}."
    elif one.reason:
        yield f"It waits: {one.reason}{f': {one.message}' if one.message else ''}."
    if one.canceling:
        yield "It is being canceled."


def _tell_end(one: TransferDetails, moving: Stage | None) -> str:
    after = f" after {format_age(moving.length)}" if moving is not None else ""
    if one.phase is Phase.COMPLETED:
        new = "" if one.new_bytes is None else f", {format_bytes(one.new_bytes)} of it new"
        return f"It moved {format_bytes(one.total_bytes)}{new}, and completed{after}."
    how = "failed" if one.phase is Phase.FAILED else "was canceled"
    return f"It {how}{after}{f': {one.message}' if one.message else ''}."
