"""The runs of kopia that open the repository once: of files, and of devices by block.

Source: tools/kopia/program; Velero main at d2241adba, pkg/uploader/block/snapshot.go, pkg/uploader/provider/block.go.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Final

from core.contract import MoverMethod
from core.models.base import JsonDict
from core.models.names import CHANGES_TAG, TRANSFER_UID_TAG
from datamover.data_path import parents
from datamover.data_path.checkpoints import Inheritance, build_inheritance
from datamover.data_path.run import DataPath
from datamover.data_path.snapshot_runs import BackupParameters, RunReport, SnapshotRun
from datamover.data_path.stage import STAGE_PATTERN
from datamover.kinds import AUTO_PARENT, NO_PARENT
from datamover.kopia.backup_process import MoverBackup, device_flags
from datamover.kopia.client_config import IDENTITY
from datamover.kopia.policy import decide_policy
from datamover.kopia.process import KopiaAnswer
from datamover.kopia.repository import Repository
from datamover.kopia.snapshots import PIN, Snapshot, parse_snapshot, read_tag, remove_source

_COPIED: Final = (
    "the volume is a copy, by its driver or a restore, or was labeled at its mount: files whose size and time are "
    "unchanged were not read again"
)


@asynccontextmanager
async def open_run(
    repository: Repository, parameters: BackupParameters, data_path: DataPath, device: tuple[int, int] | None
) -> AsyncIterator[SnapshotRun]:
    """Yield the run that the parameters ask for; what is left of it ends with the block.

    `device` is an open device's descriptor and size in bytes; None: the volume has files.
    """
    kind: type[SnapshotRun] = SnapshotRun if parameters.mover is MoverMethod.PLAIN else _OneOpenRun
    if device is not None and parameters.by_block:
        kind = _BlockRun
    run = kind(repository, parameters, data_path, device)
    try:
        yield run
    finally:
        await run.end()


class _OneOpenRun(SnapshotRun):
    """One kopia, which opens the repository once, and reads a device, or all files changed since the parent."""

    _command = "mover-backup"

    def __init__(
        self, repository: Repository, parameters: BackupParameters, data_path: DataPath, device: tuple[int, int] | None
    ) -> None:
        super().__init__(repository, parameters, data_path, device)
        self._kopia = MoverBackup(
            repository.kopia,
            parameters.target,
            self._attempted,
            files=replace(self._files, inherited_fd=device[0] if device else None),
            listener=data_path,
            meter=data_path.meter,
            command=(self._command, *(device_flags(*device) if device else ())),
        )
        self._parents: list[JsonDict] = []
        self._deleted: tuple[str, ...] = ()
        self._removed: str | None = None

    @property
    def report(self) -> RunReport:
        result = self._kopia.result
        fault, gone = result.get("delete_fault"), result.get("gone_directories")
        warning = f"could not remove incomplete snapshots of earlier backups: {fault}" if fault else self._removed
        left_out = f"left out all or a part of {gone} directories that were deleted or moved" if gone else None
        note = "; ".join(filter(None, (_COPIED if result.get("copied") else None, left_out))) or None
        return RunReport(note=note, warnings=(warning,) if warning else ())

    async def end(self) -> None:
        await self._kopia.end()

    async def prepare(self) -> Inheritance:
        await self._repository.open(partial(self._repository.start, self._data_path.meter, self._kopia.open))
        offer, parameters = self._kopia.offer, self._parameters
        self._repository.check_id(offer.unique_id)
        found = await build_inheritance(offer.snapshots, parameters.target, parameters.attempt)
        self._deleted, self._removed = found.others, found.warning
        self._parents = parents.decide_parents(
            offer.snapshots,
            found.own,
            in_use=parameters.in_use,
            requested_at=parameters.requested_at,
            transfer_uid=parameters.attempt.uid if parameters.attempt else "",
        )
        return replace(found, warning=None)

    async def _read_parent(self, snapshot_id: str) -> Snapshot:
        offered = next((one for one in self._kopia.offer.snapshots if one["id"] == snapshot_id), None)
        return parse_snapshot(offered) if offered else await super()._read_parent(snapshot_id)

    async def _back_up(self, interval: timedelta, *, read_all: bool) -> KopiaAnswer:
        work = partial(self._kopia.carry_out, self._decide(interval, read_all=read_all))
        with self._saving():
            answer = await self._data_path.guard(self._attempted, work)
        return await self._keep_checkpoint(answer)

    @property
    def _saved(self) -> JsonDict | None:
        return self._kopia.result.get("snapshot")

    def _decide(self, interval: timedelta, *, read_all: bool) -> JsonDict:
        parameters, offer, rules = self._parameters, self._kopia.offer, self._parameters.rules
        may_be_copy = not (parameters.in_use or self._device)
        requested_at = parameters.requested_at if may_be_copy else None
        return {
            "path": "/" if self._device else str(parameters.volume),
            "file": parameters.volume.name,
            # A checkpoint too has what the times of files did not show.
            "parents": [] if read_all else self._parents,
            "delete": self._deleted,
            "policy": decide_policy(offer.defined, offer.policy, parameters.policy),
            "exclude": {
                "patterns": rules.patterns,
                "max_bytes": rules.max_bytes or 0,
                "one_file_system": rules.one_file_system,
            },
            # A walk for the estimate would count the stage once more.
            "rough_estimate": STAGE_PATTERN in rules.patterns,
            "tags": parameters.all_tags,
            "pins": [PIN],
            "parallel": parameters.parallel,
            "checkpoint_seconds": interval.total_seconds(),
            "changes_tag": CHANGES_TAG,
            "may_be_copy": may_be_copy,
            # The API server has cut off the fraction of a second.
            "requested_at": (requested_at + timedelta(seconds=1)).isoformat() if requested_at else None,
        }


class _BlockRun(_OneOpenRun):
    """One kopia, which reads what has changed on the device, as far as known, and stores what the repository lacks.

    A snapshot is saved only once it is complete. Until then, checkpoints are saved for another attempt if the device is
    known as one that does not change: the storage's snapshot of a transfer.
    """

    _command = "block-write"

    _parent: str | None = None
    _choice = parents.BlockChoice()
    _checkpoint = parents.CheckpointChoice()

    @property
    def _described(self) -> str | None:
        changes = self._parameters.changes
        return parents.describe_device(changes, self._device[1]) if changes and self._device else None

    async def prepare(self) -> Inheritance:
        found = await super().prepare()
        if (attempt := self._parameters.attempt) and (saved := self._kopia.offer.checkpoints):
            others = any(read_tag(one, TRANSFER_UID_TAG) != attempt.uid for one in saved)
            alone = others and await attempt.is_alone()
            self._checkpoint = parents.choose_checkpoint(saved, attempt.uid, self._described, alone=alone)
        return found

    @property
    def report(self) -> RunReport:
        fault = self._kopia.result.get("parent_fault")
        warned = {
            "read more than has changed": self._cause if self._choice.expected else None,
            "read the device again from its start": self._restart_cause,
        }
        return RunReport(
            note=f"not compared with snapshot {self._parent}: {fault}" if fault else None,
            changed_bytes=int(self._kopia.result["changed_bytes"]),
            fell_back=bool(self._parent and self._cause),
            cause=self._cause,
            restart_cause=self._restart_cause,
            warnings=tuple(f"{what}: {cause}" for what, cause in warned.items() if cause),
        )

    @property
    def _cause(self) -> str | None:
        if fault := self._kopia.result.get("changes_fault"):
            return f"{self._choice.described} in doubt: {fault}"
        return self._choice.cause if self._parent else None

    @property
    def _restart_cause(self) -> str | None:
        fault = self._kopia.result.get("checkpoint_fault") or self._checkpoint.fault
        return f"the checkpoint of an earlier attempt is not used: {fault}" if fault else None

    async def discard_checkpoints(self, within: timedelta, *, due: bool) -> None:
        if (attempt := self._parameters.attempt) and (due or self._checkpoint.own):
            target = f"{IDENTITY}:{parents.checkpoint_path(attempt.uid)}"
            await remove_source(self._repository.kopia, target, within=within)

    async def check_parent(self, latest: Snapshot | None) -> str | None:
        wanted = self._parameters.parent
        if wanted == NO_PARENT:
            return None
        if wanted == AUTO_PARENT:
            self._parent = latest.snapshot_id if latest else None
            return None
        if any(one["id"] == wanted and not parse_snapshot(one).fault for one in self._kopia.offer.snapshots):
            self._parent = wanted
            return None
        lacks = f"the source {self._parameters.source} has no complete snapshot {wanted}"
        return f"spec.parentSnapshot is not usable: {lacks}"

    def _decide(self, interval: timedelta, *, read_all: bool) -> JsonDict:  # noqa: ARG002 - it is in the parent
        changes, parameters = self._parameters.changes, self._parameters
        if parameters.parent != NO_PARENT:
            parent = next((one for one in self._kopia.offer.snapshots if one["id"] == self._parent), None)
            self._choice = parents.choose_blocks(parent, changes, parameters.requested_at)
        return {
            "parent": self._parent,
            "tags": parents.build_block_tags(parameters.all_tags, changes),
            "pins": [PIN],
            "parallel": parameters.parallel,
            "changes": self._choice.query,
            "checkpoint": self._decide_checkpoint(interval),
        }

    def _decide_checkpoint(self, interval: timedelta) -> JsonDict | None:
        if (attempt := self._parameters.attempt) is None or self._described is None:
            return None
        return {
            "path": parents.checkpoint_path(attempt.uid),
            "tags": parents.build_checkpoint_tags(self._parameters.all_tags, self._described),
            "seconds": interval.total_seconds(),
            "resume": self._checkpoint.resume,
            "replaces": self._checkpoint.replaced,
        }
