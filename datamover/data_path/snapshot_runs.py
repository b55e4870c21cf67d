"""The runs of kopia that make the snapshot of a backup: three, or one that opens the repository once.

Knows what each reads of the source and decides before the backup, and the arguments of `snapshot create`. Does not know
what makes a snapshot complete (`datamover.data_path.backup`).
Source: kopia 0.23.1, cli/command_snapshot_create.go, snapshot/manager.go (FindPreviousManifests); Velero main at
d2241adba, pkg/uploader/block/snapshot.go, pkg/uploader/provider/block.go.
"""

import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from core.contract import BackupMover, VolumeMode
from core.errors import KopiaError
from core.models.base import JsonDict
from core.models.names import (
    CHANGES_TAG,
    EXCLUDE_DIGEST_TAG,
    EXCLUDE_TAG,
)
from core.models.transfer_settings import Compression, Exclusions
from core.models.units import format_duration
from datamover.data_path.attempts import (
    BackupAttempt,
    Inheritance,
    build_inheritance,
    inherit,
    sort_checkpoints,
)
from datamover.data_path.parents import BlockChanges, BlockChoice, build_block_tags, choose_blocks, decide_parents
from datamover.data_path.run import DataPath
from datamover.data_path.stage import STAGE_PATTERN
from datamover.kinds import AUTO_PARENT, NO_PARENT
from datamover.kopia.backup_process import GracefulStop, MoverBackup, Offer, device_flags, keep_checkpoint
from datamover.kopia.policy import SourcePolicy, decide_policy, ensure_policy, excluding
from datamover.kopia.private_run import VolumeAccess
from datamover.kopia.process import KopiaAnswer, KopiaFiles
from datamover.kopia.repository import Repository
from datamover.kopia.snapshots import PIN, Snapshot, list_source, parse_snapshot, read_snapshot, sort_source
from datamover.kopia.storage_calls import KopiaCaller
from datamover.runtime.resources import ResourceLimits

__all__ = ["BackupParameters", "SnapshotRun", "open_run"]

_logger = logging.getLogger(__name__)

_COPIED: Final = (
    "the volume is a copy, by its driver or a restore: files whose size and time are unchanged were not read again"
)


@dataclass(frozen=True)
class BackupParameters:
    """What to back up: the volume's path, its source path in the repository, tags, number of files read in parallel.

    `compression` is the algorithm for what the repository does not have yet.
    `checkpoint_interval` is how often kopia saves an incomplete snapshot; None: as often as `limits` require.
    `limits` are for the mover and its kopia; None: there are none.
    `in_use`: a workload pod may change the volume meanwhile.
    `ignore_files`: what files named `.kopiaignore` in the volume list is left out, and so is what `exclude` names.
    `parent`: the snapshot that unchanged files are taken from, as in `BackupPlan`.
    `mover`: how kopia is run; a device, and a volume with exclusions, is always backed up as `plain` does it.
    `by_block`: a device is stored block by block, as by Velero's data mover for them; `changes`: how the storage knows
    it, None: it does not.
    `stop` gives kopia time for a checkpoint after a signal; None: it gets none.
    `attempt` may continue from checkpoints, and leave some; None: there is no other attempt.
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
    mover: BackupMover = BackupMover.PLAIN
    by_block: bool = False
    changes: BlockChanges | None = None
    stop: GracefulStop | None = None
    attempt: BackupAttempt | None = None

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
        rules = {EXCLUDE_TAG: self.rules.to_json(), EXCLUDE_DIGEST_TAG: self.rules.digest} if self.rules else {}
        return {**self.tags, **(self.attempt.tags if self.attempt else {}), **rules}

    @property
    def earlier_uid(self) -> str:
        """The UID in the tags of snapshots of earlier attempts; empty: there is none."""
        return self.attempt.earlier_uid if self.attempt else ""


class SnapshotRun(Protocol):
    """The runs of kopia for one backup, in this order."""

    async def prepare(self) -> Inheritance:
        """Open the repository, delete or choose incomplete snapshots of earlier backups, and set the policy.

        Raises:
            RepositoryError: it cannot be opened.
        """
        ...

    async def check_parent(self) -> str:
        """Return why everything is read although a snapshot was named as parent; empty if it is the one to be used."""
        ...

    async def back_up(self, interval: timedelta, *, read_all: bool) -> KopiaAnswer:
        """Return kopia's answer, whose output is the snapshot; a signal lets kopia save a checkpoint.

        Args:
            interval: how often kopia saves a checkpoint.
            read_all: whether unchanged files are read too.
        """
        ...

    @property
    def note(self) -> str:
        """What the result says about it, or empty."""
        ...

    @property
    def changed_bytes(self) -> int | None:
        """How many bytes the parent does not have; None: what was read tells."""
        ...

    @property
    def fell_back(self) -> bool:
        """Whether all was read although there is a parent."""
        ...

    @property
    def cause(self) -> str:
        """Why all was read, although a parent or the storage could tell what has changed; empty: it was not."""
        ...


@asynccontextmanager
async def open_run(
    repository: Repository, parameters: BackupParameters, data_path: DataPath, device: tuple[int, int] | None
) -> AsyncIterator[SnapshotRun]:
    """Yield the run that the parameters ask for; what is left of it ends with the block.

    Args:
        repository: where the snapshot goes.
        parameters: what is backed up.
        data_path: measures and guards the run.
        device: its descriptor and its size in bytes; None: the volume has files.
    """
    run: _OneOpenRun
    if device is not None and parameters.by_block:
        run = _BlockRun(repository, parameters, data_path, device)
    elif parameters.mover is BackupMover.PLAIN or device is not None or parameters.rules:
        yield _PlainRun(repository, parameters, data_path, device[0] if device else None)
        return
    else:
        run = _OneOpenRun(repository, parameters, data_path)
    try:
        yield run
    finally:
        await run.end()


class _PlainRun:
    """kopia's own commands: each opens the repository."""

    note = ""
    changed_bytes = None
    fell_back = False
    cause = ""

    def __init__(
        self, repository: Repository, parameters: BackupParameters, data_path: DataPath, device_fd: int | None
    ) -> None:
        self._repository = repository
        self._parameters = parameters
        self._data_path = data_path
        self._device_fd = device_fd

    async def prepare(self) -> Inheritance:
        return await self._repository.open(self._prepare)

    async def _prepare(self) -> Inheritance:
        """Sort out incomplete snapshots of earlier backups, and ensure the policy.

        Each kopia takes 64 MiB for the key that it derives from the password: two at a time would be what a pod peaks
        at.
        """
        target = self._parameters.target
        found = await inherit(self._repository, target, self._parameters.attempt)
        await ensure_policy(self._repository, target, self._parameters.policy)
        return found

    async def check_parent(self) -> str:
        return await _check_parent(self._repository, self._parameters, None)

    async def back_up(self, interval: timedelta, *, read_all: bool) -> KopiaAnswer:
        volume = None if self._device_fd is not None else self._parameters.volume
        access = VolumeAccess(volume, in_use=self._parameters.in_use)
        arguments = _create_arguments(self._parameters, interval, read_all=read_all)
        files = KopiaFiles(stdin_fd=self._device_fd, volume=access)
        return await self._repository.run(partial(self._run_kopia, arguments, files))

    async def _run_kopia(self, arguments: Sequence[str], files: KopiaFiles) -> KopiaAnswer:
        kopia, data_path = self._repository.kopia, self._data_path
        attempted, stop = f"back up {self._parameters.volume}", self._parameters.stop
        async with excluding(kopia, self._parameters.target, self._parameters.rules):
            if stop is None:
                return await data_path.run(kopia, attempted, *arguments, files=files)
            with stop.saving() as terminate:
                answer = await data_path.run(kopia, attempted, *arguments, files=replace(files, terminate=terminate))
        if stop.signaled:
            await keep_checkpoint(kopia, answer, stop)
        return answer


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


class _OneOpenRun:
    """One kopia, which opens the repository once, and reads all files that were changed since the parent."""

    def __init__(self, repository: Repository, parameters: BackupParameters, data_path: DataPath) -> None:
        self._repository = repository
        self._parameters = parameters
        self._data_path = data_path
        self._kopia = self._build()
        self._parents: list[JsonDict] = []
        self._deleted: tuple[str, ...] = ()

    def _build(self) -> MoverBackup:
        parameters = self._parameters
        stop = parameters.stop
        files = KopiaFiles(
            volume=VolumeAccess(parameters.volume, in_use=parameters.in_use),
            terminate=stop.terminate if stop else None,
        )
        return self._backup(files, "mover-backup")

    def _backup(self, files: KopiaFiles, *command: str) -> MoverBackup:
        return MoverBackup(
            self._repository.kopia,
            self._parameters.target,
            f"back up {self._parameters.volume}",
            files=files,
            listener=self._data_path,
            meter=self._data_path.meter,
            command=command,
        )

    @property
    def note(self) -> str:
        return _COPIED if self._kopia.result.get("copied") else ""

    @property
    def changed_bytes(self) -> int | None:
        return None

    @property
    def fell_back(self) -> bool:
        return False

    @property
    def cause(self) -> str:
        return ""

    async def end(self) -> None:
        """Kill kopia if it still runs."""
        await self._kopia.end()

    async def prepare(self) -> Inheritance:
        await self._repository.open(partial(self._repository.start, self._data_path.meter, self._kopia.open))
        offer, parameters = self._kopia.offer, self._parameters
        self._repository.check_id(offer.unique_id)
        found = sort_source(offer.snapshots, parameters.earlier_uid)
        checkpoints = await sort_checkpoints(found, parameters.target, parameters.attempt)
        self._deleted = checkpoints.others
        self._parents = decide_parents(offer.snapshots, checkpoints.own, in_use=parameters.in_use)
        return build_inheritance(found, checkpoints)

    async def check_parent(self) -> str:
        return await _check_parent(self._repository, self._parameters, self._kopia.offer)

    async def back_up(self, interval: timedelta, *, read_all: bool) -> KopiaAnswer:
        decision = self._decide(interval, read_all=read_all)
        work = partial(self._kopia.carry_out, decision)
        stop = self._parameters.stop
        attempted = f"back up {self._parameters.volume}"
        if stop is None:
            return await self._data_path.guard(attempted, work)
        with stop.saving():
            answer = await self._data_path.guard(attempted, work)
        if stop.signaled:
            await keep_checkpoint(self._repository.kopia, answer, stop)
        return answer

    def _decide(self, interval: timedelta, *, read_all: bool) -> JsonDict:
        parameters, offer = self._parameters, self._kopia.offer
        return {
            "path": str(parameters.volume),
            "parents": self._parents,
            "delete": self._deleted,
            "policy": decide_policy(offer.defined, offer.policy, parameters.policy),
            "tags": parameters.all_tags,
            "pins": [PIN],
            "parallel": parameters.parallel,
            "read_all": read_all,
            "checkpoint_seconds": interval.total_seconds(),
            "changes_tag": CHANGES_TAG,
            "may_be_copy": not parameters.in_use,
        }


class _BlockRun(_OneOpenRun):
    """One kopia, which reads what has changed on the device, as far as known, and stores what the repository lacks.

    A snapshot is saved only once it is complete, so nothing is left of a backup that ends before.
    """

    def __init__(
        self, repository: Repository, parameters: BackupParameters, data_path: DataPath, device: tuple[int, int]
    ) -> None:
        self._device = device
        super().__init__(repository, parameters, data_path)
        self._parent = ""
        self._choice = BlockChoice()

    def _build(self) -> MoverBackup:
        fd, size_bytes = self._device
        return self._backup(KopiaFiles(inherited_fd=fd), "block-write", *device_flags(fd, size_bytes))

    @property
    def note(self) -> str:
        fault = self._kopia.result.get("parent_fault", "")
        return f"not compared with snapshot {self._parent}: {fault}" if fault else ""

    @property
    def changed_bytes(self) -> int | None:
        return int(self._kopia.result["changed_bytes"])

    @property
    def fell_back(self) -> bool:
        return bool(self._parent and self.cause)

    @property
    def cause(self) -> str:
        if fault := self._kopia.result.get("changes_fault", ""):
            return f"{self._choice.described} in doubt: {fault}"
        return self._choice.cause if self._parent else ""

    async def check_parent(self) -> str:
        offer, wanted, uid = self._kopia.offer, self._parameters.parent, self._parameters.earlier_uid
        if wanted == NO_PARENT:
            return ""
        if wanted == AUTO_PARENT:
            latest = sort_source(offer.snapshots, uid).latest
            self._parent = latest.snapshot_id if latest else ""
            return ""
        if any(one["id"] == wanted and not parse_snapshot(one).fault for one in offer.snapshots):
            self._parent = wanted
            return ""
        source = self._parameters.source
        return f"spec.parentSnapshot is not usable: the source {source} has no complete snapshot {wanted}"

    async def back_up(self, interval: timedelta, *, read_all: bool) -> KopiaAnswer:
        answer = await super().back_up(interval, read_all=read_all)
        if self.cause and self._choice.expected:
            await self._data_path.warn(f"read all of the device: {self.cause}")
        return answer

    def _decide(self, interval: timedelta, *, read_all: bool) -> JsonDict:  # noqa: ARG002 - there is no checkpoint
        changes, parameters = self._parameters.changes, self._parameters
        if parameters.parent != NO_PARENT:
            parent = next((one for one in self._kopia.offer.snapshots if one["id"] == self._parent), None)
            self._choice = choose_blocks(parent, changes)
        return {
            "parent": self._parent,
            "tags": build_block_tags(parameters.all_tags, changes),
            "pins": [PIN],
            "parallel": parameters.parallel,
            "changes": self._choice.query,
        }


async def _check_parent(kopia: KopiaCaller, parameters: BackupParameters, offer: Offer | None) -> str:
    """Return why everything is read although a snapshot was named as parent; empty if it is the one to be used.

    kopia always takes the last complete snapshot of the source, and has no flag for another one. If that is of an
    earlier attempt of the transfer, the one before was its parent.
    """
    wanted = parameters.parent
    if wanted in {AUTO_PARENT, NO_PARENT}:
        return ""
    try:
        found, latest = await _find_parent(kopia, parameters, offer)
    except KopiaError as e:
        cause = str(e)
    else:
        if latest is not None and latest.snapshot_id == wanted:
            return ""
        cause = found.fault or (
            f"it is of the source {found.source}"
            if found.source != parameters.source
            else "it is not the last complete one of its source"
        )
        cause = f"snapshot {wanted}: {cause}"
    return f"read everything, since spec.parentSnapshot is not usable: {cause}"


async def _find_parent(
    kopia: KopiaCaller, parameters: BackupParameters, offer: Offer | None
) -> tuple[Snapshot, Snapshot | None]:
    """Return the snapshot that is named as parent, and the last complete one of the source."""
    wanted, uid = parameters.parent, parameters.earlier_uid
    if offer is None:
        return await read_snapshot(kopia, wanted), (await list_source(kopia, parameters.target, uid)).latest
    own = [parse_snapshot(one) for one in offer.snapshots if one["id"] == wanted]
    return own[0] if own else await read_snapshot(kopia, wanted), sort_source(offer.snapshots, uid).latest
