"""What was read of a cluster at one moment, and how users name it: small frozen records; most are shown as they are.

Their fields are stable: they are the JSON that `nodeagent status` prints, in camelCase; times are RFC 3339.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from functools import cached_property
from typing import Final, NamedTuple

from client.leader_page import LeaderPage
from core.errors import ConfigError
from core.kube import resources as kube
from core.kube.types import UncheckedObject
from core.models.backups import RetentionReport, Shrinkage
from core.models.base import Time, WireModel, parse_time
from core.models.phases import AttemptStage, Phase
from core.models.transfers import DataDownload, DataUpload, PodVolumeBackup, PodVolumeRestore, Transfer
from core.models.verification import Verification, is_damaged
from core.text import guess
from nodeagent.coverage.read import PlannedVolumes
from nodeagent.coverage.states import CompletedBackup, Coverage, build_coverage
from nodeagent.runtime.settings import Settings


@dataclass(frozen=True)
class TransferKind:
    """One kind: its resource, the model of its objects, the short name that commands accept, and its direction."""

    resource: kube.Resource[UncheckedObject]
    model: type[Transfer]
    short: str
    restores: bool

    @property
    def name(self) -> str:
        """`kind` of its objects, such as `DataUpload`."""
        return self.resource.kind

    @property
    def words(self) -> tuple[str, ...]:
        """What a user may write for it, in lower case."""
        return (self.short, self.name.lower(), self.resource.plural, self.resource.full_name)


TRANSFER_KINDS: Final = (
    TransferKind(kube.DATA_UPLOADS, DataUpload, "du", restores=False),
    TransferKind(kube.DATA_DOWNLOADS, DataDownload, "dd", restores=True),
    TransferKind(kube.POD_VOLUME_BACKUPS, PodVolumeBackup, "pvb", restores=False),
    TransferKind(kube.POD_VOLUME_RESTORES, PodVolumeRestore, "pvr", restores=True),
)


class Target(NamedTuple):
    """One transfer as a user names it."""

    kind: TransferKind
    name: str


def kind_named(word: str) -> TransferKind:
    """Return the kind that `word` names: its name, its plural or its short name, in any case.

    Raises:
        ConfigError: it names none.
    """
    for kind in TRANSFER_KINDS:
        if word.lower() in kind.words:
            return kind
    hint = guess(word, [name for kind in TRANSFER_KINDS for name in kind.words])
    shown = ", ".join(f"{kind.name} ({kind.short})" for kind in TRANSFER_KINDS)
    raise ConfigError(f'"{word}" is no kind of transfer: {hint or shown}')


def parse_target(words: Sequence[str]) -> Target:
    """Return the transfer that `KIND/NAME`, or `KIND NAME`, names; ConfigError: they name none."""
    kind, slash, name = words[0].partition("/")
    if len(words) == 1 and slash and name and "/" not in name:
        return Target(kind_named(kind), name)
    if len(words) == 2 and not slash:  # noqa: PLR2004 - kind and name
        return Target(kind_named(kind), words[1])
    raise ConfigError(f'not KIND/NAME, such as du/backup-1: "{" ".join(words)}"')


_BACKUPS: Final = {kind.name: kind.short for kind in TRANSFER_KINDS if not kind.restores}


class TransferRecord(WireModel):
    """One transfer. `volume` is its PVC, or pod and volume; `fault` says why its resource cannot be read.

    `queue` is the volume namespace, `created` as the API prints it: both are what the admission queue is ordered by.
    `began` is when the data path of the present attempt started; `number` counts attempts from 1.
    `datamover` is `spec.datamover`, which selects the agents that it is meant for. `backup` is the backup that it
    belongs to, Velero's or one of `nodeagent backup create`; `new_bytes` changed since the backup before, None where
    that is not known. `verification` is the last one of a backup, `files` how many files it has, and `shrunk` how it is
    Shrunk. `claim` is the PVC that it backs up, and `claim_uid` its UID, empty if there is none or it is not known.
    """

    kind: str
    namespace: str
    name: str
    uid: str = ""
    phase: Phase = Phase.NEW
    node: str = ""
    queue: str = ""
    volume: str = ""
    location: str = ""
    created: str = ""
    accepted: Time | None = None
    began: Time | None = None
    completed: Time | None = None
    bytes_done: int = 0
    total_bytes: int = 0
    reason: str = ""
    message: str = ""
    number: int = 1
    stage: AttemptStage | None = None
    canceling: bool = False
    datamover: str = ""
    backup: str = ""
    new_bytes: int | None = None
    verification: Verification | None = None
    files: int | None = None
    shrunk: Shrinkage | None = None
    claim: str = ""
    claim_uid: str = ""
    fault: str = ""

    @property
    def shown(self) -> str:
        """Its name in a message, such as `DataUpload velero/du-1`."""
        return f"{self.kind} {self.namespace}/{self.name}"

    @property
    def made(self) -> datetime | None:
        """When it was created, which is not before its data, as `Transfer.made_at`."""
        times = [time for time in (self.began, self.completed) if time is not None]
        return min([*times, parse_time(self.created)] if self.created else times, default=None)

    @property
    def is_backup(self) -> bool:
        """Whether it backs a volume up."""
        return self.kind in _BACKUPS

    @property
    def damaged(self) -> bool:
        """Whether its last verification failed."""
        return is_damaged(self.verification)

    @property
    def active(self) -> bool:
        """Whether it has not ended."""
        return not self.phase.final and not self.fault

    @property
    def moving(self) -> bool:
        """Whether it has a slot: its data mover may move data."""
        return self.phase in {Phase.IN_PROGRESS, Phase.CANCELING} and self.stage in {None, AttemptStage.RUNNING}


def copy_of(one: TransferRecord) -> CompletedBackup | None:
    """Return the backup of a volume that a transfer was; None: it has not ended, or is none."""
    if not one.phase.final or one.fault or one.kind not in _BACKUPS or not one.volume or (made := one.made) is None:
        return None
    return CompletedBackup(
        (one.queue, one.claim or one.volume),
        made,
        f"{_BACKUPS[one.kind]}/{one.name}",
        complete=one.phase is Phase.COMPLETED and not one.damaged,
        failed=one.phase is Phase.FAILED or one.damaged,
        message="its data could not be read back by its verification" if one.damaged else one.message or None,
        bytes=one.total_bytes,
        shrunk=one.shrunk.text if one.shrunk is not None and one.shrunk.acknowledged is None else None,
        claim_uid=one.claim_uid,
        location=one.location,
    )


class AgentRecord(WireModel):
    """One agent's pod; `config` is the hash of its active configuration, as it announces it."""

    node: str
    pod: str
    ready: bool
    config: str = ""
    restarts: int = 0


class LeaseRecord(WireModel):
    """The Lease of the leader: who holds it, and until when unless it is renewed; `seen` is when it was read."""

    holder: str = ""
    expires: Time | None = None
    seen: Time | None = None


class ConfigRecord(WireModel):
    """The agents' ConfigMap as it is now: empty `name`, there is none.

    `hash` is of the document; `errors` keep agents from using it, `warnings` do not. `slots` is how many
    transfers a node runs at a time where no rule for it exists; `queue_length` of None: no limit.
    `leave_out_namespaces` are those whose users may leave PVCs out of backups; None: not known.
    """

    name: str = ""
    hash: str = ""
    errors: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    slots: int = 0
    queue_length: int | None = None
    restores_first: bool = False
    leave_out_namespaces: tuple[str, ...] | None = None


class LocationRecord(WireModel):
    """One BackupStorageLocation; an empty phase was not validated yet: whether it can be reached is not known."""

    name: str
    phase: str = ""
    message: str = ""
    validated: Time | None = None
    read_only: bool = False


class RepositoryRecord(WireModel):
    """One BackupRepository; `failed` is the message of the last maintenance if it failed."""

    name: str
    volume_namespace: str
    location: str
    phase: str
    message: str = ""
    maintained: Time | None = None
    failed: str = ""


class UnreadPart(StrEnum):
    """What a command may not be able to read, in the order of its messages: causes first."""

    TRANSFERS = "transfers"
    AGENTS = "agents"
    FLAGS = "flags of the agents"
    LEASE = "leader"
    PAGE = "leader's status page"
    CONFIG = "configuration"
    NODES = "nodes"
    REPOSITORIES = "repositories"
    LOCATIONS = "locations"
    RETENTION = "retention"


_OF_COVERAGE: Final = frozenset({UnreadPart.TRANSFERS, UnreadPart.FLAGS, UnreadPart.CONFIG, UnreadPart.LOCATIONS})
"""What decides, beside volumes and schedules, which state a volume has."""


@dataclass(frozen=True)
class Unread:
    """What could not be read, and why; `passing`: a watch broke a moment ago, and is being opened again.

    `restores`: of the transfers, it is a kind that backs nothing up.
    """

    part: UnreadPart
    why: str
    passing: bool = False
    restores: bool = False


@dataclass(frozen=True)
class ClusterSnapshot:
    """Everything that is judged, as read at `at`, a time by the API server's clock.

    What `unread` names is empty, and not known. `slots` is by node, where rules for single nodes exist. `settings` are
    the agents'; None: there is no DaemonSet. `wanted_agents` and `ready_agents` are what its controller counts. `page`
    is None where it could not be read. `retention` is the last report of retention, None if there is none;
    `old_schedules` are the names of CronJobs that delete by older rules. `volumes` are those that are to be backed up;
    None: they were not read yet.
    """

    namespace: str
    at: datetime
    transfers: tuple[TransferRecord, ...] = ()
    agents: tuple[AgentRecord, ...] = ()
    lease: LeaseRecord = field(default_factory=LeaseRecord)
    config: ConfigRecord = field(default_factory=ConfigRecord)
    slots: Mapping[str, int] = field(default_factory=dict)
    repositories: tuple[RepositoryRecord, ...] = ()
    locations: tuple[LocationRecord, ...] = ()
    settings: Settings | None = None
    wanted_agents: int = 0
    ready_agents: int = 0
    page: LeaderPage | None = None
    retention: RetentionReport | None = None
    old_schedules: tuple[str, ...] = ()
    volumes: PlannedVolumes | None = None
    unread: tuple[Unread, ...] = ()

    def is_unread(self, part: UnreadPart) -> bool:
        """Return whether the part, or some of it, could not be read."""
        return any(one.part is part for one in self.unread)

    @cached_property
    def coverage(self) -> Coverage | None:
        """The state of each volume; None: not known yet."""
        if self.volumes is None:
            return None
        copies = [copy for one in self.transfers if (copy := copy_of(one)) is not None]
        unread = [one for one in self.unread if one.part in _OF_COVERAGE and not one.restores]
        notes = [f"{one.part} cannot be read: {one.why}" for one in unread]
        notes += [one.fault for one in self.transfers if one.fault and one.is_backup]
        notes += self.volumes.notes
        # What a watch has shown before it broke is still known for a moment.
        lost = any(one.part is UnreadPart.TRANSFERS and not one.passing for one in unread)
        locations = None if self.is_unread(UnreadPart.LOCATIONS) else {one.name for one in self.locations}
        return build_coverage(self.volumes.plans, copies, self.at, notes, all_copies=not lost, locations=locations)

    def slots_of(self, node: str) -> int | None:
        """Return how many transfers the node runs at a time; None: not known, such as of a rejected ConfigMap."""
        if self.config.errors or self.is_unread(UnreadPart.CONFIG) or self.is_unread(UnreadPart.NODES):
            return None
        return self.slots.get(node, self.config.slots)
