"""The fence of admissions: ConfigMap `node-agent-admissions`.

Knows the UIDs of all loads that are, or may become, Accepted or Prepared, and how they come
in and go out. Whoever writes it last is the only one who may accept: a write carries the
version that was read, so a holder that was overtaken can reserve nothing more. Does not know
why a load is admitted (`nodeagent.leader.dispatcher`).
"""

import uuid
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

from core.errors import AgentError
from core.kube.client import KubeClient
from core.kube.errors import ConflictError, NotFoundError, ServerError
from core.kube.resources import CONFIG_MAPS
from core.models.base import JsonDict
from core.models.names import ADMISSIONS_CONFIGMAP
from core.models.phases import HOLDING_PHASES, Phase
from nodeagent.config.models import LARGEST_PREPARE_QUEUE

__all__ = ["AdmissionLedger", "LedgerLostError", "Reservations", "free_quota", "settle"]

_UIDS: Final = "uids"
_TURN: Final = "turn"
_WRITE: Final = "write"


class LedgerLostError(AgentError):
    """Somebody else wrote the ledger: read it and all loads again before anything else."""

    retry = True


@dataclass(frozen=True)
class Reservations:
    """Who has a place of `prepareQueueLength`, by uid, and the namespace served last."""

    uids: frozenset[str] = frozenset()
    turn: str = ""


def settle(uids: AbstractSet[str], seen: Mapping[str, Phase]) -> frozenset[str]:
    """Return who has a place after a look at all loads.

    Whatever is Accepted or Prepared has one, however it came to it. Who got beyond, or is
    gone, has none: phases never go back and UIDs never return. Who is still New keeps its
    place, for an accept may be under way.

    Args:
        uids: who had a place.
        seen: the phase of every load there is, by uid.
    """
    holding = {uid for uid, phase in seen.items() if phase in HOLDING_PHASES}
    reserved = {uid for uid in uids if seen.get(uid) is Phase.NEW}
    return frozenset(holding | reserved)


def free_quota(uids: AbstractSet[str], limit: int | None) -> int:
    """Return how many more may get a place; None is the most the ledger takes."""
    most = LARGEST_PREPARE_QUEUE if limit is None else min(limit, LARGEST_PREPARE_QUEUE)
    return max(0, most - len(uids))


class AdmissionLedger:
    """The ledger as this process read or wrote it last."""

    def __init__(self, client: KubeClient, namespace: str, *, check_leading: Callable[[], None]) -> None:
        """Keep the ledger in `namespace`; `check_leading` raises unless writing is allowed."""
        self._client = client
        self._namespace = namespace
        self._check_leading = check_leading
        self._stored: JsonDict | None = None
        self._places = Reservations()

    @property
    def places(self) -> Reservations:
        """Who has a place."""
        return self._places

    async def load(self) -> None:
        """Read the ledger by a quorum read.

        Raises:
            KubeError: the API server refused.
        """
        self._keep(await self._client.read(CONFIG_MAPS, self._namespace, ADMISSIONS_CONFIGMAP))

    async def write(self, places: Reservations) -> None:
        """Make `places` the ledger, provided that nobody wrote it since we did.

        Raises:
            LedgerLostError: somebody did, or whether ours was stored cannot be told.
            NotLeaderError: this process may not write now.
            KubeError: the API server refused; nothing was written.
        """
        self._check_leading()
        mark = uuid.uuid4().hex
        data = {_UIDS: "\n".join(sorted(places.uids)), _TURN: places.turn, _WRITE: mark}
        try:
            self._keep(await self._send(data))
        except (ConflictError, NotFoundError, ServerError) as e:
            # A write whose answer was lost conflicts with itself when it is sent again.
            try:
                await self.load()
            except ServerError as unread:
                raise LedgerLostError(f"{e}; {unread}") from e
            if ((self._stored or {}).get("data") or {}).get(_WRITE) != mark:
                raise LedgerLostError(str(e)) from e

    async def _send(self, data: dict[str, str]) -> JsonDict:
        if self._stored is None:
            manifest: JsonDict = {
                "apiVersion": CONFIG_MAPS.api_version,
                "kind": CONFIG_MAPS.kind,
                "metadata": {"name": ADMISSIONS_CONFIGMAP, "namespace": self._namespace},
                "data": data,
            }
            return await self._client.create(CONFIG_MAPS, manifest)
        meta = self._stored["metadata"]
        preconditions = {"uid": meta["uid"], "resourceVersion": meta["resourceVersion"]}
        patch: JsonDict = {"metadata": preconditions, "data": data}
        return await self._client.patch(CONFIG_MAPS, self._namespace, ADMISSIONS_CONFIGMAP, patch)

    def _keep(self, stored: JsonDict | None) -> None:
        self._stored = stored
        data = (stored or {}).get("data") or {}
        self._places = Reservations(frozenset(data.get(_UIDS, "").split()), data.get(_TURN, ""))
