"""Restore of a kopia snapshot into a volume: it is complete once its data is on the disk.

Source: kopia 0.23.1, cli/command_restore.go.
"""

import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from msgspec import UNSET

from core.contract import MoverMethod, RestoreResult, VolumeMode, VolumePath
from core.errors import DataPathError, UnsetAttributesError
from core.models.transfer_settings import InPlace
from datamover.data_path.block import DeviceRestore, read_file_system
from datamover.data_path.finished import is_unfinished, mark_unfinished, remove_mark
from datamover.data_path.in_place import InPlaceRestorer, has_entries
from datamover.data_path.in_place_compare import find_unexplained
from datamover.data_path.links import TargetLinks, find_links, read_entries, remove_links
from datamover.data_path.parts import SKIP_EXISTING, SPARSE, PartRestorer, Placeholders, find_parts
from datamover.data_path.probe import Probe, allow_writing, probe_target
from datamover.data_path.refused import Folded, Refused, TargetComparison, find_folded
from datamover.data_path.resume import ResumeSettings, open_resumable
from datamover.data_path.run import DataPath
from datamover.kinds import UploaderSettings
from datamover.kopia.location_files import open_output
from datamover.kopia.private_run import VolumeAccess
from datamover.kopia.process import KopiaFiles
from datamover.kopia.repository import Repository
from datamover.kopia.restore_process import open_once
from datamover.kopia.snapshots import Snapshot, read_snapshot
from datamover.runtime.cancellation import ShouldStop
from datamover.runtime.child import WRITING, sync_file_system
from datamover.runtime.resources import ResourceLimits
from datamover.runtime.work_dir import attempting, show_path

_logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_BLOCK_BYTES: Final = 1 << 20
"""Source: Velero main at d2241adba, pkg/uploader/block/uploader.go."""


@dataclass(frozen=True)
class RestoreParameters:
    """What to restore, where to, with how many workers, and whether zeros become holes.

    That number grows with the time that a request to the storage takes, within `limits`; None: it is fixed.
    `in_use`: a workload pod may change the target meanwhile. `resume`: the files that are finished are listed in the
    target, which only data movers of one transfer have. `again`: an earlier attempt may have written to the device.
    `done`: an earlier attempt has written everything. `fitting_entries`: the memory suffices for a snapshot of so many.
    `require_attributes`: owners, modes and times that the target does not take fail the restore. `in_place`: how it
    goes into a target that may have files; None: kopia writes all files, also into the target's. `by_block`: a snapshot
    by block is expected, whose device may have a file system. `mover`: how kopia is run. `packs`: how many packs of
    small files it fetches as a whole at a time. `entry_bytes`: what it may use more for each entry.
    """

    snapshot_id: str
    target: Path
    mode: VolumeMode
    workers: int
    limits: ResourceLimits | None = None
    sparse: bool = False
    in_use: bool = False
    resume: ResumeSettings | None = None
    again: bool = False
    done: bool = False
    fitting_entries: int | None = None
    require_attributes: bool = False
    in_place: InPlace | None = None
    by_block: bool = False
    mover: MoverMethod = MoverMethod.PLAIN
    packs: int = 0
    entry_bytes: int = 0

    @property
    def access(self) -> VolumeAccess:
        """What kopia may do to the volume; of a device, it gets an open one."""
        if self.mode is VolumeMode.BLOCK:
            return VolumeAccess()
        return VolumeAccess(self.target, writable=True, in_use=self.in_use)

    def adapted_workers(self, each_bytes: int, request_seconds: float) -> int:
        """Return how many files or blocks of that size to restore in parallel, by the time of a request."""
        if self.limits is None:
            return self.workers
        packs = 0 if self.mover is MoverMethod.PLAIN else self.packs
        workers = self.limits.adapted_restore_workers(request_seconds, each_bytes, packs)
        _logger.info(
            "a request to the storage takes %.3f s: writing %d files or blocks in parallel", request_seconds, workers
        )
        return workers


def restore_workers(settings: UploaderSettings, limits: ResourceLimits) -> int:
    """Return how many files to restore in parallel: the setting, else what memory and CPUs allow."""
    requested = settings.parallel_download
    if requested is None:
        return limits.restore_workers
    if requested > limits.fitting_restore_workers:
        _logger.warning(
            "ParallelFilesDownload=%d may need more memory than the container's limit, which suffices for %d",
            requested,
            max(1, limits.fitting_restore_workers),
        )
    return requested


async def restore(repository: Repository, parameters: RestoreParameters, data_path: DataPath) -> RestoreResult:
    """Write the snapshot to the target, wait until it is on the disk, and return the result.

    Raises:
        KopiaError: the snapshot does not exist, or kopia failed.
        RepositoryError: the data path stalled, and the repository does not answer.
        IncompleteRestoreError: the target refused some entries; the others are on the disk.
        UnsetAttributesError: it did not take attributes that are required.
        DataPathError: the snapshot is incomplete, or the target cannot be written.
    """
    async with _opening(repository, parameters, data_path):
        snapshot = await repository.open(partial(read_snapshot, repository, parameters.snapshot_id), read_only=True)
        if snapshot.fault:
            raise DataPathError(f"cannot restore snapshot {parameters.snapshot_id}: {snapshot.fault}")
        return await _Restoring(repository, snapshot, parameters, data_path).run()


@asynccontextmanager
async def _opening(repository: Repository, parameters: RestoreParameters, data_path: DataPath) -> AsyncIterator[None]:
    """Let the calls of kopia within the block open the repository, each one or only the first."""
    if parameters.mover is MoverMethod.PLAIN:
        yield
        return
    made = False
    if parameters.mode is VolumeMode.FILESYSTEM:
        # kopia is confined to it from the beginning.
        target = parameters.target
        # Who opens it reports an error.
        made = await data_path.run_in_thread(lambda _: not os.path.exists(target), f"opening target {target}")  # noqa: PTH110
        async with _open_target(target, data_path):
            pass
    try:
        async with open_once(repository.kopia, parameters.access):
            yield
    except BaseException:
        with suppress(OSError):
            if made:
                parameters.target.rmdir()
        raise


@dataclass(frozen=True)
class _Written:
    """How many bytes were written, None if that is not known, and whether an incremental restore wrote all files."""

    size_bytes: int | None = None
    all_files: bool = False


@dataclass(frozen=True)
class _Restoring:
    """The restore of one snapshot to its target."""

    repository: Repository
    snapshot: Snapshot
    parameters: RestoreParameters
    data_path: DataPath

    @property
    def target(self) -> Path:
        """The volume."""
        return self.parameters.target

    async def run(self) -> RestoreResult:
        """Write the snapshot to the target, wait until it is on the disk, and return the result."""
        snapshot, parameters, data_path = self.snapshot, self.parameters, self.data_path
        data_path.meter.total_bytes = snapshot.size_bytes
        note, unset, wrote = None, 0, self._everything()
        # After a failure, its files may be taken for equal by a restore in place.
        stays = parameters.in_use or parameters.in_place is not None
        if parameters.done:
            _logger.info("an earlier attempt completed the restore of target %s: nothing is written", self.target)
        elif snapshot.by_block:
            wrote = await self._restore_blocks()
        elif parameters.mode is VolumeMode.BLOCK:
            await self._restore_device()
        else:
            async with _open_target(self.target, data_path) as fd:
                if await self._has_files():
                    restorer, refused, wrote = await self._restore_in_place(fd)
                else:
                    if stays:
                        await self._in_root(mark_unfinished)
                    restorer, refused = await self._restore_files(fd)
                written = data_path.clock.monotonic()
                await data_path.wait_for(sync_file_system(fd, self.target), WRITING)
                if stays:
                    await self._in_root(remove_mark)
            _logger.info("the disk took %.1f s for what was not on it yet", data_path.clock.monotonic() - written)
            refused.check(restorer.describe(), restorer.errors.first)
            note, unset = refused.unset_text, refused.unset
            if note and parameters.require_attributes:
                raise UnsetAttributesError(f"{restorer.describe()}: all data is restored, but {note}")
            if note:
                await data_path.warn(note)
        return RestoreResult(
            target=VolumePath(by_path=str(self.target), volume_mode=str(parameters.mode)),
            total_bytes=snapshot.size_bytes,
            note=note or UNSET,
            unset=unset or UNSET,
            incremental_bytes=UNSET if wrote.size_bytes is None else wrote.size_bytes,
            fallback_full=True if wrote.all_files else UNSET,
            fs_type=((await read_file_system(self.target, data_path)) if snapshot.by_block else None) or UNSET,
        )

    def _everything(self) -> _Written:
        """Return what a restore writes that keeps nothing; a device keeps what it has already."""
        snapshot, parameters = self.snapshot, self.parameters
        if parameters.in_place is None or parameters.done:
            return _Written()
        size_bytes = snapshot.size_bytes if parameters.mode is VolumeMode.FILESYSTEM else None
        return _Written(size_bytes, all_files=parameters.in_place.incremental and snapshot.entries > 0)

    async def _restore_device(self) -> None:
        """Write a device that was backed up as one file, which an only file of a file system could be taken for."""
        parameters = self.parameters
        if parameters.by_block:
            raise DataPathError(
                f"snapshot {self.snapshot.snapshot_id} was not backed up by block, as the device {self.target} "
                "is to be restored: nothing was written"
            )
        await self._device(compare=parameters.again).write_stream()

    async def _restore_blocks(self) -> _Written:
        """Write a device that was backed up by block; in place, only what differs."""
        snapshot, parameters, in_place = self.snapshot, self.parameters, self.parameters.in_place is not None
        if parameters.mode is not VolumeMode.BLOCK:
            raise DataPathError(
                f"target {self.target} has a file system: snapshot {snapshot.snapshot_id} has the blocks of a device, "
                "which go into a volume of volumeMode Block"
            )
        workers = parameters.adapted_workers(_BLOCK_BYTES, self.repository.request_seconds)
        size_bytes = await self._device(compare=parameters.again or in_place).write_blocks(workers)
        return _Written(size_bytes if in_place else None)

    def _device(self, *, compare: bool) -> DeviceRestore:
        existing = self.parameters.in_place is not None
        return DeviceRestore(self.repository, self.snapshot, self.target, self.data_path, compare, existing)

    async def _has_files(self) -> bool:
        """Return whether the restore is one into a target with files: into an empty one, kopia writes in parallel."""
        return self.parameters.in_place is not None and await self._in_root(has_entries, "read")

    async def _in_root(self, work: Callable[[Path, ShouldStop], _T], verb: str = "mark") -> _T:
        """Return what `work` returns of the target, such as whether it has the mark of an unfinished restore."""
        with attempting(f"{verb} target {self.target}"):
            return await self.data_path.run_in_thread(partial(work, self.target), f"{verb}ing target {self.target}")

    async def _restore_in_place(self, fd: int) -> tuple[PartRestorer, Refused, _Written]:
        """Make the target equal to the snapshot; `fd` is open on it."""
        target, rule = self.target, self.parameters.in_place or InPlace()
        if rule.delete_extra_files and (fault := await find_unexplained(self.repository, self.snapshot)):
            raise DataPathError(f"cannot delete extra files in target {target}: {fault}")
        await allow_writing(self.repository, self.snapshot, target, data_path=self.data_path, files=False)
        if await self._in_root(is_unfinished):
            # Perhaps another transfer's, in an empty volume; any other restore in place has them in the stage alone.
            await self._remove_placeholders(began_empty=True)
            rule = rule.distrusting
        probe = await self._probe()
        if rule.delete_extra_files and not probe.names:
            raise DataPathError(f"cannot delete extra files: target {target} does not keep all names as they are")
        return await self._replace_files(rule, probe=probe, folded=await self._find_folded(probe), fd=fd)

    async def _probe(self) -> Probe:
        return await self.data_path.run_in_thread(
            partial(probe_target, self.target, self.snapshot), f"probing target {self.target}"
        )

    async def _find_folded(self, probe: Probe) -> Folded | None:
        """Return what the target may take for one; None: nothing."""
        return None if probe.apart else await find_folded(self.repository, self.snapshot, self.data_path) or None

    async def _replace_files(
        self, rule: InPlace, *, probe: Probe, folded: Folded | None, fd: int
    ) -> tuple[PartRestorer, Refused, _Written]:
        """Make the target equal to the snapshot, file by file where that is necessary."""
        repository, snapshot, target, changed = self.repository, self.snapshot, self.target, None
        if rule.incremental and rule.compare_content:
            from datamover.data_path.compare import find_changed  # noqa: PLC0415 - tarfile takes memory

            changed = await find_changed(repository, snapshot, target, packs=self.parameters.packs)
        restorer = self._restorer(tolerant=probe.refuses)
        restoring = InPlaceRestorer(
            repository,
            snapshot,
            target,
            rule,
            self.data_path,
            restorer=restorer,
            fitting=self.parameters.fitting_entries,
            changed=changed,
            precision_ns=probe.precision_ns,
            folded=folded,
            replaces=self.parameters.in_place is not None,
        )
        await restoring.restore(fd)
        # kopia may have ignored an error in a directory that it wrote as a whole.
        refused = await self._compare(restorer, probe, restoring.refused, repair=restorer.errors.count > 0)
        incremental = self.parameters.in_place is not None and self.parameters.in_place.incremental
        all_files = incremental and not restoring.kept and snapshot.entries > 0
        return restorer, refused, _Written(restoring.written_bytes, all_files=all_files)

    async def _compare(self, restorer: PartRestorer, probe: Probe, refused: Refused, *, repair: bool) -> Refused:
        """Return what the target did not take, also where kopia's success does not mean that all is restored."""
        repository, snapshot, data_path = self.repository, self.snapshot, self.data_path
        if not restorer.refused and probe.sound:
            return refused
        refused.stale = restorer.errors.first is not None
        return await TargetComparison(repository, snapshot, self.target, probe, data_path, refused, repair).run()

    def _restorer(self, *more: str, tolerant: bool) -> PartRestorer:
        repository, snapshot, parameters = self.repository, self.snapshot, self.parameters
        file_bytes = snapshot.size_bytes // max(1, snapshot.entries)
        flags = [
            # Without it, kopia writes an archive if the target is named like one.
            "--mode=local",
            f"--parallel={parameters.adapted_workers(file_bytes, repository.request_seconds)}",
            *repository.restore_flags(parameters.packs, snapshot.entries * parameters.entry_bytes),
            *([SPARSE] if parameters.sparse else []),
            *more,
        ]
        files = KopiaFiles(volume=parameters.access)
        return PartRestorer(repository, snapshot, self.target, flags, files, self.data_path, tolerant=tolerant)

    async def _restore_files(self, fd: int) -> tuple[PartRestorer, Refused]:
        """Have kopia write all files; `fd` is open on the target."""
        repository, snapshot, parameters, data_path = self.repository, self.snapshot, self.parameters, self.data_path
        target, fitting = self.target, parameters.fitting_entries
        # Between the parts, a tenant could replace a directory that was split.
        parts = await find_parts(repository, snapshot, None if parameters.in_use else fitting)
        if parts.split:
            _logger.info(
                "restoring %d parts one after the other: the memory does not suffice for all", len(parts.parts)
            )
        if fitting is not None and (largest := parts.largest).entries > fitting:
            await data_path.warn(
                f"{largest.name} has {largest.entries} entries, and kopia keeps all of them in memory: the limit "
                f"suffices for about {fitting}"
            )
        # kopia leaves the modes of finished files alone.
        await allow_writing(repository, snapshot, target, data_path=data_path, files=parameters.resume is None)
        probe = await self._probe()
        folded = await self._find_folded(probe)
        resumable = None
        if parameters.resume and folded is None:
            resumable = await open_resumable(snapshot, target, parameters.resume, data_path)
        # A volume in use never has any.
        if parameters.again and not parameters.in_use and not (resumable and resumable.resumed):
            await self._remove_placeholders(began_empty=False)
        links = await self._replace_links()
        if folded is not None:
            _logger.info("restoring file by file: the target may take names of the snapshot for one")
            restorer, refused, _ = await self._replace_files(InPlace(), probe=probe, folded=folded, fd=fd)
            return restorer, refused
        skip = [SKIP_EXISTING] if resumable and resumable.resumed else []
        restorer = self._restorer(*skip, tolerant=probe.refuses)
        run_kopia = partial(restorer.restore, parts, snapshot.entries if fitting is None else fitting)
        await (resumable.record_during(run_kopia) if resumable else run_kopia())
        await self._check_links(expected=links)
        refused = await self._compare(restorer, probe, Refused(), repair=restorer.refused)
        if resumable:
            await resumable.end()
        return restorer, refused

    async def _remove_placeholders(self, *, began_empty: bool) -> None:
        """Remove the placeholders that an earlier restore has left."""
        left, doing = Placeholders(self.target), f"looking for placeholders in {self.target}"
        remove = partial(left.remove_left, began_empty=began_empty)
        await self.data_path.run_in_thread(remove, doing, lambda: left.done)

    async def _replace_links(self) -> int:
        """Replace links that are in the way of the snapshot; return how many symbolic ones the restore leaves."""
        expected, count, example = self.snapshot.links, 0, b""
        async with self._found_links(hard=True) as found:
            for links in found.in_parts():
                entries = await read_entries(self.repository, self.snapshot, links.paths)
                if replaced := links.in_the_way(entries):
                    remove = partial(remove_links, self.target, replaced)
                    await self.data_path.run_in_thread(remove, "replacing links in the target")
                    count, example = count + len(replaced), example or replaced[0]
                expected += sum(path not in entries for path in links.symbolic)
        if count:
            await self.data_path.warn(
                f"replaced {count} links in the target by what the kopia snapshot has there, "
                f"for example {show_path(example)}"
            )
        return expected

    async def _check_links(self, *, expected: int) -> None:
        """Check that no directory or file of the snapshot became a link during the restore.

        The snapshot is not read if there are as many links as expected: it may have links in thousands of directories.
        A tenant could remove a link for each one that replaces something, but could as well remove what is restored.
        """
        async with self._found_links() as found:
            if found.symbolic == expected:
                return
            for links in found.in_parts():
                entries = await read_entries(self.repository, self.snapshot, links.symbolic)
                if wrong := links.in_the_way(entries):
                    raise DataPathError(
                        f"{show_path(wrong[0])} became a link during the restore, so it is not restored"
                    )

    @asynccontextmanager
    async def _found_links(self, *, hard: bool = False) -> AsyncIterator[TargetLinks]:
        with open_output(self.repository.work_dir) as file:
            found = TargetLinks(file)
            walk = partial(find_links, self.target, found=found, hard=hard)
            await self.data_path.run_in_thread(walk, "looking for links in the target", lambda: found.entries)
            yield found


@asynccontextmanager
async def _open_target(target: Path, data_path: DataPath) -> AsyncIterator[int]:
    fd = await data_path.run_in_thread(partial(_make_target, target), f"opening target {target}")
    try:
        yield fd
    finally:
        os.close(fd)


def _make_target(target: Path, _: ShouldStop) -> int:
    with attempting(f"create target {target}"):
        # In local mode it may be missing, and kopia is confined to it.
        try:
            target.mkdir(mode=0o700, parents=True, exist_ok=True)
        except FileExistsError as e:
            raise DataPathError(f"target {target} is not a directory") from e
        return os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
