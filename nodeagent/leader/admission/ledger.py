"""The admission ledger: ConfigMap `node-agent-admissions`.

It lists the UIDs of all transfers that are, or may become, Accepted or Prepared, and of those whose next attempt is, or
may become, exposed. Only the agent that wrote it last may accept or resume: a write carries the version that was read,
so a former leader can reserve nothing more. Which transfer is admitted next is decided in
`nodeagent.leader.admission.admission_pass`.
"""

import uuid
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

from core.errors import AgentError
from core.kube.client import KubeClient
from core.kube.errors import ConflictError, NotFoundError, ServerError, UnreachableError
from core.kube.resources import CONFIG_MAPS
from core.kube.types import ConfigObject, Manifest
from core.models.names import ADMISSIONS_CONFIGMAP
from core.models.phases import HOLDING_PHASES, Phase
from nodeagent.config.keys import LARGEST_PREPARE_QUEUE

__all__ = ["AdmissionLedger", "LedgerLostError", "Reservations", "free_quota", "settle"]

_UIDS: Final = "uids"
_TURN: Final = "turn"
_WRITE: Final = "write"


class LedgerLostError(AgentError):
    """Another leader wrote the ledger: it and all transfers must be read again before anything else."""

    retry = True


@dataclass(frozen=True)
class Reservations:
    """The uids that use the admission quota, and the namespace that was served last."""

    uids: frozenset[str] = frozenset()
    last_namespace: str = ""


def settle(uids: AbstractSet[str], phases: Mapping[str, Phase]) -> frozenset[str]:
    """Return the uids that use the quota, given what is observed.

    Each Accepted or Prepared transfer does, however it got there. One in a later phase, or deleted,
    does not: phases never go back and UIDs never return. A New one keeps its reservation, since an
    accept may be under way. An attempt after the first begins again with New: what was sent for an earlier one
    conflicts with the write that ended that one.

    Args:
        uids: the reservations so far.
        phases: the phases of all transfers as admission counts them, by uid.
    """
    holding = {uid for uid, phase in phases.items() if phase in HOLDING_PHASES}
    reserved = {uid for uid in uids if phases.get(uid) is Phase.NEW}
    return frozenset(holding | reserved)


def free_quota(uids: AbstractSet[str], limit: int | None) -> int:
    """Return how many more reservations fit; a `limit` of None is the most that the ledger can hold."""
    most = LARGEST_PREPARE_QUEUE if limit is None else min(limit, LARGEST_PREPARE_QUEUE)
    return max(0, most - len(uids))


class AdmissionLedger:
    """The ledger as this process read or wrote it last."""

    def __init__(self, client: KubeClient, namespace: str, *, check_leading: Callable[[], None]) -> None:
        """Keep the ledger in `namespace`; `check_leading` raises unless this agent is the leader."""
        self._client = client
        self._namespace = namespace
        self._check_leading = check_leading
        self._stored: ConfigObject | None = None
        self._reservations = Reservations()

    @property
    def reservations(self) -> Reservations:
        """The reservations as last read or written."""
        return self._reservations

    async def load(self) -> None:
        """Read the ledger by a quorum read.

        Raises:
            KubeError: the API server rejected the read.
        """
        self._keep(await self._client.read(CONFIG_MAPS, self._namespace, ADMISSIONS_CONFIGMAP))

    async def write(self, reservations: Reservations) -> None:
        """Write `reservations`, provided that the ledger was not written by another agent since.

        Raises:
            LedgerLostError: it was, or it cannot be determined whether this write was stored.
            NotLeaderError: this agent is not the leader.
            KubeError: the API server rejected the write; nothing was stored.
        """
        self._check_leading()
        mark = uuid.uuid4().hex
        before = _version(self._stored)
        data = {_UIDS: "\n".join(sorted(reservations.uids)), _TURN: reservations.last_namespace, _WRITE: mark}
        try:
            self._keep(await self._send(data))
        except (ConflictError, NotFoundError, ServerError) as e:
            # A write whose answer was lost conflicts with itself when it is sent again.
            try:
                await self.load()
            except ServerError as unread:
                raise LedgerLostError(f"{e}; {unread}") from e
            if _data(self._stored).get(_WRITE) == mark:
                return
            rejected = isinstance(e, ServerError) and not isinstance(e, UnreachableError)
            if rejected and _version(self._stored) == before:
                # Should an attempt without an answer still be stored, then the next write conflicts.
                raise
            raise LedgerLostError(str(e)) from e

    async def _send(self, data: dict[str, str]) -> ConfigObject:
        if self._stored is None:
            manifest: Manifest = {
                "apiVersion": CONFIG_MAPS.api_version,
                "kind": CONFIG_MAPS.kind,
                "metadata": {"name": ADMISSIONS_CONFIGMAP, "namespace": self._namespace},
                "data": data,
            }
            return await self._client.create(CONFIG_MAPS, manifest)
        return await self._client.patch_if_unchanged(CONFIG_MAPS, self._stored, {"data": data})

    def _keep(self, stored: ConfigObject | None) -> None:
        self._stored = stored
        data = _data(stored)
        self._reservations = Reservations(frozenset(data.get(_UIDS, "").split()), data.get(_TURN, ""))


def _data(stored: ConfigObject | None) -> dict[str, str]:
    return (stored.get("data") or {}) if stored else {}


def _version(stored: ConfigObject | None) -> str:
    """Return the resourceVersion of the ledger as stored; empty if there is none."""
    return "" if stored is None else str(stored["metadata"]["resourceVersion"])
