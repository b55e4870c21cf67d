"""What Events on a pod or a claim say about why it waits.

Knows which Event still holds: the newest trouble, unless something has gone on since. Pure:
does not know when Events are asked for (`exposer.causes`).
Source: Kubernetes v1.34, pkg/kubelet/events/event.go, pkg/controller/volume/events/event.go;
kubernetes-csi/external-provisioner v5, pkg/controller.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from core.models.base import JsonDict

__all__ = ["Words", "about_claim", "about_pod"]

_WENT_ON: Final = frozenset(
    {"Scheduled", "SuccessfulAttachVolume", "SuccessfulMountVolume", "Pulling", "Pulled", "Created", "Started"}
)
"""Steps of a pod's start: what went wrong before one of them is over."""

_PULLING: Final = "Pulling"
_BEGINS: Final = "Provisioning"
_EARLIEST: Final = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True)
class Words:
    """What was said: `reason` in CamelCase, `text` on one line; `trouble` is a warning."""

    reason: str
    text: str
    trouble: bool


def about_pod(events: Sequence[JsonDict]) -> Words | None:
    """Return what the Events of a pod that has its node say about its start; None: nothing of interest.

    `events` come by name, which is the order in which they began.
    """
    last = _latest([event for event in events if _warns(event) or event.get("reason") in _WENT_ON])
    if last is None or not (_warns(last) or last.get("reason") == _PULLING):
        return None
    return _words(last)


def about_claim(events: Sequence[JsonDict]) -> Words | None:
    """Return what the Events of a claim without a volume say about it; None: nothing.

    `events` come by name, which is the order in which they began.
    """
    trouble = _latest([event for event in events if _warns(event)])
    if trouble is None:
        last = _latest(events)
        return None if last is None else _words(last)
    # Whoever makes the volumes has taken it up: what others missed before is there by now.
    taken_up = [event for event in events if event.get("reason") == _BEGINS and _teller(event) != _teller(trouble)]
    last = _latest([trouble, *taken_up])
    return None if last is None else _words(last)


def _words(event: JsonDict) -> Words:
    text = " ".join(str(event.get("message") or "").split())
    return Words(str(event.get("reason") or "Unknown"), text, _warns(event))


def _warns(event: JsonDict) -> bool:
    return event.get("type") == "Warning"


def _latest(events: Sequence[JsonDict]) -> JsonDict | None:
    """Return the one that was seen last; of those of one second the one that began last."""
    order = sorted(range(len(events)), key=lambda index: (_time(events[index]), index))
    return events[order[-1]] if order else None


def _time(event: JsonDict) -> datetime:
    """Return when the event was seen last, in whole seconds: most have no finer time."""
    series = (event.get("series") or {}).get("lastObservedTime")
    created = (event.get("metadata") or {}).get("creationTimestamp")
    told = [series, event.get("lastTimestamp"), event.get("eventTime"), created]
    times = [datetime.fromisoformat(text).replace(microsecond=0) for text in told if text]
    return max(times, default=_EARLIEST)


def _teller(event: JsonDict) -> str:
    return str(event.get("reportingComponent") or (event.get("source") or {}).get("component") or "")
