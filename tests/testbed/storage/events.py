"""Records Events on an object; each one once."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from tests.testbed.storage.objects import DRIVER, EVENTS

if TYPE_CHECKING:
    from tests.testbed.api import Api, Json

__all__ = ["Recorder"]


class Recorder:
    """Writes Events as the sidecars of a CSI driver do."""

    def __init__(self, api: Api) -> None:
        """Write through `api`."""
        self._api = api
        self._recorded: set[tuple[str, str, str]] = set()

    def record(self, item: Json, reason: str, message: str) -> None:
        """Record an Event on a claim or a snapshot, unless the same was recorded before.

        Args:
            item: The object.
            reason: One word; if it ends in `Failed`, the Event is a warning.
            message: What happened.
        """
        metadata = item["metadata"]
        key = (metadata["uid"], reason, message)
        if key in self._recorded:
            return
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        reference = {name: metadata[name] for name in ("name", "namespace", "uid")}
        body = {
            "metadata": {
                "namespace": metadata["namespace"],
                "name": f"{metadata['name']}.{secrets.token_hex(8)}",
            },
            "involvedObject": {"kind": item["kind"], "apiVersion": item["apiVersion"], **reference},
            "reason": reason,
            "message": message,
            "type": "Warning" if reason.endswith("Failed") else "Normal",
            "source": {"component": DRIVER},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        self._api.create(EVENTS, body)
        self._recorded.add(key)
