"""Durations, sizes, moments and Events in their short form, for people, and the lines of a log for them."""

import sys
from collections.abc import Iterable
from datetime import datetime
from typing import Final

from core.contract import DataPathReason, ProgressMessage
from core.errors import ContractError
from core.kube.errors import NotFoundError
from core.models.backups import Shrinkage
from core.models.base import Time, WireModel, format_time
from core.models.transfer_settings import BandwidthLimits
from core.models.verification import WHOLE_PERCENT, Verification
from core.text import format_age, hinted, one_line

_KIB: Final = 1024

MOST_SECONDS: Final = 1e9
"""The longest duration that is shown: sizes that anyone may write lead to more than can be computed with."""


def format_verification(found: Verification | None, now: datetime) -> str:
    """Return what the last verification found, and when; empty: there is none."""
    if found is None:
        return ""
    share = "" if found.percent == WHOLE_PERCENT else f", {found.percent:g} % of the files"
    return f"{found.outcome} {format_ago(found.at, now)}{share}"


def format_shrinkage(found: Shrinkage | None, now: datetime) -> str:
    """Return how a backup is Shrunk, and when that was acknowledged; empty: it is not."""
    if found is None:
        return ""
    known = found.acknowledged
    return f"from {_sizes(found.full_files, found.full_bytes)} to {_sizes(found.files, found.bytes)}" + (
        f", acknowledged {format_ago(known, now)}" if known is not None else ""
    )


def _sizes(files: int | None, size: int) -> str:
    return format_bytes(size) if files is None else f"{files} files with {format_bytes(size)}"


def format_bytes(size: int) -> str:
    """Return a number of bytes with a binary unit, such as `1.5 GiB`."""
    number, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(number) < _KIB:
            break
        number, unit = number / _KIB, larger
    return f"{size} B" if unit == "B" else f"{number:.1f} {unit}"


def format_ago(moment: datetime | None, now: datetime) -> str:
    """Return how long ago it was, such as `3h ago`; `-`: it was not, or it is not known when."""
    return f"{format_age(now - moment)} ago" if moment is not None else "-"


def format_moment(moment: datetime | None, now: datetime) -> str:
    """Return the time, and how far away it is; empty: it is not known."""
    return f"{format_time(moment)} ({format_distance(moment, now)})" if moment is not None else ""


def format_distance(moment: datetime, now: datetime) -> str:
    """Return how far away it is, such as `in 3h` or `3h ago`."""
    return f"in {format_age(moment - now)}" if moment > now else format_ago(moment, now)


def missing(text: str, name: str, candidates: Iterable[str]) -> NotFoundError:
    """Return the error for a name that a user gave, with the hint which of the candidates may be meant."""
    return NotFoundError(hinted(text, name, candidates), status=404, reason="NotFound")


class EventLine(WireModel):
    """An Event on an object."""

    type: str = ""
    reason: str = ""
    message: str = ""
    count: int = 1
    last_seen: Time


def format_event(reason: str, message: str) -> str:
    """Return the message of an Event; what a data mover writes as JSON, for agents, in words."""
    if reason not in {DataPathReason.PROGRESS, DataPathReason.COMPLETED}:
        return message
    try:
        said = ProgressMessage.from_json(message)
    except ContractError:
        return message
    total = format_bytes(said.total_bytes)
    if reason == DataPathReason.COMPLETED:
        return f"{total} moved"
    return f"{format_bytes(said.done_bytes)} of {total}, {format_bytes(said.bytes_per_second)}/s"


def format_limits(limits: BandwidthLimits) -> str:
    """Return how much a data mover may exchange with its storage, such as `47.7 MiB/s sent`; empty: there is no limit.

    A direction without a limit is left out.
    """
    rates = {"sent": limits.upload_bytes_per_second, "received": limits.download_bytes_per_second}
    return ", ".join(f"{format_bytes(rate)}/s {way}" for way, rate in rates.items() if rate)


def print_line(text: str) -> None:
    """Print one line to the log of a pod, at once."""
    sys.stdout.write(f"{one_line(text)}\n")
    sys.stdout.flush()
