"""The keys of the configuration that Velero does not have, below the key `nodeagent.io`.

They are under one key, so that none clashes with a later one of Velero's. Three older ones of ours are
beside Velero's keys (`nodeagent.config.keys`).
"""

from datetime import timedelta
from typing import Final, Literal, Self

from pydantic import Field, field_validator, model_validator

from core.contract import BackupMover
from core.kube.types import VolumeSource
from core.models.storage import BlockHash
from core.models.transfer_settings import READY_SETS, Compression, Exclusions
from core.models.units import parse_duration, parse_quantity
from exposer.settings import DEFAULT_EXCLUDED
from nodeagent.config.bandwidth import BandwidthKeys
from nodeagent.config.retries import RetryKeys
from nodeagent.config.value_types import (
    AbsolutePath,
    DurationText,
    HostName,
    KeyPrefix,
    MountPath,
    ObjectName,
    Pattern,
    QuantityText,
    Section,
    expected,
)
from nodeagent.config.window_keys import ScheduleText, TimeZoneName, WindowKeys
from nodeagent.config.windows import VerificationPlan, Window, parse_schedule, parse_time_zone

__all__ = [
    "OWN_KEY",
    "CompressionKeys",
    "ExcludeKeys",
    "ExclusionKeys",
    "NfsVolume",
    "OwnKeys",
    "RepositoryVolume",
    "VerificationKeys",
]


class CompressionKeys(Section):
    """The value of `nodeagent.io.compression`."""

    default: Compression = Field(
        default=Compression.NONE,
        description="kopia's algorithm for volumes whose storage class is not in perStorageClass, or that have none",
        examples=["zstd-fastest"],
    )
    per_storage_class: dict[str, Compression] = Field(
        default_factory=dict,
        description="kopia's algorithms, by the storage class of the source volume",
        examples=[{"fast": "zstd"}],
    )


class ExclusionKeys(Section):
    """One of `exclude.rules`: what the backups of some volumes leave out."""

    namespaces: list[ObjectName] = Field(
        default_factory=list,
        description="namespaces of the volumes; empty: all of them",
        examples=[["build"]],
    )
    storage_classes: list[ObjectName] = Field(
        default_factory=list,
        description="storage classes of the volumes; empty: all of them",
        examples=[["fast"]],
    )
    patterns: list[Pattern] = Field(
        default_factory=list,
        description="what is left out, as in a .kopiaignore or .gitignore: *.tmp in any directory, /cache/ a directory "
        "at the top; without exceptions (!) and classes such as [:alpha:]",
        examples=[["/cache/", "*.tmp"]],
    )
    sets: list[Literal["lost+found", "caches", "snapshots"]] = Field(
        default_factory=list,
        description="ready patterns: the folder lost+found, caches of programs, the snapshots of storage systems",
        examples=[["lost+found", "caches", "snapshots"]],
    )
    one_file_system: bool = Field(
        default=False, description="whether file systems that are mounted in a volume are left out", examples=[True]
    )
    largest_size: QuantityText = Field(
        default="", description="size above which files are left out; empty: no limit", examples=["10Gi"]
    )

    @model_validator(mode="after")
    def _is_valid(self) -> Self:
        try:
            self.exclusions  # noqa: B018 - it raises
        except ValueError as e:
            raise expected(f"valid exclusions: {e}") from e
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

    rules: tuple[ExclusionKeys, ...] = Field(
        default=(),
        description="what backups of file systems leave out; all rules that fit a volume apply",
        examples=[[{"namespaces": ["build"], "patterns": ["/cache/"]}]],
    )
    annotation_namespaces: list[ObjectName] = Field(
        default_factory=list,
        description="namespaces in which the annotation nodeagent.io/exclude of a PVC counts: a pattern, or a set such "
        "as @caches, on each line",
        examples=[["build"]],
    )

    @field_validator("rules")
    @classmethod
    def _are_few(cls, rules: tuple[ExclusionKeys, ...]) -> tuple[ExclusionKeys, ...]:
        if sum(len(rule.exclusions.patterns) for rule in rules) > _MOST_PATTERNS:
            raise expected(f"at most {_MOST_PATTERNS} patterns in all rules, including their sets'")
        return rules


class VerificationKeys(Section):
    """The value of `nodeagent.io.verification`: the leader has all backup repositories read back."""

    period: DurationText = Field(
        default="720h",
        description="time in which all that the snapshots of a repository have is read once, a sixteenth at a time",
        examples=["720h"],
    )
    schedule: ScheduleText | None = Field(
        default=None,
        description="when shares are read, as in a CronJob, as many each time as the period takes; without it they are "
        "spread over the period",
        examples=["0 2 * * 6"],
    )
    time_zone: TimeZoneName = Field(default="UTC", description="IANA time zone of schedule", examples=["Europe/Berlin"])
    windows: tuple[WindowKeys, ...] = Field(
        default=(),
        description="when reading may start; without windows in those of maintenance",
        examples=[[{"schedule": "0 22 * * *", "timeZone": "Europe/Berlin", "duration": "8h"}]],
    )

    def to_plan(self) -> VerificationPlan:
        """Return it for decisions."""
        starts = None
        if self.schedule is not None:
            starts = Window(parse_schedule(self.schedule), parse_time_zone(self.time_zone), timedelta())
        return VerificationPlan(
            parse_duration(self.period), starts, tuple(window.to_window() for window in self.windows)
        )


OWN_KEY: Final = "nodeagent.io"


class NfsVolume(Section):
    """A directory that an NFS server exports; empty: none."""

    server: HostName = Field(
        default="", description="host name or IP address of the NFS server", examples=["nfs.example.com"]
    )
    path: AbsolutePath = Field(default="", description="directory that it exports", examples=["/export/backups"])

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if bool(self.server) != bool(self.path):
            raise expected("server and path")
        return self


class RepositoryVolume(Section):
    """One of `repositoryVolumes`: a shared volume with the repositories of locations in a file system."""

    mount_path: MountPath = Field(
        description="where data movers mount it: config.fspath of the BackupStorageLocation is this path, or a "
        "directory in it",
        examples=["/backups"],
    )
    persistent_volume_claim: ObjectName = Field(
        default="",
        description="PVC in the agent's namespace that pods of all nodes can mount, or nfs instead",
        examples=["shared-backups"],
    )
    nfs: NfsVolume = Field(
        default_factory=NfsVolume,
        description="directory of an NFS server, instead of persistentVolumeClaim",
        examples=[{"server": "nfs.example.com", "path": "/export/backups"}],
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

    mover_service_account: ObjectName = Field(
        default="",
        description="ServiceAccount of mover pods; empty: the one of --mover-service-account (our own key)",
        examples=["node-agent-mover"],
    )
    excluded_metadata: list[KeyPrefix] = Field(
        default_factory=lambda: list(DEFAULT_EXCLUDED),
        description="how the keys of annotations and labels begin that are not copied from a target PVC or a source "
        "VolumeSnapshot to ours, instead of the default list (our own key)",
        examples=[["cdi.kubevirt.io/"]],
    )
    repository_volumes: tuple[RepositoryVolume, ...] = Field(
        default=(),
        description="shared volumes with the repositories of locations with provider velero.io/fs, each mounted by "
        "the data movers of the locations in it (our own key)",
        examples=[[{"mountPath": "/backups", "persistentVolumeClaim": "shared-backups"}]],
    )
    retry: RetryKeys = Field(
        default_factory=RetryKeys,
        description="when an interrupted transfer gets another attempt (our own key)",
        examples=[{"maxRetries": 5}],
    )
    compression: CompressionKeys = Field(
        default_factory=CompressionKeys,
        description="compression of what backups store (our own key)",
        examples=[{"default": "none", "perStorageClass": {"fast": "zstd"}}],
    )
    ignore_files_namespaces: list[ObjectName] = Field(
        default_factory=list,
        description="namespaces whose users may leave files out of the backups of their volumes, by files named "
        ".kopiaignore (our own key)",
        examples=[["build"]],
    )
    exclude: ExcludeKeys = Field(
        default_factory=ExcludeKeys,
        description="what backups of file systems leave out (our own key)",
        examples=[{"rules": [{"namespaces": ["build"], "patterns": ["/cache/"]}]}],
    )
    read_all_files_namespaces: list[ObjectName] = Field(
        default_factory=list,
        description="namespaces in whose volumes each backup also reads files whose size and time are unchanged "
        "since the last one (our own key)",
        examples=[["vault"]],
    )
    block_hash: BlockHash | None = Field(
        default=None,
        description="hash of repositories that are created without a Velero server; without the key HMAC-SHA256-128 "
        "where the definitions are Velero 1.19's, and kopia's BLAKE2B-256-128 elsewhere (our own key)",
        examples=["HMAC-SHA256-128"],
    )
    verification: VerificationKeys = Field(
        default_factory=VerificationKeys,
        description="how the leader verifies backup repositories, also beside a Velero server; without the key it does "
        "not (our own key)",
        examples=[{"period": "720h"}],
    )
    leave_out_namespaces: list[ObjectName] = Field(
        default_factory=list,
        description="namespaces whose users may leave a PVC out of backups on purpose, by the annotation "
        "nodeagent.io/exclude-from-backup with the reason; elsewhere it does not count (our own key)",
        examples=[["build"]],
    )
    mover: BackupMover = Field(
        default=BackupMover.PLAIN,
        description="how data movers back files up: plain by kopia's own commands; one-open by one process, which "
        "opens the repository once and also reads files that were changed without a new time (our own key)",
        examples=["one-open"],
    )
    alert_not_protected: bool = Field(
        default=False,
        description="whether nodeagent_volume_not_protected names volumes of all namespaces, not only of those with "
        'the label nodeagent.io/alert-not-protected: "true" (our own key)',
        examples=[True],
    )
    require_file_attributes: bool = Field(
        default=False,
        description="whether a restore fails if its target does not take the owner, mode or time of a file; otherwise "
        "it is Completed, with a message (our own key)",
        examples=[True],
    )
    bandwidth: BandwidthKeys = Field(
        default_factory=BandwidthKeys,
        description="limits of the bytes that data movers exchange with storages; without the key, nothing is between "
        "kopia and the storage (our own key)",
        examples=[{"perNode": {"uploadBytesPerSecond": 100_000_000}}],
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
