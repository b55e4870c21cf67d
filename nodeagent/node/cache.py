"""What one agent keeps in memory of the cluster: its loads, and the pods of its node.

Knows the caches, which load a pod belongs to, and what became of pods that went away. Does not
know what is done about a change (`nodeagent.node.reconciler`).
"""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from core.clock import Clock
from core.errors import ContractError
from core.kube.client import KubeClient, Selection
from core.kube.resources import PODS
from core.models.base import JsonDict
from core.models.names import NODE_LABEL
from core.models.transfers import Transfer
from nodeagent.node.lifecycle import Site, TransferKey
from nodeagent.runtime.informer import Informer
from nodeagent.transfers.kinds.base import Kind
from nodeagent.transfers.mover_pod import trim_pod

__all__ = ["TransferCache", "TransferListener"]


class TransferListener(Protocol):
    """A subscriber to changes of the cache; its methods must not block."""

    def on_transfer(self, key: TransferKey, uid: str) -> None:
        """Handle an added, changed or removed transfer; `uid` differs from the cached one if it was replaced."""
        ...

    def on_pod(self, key: TransferKey) -> None:
        """Handle an added, changed or removed mover pod of the transfer."""
        ...


class TransferCache:
    """The loads with this node's label, and the pods on this node that belong to a load."""

    def __init__(self, client: KubeClient, clock: Clock, site: Site, *, kinds: Sequence[Kind]) -> None:
        """Follow transfers of `kinds` for the agent of `site`."""
        self._listeners: list[TransferListener] = []
        self._kinds = {kind.name: kind for kind in kinds}
        self._departed: dict[TransferKey, JsonDict] = {}
        self._written: dict[TransferKey, tuple[str, str]] = {}
        selector = f"{NODE_LABEL}={site.label}"
        self._loads = {
            kind.name: Informer(
                client,
                Selection(kind.resource, site.namespace, label_selector=selector),
                clock=clock,
                trim=lambda raw: raw,
                on_change=partial(self._notify_transfer, kind.name),
            )
            for kind in kinds
        }
        # Without a label: a mover that a peer's agent made carries none of ours.
        self._pods = Informer(
            client,
            Selection(PODS, site.namespace, field_selector=f"spec.nodeName={site.node}"),
            clock=clock,
            trim=trim_pod,
            on_change=self._notify_pod,
        )

    def subscribe(self, listener: TransferListener) -> None:
        """Notify `listener` of every change, after the cache has it."""
        self._listeners.append(listener)

    async def run(self) -> None:
        """Follow until canceled."""
        async with asyncio.TaskGroup() as group:
            for informer in (*self._loads.values(), self._pods):
                group.create_task(informer.run(), name="informer")

    async def wait_synced(self) -> None:
        """Return once everything was listed."""
        for informer in (*self._loads.values(), self._pods):
            await informer.synced.wait()

    def not_synced(self) -> list[str]:
        """Return which collections were not read yet, in words."""
        waiting = [f"{name}s" for name, informer in self._loads.items() if not informer.synced.is_set()]
        return waiting if self._pods.synced.is_set() else [*waiting, "mover pods"]

    def transfer_keys(self) -> list[TransferKey]:
        """Return the loads of this node."""
        return [_key(name, raw) for name, informer in self._loads.items() for raw in informer.items()]

    def raw(self, key: TransferKey) -> JsonDict | None:
        """Return a load of this node as last seen; None where there is none."""
        return self._loads[key[0]].get(key[1], key[2])

    def note_written(self, cr: Transfer) -> None:
        """Note the version of a load that a write of ours has made."""
        key = (cr.kind_name, cr.metadata.namespace, cr.name)
        if self.raw(key) is not None:
            self._written[key] = (cr.uid, cr.metadata.resource_version)

    def current(self, key: TransferKey) -> JsonDict | None:
        """Return a load of this node as last seen; None where there is none, or something that we wrote is missing.

        What others have written may be missing even so, for as long as a watch takes: whoever
        acts on it makes sure by the preconditions of his write.
        """
        raw = self.raw(key)
        if raw is None:
            return None
        meta = raw["metadata"]
        uid, version = self._written.get(key, ("", ""))
        return None if meta["uid"] == uid and _is_older(meta["resourceVersion"], version) else raw

    def load(self, key: TransferKey) -> Transfer | None:
        """Return a load of this node as last seen; None where there is none that can be read."""
        raw = self.raw(key)
        try:
            return None if raw is None else self._kinds[key[0]].parse(raw)
        except ContractError:
            # Handling the key says so, once.
            return None

    def pod(self, key: TransferKey) -> JsonDict | None:
        """Return the pod of that load's name on this node, trimmed."""
        return self._pods.get(key[1], key[2])

    def departed(self, key: TransferKey) -> JsonDict | None:
        """Return the pod of that load's name that went away last, as it was last seen."""
        return self._departed.get(key)

    def forget(self, key: TransferKey) -> None:
        """Drop what is remembered about that load's pods."""
        self._departed.pop(key, None)

    def _notify_transfer(self, kind_name: str, raw: JsonDict) -> None:
        key = _key(kind_name, raw)
        if self.raw(key) is None:
            self._written.pop(key, None)
        for listener in self._listeners:
            listener.on_transfer(key, raw["metadata"]["uid"])

    def _notify_pod(self, pod: JsonDict) -> None:
        meta = pod["metadata"]
        for owner in meta.get("ownerReferences") or []:
            key = (owner["kind"], meta["namespace"], owner["name"])
            if owner["kind"] not in self._kinds:
                continue
            if self.pod(key) is None and self.raw(key) is not None:
                self._departed[key] = pod
            for listener in self._listeners:
                listener.on_pod(key)


def _is_older(version: str, than: str) -> bool:
    """Whether a resourceVersion was made before another one; where that cannot be told, whether it is another one.

    Source: Kubernetes v1.35, API concepts, "Resource versions": those of one resource can be compared as numbers.
    """
    if version.isdecimal() and than.isdecimal():
        return int(version) < int(than)
    return version != than


def _key(kind_name: str, raw: JsonDict) -> TransferKey:
    meta = raw["metadata"]
    return (kind_name, meta["namespace"], meta["name"])
