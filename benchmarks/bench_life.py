"""`python -m benchmarks.bench_life`, in the test bed: the life of transfers of all kinds, beside kopia by hand."""

import argparse
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Final

from benchmarks.disks import snapshot_of
from benchmarks.figures import Summary, print_report, spread, table
from benchmarks.lives import Life, live, read_events
from benchmarks.processes import BenchmarkError
from benchmarks.tree import TreeShape, change_tree, make_tree
from core.contract import DataPathReason
from tests.cluster.bed import Bed
from tests.cluster.changes import MIB, announced_changes, open_tracked
from tests.cluster.followed import Followed
from tests.cluster.handkopia import HandKopia, open_kopia
from tests.cluster.site import Site
from tests.testbed.api import Api
from tests.testbed.demonstration.manifests import build_namespace
from tests.testbed.demonstration.user import User
from tests.testbed.install import install_agent
from tests.testbed.processes import BedError

_MEDIUM: Final = TreeShape(large_files=8, large_bytes=125 << 20, small_files=20_000, small_bytes=10_000)
_QUICK: Final = TreeShape(large_files=2, large_bytes=8 << 20, small_files=400, small_bytes=10_000)
_SMALL: Final = TreeShape(large_files=1, large_bytes=100_000, small_files=0, small_bytes=0)
_DEVICE_BYTES: Final = 512 << 20
_NODE: Final = "bed-1"

_COMPARED: Final = re.compile(r": compared in ([\d.]+) s")
"""Source: `tools/csi/driver`."""


@dataclass
class _Figures:
    """Lives by the name of their run, and the seconds of kopia by hand beside them."""

    lives: dict[str, list[Life]] = field(default_factory=dict)
    kopia: dict[str, list[float]] = field(default_factory=dict)

    def lines(self) -> Iterator[str]:
        """Yield a table of medians."""
        stages = list(next(iter(self.lives.values()))[0].seconds)
        rows = []
        for name, lives in self.lives.items():
            cells = [f"{median(life.seconds[stage] for life in lives):.2f}" for stage in stages]
            _, *in_progress = spread([life.in_progress for life in lives])
            by_hand = spread(self.kopia[name]) if name in self.kopia else [""] * 3
            rows.append([name, *cells, *in_progress, *by_hand])
        columns = ["run", *stages, "least InProgress", "most", "kopia by hand", "least", "most"]
        return table(columns, rows)

    def summary(self) -> Summary:
        """Return the figures: InProgress to Completed against kopia by hand, and seconds."""
        found: dict[str, float] = {}
        for name, lives in self.lives.items():
            key = name.replace(", ", "_").replace(" ", "_").lower()
            found[f"{key}_in_progress_s"] = median(life.in_progress for life in lives)
            found[f"{key}_whole_s"] = median(life.whole for life in lives)
            if name in self.kopia:
                found[f"{key}_ratio"] = found[f"{key}_in_progress_s"] / median(self.kopia[name])
        return {key: round(value, 3) for key, value in found.items()}


@dataclass
class _Benchmark:
    bed: Bed
    shape: TreeShape
    rounds: int
    figures: _Figures = field(default_factory=_Figures)
    _names: int = 0

    def run(self) -> None:
        for number in range(self.rounds):
            for size, shape in (("small", _SMALL), ("medium", self.shape)):
                self._go_through(f"life-{size}-{number}", size, shape)

    def _go_through(self, space: str, size: str, shape: TreeShape) -> None:
        """Move the volumes of a new namespace, each beside kopia on the same data; who is first alternates."""
        self.bed.user.apply(build_namespace(space))

        def fill(folder: Path) -> None:
            make_tree(folder / "tree", shape)

        devices, s3 = size == "medium", self.bed.env["BED_S3_URL"]
        site = Site(self.bed, space, s3, node=_NODE, devices=devices, size="2Gi", fill=fill, fill_device=_fill_device)
        site.prepare()
        place = site.open_place("bucket")
        with open_kopia(self.bed, f"{space}-by-hand", connect=False) as kopia:
            self._back_up(site, place, kopia, size)
        if size == "medium":
            self._run("DataUpload, block", site.upload(self._name(), location=place, block=True))
        self.bed.user.kubectl("delete", "namespace", space, "--wait=false")

    def _back_up(self, site: Site, place: str, kopia: HandKopia, size: str) -> None:
        data = site.path("data")
        for run in ("first", "unchanged", "new data"):
            if run == "new data":
                change_tree(data)
            last = site.upload(self._name(), location=place)
            by_hand = partial(_back_up_by_hand, kopia, data, first=run == "first")
            self._both(f"DataUpload, {size}, {run}", last, by_hand)
        restore = partial(self._restore, site, kopia, data)
        self._both(f"DataDownload, {size}", site.download(self._name(), of=last), restore)
        pod = self._run(f"PodVolumeBackup, {size}", site.backup(self._name(), location=site.open_place("pods")))
        self._run(f"PodVolumeRestore, {size}", site.restore(self._name(), of=pod))
        for one in (last, pod):
            if wrong := site.differences(one):
                raise BenchmarkError(f"{one.name} is not as its volume: {wrong[0]}")

    def _restore(self, site: Site, kopia: HandKopia, source: Path) -> float:
        """Restore by hand into a new volume, and write it to the disk as a data mover does; return the seconds."""
        name, began = self._name(), time.monotonic()
        self.bed.user.apply(site.claim(name))
        (snapshot,) = kopia.json("snapshot", "list", str(source))[-1:]
        target = site.path(name) / "restored"
        kopia.run("restore", snapshot["id"], str(target))
        subprocess.run(["sync", "--file-system", target], check=True)  # noqa: S603, S607
        return time.monotonic() - began

    def _both(self, name: str, transfer: Followed, by_hand: Callable[[], float]) -> None:
        hand_first = len(self.figures.lives.get(name, ())) % 2 == 1
        if not hand_first:
            self._run(name, transfer)
        os.sync()  # no run waits for another one's buffers
        self.figures.kopia.setdefault(name, []).append(by_hand())
        if hand_first:
            self._run(name, transfer)

    def _run(self, name: str, transfer: Followed) -> Followed:
        os.sync()
        life = live(transfer)
        self.figures.lives.setdefault(name, []).append(life)
        sys.stderr.write(f"{name}: {' '.join(f'{key} {value:.2f}' for key, value in life.seconds.items())}\n")
        return transfer

    def _name(self) -> str:
        self._names += 1
        return f"life-{self._names}"


def _back_up_changes(bed: Bed, *, quick: bool) -> tuple[Iterator[str], Summary]:
    """Back a device up, and again when 1 % of its 1 MiB blocks are touched; return a table and the figures.

    Raises BenchmarkError if not only changed blocks were read, or a restored device differs.
    """
    size, used, space = (64, 16, "changes") if quick else (20 << 10, 5 << 10, "changes")
    bed.user.apply(build_namespace(space))
    found: dict[str, tuple[float, float, float, float]] = {}
    with announced_changes(bed, space), open_tracked(bed, space) as tracked:
        tracked.create(mib=size, filled_mib=used)
        places = range(0, used, 100)
        for name, touched in (("full", ()), ("changed", places)):
            for at in touched:
                tracked.write(at * MIB, MIB)
            os.sync()
            before = tracked.stored_bytes()
            upload = tracked.back_up(name)
            events = read_events(bed, upload["metadata"]["name"])
            began = max(events[DataPathReason.STARTED], events.get(DataPathReason.READY, 0))
            answer = float(_COMPARED.findall((bed.folder / "logs" / "driver-1.log").read_text())[-1])
            seconds = events[DataPathReason.COMPLETED] - began - answer
            counts = tracked.hashed_bytes(upload), tracked.stored_bytes() - before
            found[name] = seconds, answer, counts[0] / MIB, counts[1] / MIB
            if activities := upload["status"].get("activities"):
                raise BenchmarkError(f"{name}: {activities}")
        if tracked.restore(upload) != tracked.content[name]:
            raise BenchmarkError("the restored device differs")
    rows = [[name, *(f"{one:.2f}" for one in figures)] for name, figures in found.items()]
    seconds, _, read, stored = found["changed"]
    return table(["backup", "move, seconds", "and the driver's answer", "MiB read", "MiB stored"], rows), {
        "changed_time_share": round(seconds / found["full"][0], 4),
        "touched_mib": len(places),
        "read_mib": round(read, 1),
        "stored_mib": round(stored, 1),
    }


def _back_up_by_hand(kopia: HandKopia, data: Path, *, first: bool) -> float:
    """Back up what a data mover would get, as the same source each time; return kopia's seconds."""
    with tempfile.TemporaryDirectory() as folder, snapshot_of(data, Path(folder)) as copy:
        began = time.monotonic()
        if first:
            kopia.create()
        kopia.run("snapshot", "create", f"--override-source={data}", str(copy))
        return time.monotonic() - began


def _fill_device(path: Path) -> None:
    chance = random.Random(path.name)  # noqa: S311 - content, no secret
    with path.open("r+b") as device:
        for _ in range(_DEVICE_BYTES >> 20):
            device.write(chance.randbytes(1 << 20))
        device.flush()
        os.fsync(device.fileno())


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench_life", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="of all runs (default: 3)")
    parser.add_argument("--changes", action="store_true", help="instead: changed blocks of a device of 20 GiB")
    parser.add_argument("--quick", action="store_true", help="with small trees, to try it")
    return parser.parse_args()


def main() -> int:
    """Measure, and print the table and the summary."""
    arguments, began = _parse(), time.monotonic()
    try:
        bed = Bed(dict(os.environ), User(Api(Path(os.environ["KUBECONFIG"]))))
        install_agent(bed.user, bed.env)
        if arguments.changes:
            print_report("A device by block", *_back_up_changes(bed, quick=arguments.quick))
            return 0
        shape = _QUICK if arguments.quick else _MEDIUM
        benchmark = _Benchmark(bed, shape, arguments.rounds)
        benchmark.run()
    except (BenchmarkError, BedError) as e:
        sys.stderr.write(f"{e}\n")
        return 1
    conditions = f"Medium: {shape.describe()}. {arguments.rounds} rounds, {time.monotonic() - began:.0f} s"
    print_report(conditions, benchmark.figures.lines(), benchmark.figures.summary())
    return 0


if __name__ == "__main__":
    sys.exit(main())
