"""The trees that are moved, and whether what came back is the same.

Knows how many files of which sizes. Does not know who moves them.
"""

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.bed.demonstration.compare import Survey, compare
from tests.bed.demonstration.survey import describe

__all__ = ["TreeShape", "find_differences", "make_tree", "survey_tree"]

_FILES_A_FOLDER: Final = 100
_PIECE_BYTES: Final = 1 << 20
_SEED: Final = 4


@dataclass(frozen=True)
class TreeShape:
    """How many files of which size in bytes; their content repeats nothing and does not compress."""

    large_files: int
    large_bytes: int
    small_files: int
    small_bytes: int

    @property
    def total_bytes(self) -> int:
        """The size of all files."""
        return self.large_files * self.large_bytes + self.small_files * self.small_bytes

    @property
    def files(self) -> int:
        """The number of all files."""
        return self.large_files + self.small_files


def make_tree(root: Path, shape: TreeShape) -> Path:
    """Make a tree at `root`, the same one each time, and return `root`."""
    rng = random.Random(_SEED)  # noqa: S311 - content, no secret
    root.mkdir(parents=True)
    for number in range(shape.large_files):
        with (root / f"large-{number}").open("wb") as file:
            for start in range(0, shape.large_bytes, _PIECE_BYTES):
                file.write(rng.randbytes(min(_PIECE_BYTES, shape.large_bytes - start)))
    for number in range(shape.small_files):
        folder = root / f"folder-{number // _FILES_A_FOLDER:04}"
        if number % _FILES_A_FOLDER == 0:
            folder.mkdir()
        (folder / f"small-{number % _FILES_A_FOLDER:02}").write_bytes(rng.randbytes(shape.small_bytes))
    return root


def survey_tree(root: Path) -> Survey:
    """Return what must come back of each entry below `root`: kind, mode, owner, time, and the content's hash."""
    paths = list(root.rglob("*"))
    with ThreadPoolExecutor() as pool:
        return dict(zip((str(path.relative_to(root)) for path in paths), pool.map(describe, paths), strict=True))


def find_differences(before: Survey, root: Path) -> tuple[str, ...]:
    """Return a line for each property below `root` that is not as it was `before`."""
    return compare(before, survey_tree(root)).differences
