"""The trees that are moved, and whether what was restored is the same.

Knows how many files of which sizes, and how all CPUs work at a tree of 200,000. Does not know
who moves them.
"""

import multiprocessing
import os
import random
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path
from typing import Final

from tests.testbed.demonstration.compare import Survey, compare
from tests.testbed.demonstration.survey import describe

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

    def describe(self) -> str:
        """Return the sizes for people."""
        return f"{self.total_bytes / 1e9:.2f} GB in {self.large_files} large and {self.small_files:,} small files"

    def apart(self) -> tuple["TreeShape", "TreeShape"]:
        """Return the shapes of a tree with the large files, and one with the small ones."""
        return replace(self, small_files=0), replace(self, large_files=0)


def make_tree(root: Path, shape: TreeShape) -> Path:
    """Make a tree at `root`, the same one each time, and return `root`."""
    root.mkdir(parents=True)
    larges = [root / f"large-{number}" for number in range(shape.large_files)]
    starts = range(0, shape.small_files, _FILES_A_FOLDER)
    folders = [root / f"folder-{start // _FILES_A_FOLDER:04}" for start in starts]
    counts = [min(_FILES_A_FOLDER, shape.small_files - start) for start in starts]
    with _processes() as pool:
        made = [
            pool.map(_make_file, larges, repeat(shape.large_bytes)),
            pool.map(_make_folder, folders, counts, repeat(shape.small_bytes)),
        ]
        for each in made:
            # Whatever went wrong in a process is raised here.
            list(each)
    return root


def change_tree(root: Path, *, each: int = 1) -> None:
    """Replace the content of every file below `root`, or of one of each so many, by other bytes of the same size."""
    files = sorted(path for path in root.rglob("*") if path.is_file())
    for path in files[each - 1 :: each]:
        with path.open("r+b") as file:
            for start in range(0, path.stat().st_size, _PIECE_BYTES):
                file.write(os.urandom(min(_PIECE_BYTES, path.stat().st_size - start)))


def survey_tree(root: Path) -> Survey:
    """Return what must be restored of each entry below `root`: kind, mode, owner, time, and the content's hash."""
    with _processes() as pool:
        survey: Survey = {}
        for part in pool.map(_survey, repeat(root), sorted(root.iterdir())):
            survey.update(part)
    return survey


def find_differences(before: Survey, root: Path) -> tuple[str, ...]:
    """Return a line for each property below `root` that is not as it was `before`."""
    return compare(before, survey_tree(root)).differences


def _processes() -> ProcessPoolExecutor:
    """Return as many processes as there are CPUs; forked, they have all they need and begin at once."""
    return ProcessPoolExecutor(len(os.sched_getaffinity(0)), multiprocessing.get_context("fork"))


def _make_file(path: Path, size_bytes: int) -> None:
    rng = _random_for(path)
    with path.open("wb") as file:
        for start in range(0, size_bytes, _PIECE_BYTES):
            file.write(rng.randbytes(min(_PIECE_BYTES, size_bytes - start)))


def _make_folder(folder: Path, files: int, size_bytes: int) -> None:
    rng = _random_for(folder)
    folder.mkdir()
    for number in range(files):
        (folder / f"small-{number:02}").write_bytes(rng.randbytes(size_bytes))


def _random_for(path: Path) -> random.Random:
    return random.Random(f"{_SEED} {path.name}")  # noqa: S311 - content, no secret


def _survey(root: Path, top: Path) -> Survey:
    """Describe an entry of `root`, and all below it."""
    paths = [top]
    if not top.is_symlink() and top.is_dir():
        for parent, folders, files in os.walk(top, onerror=_raise):
            paths += [Path(parent) / each for each in (*folders, *files)]
    return {str(path.relative_to(root)): describe(path) for path in paths}


def _raise(error: OSError) -> None:
    raise error
