"""Copies of volumes, for tests of the rules of retention."""

from datetime import timedelta
from typing import Any, Final

from client.backups.copies import Copy
from core.models.phases import Phase
from tests.nodeagent.support.hand_clock import NOON

DAY: Final = timedelta(days=1)
DATA: Final = ("app", "data")


def make_copy(backup: str, days_old: float = 10, **more: Any) -> Copy:
    """Return a complete copy of app/data in `default`, which expires after a day."""
    values: dict[str, Any] = {"kind": "DataUpload", "transfer": f"{backup}-1", "snapshot_id": f"s-{backup}", "ttl": DAY}
    values |= {"location": "default", "phase": Phase.COMPLETED, "created": NOON - days_old * DAY}
    namespace, claim = more.pop("volume", DATA)
    return Copy(backup=backup, namespace=namespace, claim=claim, **{"uid": f"{backup}-{claim}"} | values | more)
