"""The two programs that are compared: the mover as its pod runs it, and kopia by itself, with nothing cached."""

import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

from benchmarks.cluster import BUCKET, PREFIX, REGION, RUN, Cluster
from benchmarks.disks import Disks, replaced
from benchmarks.groups import memory_group
from benchmarks.processes import BenchmarkError, Command, Measured, measure
from core.contract import BackupResult, MoverArgs, MoverMethod, MoverVerb, RestoreResult, VolumeMode, parse_result
from core.mover_specs import InitRepository, ListFiles, SendFiles
from core.snapshot_contract import SEND_COMMAND, SentFiles
from datamover.kopia.client_config import CacheLimit
from datamover.runtime.resources import ResourceLimits
from tests.datamover.support.plainkopia import PASSWORD
from tests.datamover.support.pods import REPOSITORY, TRANSFER
from tests.datamover.support.s3server import S3Server
from tests.support.tools import tool

BARE_BUCKET: Final = "bare"

_ROOT: Final = Path(__file__).parents[1]

_ROOT_ID: Final = re.compile(r"snapshot with root (\w+)")

_AS_A_POD: Final = ("setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin", "--")
"""A mover pod cannot mount; with that permission kopia would be confined by other means."""


@dataclass(frozen=True)
class MoverRun:
    """One run of the mover: its command, and the file of its termination message."""

    command: Command
    message_file: Path

    def read_message(self) -> str:
        """Return the termination message. Raises BenchmarkError if there is none."""
        if message := self.message_file.read_text():
            return message
        raise BenchmarkError("the mover left no termination message")


@dataclass(frozen=True)
class KopiaSettings:
    """What bare kopia is run with: its defaults, unless anything is given.

    `cache` are flags that connect, `parallel` is how many files it reads or writes at a time. Without `flushes` it
    flushes nothing.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    cache: Sequence[str] = ()
    parallel: int | None = None
    flushes: bool = True

    @classmethod
    def of_backups(cls) -> Self:
        """Return the settings of the mover's kopia in a backup, where nothing limits the memory."""
        return cls(ResourceLimits(cpus=1).go_settings({}), CacheLimit().arguments)

    @classmethod
    def of_restores(cls) -> Self:
        """Return the same of a restore on this machine."""
        limits = ResourceLimits(len(os.sched_getaffinity(0)))
        memory = limits.go_settings({}, restore_workers=limits.restore_workers)
        return cls(memory, CacheLimit().arguments, limits.restore_workers, flushes=False)

    @property
    def arguments(self) -> list[str]:
        """The flags of a backup or a restore."""
        return [f"--parallel={self.parallel}"] if self.parallel else []


class Mover:
    """`python -OO -m datamover`, with everything compiled as in the image."""

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        disks: Disks,
        numbers: Iterator[int],
        *,
        confined: bool = True,
        way: MoverMethod = MoverMethod.ONE_OPEN,
    ) -> None:
        self._cluster = cluster
        self._folder = folder
        self._disks = disks
        self._numbers = numbers
        self._module = "datamover" if confined else "benchmarks.unconfined"
        self._way = way

    async def init(self) -> Measured:
        """Make the repository in the empty bucket."""
        with self._disks.cache() as scratch:
            measured, _ = await self._run(InitRepository(backup_repository=REPOSITORY), scratch)
        return measured

    async def back_up(
        self, volume: Path, limit_mib: int | None = None, mode: VolumeMode = VolumeMode.FILESYSTEM
    ) -> tuple[Measured, BackupResult]:
        """Back a volume up, and return what that took until the termination message was written."""
        self._cluster.objects.put_transfer("DataUpload", **_data_mover(mode))
        with self._disks.cache() as scratch:
            args = MoverArgs(MoverVerb.BACKUP, "data-upload", TRANSFER, str(volume), mode, mover=str(self._way))
            measured, message = await self._run(args, scratch, limit_mib)
        return measured, parse_result(BackupResult, message)

    async def restore(
        self, snapshot_id: str, volume: Path, limit_mib: int | None = None, mode: VolumeMode = VolumeMode.FILESYSTEM
    ) -> Measured:
        """Restore into an empty folder or a device; return what that took until the termination message was written."""
        self._cluster.objects.put_transfer("DataDownload", snapshotID=snapshot_id, **_data_mover(mode))
        with self._disks.cache() as scratch:
            args = MoverArgs(MoverVerb.RESTORE, "data-download", TRANSFER, str(volume), mode, mover=str(self._way))
            measured, message = await self._run(args, scratch, limit_mib)
        parse_result(RestoreResult, message)
        return measured

    async def list_files(self, snapshot_id: str, path: str) -> Measured:
        """List a directory of a device as `backup ls` does."""
        with self._disks.cache() as scratch:
            measured, _ = await self._run(ListFiles(**_within(snapshot_id, path)), scratch)
        return measured

    async def send_files(self, snapshot_id: str, path: str = "") -> tuple[Measured, SentFiles]:
        """Send a device, or a path in it, as the pod of `backup cp` does; return what that took until all was sent."""
        # The path of a socket has 107 bytes at most.
        short = RUN / "scratch"
        short.mkdir(exist_ok=True)
        with self._disks.cache() as scratch, replaced(short, scratch), memory_group() as group:
            command = self.prepare(SendFiles(**_within(snapshot_id, path)), short).command
            report = command.log.with_name("report")
            relay = shlex.join([sys.executable, "-OO", *SEND_COMMAND[1:]])
            # Both stay for a while.
            way = f'"$@" & mover=$!; {relay} >/dev/null 2>{report} & until [ -s {report} ]; do sleep 0.1; done; '
            way += "kill $mover; wait $mover; wait $!"
            measured = await measure(replace(command, argv=["sh", "-c", way, "sh", *command.argv], group=group))
        return replace(measured, ended_ns=report.stat().st_mtime_ns), SentFiles.from_json(report.read_text().strip())

    async def _run(
        self, args: MoverArgs | InitRepository | ListFiles, scratch: Path, limit_mib: int | None = None
    ) -> tuple[Measured, str]:
        with memory_group(limit_mib) as group:
            run = self.prepare(args, scratch)
            measured = await measure(replace(run.command, group=group))
        return replace(measured, ended_ns=run.message_file.stat().st_mtime_ns), run.read_message()

    def prepare(
        self,
        args: MoverArgs | InitRepository | ListFiles | SendFiles,
        scratch: Path,
        *,
        settings: Mapping[str, str] | None = None,
    ) -> MoverRun:
        """Return a run with these arguments, temporary files in `scratch`, and more variables in `settings`."""
        here = self._folder / f"mover-{next(self._numbers)}"
        here.mkdir()
        message = here / "termination-log"
        message.touch()
        python = [*_AS_A_POD, sys.executable, "-OO", "-m", self._module]
        line = [*python, *args.argv, f"--termination-message-path={message}"]
        environment = {**self._environment(scratch), **(settings or {})}
        return MoverRun(Command(line, environment, here / "log"), message)

    def _environment(self, scratch: Path) -> dict[str, str]:
        return {
            **self._cluster.environment,
            "PATH": f"{tool('kopia', 'kopia').parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(_ROOT),
            "PYTHONUNBUFFERED": "1",
            # The image has all modules compiled; here the first run compiles them.
            "PYTHONPYCACHEPREFIX": str(self._folder / "compiled"),
            "VELERO_SCRATCH_DIR": str(scratch),
        }


def _within(snapshot_id: str, path: str) -> dict[str, Any]:
    """Return where a path in a device is."""
    where = {"backup_storage_location": "default", "volume_namespace": "app"}
    return {**where, "snapshot": snapshot_id, "path": path, "device": True}


def _data_mover(mode: VolumeMode) -> dict[str, str]:
    return {"datamover": "velero-block"} if mode == VolumeMode.BLOCK else {}


_DEFAULTS: Final = KopiaSettings()


@dataclass(frozen=True)
class BareKopia:
    """`kopia repository connect` and one command more."""

    s3: S3Server
    log: Path
    disks: Disks

    async def back_up(self, volume: Path, settings: KopiaSettings = _DEFAULTS) -> Measured:
        """Back a volume up into the repository of the bare bucket."""
        if settings.parallel:
            # kopia reads no more files in parallel than the policy allows: one for each CPU, if that says nothing.
            await self._call(["policy", "set", "--global", f"--max-parallel-file-reads={settings.parallel}"])
        if volume.is_block_device():
            # It reads devices through its standard input only.
            arguments = ["snapshot", "create", "--stdin-file=device", "/", *settings.arguments]
            return await self._call(arguments, settings, way=f'"$@" <{volume}')
        return await self._call(["snapshot", "create", str(volume), *settings.arguments], settings)

    async def restore(
        self, snapshot_id: str, volume: Path, settings: KopiaSettings = _DEFAULTS, bucket: str = BUCKET
    ) -> Measured:
        """Restore a snapshot into an empty folder, or what is not zero of it to a device; write it to the disk."""
        if volume.is_block_device():
            way = f'"$@" | dd of={volume} bs=1M iflag=fullblock conv=sparse,notrunc,fsync status=none'
            return await self._call(["show", f"{snapshot_id}/device"], settings, bucket, way=way)
        arguments = ["restore", snapshot_id, str(volume), *settings.arguments]
        return await self._call(arguments, settings, bucket, synced=volume)

    def read_root(self) -> str:
        """Return the root of the snapshot that the last run made."""
        (root,) = _ROOT_ID.findall(self.log.read_text())
        return str(root)

    async def _call(
        self,
        arguments: Sequence[str],
        settings: KopiaSettings = _DEFAULTS,
        bucket: str = BARE_BUCKET,
        synced: Path | None = None,
        way: str = "",
    ) -> Measured:
        """Connect to the repository of a bucket, and run one command more; write the file system of `synced` then.

        `way` is how a shell runs it, `"$@"`.
        """
        with self.disks.cache() as home, memory_group() as group:
            run = partial(Command, environment=self._environment(home, settings), log=self.log, group=group)
            kopia = tool("kopia", "kopia")
            endpoint = self.s3.url.removeprefix("http://")
            reach = [f"--bucket={bucket}", f"--prefix={PREFIX}", f"--endpoint={endpoint}", f"--region={REGION}"]
            connect: list[str | Path] = [kopia, "repository", "connect", "s3", *reach, "--disable-tls", *settings.cache]
            shell = ["bash", "-euo", "pipefail", "-c", way, "bash"] if way else []
            commands = [run(connect), run([*shell, kopia, *arguments], flushes=settings.flushes)]
            if synced:
                commands.append(run(["sync", "--file-system", synced]))
            return await measure(*commands)

    def _environment(self, home: Path, settings: KopiaSettings) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "KOPIA_PASSWORD": PASSWORD,
            "KOPIA_CHECK_FOR_UPDATES": "false",
            "AWS_ACCESS_KEY_ID": self.s3.access_key,
            "AWS_SECRET_ACCESS_KEY": self.s3.secret_key,
            **settings.environment,
        }
