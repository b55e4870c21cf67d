"""All loads of the namespace, each reduced to what their dispatcher needs.

Knows one small entry a load, kept by list and watch. Does not know what is decided about
them. An entry takes well under 2 KiB, however large the custom resource is.
"""

import asyncio
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from core.clock import Clock
from core.errors import ContractError
from core.kube.client import KubeClient, Selection
from core.logs import fields
from core.models.base import JsonDict
from core.models.names import NODE_LABEL
from core.models.phases import Phase
from nodeagent.runtime.informer import Informer
from nodeagent.transfers.kinds.base import Kind

__all__ = ["Entry", "TransferIndex", "build_entry"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Entry:
    """One load as the dispatcher remembers it.

    `queue` is the namespace whose turn it is when the load is admitted. `created` is the
    creation time as the API prints it, which sorts as time does. `stop`: somebody wants it to
    end. `managed`: it is meant for this data mover. `node_label`: who works on it.
    `finalizer`: it has its kind's. `reason`: its pending reason as reported, empty where none was.
    `fault` names the fields for which it cannot be read, where it may be
    meant for us.
    """

    kind: str
    namespace: str
    name: str
    uid: str
    phase: Phase
    queue: str
    created: str
    stop: bool
    managed: bool
    node_label: str
    finalizer: bool
    reason: str
    fault: str = ""

    @property
    def log_fields(self) -> dict[str, Any]:
        """The load's identity, as fields of a log line."""
        return fields(kind=self.kind, namespace=self.namespace, name=self.name, uid=self.uid)

    @property
    def key(self) -> tuple[str, str, str]:
        """Kind, namespace and name."""
        return (self.kind, self.namespace, self.name)


def build_entry(kind: Kind, raw: JsonDict) -> Entry:
    """Return the entry of `raw`, a load of `kind`; one that cannot be read counts as not managed."""
    fault = ""
    try:
        cr = kind.parse(raw)
        queue, managed, phase = sys.intern(kind.queue_namespace(cr)), kind.managed(cr), cr.phase
        stop, reason = cr.cancel_requested, sys.intern(str(cr.pending_reason))
    except ContractError as e:
        meta = raw["metadata"]
        told = fields(kind=kind.name, namespace=meta["namespace"], name=meta["name"], uid=meta["uid"])
        _log.warning("left alone: %s", e, extra=told)
        queue, managed, phase, stop, reason = "", False, Phase.NEW, False, ""
        spec = raw.get("spec")
        named = spec.get("datamover", "") if isinstance(spec, dict) else ""
        fault = str(e) if not isinstance(named, str) or named in kind.datamovers else ""
    meta = raw["metadata"]
    return Entry(
        kind=kind.name,
        namespace=sys.intern(meta["namespace"]),
        name=meta["name"],
        uid=meta["uid"],
        phase=phase,
        queue=queue,
        created=meta.get("creationTimestamp", ""),
        stop=stop,
        managed=managed,
        node_label=sys.intern((meta.get("labels") or {}).get(NODE_LABEL, "")),
        finalizer=kind.finalizer in (meta.get("finalizers") or []),
        reason=reason,
        fault=fault,
    )


class TransferIndex:
    """The loads of all kinds in one namespace."""

    def __init__(
        self,
        client: KubeClient,
        clock: Clock,
        *,
        namespace: str,
        kinds: Sequence[Kind],
        on_change: Callable[[Entry], None],
    ) -> None:
        """Follow the loads of `kinds`; `on_change` gets each entry that came, changed or went."""
        self._informers = [
            Informer(
                client,
                Selection(kind.resource, namespace),
                clock=clock,
                trim=partial(build_entry, kind),
                on_change=on_change,
            )
            for kind in kinds
        ]

    async def run(self) -> None:
        """Follow until canceled."""
        async with asyncio.TaskGroup() as group:
            for informer in self._informers:
                group.create_task(informer.run(), name="load index")

    async def wait_synced(self) -> None:
        """Return once every kind was listed."""
        for informer in self._informers:
            await informer.synced.wait()

    def entries(self) -> list[Entry]:
        """Return the entries of all loads there are."""
        return [entry for informer in self._informers for entry in informer.items()]
