"""What a restore into a volume that may have data does with it, as a custom resource asks for it, and the plan of one.

Source: Velero main at 4a7db86f17d3, pkg/restore/actions/csi/pvc_action.go: `spec.restoreType` is set on every restore,
also where the claim did not exist.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

from msgspec import field

from core.errors import ConfigError
from core.models.base import Int64, WireModel
from core.models.job_output import OutputLine
from core.models.units import parse_boolean

__all__ = [
    "COMPARE_CONTENT",
    "DELETE_EXTRA_FILES",
    "FULL",
    "INCREMENTAL",
    "PLAN_LINE",
    "EndedPlan",
    "InPlace",
    "PlannedEntries",
    "RestorePlan",
    "read_switch",
]

FULL: Final = "full"
INCREMENTAL: Final = "incremental"
_PLAIN: Final = frozenset({"", "none"})

DELETE_EXTRA_FILES: Final = "DeleteExtraFiles"
"""An uploader setting of Velero 1.19: a restore into an existing volume deletes what the snapshot does not have."""

COMPARE_CONTENT: Final = "CompareContent"
"""One of ours, which Velero ignores: an incremental restore also reads files of equal size and time, and compares."""


@dataclass(frozen=True)
class InPlace:
    """How a restore goes into a volume that may have data; without it, as into a new one.

    `incremental`: what is equal is not written. `delete_extra_files`: what the snapshot does not have is deleted.
    `compare_content`: files are equal if their content is, whatever size and time say.
    """

    incremental: bool = False
    delete_extra_files: bool = False
    compare_content: bool = False

    @classmethod
    def of(cls, restore_type: str, settings: Mapping[str, str]) -> Self | None:
        """Return what `spec.restoreType`, in any case of letters, and the uploader settings ask for; None: plain.

        Raises:
            ConfigError: the type is unknown, or a setting is neither true nor false.
        """
        wanted = restore_type.lower()
        if wanted not in {*_PLAIN, FULL, INCREMENTAL}:
            raise ConfigError(f'unknown restore type "{restore_type}": use none, full or incremental')
        if wanted in _PLAIN:
            return None
        return cls(
            incremental=wanted == INCREMENTAL,
            delete_extra_files=read_switch(settings, DELETE_EXTRA_FILES),
            compare_content=read_switch(settings, COMPARE_CONTENT),
        )

    @property
    def restore_type(self) -> str:
        """The type, as `spec.restoreType` has it."""
        return INCREMENTAL if self.incremental else FULL


def read_switch(settings: Mapping[str, str], name: str) -> bool:
    """Return a setting that is true or false; an absent or empty one is false.

    Raises:
        ConfigError: it is neither.
    """
    try:
        return parse_boolean(settings.get(name, ""))
    except ValueError as e:
        raise ConfigError(f"setting {name}: {e}") from e


class PlannedEntries(WireModel, omit_defaults=True):
    """Entries with which a restore would do the same: files and links, their bytes, directories.

    `names` are the first paths, cut and escaped: a tenant chooses them.
    """

    files: Int64 = 0
    bytes: Int64 = 0
    directories: Int64 = 0
    names: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Return whether there is an entry."""
        return bool(self.files or self.directories)


class RestorePlan(WireModel):
    """What a restore into a volume with data would do.

    `to_set` gets another owner, mode or time alone. `equal` stays as it is. `to_delete` is not in the snapshot, or has
    another type there. `kept` is not in the snapshot, and stays whatever is deleted: only what was looked at counts.
    `blocked` could not be restored. `refusal` is why the restore would fail before it writes anything; empty: it would
    not.
    """

    to_write: PlannedEntries = field(default_factory=PlannedEntries)
    to_set: PlannedEntries = field(default_factory=PlannedEntries)
    equal: PlannedEntries = field(default_factory=PlannedEntries)
    to_delete: PlannedEntries = field(default_factory=PlannedEntries)
    kept: PlannedEntries = field(default_factory=PlannedEntries)
    blocked: PlannedEntries = field(default_factory=PlannedEntries)
    refusal: str = ""


PLAN_LINE: Final = OutputLine("nodeagent.io/restore-plan", RestorePlan)


class EndedPlan(WireModel):
    """The termination message of `plan-restore` that came to its end: how many entries it compared."""

    entries: Int64
