"""The last observed transfers and mover pods of one node, kept current by watches."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from core.clock import Clock
from core.errors import AgentError, ContractError
from core.kube.client import KubeClient, Selection
from core.kube.resources import PODS
from core.kube.types import Pod, UncheckedObject
from core.models.names import NODE_LABEL
from core.models.phases import RUNNING_PHASES, AttemptStage, Phase
from core.models.transfers import Transfer
from nodeagent.node.lifecycle import Observation, Site, TransferKey
from nodeagent.runtime.informer import Informer
from nodeagent.transfers.kinds.base import Kind
from nodeagent.transfers.mover_pod import is_current, may_take_over, trim_pod

_NEEDS_POD: Final = RUNNING_PHASES | {Phase.PREPARED}
"""In these phases a missing mover pod ends the transfer, or has it created again."""


class InvalidTransferError(AgentError):
    """A custom resource does not have the form of its kind; only a change to it helps."""


class TransferCache:
    """The transfers with this node's label, and the pods on this node that belong to a transfer."""

    def __init__(self, client: KubeClient, clock: Clock, site: Site, *, kinds: Sequence[Kind[Any]]) -> None:
        self._client = client
        self._on_transfer: Callable[[TransferKey, str], None] = lambda *_: None
        self._on_pod: Callable[[TransferKey], None] = lambda _: None
        self._kinds = {kind.spec.name: kind for kind in kinds}
        self._departed: dict[TransferKey, Pod] = {}
        self._written: dict[TransferKey, tuple[str, str]] = {}
        selector = f"{NODE_LABEL}={site.label}"
        self._transfers = {
            kind.spec.name: Informer[UncheckedObject](
                client,
                Selection(kind.spec.resource, site.namespace, label_selector=selector),
                clock=clock,
                trim=lambda raw: raw,
                on_change=partial(self._notify_transfer, kind.spec.name),
            )
            for kind in kinds
        }
        # No label selector: the mover pods of Velero's agent do not have our labels.
        self._pods = Informer(
            client,
            Selection(PODS, site.namespace, field_selector=f"spec.nodeName={site.node}"),
            clock=clock,
            trim=trim_pod,
            on_change=self._notify_pod,
        )
        transfers = {f"{name}s": informer for name, informer in self._transfers.items()}
        self._named: dict[str, Informer[UncheckedObject] | Informer[Pod]] = {**transfers, "mover pods": self._pods}

    def subscribe(self, on_transfer: Callable[[TransferKey, str], None], on_pod: Callable[[TransferKey], None]) -> None:
        """Have both called, with the key of a transfer, after it or its mover pod has changed; they must not block.

        `on_transfer` also gets its UID, which differs from the cached one if it was replaced.
        """
        self._on_transfer, self._on_pod = on_transfer, on_pod

    async def run(self) -> None:
        """Watch until canceled."""
        async with asyncio.TaskGroup() as group:
            for informer in self._named.values():
                group.create_task(informer.run(), name="informer")

    async def wait_synced(self) -> None:
        """Return once everything was listed."""
        for informer in self._named.values():
            await informer.synced.wait()

    def not_synced(self) -> list[str]:
        """Return the names of the collections that were not listed yet."""
        return [name for name, informer in self._named.items() if not informer.synced.is_set()]

    def outdated(self) -> list[str]:
        """Return the collections that have not been followed for long, with the reason."""
        reasons = {name: informer.explain_outage() for name, informer in self._named.items()}
        return [f"{name}: {reason}" for name, reason in reasons.items() if reason]

    @property
    def outdated_seconds(self) -> float:
        """For how long the mover pods have not been observed; 0.0 while they are."""
        return self._pods.outdated_seconds

    def transfers(self) -> list[Transfer]:
        """Return this node's transfers but for invalid ones."""
        keys = [_key(name, raw) for name, informer in self._transfers.items() for raw in informer.items()]
        return [cr for key in keys if (cr := self.transfer(key)) is not None]

    def raw(self, key: TransferKey) -> UncheckedObject | None:
        """Return a cached transfer as JSON dict; None if there is none."""
        return self._transfers[key[0]].get(key[1], key[2])

    def transfer(self, key: TransferKey) -> Transfer | None:
        """Return a cached transfer; None if there is none, or it is invalid."""
        raw = self.raw(key)
        try:
            return None if raw is None else self._kinds[key[0]].parse(raw)
        except ContractError:
            # Reconciling the key reports it, once.
            return None

    def observe_written(self, cr: Transfer) -> None:
        """Remember the version of a transfer that a write of this agent returned."""
        if self.raw(cr.key) is not None:
            self._written[cr.key] = (cr.uid, cr.metadata.resource_version)

    def current(self, key: TransferKey) -> UncheckedObject | None:
        """Return a cached transfer; None if there is none, or it is older than the last write of this agent.

        Writes of others may be missing for a while: the preconditions of the next write detect that.
        """
        raw = self.raw(key)
        if raw is None:
            return None
        meta = raw["metadata"]
        uid, version = self._written.get(key, ("", ""))
        return None if meta["uid"] == uid and _is_older(meta["resourceVersion"], version) else raw

    def pod(self, key: TransferKey) -> Pod | None:
        """Return the cached pod of the transfer's name on this node, trimmed."""
        return self._pods.get(key[1], key[2])

    def departed(self, key: TransferKey) -> Pod | None:
        """Return the last version of the last pod of the transfer's name that disappeared from this node."""
        return self._departed.get(key)

    async def read(self, key: TransferKey, *, reread: bool = False) -> Observation | None:
        """Return a transfer and its mover pod: as cached where the cache is current, else from the API server.

        `reread`: the cache is known to be outdated. None if there is nothing to reconcile: the
        transfer does not exist, or it is another agent's and no mover pod of it runs here.

        Raises:
            InvalidTransferError: the transfer does not have the form of its kind.
        """
        cached, pod = self.raw(key), self.pod(key)
        if cached is None and (pod is None or not may_take_over(pod)):
            return None
        kind = self._kinds[key[0]]
        raw = None if reread else self.current(key)
        if raw is None:
            raw = await self._client.read(kind.spec.resource, key[1], key[2])
        if raw is None:
            return None
        try:
            cr: Transfer = kind.parse(raw)
        except ContractError as e:
            raise InvalidTransferError(str(e)) from e
        if cached is None and not kind.managed(cr):
            # Other data movers may label their pods as Velero does.
            return None
        # A cached pod of an earlier transfer of the same name, or of an earlier attempt, does not hide this one's.
        needed = cr.phase in _NEEDS_POD and cr.stage is not AttemptStage.READY
        pod_missing = needed and (pod is None or not is_current(pod, cr))
        if pod_missing:
            # The cache may be outdated, and does not have the pods of other nodes.
            pod = await self._client.read(PODS, key[1], key[2])
        watched = not pod_missing and (cached is not None or cr.phase.final)
        return Observation(cr, pod, self.departed(key), watched=watched)

    def forget(self, key: TransferKey) -> None:
        """Drop the pod that disappeared of that transfer."""
        self._departed.pop(key, None)

    def _notify_transfer(self, kind_name: str, raw: UncheckedObject) -> None:
        key = _key(kind_name, raw)
        if self.raw(key) is None:
            self._written.pop(key, None)
        self._on_transfer(key, raw["metadata"]["uid"])

    def _notify_pod(self, pod: Pod) -> None:
        meta = pod["metadata"]
        for owner in meta.get("ownerReferences") or []:
            key = (owner["kind"], meta["namespace"], owner["name"])
            if owner["kind"] not in self._kinds:
                continue
            if self.pod(key) is None and self.raw(key) is not None:
                self._departed[key] = pod
            self._on_pod(key)


def _is_older(version: str, than: str) -> bool:
    """Return whether a resourceVersion precedes another; if they are no numbers, whether they differ.

    Source: Kubernetes v1.35, API concepts, "Resource versions": within one resource they can be compared as numbers.
    """
    if version.isdecimal() and than.isdecimal():
        return int(version) < int(than)
    return version != than


def _key(kind_name: str, raw: UncheckedObject) -> TransferKey:
    meta = raw["metadata"]
    return (kind_name, meta["namespace"], meta["name"])
