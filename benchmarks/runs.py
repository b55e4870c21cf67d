"""All runs of the mover and of bare kopia, in their order: which are compared, and how each begins on equal terms."""

import filecmp
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.bed import Bed
from benchmarks.cluster import BUCKET
from benchmarks.disks import replaced
from benchmarks.figures import Runs, Summary, alternate, say
from benchmarks.line import run_line
from benchmarks.processes import BenchmarkError, Measured
from benchmarks.programs import BARE_BUCKET, BareKopia, KopiaSettings, Mover
from benchmarks.tree import TreeShape, make_tree
from core.contract import MoverMethod, VolumeMode
from core.models.names import BANDWIDTH_ANNOTATION
from core.models.transfer_settings import BandwidthLimits
from tests.datamover.support.loopdevice import attached, make_ext4, mounted_image

_LIMIT_MIB: Final = 256
_MANY_LIMIT_MIB: Final = 512

_UPLOAD: Final = "upload"
_SECOND: Final = "second backup, nothing changed"
_SMALL: Final = "restore of small files"
_LARGE: Final = "restore of large files"
_RESTORE: Final = "restore"
_DEVICE: Final = "restore of a device"

_MOVER: Final = ", mover"
_BARE: Final = ", bare kopia"
_TUNED: Final = ", bare kopia with the mover's settings"

_LIST: Final = "ls of a directory in a device"
_COPY: Final = "cp of all files in it"
_COPY_DEVICE: Final = "cp of the device"

_FEW: Final = TreeShape(0, 0, 50, 2_000)
_FEW_FILES: Final = f"upload of {_FEW.files} files"

_BEST_UPLOAD: Final = KopiaSettings(parallel=32)
_BEST_RESTORE: Final = KopiaSettings(parallel=64)
"""With these numbers of files kopia took the least time over a line of 20 ms, of 2 to 32, and of 32 to 128."""

_HOST: Final = "storage.example.com"
"""A name of this machine: Go uses no proxy for `localhost` and addresses of the loopback interface."""

_HOSTS: Final = Path("/etc/hosts")

_Run = Callable[[], Awaitable[Measured]]
_Restore = Callable[[Path], Awaitable[Measured]]
"""A restore into an empty volume."""


@dataclass(frozen=True)
class Plan:
    """How much is measured; `line_seconds` is the round trip to a storage that is far away."""

    tree: TreeShape
    many_files: TreeShape
    pairs: int
    compared_tree: TreeShape
    compared_pairs: int
    very_many_files: TreeShape
    far_tree: TreeShape
    far_pairs: int
    device_mib: int
    far_device_mib: int
    line_seconds: float = 0.02


FULL: Final = Plan(
    TreeShape(8, 125_000_000, 20_000, 10_000),
    TreeShape(0, 0, 200_000, 2_000),
    pairs=5,
    compared_tree=TreeShape(3, 100_000_000, 5_000, 10_000),
    compared_pairs=15,
    very_many_files=TreeShape(0, 0, 2_000_000, 16),
    far_tree=TreeShape(0, 0, 20_000, 10_000),
    far_pairs=3,
    device_mib=4 << 10,
    far_device_mib=1 << 10,
)
_TINY: Final = TreeShape(1, 3_000_000, 50, 2_000)
QUICK: Final = Plan(
    _TINY,
    TreeShape(0, 0, 300, 1_000),
    pairs=1,
    compared_tree=_TINY,
    compared_pairs=1,
    very_many_files=TreeShape(0, 0, 1_000, 16),
    far_tree=TreeShape(0, 0, 100, 2_000),
    far_pairs=1,
    device_mib=64,
    far_device_mib=16,
)


class Benchmark:
    """One pass over what is measured; `runs` are all runs so far."""

    def __init__(self, plan: Plan, bed: Bed) -> None:
        self._plan = plan
        self._bed = bed
        self._bare = BareKopia(bed.s3, bed.folder / "bare.log", bed.disks)
        self.runs = Runs()

    async def measure_mover(self) -> Summary:
        """Measure the mover and bare kopia, with its defaults and with the mover's settings; return the figures."""
        plan, runs = self._plan, self.runs
        with self._bed.tree(plan.tree) as tree:
            limited = await self._limited(tree, "")
            with self._bed.tree(plan.many_files) as many:
                limited_many = await self._limited(many, f"{plan.many_files.files:,} files ")
            for number in range(plan.pairs):
                await self._uploads(tree, number)
        self._bed.fresh_bucket()
        large, small = [await self._back_up_once(shape) for shape in plan.tree.apart()]
        for number in range(plan.pairs):
            await self._restores(large, small, number)
        restores = {"small": _SMALL, "large": _LARGE}
        excesses = {"upload": _UPLOAD, "second_backup": _SECOND} | {f"restore_{key}": restores[key] for key in restores}
        return {
            "upload_ratio": runs.ratio(_UPLOAD + _MOVER, _UPLOAD + _BARE),
            **{f"restore_{key}_ratio": runs.ratio(what + _MOVER, what + _BARE) for key, what in restores.items()},
            **{
                f"restore_{key}_same_settings_ratio": runs.ratio(what + _MOVER, what + _TUNED)
                for key, what in restores.items()
            },
            "second_backup_s": round(runs.seconds(_SECOND + _MOVER), 2),
            **{f"{key}_excess_mib": runs.excess_mib(what + _MOVER, what + _TUNED) for key, what in excesses.items()},
            "upload_cost_of_memory_setting": round(runs.ratio(_UPLOAD + _TUNED, _UPLOAD + _BARE) - 1, 3),
            "limited_256mib_ok": limited,
            "limited_256mib_200k_files_ok": limited_many,
            "mover_alone_mib": runs.own_mib(*(what + _MOVER for what in (_UPLOAD, _SECOND, _SMALL, _LARGE))),
        }

    async def compare_confinement(self) -> Summary:
        """Measure what the confinement of kopia costs: pairs of the mover, with it and without; return the figures."""
        confined, unconfined = ", kopia confined", ", unconfined"
        await self._compare({confined: self._bed.mover, unconfined: self._bed.new_mover(confined=False)})
        figures = self._compared("confined", confined, unconfined)
        return figures | {"mover_alone_mib": self.runs.own_mib(_UPLOAD + confined, _RESTORE + confined)}

    async def compare_proxy(self) -> Summary:
        """Measure what the proxy costs that limits the bandwidth, without a limit; return the figures."""
        bed, proxy, none = self._bed, ", proxy without limits", ", no proxy"

        def annotate(name: str) -> None:
            limits = {BANDWIDTH_ANNOTATION: BandwidthLimits().to_json()}
            bed.cluster.objects.annotations = limits if name == proxy else {}

        hosts = bed.folder / "hosts"
        hosts.write_text(f"{_HOSTS.read_text()}\n127.0.0.1 {_HOST}\n")
        bed.cluster.put_location(replace(bed.s3, url=bed.s3.url.replace("127.0.0.1", _HOST)))
        with replaced(_HOSTS, hosts):
            await self._compare(dict.fromkeys((proxy, none), bed.mover), annotate)
        return self._compared("unlimited", proxy, none)

    async def compare_movers(self) -> Summary:
        """Measure backups of many files and of few by both ways to run kopia, and by kopia; return the figures."""
        bed, plan, runs = self._bed, self._plan, self.runs
        ways = {f", {way}": bed.new_mover(way=way) for way in MoverMethod}
        with bed.tree(plan.far_tree) as many, bed.tree(_FEW) as few:
            for number in range(plan.pairs):
                say(f"round {number + 1} of {plan.pairs}")
                for name in alternate([*ways, _BARE], number):
                    run = ways[name].back_up if name in ways else self._bare.back_up
                    bed.fresh_bucket(BUCKET if name in ways else BARE_BUCKET)
                    for what, tree in ((_UPLOAD, many), (_SECOND, many), (_FEW_FILES, few)):
                        bed.settle()
                        done = await run(tree)
                        runs.add(what + name, done[0] if isinstance(done, tuple) else done)
        return {
            f"{key}_{name.strip(', ').replace('-', '_')}_{figure}": measured(what + name, what + _BARE)
            for key, what in (("upload", _UPLOAD), ("second_backup", _SECOND), ("few_files", _FEW_FILES))
            for name in ways
            for figure, measured in (("ratio", runs.ratio), ("excess_mib", runs.excess_mib))
        }

    async def measure_far(self) -> Summary:
        """Measure uploads and restores by a line with a long round trip; return the figures."""
        bed, runs, plan = self._bed, self.runs, self._plan
        with bed.tree(plan.far_tree) as tree:
            async with run_line(bed.s3.url, round_trip=plan.line_seconds) as url:
                far = replace(bed.s3, url=url)
                bed.cluster.put_location(far)
                bare = replace(self._bare, s3=far)
                uploads: list[tuple[str, str, _Run]] = [
                    (_UPLOAD + _MOVER, BUCKET, partial(self._back_up, tree)),
                    (_UPLOAD + _BARE, BARE_BUCKET, partial(bare.back_up, tree, _BEST_UPLOAD)),
                ]
                for number in range(plan.far_pairs):
                    await self._fresh_uploads(alternate(uploads, number))
                _, result = await bed.mover.back_up(tree)
                restores: list[tuple[str, _Restore]] = [
                    (_RESTORE + _MOVER, partial(bed.mover.restore, result.snapshot_id)),
                    (_RESTORE + _BARE, partial(bare.restore, result.snapshot_id, settings=_BEST_RESTORE)),
                ]
                for number in range(plan.far_pairs):
                    await self._run_restores(alternate(restores, number))
                await self._restore_device(bare)
        compared = {"upload": _UPLOAD, "restore": _RESTORE, "device_restore": _DEVICE}
        return {f"far_{key}_ratio": runs.ratio(what + _MOVER, what + _BARE) for key, what in compared.items()}

    async def measure_many(self) -> Summary:
        """Measure very many files within a memory limit both ways, and a small tree in their repository.

        Raises:
            BenchmarkError: a run failed, for example for lack of memory.
        """
        bed, shape, limit = self._bed, self._plan.very_many_files, f", within {_MANY_LIMIT_MIB} MiB"
        bed.fresh_bucket()
        files, few = f"{shape.files:,} files", f"{self._plan.compared_tree.files:,} files in their repository"
        with bed.disks.volume() as volume:
            say(f"making a tree of {files}")
            tree = make_tree(volume / "tree", shape)
            for name in (f"{_UPLOAD} of {files}{limit}", f"{_SECOND}{limit}"):
                bed.settle()
                snapshot_id = await self._limited_upload(name, tree, _MANY_LIMIT_MIB)
        with bed.tree(self._plan.compared_tree) as tree, bed.disks.volume() as target:
            of_few = await self._limited_upload(f"{_UPLOAD} of {few}{limit}", tree, _MANY_LIMIT_MIB)
            await self._limited_restore(f"{_RESTORE} of {few}{limit}", of_few, target, _MANY_LIMIT_MIB)
            same = bed.is_same(tree, target)
        with bed.disks.volume() as target:
            await self._limited_restore(f"{_RESTORE} of {files}{limit}", snapshot_id, target, _MANY_LIMIT_MIB)
            same = same and sum(len(names) for _, _, names in os.walk(target)) == shape.files
        return {
            "many_files": shape.files,
            f"many_files_{_MANY_LIMIT_MIB}mib_ok": same,
            "many_files_most_mib": self.runs.most_mib(),
        }

    async def measure_files(self) -> Summary:
        """Measure lists and copies of files in a device, and a copy of the device; return the figures.

        Raises:
            BenchmarkError: a run failed, or did not send all.
        """
        bed, shape, device_bytes = self._bed, self._plan.tree, self._plan.device_mib << 20
        bed.fresh_bucket()
        image = bed.folder / "device.image"
        make_ext4(image, device_bytes, "-i", "8192")
        with mounted_image(image, bed.folder / "device") as folder:
            say(f"making a tree of {shape.files:,} files")
            make_tree(folder / "tree", shape)
        with attached(image) as device:
            _, result = await bed.mover.back_up(device, mode=VolumeMode.BLOCK)
        image.unlink()
        self.runs.add(_LIST, await bed.mover.list_files(result.snapshot_id, "/tree"))
        for name, path, least in ((_COPY_DEVICE, "", device_bytes), (_COPY, "/tree", shape.total_bytes)):
            say(name)
            bed.settle()
            measured, sent = await bed.mover.send_files(result.snapshot_id, path)
            if sent.error or sent.bytes < least:
                raise BenchmarkError(f"{name}: {sent.bytes} bytes, {sent.error}")
            self.runs.add(name, measured)
        names = {"ls": _LIST, "cp_device": _COPY_DEVICE, "cp_files": _COPY}
        seconds: Summary = {f"{key}_s": round(self.runs.seconds(name), 1) for key, name in names.items()}
        return seconds | {f"{key}_most_mib": self.runs.most_mib(name) for key, name in names.items()}

    async def _restore_device(self, bare: BareKopia) -> None:
        """Let the mover and kopia back up a device of random data, and restore it in turns; raises BenchmarkError."""
        bed, plan = self._bed, self._plan
        image, restored = bed.folder / "device.image", bed.folder / "restored.image"
        say(f"a device of {plan.far_device_mib} MiB")
        with image.open("wb") as file:
            for _ in range(plan.far_device_mib):
                file.write(os.urandom(1 << 20))
        bed.fresh_bucket(BARE_BUCKET)
        with attached(image) as device:
            _, result = await bed.mover.back_up(device, mode=VolumeMode.BLOCK)
            await bare.back_up(device)
        restores: list[tuple[str, _Restore]] = [
            (_DEVICE + _MOVER, partial(bed.mover.restore, result.snapshot_id, mode=VolumeMode.BLOCK)),
            (_DEVICE + _BARE, partial(bare.restore, bare.read_root(), bucket=BARE_BUCKET)),
        ]
        for number in range(plan.far_pairs):
            for name, run in alternate(restores, number):
                with restored.open("wb") as file:
                    file.truncate(plan.far_device_mib << 20)
                with attached(restored) as device:
                    bed.settle()
                    self.runs.add(name, await run(device))
                if not filecmp.cmp(image, restored, shallow=False):
                    raise BenchmarkError(f"{name}: the device differs")
                restored.unlink()
        image.unlink()

    async def _uploads(self, tree: Path, number: int) -> None:
        """Run one upload of each kind, and second backups of both kinds."""
        say(f"uploads: pair {number + 1} of {self._plan.pairs}")
        tuned = partial(self._bare.back_up, tree, KopiaSettings.of_backups())
        runs: list[tuple[str, str, _Run]] = [
            (_UPLOAD + _MOVER, BUCKET, partial(self._back_up, tree)),
            (_UPLOAD + _BARE, BARE_BUCKET, partial(self._bare.back_up, tree)),
            (_UPLOAD + _TUNED, BARE_BUCKET, tuned),
        ]
        await self._fresh_uploads(alternate(runs, number))
        self._bed.settle()
        self.runs.add(_SECOND + _MOVER, await self._back_up(tree))
        self.runs.add(_SECOND + _TUNED, await tuned())

    async def _restores(self, large: str, small: str, number: int) -> None:
        """Run one restore of each kind, of large and of small files."""
        say(f"restores: pair {number + 1} of {self._plan.pairs}")
        mover, bare, settings = self._bed.mover, self._bare, KopiaSettings.of_restores()
        runs = [
            one
            for what, snapshot_id in ((_LARGE, large), (_SMALL, small))
            for one in (
                (what + _MOVER, partial(mover.restore, snapshot_id)),
                (what + _BARE, partial(bare.restore, snapshot_id)),
                (what + _TUNED, partial(bare.restore, snapshot_id, settings=settings)),
            )
        ]
        await self._run_restores(alternate(runs, number))

    async def _fresh_uploads(self, runs: Sequence[tuple[str, str, _Run]]) -> None:
        """Run each upload into an empty repository in its bucket."""
        for name, bucket, run in runs:
            self._bed.fresh_bucket(bucket)
            self.runs.add(name, await run())

    async def _run_restores(self, runs: Sequence[tuple[str, _Restore]]) -> None:
        """Run each restore into an empty volume."""
        for name, run in runs:
            with self._bed.disks.volume() as target:
                self._bed.settle()
                self.runs.add(name, await run(target))

    async def _compare(self, movers: dict[str, Mover], begin: Callable[[str], None] = lambda _: None) -> None:
        """Run pairs of movers; `begin` is called with the name of each before its run."""
        with self._bed.tree(self._plan.compared_tree) as tree:
            for number in range(self._plan.compared_pairs):
                say(f"pair {number + 1} of {self._plan.compared_pairs}")
                for name, mover in alternate(list(movers.items()), number):
                    begin(name)
                    self._bed.fresh_bucket()
                    uploaded, result = await mover.back_up(tree)
                    self.runs.add(_UPLOAD + name, uploaded)
                    await self._run_restores([(_RESTORE + name, partial(mover.restore, result.snapshot_id))])

    def _compared(self, key: str, name: str, other: str) -> Summary:
        """Return the medians of all pairs' ratios."""
        figures: dict[str, Callable[[Measured], float]] = {
            "ratio": lambda run: run.seconds,
            "cpu_ratio": lambda run: run.cpu_seconds,
        }
        return {
            f"{key}_{what}_{ratio}": self.runs.paired_ratio(what + name, what + other, figure)
            for what in (_UPLOAD, _RESTORE)
            for ratio, figure in figures.items()
        }

    async def _back_up_once(self, shape: TreeShape) -> str:
        """Return the mover's snapshot of a tree; it is not measured."""
        with self._bed.tree(shape) as tree:
            _, result = await self._bed.mover.back_up(tree)
        return result.snapshot_id

    async def _back_up(self, tree: Path) -> Measured:
        measured, _ = await self._bed.mover.back_up(tree)
        return measured

    async def _limited(self, tree: Path, files: str) -> bool:
        """Return whether a tree is restored unchanged within a memory limit."""
        name = f"{files}within {_LIMIT_MIB} MiB, mover"
        self._bed.s3.make_bucket(BARE_BUCKET)
        self._bed.fresh_bucket()
        with self._bed.disks.volume() as target:
            try:
                snapshot_id = await self._limited_upload(f"{_UPLOAD} {name}", tree, _LIMIT_MIB)
                await self._limited_restore(f"{_RESTORE} {name}", snapshot_id, target, _LIMIT_MIB)
            except BenchmarkError as e:
                say(str(e))
                return False
            return self._bed.is_same(tree, target)

    async def _limited_upload(self, name: str, tree: Path, limit_mib: int) -> str:
        """Run an upload within a memory limit; return its snapshot."""
        say(name)
        run, result = await self._bed.mover.back_up(tree, limit_mib)
        self.runs.add(name, run)
        return result.snapshot_id

    async def _limited_restore(self, name: str, snapshot_id: str, target: Path, limit_mib: int) -> None:
        say(name)
        self.runs.add(name, await self._bed.mover.restore(snapshot_id, target, limit_mib))
