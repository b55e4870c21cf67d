"""Events about one object, as a user reads them."""

from core.kube.client import KubeClient, Selection
from core.kube.resources import EVENTS
from core.kube.types import Event
from core.models.base import Time, WireModel, parse_time

__all__ = ["EventLine", "event_line", "read_events"]


class EventLine(WireModel):
    """An Event on an object."""

    type: str = ""
    reason: str = ""
    message: str = ""
    count: int = 1
    last_seen: Time


async def read_events(client: KubeClient, namespace: str, uid: str) -> list[EventLine]:
    """Return the Events about the object with that UID, newest first.

    Raises:
        KubeError: they cannot be listed.
    """
    found = await client.list(Selection(EVENTS, namespace, field_selector=f"involvedObject.uid={uid}"))
    return sorted(map(event_line, found), key=lambda line: line.last_seen, reverse=True)


def event_line(raw: Event) -> EventLine:
    """Return an Event as JSON dict as a line."""
    seen = raw.get("lastTimestamp") or raw.get("eventTime") or raw["metadata"]["creationTimestamp"]
    return EventLine(
        type=raw.get("type") or "",
        reason=raw.get("reason") or "",
        message=raw.get("message") or "",
        count=raw.get("count") or 1,
        last_seen=parse_time(seen),
    )
