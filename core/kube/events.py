"""Recording of Events, in the format that Velero writes (core/v1).

Source: Kubernetes v1.34, client-go tools/record; tests/recordings/velero-1.18.2/events-*.json.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

from core.clock import Clock
from core.kube.client import KubeClient
from core.kube.errors import AlreadyExistsError, UnreachableError
from core.kube.event_files import MESSAGE_LIMIT_BYTES, write_event
from core.kube.resources import EVENTS, LONGEST_NAME
from core.kube.types import Object
from core.models.base import CustomResource, WireModel, format_time
from core.redact import redact

_log = logging.getLogger(__name__)

_ANSWER_SECONDS: Final = 10.0
"""Events may be in an etcd of their own that does not answer, and are not worth a longer wait."""

_CLUSTER_SCOPED_NAMESPACE: Final = "default"
"""Namespace of Events on cluster-scoped objects. Source: Kubernetes, validation of Events."""


class ObjectRef(WireModel, omit_defaults=True):
    """The object that an Event refers to: `involvedObject`."""

    api_version: str
    kind: str
    namespace: str = ""
    name: str
    uid: str = ""
    resource_version: str = ""

    @classmethod
    def of(cls, obj: Object | CustomResource) -> Self:
        """Return the reference to `obj`."""
        if isinstance(obj, CustomResource):
            return cls.like(obj.metadata, api_version=obj.api_version, kind=obj.kind)
        return cls.from_wire({**obj["metadata"], "apiVersion": obj["apiVersion"], "kind": obj["kind"]})


class EventRecorder:
    """Records Events as one component."""

    def __init__(
        self, client: KubeClient, clock: Clock, *, component: str, host: str, labels: Mapping[str, str] | None = None
    ) -> None:
        """Record through `client` as `component` on the node `host`; each Event gets `labels`."""
        self._client = client
        self._clock = clock
        self._source = {"component": component, "host": host}
        self._labels = {"labels": dict(labels)} if labels else {}
        self._files: Path | None = None

    def write_to(self, directory: Path) -> None:
        """Write each Event to a file in `directory`, too, before it is recorded."""
        self._files = directory

    async def record(self, about: ObjectRef, reason: str, message: str, *, warning: bool = False) -> None:
        """Record one Event on the object, in its namespace.

        What has the form of a secret is redacted; a message over 1,024 bytes is truncated. Raise UnreachableError if
        there is no answer soon.
        """
        now = format_time(self._clock.now())
        # Unique among the Events of the object, as in client-go: a time in nanoseconds.
        suffix = f".{time.time_ns():x}"
        meta = {
            "name": about.name[: LONGEST_NAME - len(suffix)].rstrip("-.") + suffix,
            "namespace": about.namespace or _CLUSTER_SCOPED_NAMESPACE,
            **self._labels,
        }
        event = EVENTS.build(
            meta,
            involvedObject=about.to_wire(),
            reason=reason,
            message=_truncate(redact(message)),
            source=self._source,
            type="Warning" if warning else "Normal",
            count=1,
            firstTimestamp=now,
            lastTimestamp=now,
        )
        if self._files is not None:
            try:
                write_event(self._files, event)
            except OSError as e:
                _log.warning("cannot write an Event to %s: %s", self._files, e.strerror, extra={"reason": reason})
        # An Event of that name is this one, created by an attempt whose response was lost.
        with suppress(AlreadyExistsError):
            try:
                async with asyncio.timeout(_ANSWER_SECONDS):
                    await self._client.create(EVENTS, event)
            except TimeoutError as e:
                raise UnreachableError(f"no answer to Event {reason} within {_ANSWER_SECONDS:.0f} s") from e


def _truncate(message: str) -> str:
    raw = message.encode(errors="replace")
    if len(raw) <= MESSAGE_LIMIT_BYTES:
        return message
    return raw[: MESSAGE_LIMIT_BYTES - 3].decode(errors="ignore") + "…"
