"""The two programs that are compared: the mover as its pod runs it, and kopia by itself.

Knows their command lines and environments, and that a run starts with nothing cached. Does
not know which runs there are.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from benchmarks.cluster import BUCKET, PREFIX, REGION, Cluster
from benchmarks.disks import Disks
from benchmarks.processes import BenchmarkError, Command, Measured, measure
from core.contract import BackupResult, MoverArgs, MoverVerb, RestoreResult, parse_result
from datamover.runtime.resources import ResourceLimits
from tests.datamover.support.plainkopia import PASSWORD
from tests.datamover.support.pods import REPOSITORY, TRANSFER
from tests.datamover.support.s3server import S3Server
from tests.support.tools import tool

__all__ = ["BARE_BUCKET", "TUNED", "BareKopia", "Mover", "MoverRun"]

BARE_BUCKET: Final = "bare"
TUNED: Final = ResourceLimits(cpus=1).go_settings({})
"""What the mover gives kopia where nothing limits the memory."""

_ROOT: Final = Path(__file__).parents[1]

_AS_A_POD: Final = ("setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin", "--")
"""A mover pod cannot mount; with that permission kopia would be confined by other means."""


@dataclass(frozen=True)
class MoverRun:
    """One run of the mover: its command, and the file of its termination message."""

    command: Command
    message_file: Path

    def read_message(self) -> str:
        """Return the termination message.

        Raises:
            BenchmarkError: there is none.
        """
        if message := self.message_file.read_text():
            return message
        raise BenchmarkError("the mover left no termination message")


class Mover:
    """`python -OO -m datamover`, with everything compiled as in the image."""

    def __init__(
        self, cluster: Cluster, folder: Path, disks: Disks, numbers: Iterator[int], *, confined: bool = True
    ) -> None:
        self._cluster = cluster
        self._folder = folder
        self._disks = disks
        self._numbers = numbers
        self._module = "datamover" if confined else "benchmarks.unconfined"

    async def init(self) -> Measured:
        """Make the repository in the empty bucket."""
        measured, _ = await self._run(MoverVerb.INIT_REPOSITORY, "backup-repository", REPOSITORY)
        return measured

    async def back_up(self, volume: Path, group: Path | None = None) -> tuple[Measured, BackupResult]:
        """Back a volume up, and return what that took until the termination message was written."""
        self._cluster.objects.put_transfer("DataUpload")
        measured, message = await self._run(MoverVerb.BACKUP, "data-upload", TRANSFER, volume=volume, group=group)
        return measured, parse_result(BackupResult, message)

    async def restore(self, snapshot_id: str, volume: Path, group: Path | None = None) -> Measured:
        """Restore into an empty folder, and return what that took until the termination message was written."""
        self._cluster.objects.put_transfer("DataDownload", snapshotID=snapshot_id)
        measured, message = await self._run(MoverVerb.RESTORE, "data-download", TRANSFER, volume=volume, group=group)
        parse_result(RestoreResult, message)
        return measured

    async def _run(
        self, verb: MoverVerb, flag: str, name: str, *, volume: Path | None = None, group: Path | None = None
    ) -> tuple[Measured, str]:
        with self._disks.cache() as scratch:
            run = self.prepare(MoverArgs(verb, flag, name, str(volume or "")), scratch, group=group)
            measured = await measure(run.command)
        return replace(measured, ended_ns=run.message_file.stat().st_mtime_ns), run.read_message()

    def prepare(
        self, args: MoverArgs, scratch: Path, *, group: Path | None = None, settings: Mapping[str, str] | None = None
    ) -> MoverRun:
        """Return a run with these arguments, temporary files in `scratch`, and more variables in `settings`."""
        here = self._folder / f"mover-{next(self._numbers)}"
        here.mkdir()
        message = here / "termination-log"
        message.touch()
        python = [*_AS_A_POD, sys.executable, "-OO", "-m", self._module]
        line = [*python, *args.argv, f"--termination-message-path={message}"]
        environment = {**self._environment(scratch), **(settings or {})}
        return MoverRun(Command(line, environment, here / "log", group), message)

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


@dataclass(frozen=True)
class BareKopia:
    """`kopia repository connect` and one command more, with kopia's defaults."""

    s3: S3Server
    log: Path
    disks: Disks

    async def back_up(self, volume: Path, settings: dict[str, str] | None = None, *, parallel: int = 0) -> Measured:
        """Back a volume up into the repository of the bare bucket; `parallel` is 0 for kopia's default."""
        line = ("snapshot", "create", str(volume), *_in_parallel(parallel))
        return await self.call(BARE_BUCKET, *line, settings=settings)

    async def restore(self, snapshot_id: str, volume: Path, *, parallel: int = 0) -> Measured:
        """Restore a snapshot of the mover's into an empty folder, and write it to the disk."""
        return await self.call(BUCKET, "restore", snapshot_id, str(volume), *_in_parallel(parallel), synced=volume)

    async def call(
        self, bucket: str, *arguments: str, synced: Path | None = None, settings: dict[str, str] | None = None
    ) -> Measured:
        """Connect to the repository of a bucket, and run one command more; write the file system of `synced` then."""
        environment = {
            "PATH": os.environ["PATH"],
            "KOPIA_PASSWORD": PASSWORD,
            "KOPIA_CHECK_FOR_UPDATES": "false",
            "AWS_ACCESS_KEY_ID": self.s3.access_key,
            "AWS_SECRET_ACCESS_KEY": self.s3.secret_key,
            **(settings or {}),
        }
        kopia = tool("kopia", "kopia")
        endpoint = self.s3.url.removeprefix("http://")
        reach = [f"--bucket={bucket}", f"--prefix={PREFIX}", f"--endpoint={endpoint}", f"--region={REGION}"]
        lines: list[list[str | Path]] = [
            [kopia, "repository", "connect", "s3", *reach, "--disable-tls"],
            [kopia, *arguments],
        ]
        if synced:
            lines.append(["sync", "--file-system", synced])
        with self.disks.cache() as home:
            return await measure(*(Command(line, {**environment, "HOME": str(home)}, self.log) for line in lines))


def _in_parallel(files: int) -> list[str]:
    return [f"--parallel={files}"] if files else []
