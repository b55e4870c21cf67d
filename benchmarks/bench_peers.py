"""`python -m benchmarks.bench_peers`: backups and restores by ours and by other programs, on one machine.

Knows what is backed up and in which order. Each cell, one program with one volume, runs alone, is appended to a file
and leaves nothing behind, so a run that was interrupted goes on. Does not know how a program is started.
"""

import argparse
import json
import os
import random
import shutil
import stat
import struct
import subprocess
import sys
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks.bed import Bed, Report, run_alone
from benchmarks.figures import Summary, alternate, say, spread, table
from benchmarks.peers import OF_DEVICES, OURS, PEERS, Peer, Peers
from benchmarks.processes import BenchmarkError, Measured
from benchmarks.tree import TreeShape, change_tree, find_differences, make_tree, survey_tree
from core.contract import VolumeMode
from tests.datamover.support.loopdevice import attached, make_ext4, mounted_image
from tests.datamover.support.random_trees import Again, File, Folder, Kept, Special, create

_MIB: Final = 1 << 20
_EACH: Final = 100
"""One of so many files or used blocks is changed."""

_PHASES = _FIRST, _UNCHANGED, _CHANGED, _RESTORE = "first backup", "nothing changed", "1 % changed", "restore"
_SECONDS: Final = "seconds"
_FIGURES: Final = {_SECONDS: 2, "CPU seconds": 2, "peak MiB": 0, "MB stored": 1, "requests": 0, "load before it": 1}
"""With their digits."""

_Row = dict[str, Any]


@dataclass(frozen=True)
class Work:
    """A volume of `size_mib` that is filled, changed and compared as a folder or a device, by `mode`."""

    rounds: int
    size_mib: int
    fill: Callable[[Path], object]
    change: Callable[[Path], object]
    find_differences: Callable[[Path, Path], Sequence[str]]
    mode: VolumeMode = VolumeMode.FILESYSTEM

    @property
    def peers(self) -> Peers:
        """What is compared, by name."""
        return PEERS if self.mode is VolumeMode.FILESYSTEM else OF_DEVICES

    def make(self, image: Path, mode: VolumeMode) -> None:
        """Make an empty volume."""
        if mode is VolumeMode.FILESYSTEM:
            make_ext4(image, self.size_mib * _MIB, "-i", "8192")
            with mounted_image(image, image.with_suffix("")) as folder:
                (folder / "data").mkdir()
        else:
            with image.open("wb") as file:
                file.truncate(self.size_mib * _MIB)


@contextmanager
def _opened(image: Path, mode: VolumeMode) -> Iterator[Path]:
    """Attach a volume, as it is after a snapshot: nothing of it is cached but what the disk has."""
    if mode is VolumeMode.BLOCK:
        with attached(image) as device:
            yield device
    else:
        with mounted_image(image, image.with_suffix("")) as folder:
            # Not the top folder: it has `lost+found`.
            yield folder / "data"


def _tree(rounds: int, size_mib: int, shape: TreeShape) -> Work:
    return Work(
        rounds,
        size_mib,
        fill=lambda folder: make_tree(folder / "tree", shape),
        change=partial(change_tree, each=_EACH),
        find_differences=lambda one, other: find_differences(survey_tree(one), other),
    )


def _device(rounds: int, size_mib: int, used_mib: int) -> Work:
    """Return a device with blocks of 1 MiB of random data all over it; 4 KiB of one of a hundred are changed."""

    def write(device: Path, each: int, size_bytes: int, seed: str) -> None:
        with device.open("r+b") as file:
            for number in range(0, used_mib, each):
                file.seek(number * (size_mib // used_mib) * _MIB)
                file.write(random.Random(f"{seed} {number}").randbytes(size_bytes))  # noqa: S311 - content, no secret
            file.flush()
            os.fsync(file.fileno())

    def compare(one: Path, other: Path) -> list[str]:
        argv = ["cmp", str(one), str(other)]
        done = subprocess.run(argv, check=False, capture_output=True, text=True)  # noqa: S603 - compares files of ours
        return (done.stdout + done.stderr).splitlines()

    fill = partial(write, each=1, size_bytes=_MIB, seed="first")
    change = partial(write, each=_EACH, size_bytes=4096, seed="second")
    return Work(rounds, size_mib, fill, change, compare, VolumeMode.BLOCK)


_OLD: Final = Kept((1000, 1000), 1_600_000_000 * 10**9, 0o4755)
_ACL: Final = struct.pack("<I" + "HHi" * 5, 2, *(1, 6, -1), *(2, 4, 1000), *(4, 4, -1), *(16, 4, -1), *(32, 4, -1))
"""Source: Linux, include/uapi/linux/posix_acl_xattr.h: a version; tag, permissions and ID of each entry."""

_ALL_KINDS: Final = Folder(
    _OLD,
    {
        b"file": File(_OLD, b"content", 16 * _MIB, ("user.note", b"note")),
        b"same": Again(),
        b"ACL": File(_OLD, b"", 0, ("system.posix_acl_access", _ACL)),
        b"pipe": Special(_OLD, stat.S_IFIFO),
        b"null": Special(_OLD, stat.S_IFCHR),
        b"folder": Folder(_OLD, {b"new": File(Kept((0, 0), 1_700_000_000 * 10**9, 0o600), b"")}),
    },
)
_KEPT: Final[dict[str, Callable[[Path], object]]] = {
    "hard links": lambda root: (root / "file").stat().st_nlink,
    "holes": lambda root: (root / "file").stat().st_blocks < 1 << 10,
    "set-user-ID bits": lambda root: (root / "file").stat().st_mode,
    "extended attributes": lambda root: os.getxattr(root / "file", "user.note"),
    "ACLs": lambda root: os.getxattr(root / "ACL", "system.posix_acl_access"),
    "named pipes": lambda root: (root / "pipe").is_fifo(),
    "device files": lambda root: (root / "null").is_char_device(),
    "times of directories": lambda root: (root / "folder").stat().st_mtime_ns,
}


def _find_lost(root: Path, target: Path) -> list[str]:
    def read(what: str, one: Path) -> object:
        with suppress(OSError):
            return _KEPT[what](one / "tree")
        return None

    return [what for what in _KEPT if read(what, root) != read(what, target)]


_KINDS: Final = "kinds"
_WORKS: Final = {
    _KINDS: Work(1, 64, lambda folder: create(folder / "tree", _ALL_KINDS), lambda _: None, _find_lost),
    "files": _tree(3, 4 << 10, TreeShape(8, 125_000_000, 20_000, 10_000)),
    "device": _device(3, 20 << 10, 5 << 10),
    "million": _tree(1, 12 << 10, TreeShape(0, 0, 1_000_000, 4_096)),
}
_QUICK: Final = _WORKS | {
    "files": _tree(1, 64, TreeShape(1, 3_000_000, 200, 2_000)),
    "device": _device(1, 64, 16),
    "million": _tree(1, 64, TreeShape(0, 0, 500, 4_096)),
}


async def _run_cell(bed: Bed, work: Work, peer: Peer) -> list[_Row]:
    """Back up, restore, and return a row for each phase; the last one has what is different, `lost`."""
    rows: list[_Row] = []
    bucket, source, target = bed.s3.folder / peer.bucket, bed.folder / "source.image", bed.folder / "target.image"

    async def run(phase: str, image: Path, act: Callable[[Path], Awaitable[Measured]]) -> None:
        with _opened(image, peer.mode) as volume:
            bed.settle()
            before, requests, load = _size(bucket), bed.count_requests(), os.getloadavg()[0]
            took = await act(volume)
        stored, requests = (_size(bucket) - before) / 1e6, bed.count_requests() - requests
        figures = (took.seconds, took.cpu_seconds, took.working_set_mib, stored, requests, load)
        rows.append({"phase": phase, **dict(zip(_FIGURES, figures, strict=True))})

    try:
        work.make(source, work.mode)
        with _opened(source, work.mode) as volume:
            work.fill(volume)
        await peer.create()
        await run(_FIRST, source, peer.back_up)
        await run(_UNCHANGED, source, peer.back_up)
        with _opened(source, work.mode) as volume:
            work.change(volume)
        await run(_CHANGED, source, peer.back_up)
        work.make(target, peer.mode)
        await run(_RESTORE, target, peer.restore)
        with _opened(source, work.mode) as one, _opened(target, work.mode) as other:
            rows[-1]["lost"] = list(work.find_differences(one, other))
    finally:
        for image in (source, target):
            image.unlink(missing_ok=True)
        shutil.rmtree(bucket, ignore_errors=True)
    return rows


def _size(folder: Path) -> int:
    return sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())


async def _measure(arguments: argparse.Namespace, bed: Bed) -> Report:
    works, left = _QUICK if arguments.quick else _WORKS, arguments.cells
    results: Path = arguments.results or bed.folder / "results"
    results.touch()
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    for what in arguments.work or works:
        work = works[what]
        for number in range(work.rounds):
            for name in alternate([each for each in work.peers if each in (arguments.peer or work.peers)], number):
                cell: _Row = {"work": what, "round": number, "peer": name}
                if left == 0 or any(cell.items() <= row.items() for row in rows):
                    continue
                say(f"{what}, round {number + 1} of {work.rounds}: {name}")
                with ExitStack() as stack:
                    done: list[_Row] = [cell | row for row in await _run_cell(bed, work, work.peers[name](bed, stack))]
                if what != _KINDS and (lost := done[-1]["lost"]):
                    raise BenchmarkError(f"{name} restored something else: {lost[0]}")
                rows, left = rows + done, left - 1
                with results.open("a") as file:
                    file.writelines(f"{json.dumps(row)}\n" for row in done)
    return Report("Buckets are in memory, volumes and caches on the disk", _lines(rows), _summary(rows))


def _groups(rows: list[_Row]) -> dict[tuple[str, str, str], list[_Row]]:
    """Return the rows of each volume, phase and program."""
    groups: defaultdict[tuple[str, str, str], list[_Row]] = defaultdict(list)
    shown = [row for row in rows if row["work"] != _KINDS]
    for row in sorted(shown, key=lambda row: (list(_WORKS).index(row["work"]), _PHASES.index(row["phase"]))):
        groups[row["work"], row["phase"], row["peer"]].append(row)
    return groups


def _lines(rows: list[_Row]) -> Iterator[str]:
    shown = []
    for key, group in _groups(rows).items():
        medians = [f"{median(row[name] for row in group):.{digits}f}" for name, digits in _FIGURES.items()]
        _, *extremes = spread([row[_SECONDS] for row in group])
        shown.append([*key, *medians, *extremes])
    yield from table(["volume", "phase", "program", *_FIGURES, "least seconds", "most"], shown)
    yield from (f"{row['peer']} does not keep: {', '.join(row['lost'])}" for row in rows if row.get("lost"))


def _summary(rows: list[_Row]) -> Summary:
    """Return how long ours takes of each volume and phase, in seconds and compared with the best other program."""
    medians = {key: median(row[_SECONDS] for row in group) for key, group in _groups(rows).items()}
    summary: Summary = {}
    for (work, phase, peer), seconds in medians.items():
        others = [took for key, took in medians.items() if key[:2] == (work, phase) and OURS not in key[2]]
        if OURS in peer:
            name = "_".join(f"{work} {phase} {peer}".replace("1 %", "1_percent").replace(",", "").split())
            summary[f"{name}_s"] = round(seconds, 2)
            summary[f"{name}_ratio"] = round(seconds / min(others), 3) if others else None
    return summary


def main() -> int:
    """Measure, and print the table and the summary; return the exit code."""
    parser = argparse.ArgumentParser(prog="bench_peers", description="Backups and restores by ours and by others.")
    parser.add_argument("--work", action="append", choices=_WORKS, help="only this volume; may be repeated")
    parser.add_argument("--peer", action="append", choices=PEERS, help="only this program; may be repeated")
    parser.add_argument("--results", type=Path, help="file of results: what it has is not measured again")
    parser.add_argument("--cells", type=int, default=-1, help="end after so many cells (default: after all)")
    return run_alone(parser, _measure)


if __name__ == "__main__":
    sys.exit(main())
