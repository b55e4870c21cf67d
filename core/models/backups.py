"""What is known of a backup beside its data: its PVC, whether it is Shrunk, and why retention kept it. Pure.

The PVC is in an annotation of a transfer, and in the tag of the same name of its snapshot. Any writer to the bucket
chooses what a tag says, so it is checked like any input. A data mover decides whether a backup is Shrunk by all
snapshots of the source in the repository, whichever agent made them.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, Self, cast

from msgspec import field, structs

from core.errors import ContractError
from core.models import names
from core.models.base import Int64, ObjectMeta, SparseModel, Time, WireModel, format_time
from core.models.units import parse_quantity

REPORT_KEY: Final = "_report"
"""The key of the report in the ConfigMap; an entry's key is the name of a backup, which begins with no underscore."""

_BACKLOG: Final = 10
"""From so many waiting copies on, a person is to know: a steady schedule never has one."""


class HeldBackup(SparseModel, omit_defaults=True):
    """An expired backup that was kept for one volume; `reason` is a sentence, `command` what lets go.

    `rule` is a value of `client.backups.retention.RetentionRule`. `namespace` and `claim` are the volume, `created` is
    when the backup was made, `bytes` the size of what it has.
    """

    backup: str
    rule: str
    reason: str
    namespace: str
    claim: str
    location: str
    created: Time | None = None
    bytes: Int64 = 0
    command: str | None = None


class RetentionReport(SparseModel, omit_defaults=True):
    """What one run of retention has left.

    `at` is when, by its witnesses of the time. `held` are the first expired backups that a rule keeps which may not end
    by itself, `held_count` how many there are. `waiting` is how many expired copies, of `waiting_backups`, wait for the
    limit of deletions, `waiting_why` why so many, `through` when they will be gone. `failure` is why nothing, or not
    all, could be judged or deleted; None: it could. `schedule` is None for a command.
    """

    at: Time
    schedule: str | None = None
    deleted: Int64 = 0
    held: list[HeldBackup] = field(default_factory=list)
    held_count: Int64 = 0
    waiting: Int64 = 0
    waiting_backups: Int64 = 0
    waiting_why: str | None = None
    through: Time | None = None
    failure: str | None = None

    @property
    def backlog(self) -> str | None:
        """A message about the copies that wait: how many, why, until when, what deletes them; None: they are few."""
        if self.waiting < _BACKLOG:
            return None
        why = f" ({self.waiting_why})" if self.waiting_why else ""
        through = f"; the last one goes at about {format_time(self.through)}" if self.through is not None else ""
        message = f"{self.waiting} expired copies wait for the limit of deletions{why}{through}"
        return f"{message}; to delete them at once: nodeagent backup delete --expired --at-most {self.waiting_backups}"


def read_report(data: Mapping[str, str] | None) -> RetentionReport | None:
    """Return the report in `data` of the ConfigMap; None: there is none, or it is invalid."""
    try:
        return RetentionReport.from_json((data or {})[REPORT_KEY])
    except (KeyError, ContractError):
        return None


def schedule_words(cron_job: Mapping[str, Any]) -> list[str]:
    """Return the words after the program of a batch/v1 CronJob; none: it is not a schedule of ours."""
    # As Kubernetes reads them, and `escape_words` of the exposer wrote them.
    words = [str(word).replace("$$", "$") for word in _container_of(cron_job).get("args") or []]
    return words if words[:1] == [names.SCHEDULE_COMMAND] else []


def _container_of(cron_job: Mapping[str, Any]) -> Mapping[str, Any]:
    template = ((cron_job.get("spec") or {}).get("jobTemplate") or {}).get("spec") or {}
    containers = ((template.get("template") or {}).get("spec") or {}).get("containers") or [{}]
    return cast("Mapping[str, Any]", containers[0])


def deletes_by_old_rules(cron_job: Mapping[str, Any]) -> bool:
    """Return whether a batch/v1 CronJob is a schedule of ours that deletes, with an image whose rules may be older.

    A CronJob keeps the image of the day when it was made, and so its rules.
    """
    if not any(word.startswith(("--ttl", "--keep-")) for word in schedule_words(cron_job)):
        return False
    annotations = cron_job["metadata"].get("annotations") or {}
    # A webhook may have added the digest of the tag.
    known, image = annotations.get(names.RETENTION_IMAGE_ANNOTATION) or "", _container_of(cron_job).get("image") or ""
    return not known or known.partition("@")[0] != image.partition("@")[0]


_MODES: Final = frozenset({"Filesystem", "Block"})

_LIMIT_BYTES: Final = 16 * 1024
"""Of the JSON with labels: a tag is an argument of kopia, and all annotations of an object share 256 KiB."""


class SavedClaim(WireModel, omit_defaults=True):
    """The spec of a PVC, its labels, and how large its volume was.

    `size` is the requested quantity; None: none was requested. `capacity` is the volume's, which may have been
    larger; None: not known. `storage_class` of None: the claim named none; "": one without a provisioner.
    """

    annotation: ClassVar[str] = names.CLAIM_ANNOTATION

    namespace: str
    name: str
    size: str | None = None
    capacity: str | None = None
    storage_class: str | None = None
    access_modes: tuple[str, ...] = ()
    volume_mode: str = "Filesystem"
    labels: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Reject what no PVC could have; msgspec converts the ValueError to a validation error."""
        named = {"namespace": self.namespace, "name": self.name}
        if self.storage_class:
            named["storageClass"] = self.storage_class
        for key, value in named.items():
            if not names.OBJECT_NAME.fullmatch(value):
                raise ValueError(f"{key}: not the name of an object")
        for quantity in filter(None, (self.size, self.capacity)):
            parse_quantity(quantity)
        if self.volume_mode not in _MODES:
            raise ValueError(f"volumeMode: must be one of {', '.join(sorted(_MODES))}")

    @classmethod
    def from_claim(cls, claim: Mapping[str, Any]) -> Self:
        """Return what is kept of `claim`, a v1 PersistentVolumeClaim as JSON dict; raise ContractError if invalid."""
        meta, spec = claim["metadata"], claim.get("spec") or {}
        requests = (spec.get("resources") or {}).get("requests") or {}
        wire = {
            "namespace": meta.get("namespace"),
            "name": meta.get("name"),
            "size": requests.get("storage"),
            "capacity": ((claim.get("status") or {}).get("capacity") or {}).get("storage"),
            "storageClass": spec.get("storageClassName"),
            "accessModes": spec.get("accessModes"),
            "volumeMode": spec.get("volumeMode"),
            "labels": meta.get("labels"),
        }
        return cls.from_wire(wire)

    @property
    def text(self) -> str:
        """The value of the annotation and of the tag; without the labels where they are too long."""
        whole = self.to_json()
        return whole if len(whole.encode()) <= _LIMIT_BYTES else structs.replace(self, labels={}).to_json()


_FILES: Final = 100
_BYTES: Final = 64 * 1024**2
"""A smaller loss is no reason to look: a half of little is little."""


@dataclass(frozen=True)
class SavedSize:
    """What a complete snapshot has: files, None where that is not known, and their bytes.

    `rules` is the digest of its exclusions, None without any; `left_out` are the files and bytes that these left out,
    None where that is not known.
    """

    snapshot_id: str
    files: int | None
    bytes: int
    rules: str | None = None
    left_out: tuple[int, int] | None = None

    def has_shrunk_from(self, full: "SavedSize") -> bool:
        """Return whether this has less than half of the files or bytes of `full`, and not just a few less.

        What exclusions other than in `full` left out counts as if it were there.
        """
        more_files, more_bytes = 0, 0
        if self.rules not in {None, full.rules}:
            if self.left_out is None:
                return False
            more_files, more_bytes = self.left_out
        files = self.files is not None and full.files is not None
        fewer = files and _is_far_less((self.files or 0) + more_files, full.files or 0, _FILES)
        return fewer or _is_far_less(self.bytes + more_bytes, full.bytes, _BYTES)

    def confirms(self, shrunk: "SavedSize") -> bool:
        """Return whether this has at least nine tenths of `shrunk`, the one before: the volume is as small as that."""
        files = self.files is None or shrunk.files is None or 10 * self.files >= 9 * shrunk.files
        return files and 10 * self.bytes >= 9 * shrunk.bytes


class Shrinkage(SparseModel, omit_defaults=True):
    """What a Shrunk backup has, and what the newest one before it had that is not: the snapshot `full_snapshot`.

    `acknowledged` is when it was acknowledged; None: it was not.
    """

    annotation: ClassVar[str] = names.SHRUNK_ANNOTATION

    bytes: Int64
    full_bytes: Int64
    full_snapshot: str | None = None
    files: Int64 | None = None
    full_files: Int64 | None = None
    acknowledged: Time | None = None

    @property
    def text(self) -> str:
        """What to tell about it."""
        now, before = _show(self.files, self.bytes), _show(self.full_files, self.full_bytes)
        return f"shrunk: the volume has {now}, and had {before}"


def find_full(history: Iterable[SavedSize], new: SavedSize, acknowledged: Collection[str] = ()) -> Shrinkage | None:
    """Return from what `new` has shrunk; None: it has not.

    Args:
        history: the complete snapshots of the same source before it, the oldest first.
        new: the last one.
        acknowledged: the IDs of those in `history` that were acknowledged: they are not Shrunk.
    """
    full: SavedSize | None = None
    shrunk: SavedSize | None = None
    for one in (*history, new):
        if one.rules == new.rules:
            # Not recorded in the repository, and about the same under the same rules.
            one = replace(one, left_out=new.left_out)  # noqa: PLW2901 - the same snapshot
        confirmed = shrunk is not None and one.confirms(shrunk)
        if full is None or confirmed or one.snapshot_id in acknowledged or not one.has_shrunk_from(full):
            full, shrunk = one, None
        else:
            shrunk = one
    if full is None or shrunk is None:
        return None
    return Shrinkage(
        bytes=new.bytes, full_bytes=full.bytes, full_snapshot=full.snapshot_id, files=new.files, full_files=full.files
    )


def velero_backup_of(meta: ObjectMeta) -> str:
    """Return the name of the Velero Backup of a transfer; empty: it has none.

    Its label has a long name in the form of `label_value`, an owner reference as it is. Source: Velero v1.18,
    newDataUpload in pkg/backup/actions/csi/pvc_action.go, newPodVolumeBackup in pkg/podvolume/backupper.go.
    """
    label = meta.labels.get(names.VELERO_BACKUP_LABEL, "")
    owners = (one.name for one in meta.owner_references if one.kind == "Backup")
    return next((name for name in owners if names.label_value(name) == label), label)


def is_shrunk(annotations: Mapping[str, str]) -> bool:
    """Return whether the backup with these annotations is Shrunk, and was not acknowledged."""
    found = Shrinkage.from_annotations(annotations)
    return found is not None and found.acknowledged is None


def _is_far_less(now: int, before: int, least: int) -> bool:
    return 2 * now < before and before - now > least


def _show(files: int | None, size_bytes: int) -> str:
    return f"{size_bytes} bytes" if files is None else f"{files} files with {size_bytes} bytes"
