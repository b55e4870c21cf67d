"""A mover's log, taken over into the agent's own before the pod goes.

Knows how much is taken and how each line is marked. Does not know when a pod is deleted.
"""

import asyncio
import logging
import re
from typing import Final

from core.kube.client import KubeClient
from core.kube.errors import KubeError
from core.logs import bind
from core.models.base import JsonDict
from core.models.transfers import Load

__all__ = ["MoverLogs", "add_log_end"]

_log = logging.getLogger(__name__)

_LIMIT_BYTES: Final = 4 * 1024 * 1024
"""What is taken over of one mover's log: its end."""

_TIMEOUT_SECONDS: Final = 30.0
"""A kubelet that does not answer holds up the load's end for no longer than this."""

_LINES_AT_A_TIME: Final = 500
"""After so many lines everything else gets its turn."""

_TAIL_LINES: Final = 5
_TAIL_LIMIT_CHARACTERS: Final = 1024
"""What of the log reaches the message of a load that failed."""

_TELLING_CHARACTERS: Final = 12
"""A shorter part of a message says nothing about which line of a log it repeats."""

_PARTS: Final = re.compile(r"\n|; ")


def add_log_end(message: str, tail: str) -> str:
    """Return `message` with those lines of `tail`, a log's end, that tell more than it does."""
    told = [part.strip() for part in _PARTS.split(message) if len(part.strip()) >= _TELLING_CHARACTERS]
    lines = [line.strip() for line in tail.splitlines() if line.strip()]
    news = [line for line in lines if line not in message and not any(part in line for part in told)]
    return f"{message}; its log ends: " + "\n".join(news) if news else message


class MoverLogs:
    """Takes over each mover's log once."""

    def __init__(self, client: KubeClient) -> None:
        """Read logs through `client`."""
        self._client = client
        self._taken: dict[str, tuple[str, str]] = {}

    async def take_over(self, cr: Load, pod: JsonDict | None) -> str:
        """Write the log of `pod`, the mover of `cr`, into the agent's log.

        Writes nothing where there is no pod, where it never ran, or where its log was taken before. A log that
        cannot be had is told and given up: the load's end is worth more.

        Returns:
            the log's last lines, empty where there are none or they cannot be had.
        """
        if pod is None or not _has_run(pod):
            return ""
        meta = pod["metadata"]
        taken_of, tail = self._taken.get(cr.uid, ("", ""))
        if taken_of == meta["uid"]:
            return tail
        log = bind(
            _log,
            kind=cr.kind_name,
            namespace=cr.metadata.namespace,
            name=cr.name,
            uid=cr.uid,
            pod=meta["name"],
        )
        try:
            async with asyncio.timeout(_TIMEOUT_SECONDS):
                text = await self._client.pod_log(meta["namespace"], meta["name"], limit_bytes=_LIMIT_BYTES)
        except (KubeError, TimeoutError) as e:
            log.warning("the mover's log could not be taken over: %s", e)
            return ""
        lines = text.splitlines()
        tail = "\n".join(lines[-_TAIL_LINES:])[-_TAIL_LIMIT_CHARACTERS:]
        self._taken[cr.uid] = (meta["uid"], tail)
        for number, line in enumerate(lines, 1):
            log.info("mover: %s", line)
            if number % _LINES_AT_A_TIME == 0:
                await asyncio.sleep(0)
        return tail

    def forget(self, uid: str) -> None:
        """Drop what is remembered about the load of that uid."""
        self._taken.pop(uid, None)


def _has_run(pod: JsonDict) -> bool:
    """Whether a container of `pod` was ever started, so that there is a log."""
    status = pod.get("status") or {}
    phase = status.get("phase", "Pending")
    ended = any((each.get("state") or {}).get("terminated") for each in status.get("containerStatuses") or [])
    # A pod that the kubelet refused, or that was evicted before it began, has failed without a container.
    return phase != "Pending" and (phase != "Failed" or ended)
