"""The keys of the configuration that Velero does not have, below the key `nodeagent.io`: limits, windows, retries.

They are under one key, so that none clashes with a later one of Velero's. Three older ones of ours are
beside Velero's keys (`nodeagent.config.keys`).
"""

from datetime import datetime, timedelta
from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, Field, StrictBool, StrictInt, StrictStr, field_validator, model_validator

from core.contract import MoverMethod
from core.errors import Translated
from core.kube.types import VolumeSource
from core.models.phases import RetryRules
from core.models.storage import BlockHash
from core.models.transfer_settings import READY_SETS, BandwidthLimits, Compression, Exclusions
from core.models.units import parse_duration, parse_quantity
from exposer.settings import DEFAULT_EXCLUDED
from nodeagent.config.value_types import (
    AbsolutePath,
    Duration,
    DurationText,
    HostName,
    KeyPrefix,
    MountPath,
    ObjectName,
    OptionalDurationText,
    Pattern,
    QuantityText,
    Section,
    checked_by,
    expected,
    is_zero,
    setting,
    toggle,
)
from nodeagent.config.windows import VerificationPlan, Window, is_open, parse_schedule, parse_time_zone

ScheduleText = Annotated[StrictStr, checked_by(parse_schedule, 'a schedule of a CronJob such as "0 22 * * *"')]
TimeZoneName = Annotated[StrictStr, checked_by(parse_time_zone, 'a time zone such as "Europe/Berlin"')]


class WindowKeys(Section):
    """One of `windows`."""

    schedule: ScheduleText = setting(..., "when the window opens, as in a CronJob", "0 22 * * *")
    time_zone: TimeZoneName = setting("UTC", "IANA time zone of schedule", "Europe/Berlin")
    duration: Duration = setting(..., "how long it is open", "8h")

    def to_window(self) -> Window:
        """Return it for decisions."""
        return Window(parse_schedule(self.schedule), parse_time_zone(self.time_zone), self.duration)


_LEAST: Final = 100_000
"""With less, a request of kopia's would time out before one of its blobs of 20 MB has passed."""


def _check_rate(rate: int) -> int:
    if 0 < rate < _LEAST:
        raise expected(f"at least {_LEAST}, or 0: no limit")
    return rate


_Rate = Annotated[StrictInt, Field(ge=0, le=2**50), AfterValidator(_check_rate)]


class BandwidthBudget(Section):
    """A limit in each direction, as seen from the node; with windows, it holds in these alone."""

    upload_bytes_per_second: _Rate = setting(0, "bytes per second that are sent; 0: no limit", 50_000_000)
    download_bytes_per_second: _Rate = setting(0, "bytes per second that are received; 0: no limit", 50_000_000)
    windows: tuple[WindowKeys, ...] = setting(
        (),
        "when the limits hold; without one: always",
        [{"schedule": "0 8 * * 1-5", "timeZone": "Europe/Berlin", "duration": "10h"}],
    )

    def at(self, moment: datetime) -> BandwidthLimits:
        """Return the limits that hold at `moment`."""
        if self.windows and not is_open([one.to_window() for one in self.windows], moment):
            return BandwidthLimits()
        return BandwidthLimits(
            upload_bytes_per_second=self.upload_bytes_per_second,
            download_bytes_per_second=self.download_bytes_per_second,
        )


class BandwidthKeys(Section):
    """The value of `nodeagent.io.bandwidth`."""

    per_mover: BandwidthBudget = setting(
        BandwidthBudget, "limits of each data mover", {"uploadBytesPerSecond": 20_000_000}
    )
    per_node: BandwidthBudget = setting(
        BandwidthBudget, "limits that all data movers of a node share", {"uploadBytesPerSecond": 100_000_000}
    )
    per_location: dict[str, BandwidthBudget] = setting(
        dict,
        "limits on each node that its data movers share which use a BackupStorageLocation, by its name",
        {"default": {"downloadBytesPerSecond": 50_000_000}},
    )


_Kind = Literal["DataUpload", "DataDownload", "PodVolumeBackup", "PodVolumeRestore"]

_MOST_RETRIES: Final = 100
"""An annotation has the attempts, and each starts a pod."""

_LARGEST_FACTOR: Final = 10


def _check_limit(text: str) -> str:
    if text and is_zero(text):
        raise expected('more than 0, such as "8Gi"')
    return text


_Retries = Annotated[StrictInt, Field(ge=0, le=_MOST_RETRIES)]
_Factor = Annotated[float, Field(strict=True, ge=1, le=_LARGEST_FACTOR, allow_inf_nan=False)]
_Limit = Annotated[QuantityText, AfterValidator(_check_limit)]


class RetryOverrides(Section):
    """An entry of `perKind`: what differs for one kind."""

    enabled: StrictBool | None = setting(None, "enabled of this kind", example=False)
    max_retries: _Retries | None = setting(None, "maxRetries of this kind", 5)
    initial_backoff: DurationText | None = setting(None, "initialBackoff of this kind", "1m")
    max_backoff: DurationText | None = setting(None, "maxBackoff of this kind", "30m")
    deadline: OptionalDurationText | None = setting(None, "deadline of this kind", "8h")
    oom_memory_factor: _Factor | None = setting(None, "oomMemoryFactor of this kind", 2)
    oom_memory_limit_max: _Limit | None = setting(None, "oomMemoryLimitMax of this kind", "16Gi")


class RetryKeys(Section):
    """The value of `nodeagent.io.retry`."""

    enabled: StrictBool = toggle(
        "give an interrupted transfer another attempt; false: it is Failed, as in Velero", default=True
    )
    max_retries: _Retries = setting(3, "how many more attempts a transfer gets at most", 5)
    initial_backoff: DurationText = setting(
        "30s", "delay of the second attempt after the interruption; each further one is delayed for twice as long", "1m"
    )
    max_backoff: DurationText = setting("10m", "longest delay, also where initialBackoff is longer", "30m")
    deadline: OptionalDurationText = setting(
        "",
        'age of a transfer from which it is not retried; "0": none; empty: "4h" if it has an owner, '
        "which is as long as a Velero server waits by default, and else none",
        "8h",
    )
    oom_memory_factor: _Factor = setting(
        1.5,
        "factor of the memory limit and request of a data mover after each one that ran out of memory; no "
        "effect without podResources.memoryLimit",
        2,
    )
    oom_memory_limit_max: _Limit = setting(
        "", "largest memory limit that results from the factor; empty: four times podResources.memoryLimit", "8Gi"
    )
    per_kind: dict[_Kind, RetryOverrides] = setting(
        dict, "other values for some kinds of transfers", {"DataUpload": {"maxRetries": 5}}
    )


def rules_of_kind(retry: RetryKeys, kind: str, *, velero_server: bool) -> RetryRules:
    """Return the rules for one kind, such as `DataUpload`.

    `velero_server`: one waits for the transfers, which is no longer than its item timeout.
    """
    own: RetryOverrides | None = dict(retry.per_kind).get(kind)  # type: ignore[call-overload] # any kind may be asked for
    deadline = RetryRules.deadline if velero_server else None
    chosen = retry if own is None else retry.model_copy(update=own.model_dump(exclude_none=True))
    return RetryRules(
        enabled=chosen.enabled,
        max_retries=chosen.max_retries,
        initial_backoff=parse_duration(chosen.initial_backoff),
        max_backoff=parse_duration(chosen.max_backoff),
        deadline=(parse_duration(chosen.deadline) or None) if chosen.deadline else deadline,
        oom_memory_factor=chosen.oom_memory_factor,
        oom_memory_limit_max=chosen.oom_memory_limit_max or None,
    )


class CompressionKeys(Section):
    """The value of `nodeagent.io.compression`."""

    default: Compression = setting(
        Compression.NONE,
        "kopia's algorithm for volumes whose storage class is not in perStorageClass, or that have none",
        "zstd-fastest",
    )
    per_storage_class: dict[str, Compression] = setting(
        dict, "kopia's algorithms, by the storage class of the source volume", {"fast": "zstd"}
    )


class ExclusionKeys(Section, extra="forbid"):
    """One of `exclude.rules`: what the backups of some volumes leave out.

    An unknown key is an error: with `namespace` for `namespaces`, the rule would apply to all of them.
    """

    namespaces: list[ObjectName] = setting(list, "namespaces of the volumes; empty: all of them", ["build"])
    storage_classes: list[ObjectName] = setting(list, "storage classes of the volumes; empty: all of them", ["fast"])
    patterns: list[Pattern] = setting(
        list,
        "what is left out, as in a .kopiaignore or .gitignore: *.tmp in any directory, /cache/ a directory "
        "at the top; without exceptions (!) and classes such as [:alpha:]",
        ["/cache/", "*.tmp"],
    )
    sets: list[Literal["lost+found", "caches", "snapshots"]] = setting(
        list,
        "ready patterns: the folder lost+found, caches of programs, the snapshots of storage systems",
        ["lost+found", "caches", "snapshots"],
    )
    one_file_system: bool = toggle("whether file systems that are mounted in a volume are left out")
    largest_size: QuantityText = setting("", "size above which files are left out; empty: no limit", "10Gi")

    @model_validator(mode="after")
    def _is_valid(self) -> Self:
        with Translated(ValueError, expected, "valid exclusions"):
            self.exclusions  # noqa: B018 - it raises
        return self

    @property
    def exclusions(self) -> Exclusions:
        """The rules as data movers have them."""
        ready = [pattern for name in self.sets for pattern in READY_SETS[name]]
        return Exclusions(
            patterns=tuple(sorted({*self.patterns, *ready})),
            max_bytes=int(parse_quantity(self.largest_size)) if self.largest_size else None,
            one_file_system=self.one_file_system,
        )


_MOST_PATTERNS: Final = 200
"""Each mover pod has the patterns of its volume in its arguments."""


class ExcludeKeys(Section):
    """The value of `nodeagent.io.exclude`."""

    rules: tuple[ExclusionKeys, ...] = setting(
        (),
        "what backups of file systems leave out; all rules that fit a volume apply",
        [{"namespaces": ["build"], "patterns": ["/cache/"]}],
    )
    annotation_namespaces: list[ObjectName] = setting(
        list,
        "namespaces in which the annotation nodeagent.io/exclude of a PVC counts: a pattern, or a set such "
        "as @caches, on each line",
        ["build"],
    )

    @field_validator("rules")
    @classmethod
    def _are_few(cls, rules: tuple[ExclusionKeys, ...]) -> tuple[ExclusionKeys, ...]:
        if sum(len(rule.exclusions.patterns) for rule in rules) > _MOST_PATTERNS:
            raise expected(f"at most {_MOST_PATTERNS} patterns in all rules, including their sets'")
        return rules


class VerificationKeys(Section):
    """The value of `nodeagent.io.verification`: the leader has all backup repositories read back."""

    period: DurationText = setting(
        "720h", "time in which all that the snapshots of a repository have is read once, a sixteenth at a time", "720h"
    )
    schedule: ScheduleText | None = setting(
        None,
        "when shares are read, as in a CronJob, as many each time as the period takes; without it they are "
        "spread over the period",
        "0 2 * * 6",
    )
    time_zone: TimeZoneName = setting("UTC", "IANA time zone of schedule", "Europe/Berlin")
    windows: tuple[WindowKeys, ...] = setting(
        (),
        "when reading may start; without windows in maintenance's",
        [{"schedule": "0 22 * * *", "timeZone": "Europe/Berlin", "duration": "8h"}],
    )
    restore_test: bool = toggle(
        "whether one volume of each repository is also restored once in the period, into a scratch PVC in "
        "the agents' namespace, and compared with its snapshot"
    )
    restore_test_storage_class: ObjectName = setting(
        "", "class of the scratch PVC; empty: the class of the volume's PVC", "scratch"
    )

    def to_plan(self) -> VerificationPlan:
        """Return it for decisions."""
        starts = None
        if self.schedule is not None:
            starts = Window(parse_schedule(self.schedule), parse_time_zone(self.time_zone), timedelta())
        return VerificationPlan(
            parse_duration(self.period),
            starts,
            tuple(window.to_window() for window in self.windows),
            self.restore_test,
            self.restore_test_storage_class or None,
        )


OWN_KEY: Final = "nodeagent.io"


class NfsVolume(Section):
    """A directory that an NFS server exports; empty: none."""

    server: HostName = setting("", "host name or IP address of the NFS server", "nfs.example.com")
    path: AbsolutePath = setting("", "directory that it exports", "/export/backups")

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if bool(self.server) != bool(self.path):
            raise expected("server and path")
        return self


class RepositoryVolume(Section):
    """One of `repositoryVolumes`: a shared volume with the repositories of locations in a file system."""

    mount_path: MountPath = setting(
        ...,
        "where data movers mount it: config.fspath of the BackupStorageLocation is this path, or a directory in it",
        "/backups",
    )
    persistent_volume_claim: ObjectName = setting(
        "", "PVC in the agent's namespace that pods of all nodes can mount, or nfs instead", "shared-backups"
    )
    nfs: NfsVolume = setting(
        NfsVolume,
        "directory of an NFS server, instead of persistentVolumeClaim",
        {"server": "nfs.example.com", "path": "/export/backups"},
    )

    @model_validator(mode="after")
    def _is_one_volume(self) -> Self:
        if bool(self.persistent_volume_claim) == bool(self.nfs.server):
            raise expected("either persistentVolumeClaim or nfs")
        return self

    def to_wire(self) -> VolumeSource:
        """Return it as a volume of a pod, without its name."""
        if self.nfs.server:
            return {"nfs": {"server": self.nfs.server, "path": self.nfs.path}}
        return {"persistentVolumeClaim": {"claimName": self.persistent_volume_claim}}


class OwnKeys(Section):
    """The value of `nodeagent.io`."""

    mover_service_account: ObjectName = setting(
        "", "ServiceAccount of mover pods; empty: the one of --mover-service-account (our own key)", "node-agent-mover"
    )
    excluded_metadata: list[KeyPrefix] = setting(
        lambda: list(DEFAULT_EXCLUDED),
        "how the keys of annotations and labels begin that are not copied from a target PVC or a source "
        "VolumeSnapshot to ours, instead of the default list (our own key)",
        ["cdi.kubevirt.io/"],
    )
    repository_volumes: tuple[RepositoryVolume, ...] = setting(
        (),
        "shared volumes with the repositories of locations with provider velero.io/fs, each mounted by "
        "the data movers of the locations in it (our own key)",
        [{"mountPath": "/backups", "persistentVolumeClaim": "shared-backups"}],
    )
    retry: RetryKeys = setting(
        RetryKeys, "when an interrupted transfer gets another attempt (our own key)", {"maxRetries": 5}
    )
    compression: CompressionKeys = setting(
        CompressionKeys,
        "compression of what backups store (our own key)",
        {"default": "none", "perStorageClass": {"fast": "zstd"}},
    )
    ignore_files_namespaces: list[ObjectName] = setting(
        list,
        "namespaces whose users may leave files out of the backups of their volumes, by files named "
        ".kopiaignore (our own key)",
        ["build"],
    )
    exclude: ExcludeKeys = setting(
        ExcludeKeys,
        "what backups of file systems leave out (our own key)",
        {"rules": [{"namespaces": ["build"], "patterns": ["/cache/"]}]},
    )
    read_all_files_namespaces: list[ObjectName] = setting(
        list,
        "namespaces in whose volumes each backup also reads files whose size and time are unchanged "
        "since the last one (our own key)",
        ["vault"],
    )
    block_hash: BlockHash | None = setting(
        None,
        "hash of repositories that are created without a Velero server; without the key HMAC-SHA256-128 "
        "where the definitions are Velero 1.19's, and kopia's BLAKE2B-256-128 elsewhere (our own key)",
        "HMAC-SHA256-128",
    )
    block_storage_classes: list[ObjectName] = setting(
        list,
        "storage classes whose volumes nodeagent backup create and schedules back up by block unless "
        "--data-mover says otherwise; of a class that has no raw block volumes, files are backed up (our own key)",
        ["fast"],
    )
    verification: VerificationKeys = setting(
        VerificationKeys,
        "how the leader verifies backup repositories, also beside a Velero server; without the key it does "
        "not (our own key)",
        {"period": "720h"},
    )
    leave_out_namespaces: list[ObjectName] = setting(
        list,
        "namespaces whose users may leave a PVC out of backups on purpose, by the annotation "
        "nodeagent.io/exclude-from-backup with the reason; elsewhere it does not count (our own key)",
        ["build"],
    )
    mover: MoverMethod = setting(
        MoverMethod.ONE_OPEN,
        "how data movers run kopia: plain by its own commands; one-open by one process, which opens the "
        "repository once, and in a backup also reads files that were changed without a new time (our own key)",
        "plain",
    )
    alert_not_protected: bool = toggle(
        "whether nodeagent_volume_not_protected names volumes of all namespaces, not only of those with "
        'the label nodeagent.io/alert-not-protected: "true" (our own key)'
    )
    require_file_attributes: bool = toggle(
        "whether a restore fails if its target does not take the owner, mode or time of a file; otherwise "
        "it is Completed, with a message (our own key)"
    )
    bandwidth: BandwidthKeys = setting(
        BandwidthKeys,
        "limits of the bytes that data movers exchange with storages; without the key, nothing is between "
        "kopia and the storage (our own key)",
        {"perNode": {"uploadBytesPerSecond": 100_000_000}},
    )

    @property
    def budgets(self) -> BandwidthKeys | None:
        """The limits; None without the key, which differs from limits that are 0: these may change later."""
        return self.bandwidth if "bandwidth" in self.model_fields_set else None

    @property
    def verification_plan(self) -> VerificationPlan | None:
        """When backup repositories are verified; None without the key: they are not."""
        return self.verification.to_plan() if "verification" in self.model_fields_set else None

    @field_validator("repository_volumes")
    @classmethod
    def _differ(cls, volumes: tuple[RepositoryVolume, ...]) -> tuple[RepositoryVolume, ...]:
        if len({volume.mount_path for volume in volumes}) < len(volumes):
            raise expected("a mountPath that no other of repositoryVolumes has")
        return volumes
