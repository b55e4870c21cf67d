"""The index of all transfers in the namespace, each reduced to what the leader needs.

It is kept by list and watch. An entry takes well under 2 KiB, however large the custom resource is.
"""

import asyncio
import logging
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Any, Final

from core.clock import Clock
from core.errors import ContractError
from core.kube.client import KubeClient, Selection
from core.kube.types import Metadata, UncheckedObject
from core.logs import fields
from core.models.backups import is_shrunk
from core.models.names import NODE_LABEL, NOT_PREPARED_ANNOTATION, PVC_UID_LABEL, SCHEDULE_LABEL
from core.models.phases import AttemptStage, InterruptionCause, Phase
from core.models.reasons import NotPrepared
from core.models.storage import RepositoryKey
from core.models.transfers import DataUpload, PodVolumeBackup, Transfer
from core.models.verification import Verification, is_damaged
from nodeagent.runtime.informer import Informer
from nodeagent.transfers.kinds.base import Kind

_SCHEDULED: Final = re.compile(r"(?P<schedule>.+)-[0-9]{14}")
"""The name of a Backup that a Schedule created. Source: Velero v1.18, TimestampedName in pkg/apis/velero/v1."""


@dataclass(frozen=True, slots=True)
class VolumeCopy:
    """One backup that has ended; it saved nothing unless it is `complete`.

    `claim` is the PVC, None for a volume of a pod that has none. `created` is when its transfer was created, by the
    API server's clock: the data is not newer. `schedule` is the name of the Schedule or CronJob that made it;
    None: none is known. `shrunk`: it is Shrunk, and not acknowledged. `completed` is when it ended,
    `new_bytes` what the repository did not have; None: not known. `seconds` is from its start to its end.
    `claim_uid` is the UID of the PVC; empty: not known.
    """

    claim: str | None
    created: datetime
    bytes: int
    schedule: str | None
    verification: Verification | None
    complete: bool = True
    shrunk: bool = False
    completed: datetime | None = None
    new_bytes: int | None = None
    seconds: float = 0.0
    claim_uid: str = ""

    @property
    def damaged(self) -> bool:
        """Whether its last verification failed."""
        return is_damaged(self.verification)


def read_copy(cr: Transfer) -> VolumeCopy | None:
    """Return what `cr` saved; None: it has not ended, or is no backup."""
    created, status = cr.made_at, cr.status
    if not cr.phase.final or not isinstance(cr, DataUpload | PodVolumeBackup) or created is None:
        return None
    began, completed = status.start_timestamp, status.completion_timestamp
    return VolumeCopy(
        claim=_intern(cr.source_claim),
        created=created,
        bytes=status.progress.total_bytes,
        schedule=_intern(_schedule_of(cr)),
        verification=Verification.from_annotations(cr.metadata.annotations),
        complete=cr.phase is Phase.COMPLETED,
        shrunk=is_shrunk(cr.metadata.annotations),
        completed=completed,
        new_bytes=status.incremental_bytes,
        seconds=(completed - began).total_seconds() if completed and began else 0.0,
        claim_uid=sys.intern(cr.metadata.labels.get(PVC_UID_LABEL, "")),
    )


def _intern(text: str | None) -> str | None:
    # A member of an enumeration cannot be interned.
    return None if text is None else sys.intern(str(text))


def _schedule_of(cr: Transfer) -> str | None:
    if label := cr.metadata.labels.get(SCHEDULE_LABEL):
        return label
    names = (owner.name for owner in cr.metadata.owner_references if owner.kind == "Backup")
    match = _SCHEDULED.fullmatch(next(names, ""))
    return match["schedule"] if match else None


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Entry:
    """One transfer as the leader remembers it.

    `queue` is the namespace of the volume; namespaces alternate in the admission queue. `created` is
    the creation time as the API prints it, which sorts as time does. `stop`: a cancel is requested.
    `managed`: it is meant for this data mover. `node_label` names the owning agent. `finalizer`: it has
    the one of its kind. `reason` is the pending reason as reported, None where there is none.
    `not_prepared` is why it failed before Prepared, if that may be a fault of its node. `fault`
    names the invalid fields of a resource that cannot be parsed and may be meant for this data mover.
    `copies` are the Secrets and ConfigMaps that it was accepted with, such as `Secret/token`. `location` is the name of
    its backup storage location. `stage` is how far its attempt is, None unless InProgress; `interrupted_by` is what
    ended the one before, None in the first. `bound`: only its own node can carry it out,
    or not every agent. `copy` is what a backup that has ended saved.
    """

    kind: str
    namespace: str
    name: str
    uid: str
    created: str
    node_label: str
    finalizer: bool
    phase: Phase = Phase.NEW
    queue: str = ""
    stop: bool = False
    managed: bool = False
    reason: str | None = None
    fault: str | None = None
    not_prepared: NotPrepared | None = None
    copies: tuple[str, ...] = ()
    location: str | None = None
    stage: AttemptStage | None = None
    interrupted_by: InterruptionCause | None = None
    bound: bool = False
    copy: VolumeCopy | None = None

    @property
    def admission_phase(self) -> Phase:
        """The phase by which quota and node shares are counted: each attempt is admitted again.

        An interrupted transfer whose next attempt may begin counts as New: with a reservation, that may be under way.
        Once it is exposed again it counts as Prepared.
        """
        if self.stage is AttemptStage.READY:
            return Phase.NEW
        return Phase.PREPARED if self.stage is AttemptStage.EXPOSING else self.phase

    @property
    def idle(self) -> bool:
        """Whether it is assigned to an agent and no mover moves its data: Accepted, or between two attempts."""
        return self.phase is Phase.ACCEPTED or self.interrupted

    @property
    def interrupted(self) -> bool:
        """Whether its attempt was interrupted, and the next one has not started its data path."""
        return self.stage not in {None, AttemptStage.RUNNING}

    @property
    def log_fields(self) -> dict[str, Any]:
        """The identity of the transfer, as fields of a log line."""
        return fields(kind=self.kind, namespace=self.namespace, name=self.name, uid=self.uid)

    @property
    def key(self) -> tuple[str, str, str]:
        """Kind, namespace and name."""
        return (self.kind, self.namespace, self.name)


def build_entry(kind: Kind[Any], raw: UncheckedObject) -> Entry:
    """Return the entry of `raw`, a transfer of `kind`; one that cannot be parsed counts as not managed."""
    meta = raw["metadata"]
    entry = Entry(
        kind=kind.spec.name,
        namespace=sys.intern(meta["namespace"]),
        name=meta["name"],
        uid=meta["uid"],
        created=meta.get("creationTimestamp", ""),
        node_label=sys.intern((meta.get("labels") or {}).get(NODE_LABEL, "")),
        finalizer=kind.spec.finalizer in (meta.get("finalizers") or []),
        not_prepared=_parse_not_prepared(meta),
    )
    try:
        cr = kind.parse(raw)
        attempts = cr.attempts if cr.phase is Phase.IN_PROGRESS else None
        return replace(
            entry,
            phase=cr.phase,
            queue=sys.intern(kind.queue_namespace(cr)),
            stop=cr.cancel_requested,
            managed=kind.managed(cr),
            reason=_intern(cr.pending_reason),
            copies=tuple(map(sys.intern, cr.copies)),
            location=sys.intern(cr.spec.backup_storage_location),
            stage=attempts and attempts.stage,
            interrupted_by=attempts and attempts.last and attempts.last.cause,
            bound=kind.spec.bound_to_node or bool(cr.required_feature),
            copy=read_copy(cr),
        )
    except ContractError as e:
        _log.warning("transfer ignored, the resource is invalid: %s", e, extra=entry.log_fields)
        spec = raw.get("spec")
        named = spec.get("datamover", "") if isinstance(spec, dict) else ""
        meant = not isinstance(named, str) or named in kind.datamovers
        return replace(entry, fault=str(e) if meant else None)


def _parse_not_prepared(meta: Metadata) -> NotPrepared | None:
    """Return why a transfer failed before Prepared; None where that is not recorded, or by no agent."""
    text = (meta.get("annotations") or {}).get(NOT_PREPARED_ANNOTATION)
    return NotPrepared(text) if text in set(NotPrepared) else None


class TransferIndex:
    """The transfers of all kinds in one namespace."""

    def __init__(
        self,
        client: KubeClient,
        clock: Clock,
        *,
        namespace: str,
        kinds: Sequence[Kind[Any]],
        on_change: Callable[[Entry], None],
    ) -> None:
        """Watch transfers of `kinds`; `on_change` is called with each entry that was added, changed or deleted."""
        self._on_change = on_change
        self._finished: defaultdict[tuple[str, str | None], set[str]] = defaultdict(set)
        self._informers: dict[str, Informer[Entry]] = {
            kind.spec.name: Informer(
                client,
                Selection(kind.spec.resource, namespace),
                clock=clock,
                trim=partial(build_entry, kind),
                on_change=self._observe,
            )
            for kind in kinds
        }

    async def run(self) -> None:
        """Watch until canceled."""
        async with asyncio.TaskGroup() as group:
            for informer in self._informers.values():
                group.create_task(informer.run(), name="transfer index")

    async def wait_synced(self) -> None:
        """Return once all kinds were listed."""
        for informer in self._informers.values():
            await informer.synced.wait()

    def entries(self) -> list[Entry]:
        """Return the entries of all transfers."""
        return [entry for informer in self._informers.values() for entry in informer.items()]

    def finished_backups(self, key: RepositoryKey) -> AbstractSet[str] | None:
        """Return the UIDs of the backups in the repository that have a final phase; None before all were listed."""
        if not all(informer.synced.is_set() for informer in self._informers.values()):
            return None
        return self._finished.get((key.volume_namespace, key.location), frozenset())

    def _observe(self, entry: Entry) -> None:
        if entry.copy is not None:
            # Each repository is looked at every minute: not all transfers each time.
            found = self._finished[entry.queue, entry.location]
            gone = self._informers[entry.kind].get(entry.namespace, entry.name) is not entry
            (found.discard if gone else found.add)(entry.uid)
        self._on_change(entry)
