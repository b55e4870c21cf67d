"""Whether a backup has far fewer files or bytes than the one before it: it is Shrunk. Pure.

A data mover decides it by the snapshots of the source that are in the repository, whoever made them; the annotation
`nodeagent.io/shrunk` of a transfer has the answer, and whether somebody has acknowledged it.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from core.models.base import Int64, Time, WireModel
from core.models.names import SHRUNK_ANNOTATION

__all__ = ["SavedSize", "Shrinkage", "find_full", "is_shrunk", "read_shrinkage"]

_FILES: Final = 100
_BYTES: Final = 64 * 1024**2
"""A smaller loss is no reason to look: a half of little is little."""


@dataclass(frozen=True)
class SavedSize:
    """What a complete snapshot has: files, None where that is not known, and their bytes.

    `rules` is the digest of its exclusions, empty without any; `left_out` are the files and bytes that these left out,
    None where that is not known.
    """

    snapshot_id: str
    files: int | None
    bytes: int
    rules: str = ""
    left_out: tuple[int, int] | None = None

    def has_shrunk_from(self, full: "SavedSize") -> bool:
        """Return whether this has less than half of the files or bytes of `full`, and not just a few less.

        What exclusions other than in `full` left out counts as if it were there.
        """
        more_files, more_bytes = 0, 0
        if self.rules not in {"", full.rules}:
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


class Shrinkage(WireModel, omit_defaults=True):
    """What a Shrunk backup has, and what the newest one before it had that is not: the snapshot `full_snapshot`.

    Somebody has acknowledged it at `acknowledged`; None: nobody has.
    """

    bytes: Int64
    full_bytes: Int64
    full_snapshot: str = ""
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
        acknowledged: the IDs of those in `history` that somebody has acknowledged: they are not Shrunk.
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
        bytes=new.bytes,
        full_bytes=full.bytes,
        full_snapshot=full.snapshot_id,
        files=new.files,
        full_files=full.files,
    )


def read_shrinkage(annotations: Mapping[str, str]) -> Shrinkage | None:
    """Return how the backup with these annotations is Shrunk; None: it is not, or that is invalid."""
    return Shrinkage.read_annotation(annotations, SHRUNK_ANNOTATION)


def is_shrunk(annotations: Mapping[str, str]) -> bool:
    """Return whether the backup with these annotations is Shrunk, and nobody has acknowledged it."""
    found = read_shrinkage(annotations)
    return found is not None and found.acknowledged is None


def _is_far_less(now: int, before: int, least: int) -> bool:
    return 2 * now < before and before - now > least


def _show(files: int | None, size_bytes: int) -> str:
    return f"{size_bytes} bytes" if files is None else f"{files} files with {size_bytes} bytes"
