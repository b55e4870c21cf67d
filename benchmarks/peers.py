"""Programs that back up a volume into a bucket, each as its user starts it: ours, Velero's, kopia, restic, rustic.

Knows their command lines, and that each run begins with nothing cached. Does not know what is backed up, or how often.
Source: restic 0.18, doc/047_tuning_backup_parameters.rst; kopia 0.23, kopia --help-full; rustic 0.11, config/README.md;
opendal 0.58, services/s3.
"""

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.bed import Bed
from benchmarks.cluster import BUCKET, REGION
from benchmarks.groups import memory_group
from benchmarks.processes import Command, Measured, measure
from benchmarks.programs import BARE_BUCKET, BareKopia, KopiaSettings
from core.contract import MoverMethod, VolumeMode
from core.kube.resources import NAMESPACES
from tests.datamover.support.plainkopia import PASSWORD
from tests.datamover.support.pods import TRANSFER
from tests.datamover.velero.movers import VeleroMover
from tests.support.apiserver import run_apiserver
from tests.support.tools import tool
from tests.velero.server import apply_definitions

_VELERO: Final = "1.18.3"
_ID: Final = re.compile(r'"snapshotID":"(\w+)"')


@dataclass
class Peer(ABC):
    """A program, and what it needs until `stack` is left; its repository in `bucket` is its own."""

    bed: Bed
    stack: ExitStack
    _: KW_ONLY
    mode: VolumeMode = VolumeMode.FILESYSTEM
    bucket: str = BUCKET
    newest: str = field(default="", init=False)

    async def create(self) -> None:
        """Make an empty repository in place of what is there: a copy of the one that our mover makes."""
        self.bed.fresh_bucket(self.bucket)

    @abstractmethod
    async def back_up(self, volume: Path) -> Measured:
        """Back up a folder or a device."""

    @abstractmethod
    async def restore(self, target: Path) -> Measured:
        """Restore the newest backup into an empty folder or device, and write it to the disk."""


@dataclass
class _Ours(Peer):
    """The data mover as its pod runs it."""

    way: MoverMethod = MoverMethod.ONE_OPEN

    async def back_up(self, volume: Path) -> Measured:
        measured, result = await self.bed.new_mover(way=self.way).back_up(volume, mode=self.mode)
        self.newest = result.snapshot_id
        return measured

    async def restore(self, target: Path) -> Measured:
        return await self.bed.mover.restore(self.newest, target, mode=self.mode)


@dataclass
class _Velero(Peer):
    """The data mover of Velero's release, on a real API server."""

    def __post_init__(self) -> None:
        server, folder = self.stack.enter_context(run_apiserver()), self.stack.enter_context(self.bed.disks.cache())
        apply_definitions(_VELERO, server, folder)
        server.api.create(NAMESPACES, {"metadata": {"name": "velero"}})
        self.mover = VeleroMover(_VELERO, server, folder)

    async def back_up(self, volume: Path) -> Measured:
        measured, message = await self._move("DataUpload", volume)
        (self.newest,) = _ID.findall(message)
        return measured

    async def restore(self, target: Path) -> Measured:
        measured, _ = await self._move("DataDownload", target, _sync(target), snapshotID=self.newest)
        return measured

    async def _move(self, kind: str, volume: Path, *more: Sequence[str], **spec: str) -> tuple[Measured, str]:
        pod, log = self.bed.cluster.objects, self.bed.folder / "velero.log"
        pod.put_transfer(kind, **spec)
        with self.bed.disks.cache() as scratch, memory_group() as group:
            run = self.mover.prepare(pod, kind, TRANSFER, volume, mode=self.mode, folder=scratch / "pod")
            commands = [Command(argv, run.environment, log, group) for argv in (run.argv, *more)]
            return await measure(*commands), run.message_file.read_text()


@dataclass
class _Kopia(Peer):
    """kopia as released: `repository connect`, and one command more."""

    bucket: str = BARE_BUCKET
    settings: KopiaSettings = field(default_factory=KopiaSettings)

    def __post_init__(self) -> None:
        self.kopia = BareKopia(self.bed.s3, self.bed.folder / "kopia.log", self.bed.disks)

    async def back_up(self, volume: Path) -> Measured:
        measured = await self.kopia.back_up(volume, self.settings)
        self.newest = self.kopia.read_root()
        return measured

    async def restore(self, target: Path) -> Measured:
        return await self.kopia.restore(self.newest, target, self.settings, self.bucket)


@dataclass
class _Restic(Peer):
    """restic, or rustic, which has its format and its commands; `bucket` names the program."""

    bucket: str = "restic"
    backup_flags: Sequence[str] = ()
    target_flags: Sequence[str] = ("--target",)

    async def create(self) -> None:
        self.bed.s3.make_bucket(self.bucket)
        await self._run(["init"])

    async def back_up(self, volume: Path) -> Measured:
        self.newest = f"latest:{volume}"
        return await self._run(["backup", *self.backup_flags, str(volume)])

    async def restore(self, target: Path) -> Measured:
        return await self._run(["restore", self.newest, *self.target_flags, str(target)], _sync(target))

    async def _run(self, words: Sequence[str], *more: Sequence[str]) -> Measured:
        s3, log = self.bed.s3, self.bed.folder / "peer.log"
        keys = {"AWS_ACCESS_KEY_ID": s3.access_key, "AWS_SECRET_ACCESS_KEY": s3.secret_key, "AWS_REGION": REGION}
        keys |= {"RESTIC_REPOSITORY": f"s3:{s3.url}/{self.bucket}", "RESTIC_PASSWORD": PASSWORD}
        keys |= {"RUSTIC_REPOSITORY": "opendal:s3", "RUSTIC_PASSWORD": PASSWORD}
        keys |= {"OPENDAL_ENDPOINT": s3.url, "OPENDAL_BUCKET": self.bucket}
        with self.bed.disks.cache() as home, memory_group() as group:
            environment = {"PATH": os.environ["PATH"], "HOME": str(home), **keys}
            commands = [[str(tool(self.bucket, self.bucket)), *words], *more]
            return await measure(*(Command(argv, environment, log, group) for argv in commands))


def _sync(target: Path) -> list[str]:
    """Return the command that writes what was restored to the disk."""
    return ["sync", *([] if target.is_block_device() else ["--file-system"]), str(target)]


Peers = dict[str, Callable[..., Peer]]
"""By their names; each is made of a bed and a stack."""

OURS: Final = "ours"
PEERS: Final[Peers] = {
    OURS: _Ours,
    "ours, by block": partial(_Ours, mode=VolumeMode.BLOCK),
    "Velero": _Velero,
    "kopia": _Kopia,
    "restic": _Restic,
    "rustic": partial(_Restic, bucket="rustic", target_flags=()),
    "ours, plain": partial(_Ours, way=MoverMethod.PLAIN),
    "kopia, 8 files at a time": partial(_Kopia, settings=KopiaSettings(parallel=8)),
    "restic, 64 MiB packs, 8 files at a time": partial(
        _Restic, backup_flags=("--pack-size=64", "--read-concurrency=8")
    ),
}
_DEVICES: Final[Peers] = {OURS: _Ours, "Velero": _Velero, "kopia": _Kopia}
OF_DEVICES: Final[Peers] = {name: partial(peer, mode=VolumeMode.BLOCK) for name, peer in _DEVICES.items()}
