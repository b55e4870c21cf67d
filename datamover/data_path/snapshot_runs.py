"""The parameters of a backup, and the runs of kopia that make its snapshot; each run opens the repository.

Source: kopia 0.23.1, cli/command_snapshot_create.go, snapshot/manager.go (FindPreviousManifests).
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path

from core.contract import MoverMethod, VolumeMode
from core.errors import DataPathError, KopiaError, StorageOutageError
from core.models.base import JsonDict
from core.models.names import EXCLUDE_DIGEST_TAG, EXCLUDE_TAG
from core.models.transfer_settings import Compression, Exclusions
from core.models.units import format_duration
from datamover.data_path.checkpoints import BackupAttempt, Inheritance, inherit
from datamover.data_path.parents import BlockChanges
from datamover.data_path.run import DataPath
from datamover.data_path.stage import STAGE_PATTERN
from datamover.kinds import AUTO_PARENT, NO_PARENT
from datamover.kopia.backup_process import GracefulStop, keep_checkpoint
from datamover.kopia.policy import SourcePolicy, ensure_policy, excluding
from datamover.kopia.private_run import VolumeAccess
from datamover.kopia.process import KopiaAnswer, KopiaFiles
from datamover.kopia.repository import Repository
from datamover.kopia.snapshots import PIN, Snapshot, delete_snapshot, read_snapshot, remove_own_incomplete
from datamover.runtime.resources import ResourceLimits

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BackupParameters:
    """What to back up: the volume's path, its source path in the repository, tags, number of files read in parallel.

    `compression` is for what the repository does not have yet. `checkpoint_interval` is how often kopia saves an
    incomplete snapshot; None: as often as `limits`, if there are any, require. `in_use`: a workload pod may change the
    volume meanwhile. `ignore_files`: what files named `.kopiaignore` list is left out, as what `exclude` names.
    `parent`: the snapshot that unchanged files are taken from, as in `BackupPlan`. `mover`: how kopia is run, except by
    block. `requested_at`: after the state of a volume that is not in use, and before its mount; None: that is not
    known. `by_block`: a device is stored block by block, as by Velero's data mover for them; `changes`: how the storage
    knows it, None: it does not. `stop` gives kopia time for a checkpoint after a signal; None: it gets none. `attempt`
    may continue from checkpoints, and leave some; None: there is no other attempt. `confirm` raises a DataPathError if
    what was read may not be the volume.
    """

    volume: Path
    mode: VolumeMode
    source: str
    parallel: int
    compression: Compression = Compression.NONE
    tags: Mapping[str, str] = field(default_factory=dict)
    checkpoint_interval: timedelta | None = None
    limits: ResourceLimits | None = None
    in_use: bool = False
    ignore_files: bool = False
    exclude: Exclusions = field(default_factory=Exclusions)
    parent: str = AUTO_PARENT
    mover: MoverMethod = MoverMethod.PLAIN
    requested_at: datetime | None = None
    by_block: bool = False
    changes: BlockChanges | None = None
    stop: GracefulStop | None = None
    attempt: BackupAttempt | None = None
    confirm: Callable[[], None] = lambda: None

    @property
    def target(self) -> str:
        """The source in kopia's format, with the identity that Velero uses."""
        return f"default@default:{self.source}"

    @property
    def rules(self) -> Exclusions:
        """The exclusions that apply: none of a block device."""
        return self.exclude if self.mode is VolumeMode.FILESYSTEM else Exclusions()

    @property
    def policy(self) -> SourcePolicy:
        """The policy that the source gets."""
        return SourcePolicy(self.parallel, self.compression, self.ignore_files)

    @property
    def all_tags(self) -> dict[str, str]:
        """The tags of the snapshot, of the attempt and of the exclusions."""
        digest = self.rules.digest
        rules = {EXCLUDE_TAG: self.rules.to_json(), EXCLUDE_DIGEST_TAG: digest} if digest is not None else {}
        return {**self.tags, **(self.attempt.tags if self.attempt else {}), **rules}


@dataclass(frozen=True)
class RunReport:
    """What the result says about the runs of kopia.

    `changed_bytes`: how many the parent does not have; None: they follow from what was read. `fell_back`: all was read
    although there is a parent. `cause`: why, although parent or storage may know what has changed. `restart_cause`: why
    a device was read again from its start, although an earlier attempt has saved a checkpoint. `warnings`: what did not
    fail them.
    """

    note: str | None = None
    changed_bytes: int | None = None
    fell_back: bool = False
    cause: str | None = None
    restart_cause: str | None = None
    warnings: tuple[str, ...] = ()


class SnapshotRun:
    """The runs of kopia for one backup, here by its own commands, which open the repository; `end` must be called.

    `device` is an open device's descriptor and size in bytes; None: the volume has files.
    """

    def __init__(
        self, repository: Repository, parameters: BackupParameters, data_path: DataPath, device: tuple[int, int] | None
    ) -> None:
        self._repository = repository
        self._parameters = parameters
        self._data_path = data_path
        self._device = device
        self._attempted = f"back up {parameters.volume}"
        self._answer: KopiaAnswer | None = None

    @property
    def report(self) -> RunReport:
        """What the result says about it, once kopia has succeeded."""
        return RunReport()

    async def prepare(self) -> Inheritance:
        """Open the repository, delete or choose incomplete snapshots of earlier backups, and set the policy.

        Raises:
            RepositoryError: it cannot be opened.
        """
        return await self._repository.open(self._prepare)

    async def _prepare(self) -> Inheritance:
        """Sort out incomplete snapshots, then ensure the policy: each kopia takes 64 MiB to derive the key."""
        target = self._parameters.target
        found = await inherit(self._repository, target, self._parameters.attempt)
        await ensure_policy(self._repository, target, self._parameters.policy)
        return found

    async def check_parent(self, latest: Snapshot | None) -> str | None:
        """Return why everything is read although a snapshot was named as parent; None if it is the one to be used.

        `latest` is the last complete one of the source. kopia always takes that one, and has no flag for another. If it
        is of an earlier attempt of the transfer, the one before was its parent.
        """
        wanted = self._parameters.parent
        if wanted in {AUTO_PARENT, NO_PARENT} or (latest is not None and latest.snapshot_id == wanted):
            return None
        try:
            found = await self._read_parent(wanted)
        except KopiaError as e:
            cause = str(e)
        else:
            source = f"it is of the source {found.source}" if found.source != self._parameters.source else None
            cause = f"snapshot {wanted}: {found.fault or source or 'it is not the last complete one of its source'}"
        return f"read everything, since spec.parentSnapshot is not usable: {cause}"

    async def _read_parent(self, snapshot_id: str) -> Snapshot:
        return await read_snapshot(self._repository, snapshot_id)

    async def back_up(self, interval: timedelta, *, read_all: bool) -> KopiaAnswer:
        """Return kopia's answer; it saves a checkpoint at each `interval`, and after a signal.

        After a cancellation or a stall nothing refers to a snapshot: it goes, unless another attempt may follow.
        """
        try:
            return await self._back_up(interval, read_all=read_all)
        except (asyncio.CancelledError, DataPathError) as e:
            stop, saved = self._parameters.stop, self._saved
            if saved and not (stop and stop.interrupted) and not isinstance(e, StorageOutageError):
                with suppress(DataPathError):
                    await delete_snapshot(self._repository.kopia, saved["id"])
            raise

    async def _back_up(self, interval: timedelta, *, read_all: bool) -> KopiaAnswer:
        arguments = _create_arguments(self._parameters, interval, read_all=read_all)
        return await self._repository.run(partial(self._run_kopia, arguments))

    async def _run_kopia(self, arguments: Sequence[str]) -> KopiaAnswer:
        kopia, files = self._repository.kopia, self._files
        if self._device:
            files = replace(files, stdin_fd=self._device[0])
        async with excluding(kopia, self._parameters.target, self._parameters.rules):
            with self._saving():
                self._answer = await self._data_path.run(kopia, self._attempted, *arguments, files=files)
        return await self._keep_checkpoint(self._answer)

    @property
    def _saved(self) -> JsonDict | None:
        """The snapshot that kopia has saved, as far as it has said so; None: none."""
        with suppress(KopiaError):
            return None if self._answer is None else self._answer.document()
        return None

    @property
    def _files(self) -> KopiaFiles:
        """The volume, unless it is a device, and what lets kopia save a checkpoint."""
        parameters, stop = self._parameters, self._parameters.stop
        access = VolumeAccess(None if self._device else parameters.volume, in_use=parameters.in_use)
        return KopiaFiles(volume=access, terminate=stop.terminate if stop else None)

    def _saving(self) -> AbstractContextManager[object]:
        """Let a kopia that runs within the block save a checkpoint after a signal."""
        return self._parameters.stop.saving() if self._parameters.stop else nullcontext()

    async def _keep_checkpoint(self, answer: KopiaAnswer) -> KopiaAnswer:
        """Return the answer, unless kopia has saved a checkpoint after a signal."""
        if (stop := self._parameters.stop) and stop.signaled:
            await keep_checkpoint(self._repository.kopia, answer, stop)
        return answer

    async def discard_checkpoints(self, within: timedelta, *, due: bool) -> None:
        """Delete checkpoints of a failed backup if possible; `due`: it lasted as long as kopia takes to save one."""
        if due and (start := self._data_path.meter.snapshot_started) is not None:
            await remove_own_incomplete(self._repository.kopia, self._parameters.target, start=start, within=within)

    async def end(self) -> None:
        """End what is left of it: nothing of a command."""


def _create_arguments(parameters: BackupParameters, interval: timedelta, *, read_all: bool) -> list[str]:
    device = parameters.mode is VolumeMode.BLOCK
    return [
        "snapshot",
        "create",
        "/" if device else str(parameters.volume),
        *([f"--stdin-file={parameters.volume.name}"] if device else []),
        f"--override-source={parameters.target}",
        f"--pin={PIN}",
        *(f"--tags={key}:{value}" for key, value in parameters.all_tags.items()),
        f"--parallel={parameters.parallel}",
        *(["--force-hash=100"] if read_all else []),
        f"--checkpoint-interval={format_duration(interval)}",
        "--fail-fast",
        "--no-send-snapshot-report",
        "--json",
        # With the statistics, which have the number of excluded entries.
        "--json-verbose",
        # A scan for the estimate would count the stage once more.
        *(["--progress-estimation-type=rough"] if STAGE_PATTERN in parameters.rules.patterns else []),
    ]
