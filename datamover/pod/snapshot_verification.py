"""The verification of snapshots of one repository, in a pod: each by itself, so that one fault hides no other.

A snapshot that could not be verified has a line of the output too, with the cause. Shares are verified without the
snapshots, which are read, and say what it is, only if something in a share is damaged.
"""

import logging
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from core.contract import VolumeMode
from core.errors import AgentError, DataPathError, StorageOutageError
from core.models.job_output import JobOutput
from core.models.storage import RepositoryKey
from core.models.verification import (
    SHARE_LINE,
    SHARES,
    VERIFIED_LINE,
    WHOLE_PERCENT,
    SnapshotVerification,
    VerificationOutcome,
    VerifiedShare,
    VerifiedSnapshot,
)
from core.mover_specs import VerifySnapshots
from datamover.data_path.compare import compare_volume
from datamover.kopia.location_files import open_output
from datamover.kopia.private_run import VolumeAccess
from datamover.kopia.repository import Repository
from datamover.kopia.restore_process import open_once
from datamover.kopia.snapshots import Snapshot, SnapshotMissingError, read_snapshot
from datamover.kopia.verification import (
    DamagedSnapshotError,
    count_contents,
    has_sound_directories,
    is_damage,
    verify_snapshot,
)
from datamover.pod.cluster import PodContext, open_access
from datamover.pod.reporting import Termination, build_success
from datamover.pod.snapshot_report import list_stored, read_backup_snapshots, summarize

_logger = logging.getLogger(__name__)

_CAUSE_CHARACTERS: Final = 1000

_ENOUGH_SECONDS: Final = 900.0
"""What reads a small repository within this time reads all of it, rather than a sixteenth in each of 16 pods."""


async def verify_snapshots(spec: VerifySnapshots, context: PodContext) -> Termination:
    """Write a line for each of the snapshots, or of the shares, and return the SnapshotVerification.

    Raises:
        AgentError: the repository, its location or its credentials could not be read from the cluster.
    """
    wanted, location = await context.reader.place(spec.name)
    with open_access(context) as access:
        repository = await access.resolve(location, wanted)
        key = RepositoryKey(wanted.spec.volume_namespace, location.name)
        verifier = _Verifier(spec, access.context, repository, key)
        found = await (verifier.run_shares() if spec.shares else verifier.run(spec.snapshots, named=True))
    return build_success(verifier.output.seal(SnapshotVerification(snapshots=len(found))))


@dataclass(frozen=True)
class _Verifier:
    """Verifies snapshots or shares of a repository, the one of `key`, and writes the results to `output`."""

    spec: VerifySnapshots
    context: PodContext
    repository: Repository
    key: RepositoryKey
    output: JobOutput = field(default_factory=JobOutput)

    async def run(self, snapshots: Collection[str], *, named: bool = False) -> list[VerifiedSnapshot]:
        """Verify these snapshots one after the other, and return what was found out about each.

        Those that are not there, or are incomplete, may have been deleted: unless the command has `named` them, they
        count only if a completed backup refers to them at the end.
        """
        outage: StorageOutageError | None = None
        results, absent = list[VerifiedSnapshot](), list[VerifiedSnapshot]()
        for number, snapshot_id in enumerate(snapshots, start=1):
            _logger.info("snapshot %s: %d of %d", snapshot_id, number, len(snapshots))
            try:
                # Each attempt would wait for the storage as long as the first one.
                found = self._explain(snapshot_id, outage) if outage else await self._verify(snapshot_id)
            except StorageOutageError as e:
                outage, found = e, self._explain(snapshot_id, e)
            except AgentError as e:
                found = self._explain(snapshot_id, e)
                if not named and isinstance(e, SnapshotMissingError | DamagedSnapshotError):
                    absent.append(found)
                    continue
            results.append(found)
            self.output.write(VERIFIED_LINE, found)
        if absent:
            expected = await self._read_expected()
            for found in (one for one in absent if one.id in expected):
                results.append(found)
                self.output.write(VERIFIED_LINE, found)
        return results

    async def _verify(self, snapshot_id: str) -> VerifiedSnapshot:
        spec, repository = self.spec, self.repository
        snapshot = await repository.open(partial(read_snapshot, repository, snapshot_id), read_only=True)
        if snapshot.fault:
            raise DamagedSnapshotError(f"snapshot {snapshot_id}: {snapshot.fault}")
        if spec.volume_path is not None:
            return await self._compare(snapshot, Path(spec.volume_path))
        return await verify_snapshot(repository, snapshot, spec.percent)

    async def _compare(self, snapshot: Snapshot, volume: Path) -> VerifiedSnapshot:
        repository = self.repository
        try:
            mode = self.spec.volume_mode or VolumeMode.FILESYSTEM
            async with open_once(repository.kopia, VolumeAccess()):
                packs = self.context.limits.restore_packs
                return await compare_volume(repository, snapshot, volume, mode, packs=packs)
        except DataPathError as e:
            # kopia ends at the first file that it cannot read, and does not name it.
            if is_damage(e) and (found := await verify_snapshot(repository, snapshot, WHOLE_PERCENT)).faults:
                return found
            raise

    def _explain(self, snapshot_id: str, error: AgentError) -> VerifiedSnapshot:
        """Return the result for a snapshot that could not be read, be it damaged or not."""
        damaged = is_damage(error)
        text = self.context.redactor.redact(str(error))
        _logger.log(logging.WARNING if damaged else logging.ERROR, "snapshot %s: %s", snapshot_id, text)
        return VerifiedSnapshot(
            id=snapshot_id,
            outcome=VerificationOutcome.FAILED if damaged else None,
            percent=WHOLE_PERCENT if self.spec.volume_path is not None else self.spec.percent,
            faults=[summarize(text)[:_CAUSE_CHARACTERS]],
            fault_count=1,
        )

    # -- shares --------------------------------------------------------------------------------------------------------
    async def run_shares(self) -> list[VerifiedSnapshot]:
        """Write a line for each share that is right; return what was found out about snapshots, too."""
        expected = await self._read_expected()
        listed: set[str] = set()
        try:
            if not (listed := await self._list()):
                await self.repository.check_listing()
            sound = await self._read_shares()
        except AgentError as e:
            # Without any snapshot, nothing would be found damaged in a repository that is gone.
            if not is_damage(e) or not (expected or listed):
                raise
            _logger.warning("the repository is damaged: %s", self.context.redactor.redact(str(e)))
            sound = False
        if not sound:
            return await self._find_damaged(sorted(expected | listed))
        return await self.run(sorted(expected - listed))

    async def _read_shares(self) -> bool:
        """Read shares, and write the lines; return False at the first one that is damaged."""
        clock = self.context.clock
        began = clock.monotonic()
        # In each run: a content whose index was lost since the first one is in no share any more.
        if not await has_sound_directories(self.repository):
            return False
        for count, share in enumerate(self.spec.shares):
            if count >= (self.spec.least or 1) and clock.monotonic() - began >= _ENOUGH_SECONDS:
                break
            _logger.info("share %d of %d", share + 1, SHARES)
            try:
                contents = await count_contents(self.repository, share)
            except AgentError as e:
                if count == 0 or is_damage(e):
                    raise
                _logger.warning("share %d was not read: %s", share + 1, self.context.redactor.redact(str(e)))
                break
            if contents is None:
                return False
            self.output.write(SHARE_LINE, VerifiedShare(share=share, contents=contents))
        return True

    async def _find_damaged(self, snapshots: Collection[str]) -> list[VerifiedSnapshot]:
        """Read all snapshots, and so all shares; return what was found out about them."""
        _logger.warning("contents are missing or damaged: all %d snapshots are read, to find out which", len(snapshots))
        found = await self.run(snapshots)
        if all(one.outcome is not None for one in found):
            for share in range(SHARES):
                self.output.write(SHARE_LINE, VerifiedShare(share=share))
        return found

    async def _read_expected(self) -> set[str]:
        """Return the snapshots that completed backups refer to."""
        return await read_backup_snapshots(self.context.patient_client, self.context.namespace, self.key)

    async def _list(self) -> set[str]:
        """Return the IDs of the complete snapshots in the repository."""
        with open_output(self.repository.work_dir) as file:
            read = await list_stored(self.repository, file)
            # A backup may delete an incomplete one at any time.
            return {one.id for one in read() if not one.incomplete}
