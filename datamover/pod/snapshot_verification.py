"""The verification of snapshots of one repository, in a pod: each by itself, so that one fault hides no other.

Reads the repository and changes nothing. What it finds out about a snapshot is a line of the output; a snapshot that
could not be verified has one too, with the cause.
"""

import logging
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from core.contract import VolumeMode
from core.errors import AgentError, DataPathError, StorageOutageError
from core.models.job_output import JobOutput
from core.models.verification import (
    VERIFIED_LINE,
    WHOLE_PERCENT,
    SnapshotVerification,
    VerificationOutcome,
    VerifiedSnapshot,
)
from core.mover_specs import VerifySnapshots
from datamover.data_path.compare import compare_volume
from datamover.kopia.repository import Repository
from datamover.kopia.snapshots import Snapshot, read_snapshot
from datamover.kopia.stalls import Watchdog
from datamover.kopia.storage_calls import WaitLog
from datamover.kopia.verification import DamagedSnapshotError, is_damage, verify_snapshot
from datamover.pod.cluster import PodContext
from datamover.pod.reporting import Termination, build_success
from datamover.pod.repository_access import open_access

__all__ = ["verify_snapshots"]

_logger = logging.getLogger(__name__)

_CAUSE_CHARACTERS: Final = 1000


async def verify_snapshots(spec: VerifySnapshots, context: PodContext) -> Termination:
    """Write a line for each of the snapshots, and return the SnapshotVerification.

    Raises:
        AgentError: the repository, its location or its credentials could not be read from the cluster.
    """
    reader = context.reader
    wanted = await reader.repository(spec.name)
    location = await reader.location(wanted.spec.backup_storage_location)
    with open_access(context) as access:
        repository = await access.resolve(location, wanted)
        watchdog = Watchdog(context.clock, WaitLog().warn, repository.probe, access.tools.waits.limits)
        verifier = _Verifier(spec, access.context, repository, watchdog)
        await verifier.run()
    return build_success(verifier.output.seal(SnapshotVerification(snapshots=len(spec.snapshots))))


@dataclass(frozen=True)
class _Verifier:
    """Verifies snapshots of a repository one after the other, and writes the results to `output`."""

    spec: VerifySnapshots
    context: PodContext
    repository: Repository
    watchdog: Watchdog
    output: JobOutput = field(default_factory=JobOutput)

    async def run(self) -> None:
        outage: StorageOutageError | None = None
        for number, snapshot_id in enumerate(self.spec.snapshots, start=1):
            _logger.info("snapshot %s: %d of %d", snapshot_id, number, len(self.spec.snapshots))
            try:
                # Each attempt would wait for the storage as long as the first one.
                found = self._explain(snapshot_id, outage) if outage else await self._verify(snapshot_id)
            except StorageOutageError as e:
                outage, found = e, self._explain(snapshot_id, e)
            except AgentError as e:
                found = self._explain(snapshot_id, e)
            self.output.write(VERIFIED_LINE, found)

    async def _verify(self, snapshot_id: str) -> VerifiedSnapshot:
        spec, repository = self.spec, self.repository
        snapshot = await repository.open(partial(read_snapshot, repository, snapshot_id), read_only=True)
        if snapshot.fault:
            raise DamagedSnapshotError(f"snapshot {snapshot_id}: {snapshot.fault}")
        if spec.volume_path is not None:
            return await self._compare(snapshot, Path(spec.volume_path))
        return await verify_snapshot(repository, self.watchdog, snapshot, spec.percent)

    async def _compare(self, snapshot: Snapshot, volume: Path) -> VerifiedSnapshot:
        repository, watchdog = self.repository, self.watchdog
        try:
            mode = self.spec.volume_mode or VolumeMode.FILESYSTEM
            return await compare_volume(repository, watchdog, snapshot, volume, mode)
        except DataPathError as e:
            # kopia ends at the first file that it cannot read, and does not name it.
            if is_damage(e) and (found := await verify_snapshot(repository, watchdog, snapshot, WHOLE_PERCENT)).faults:
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
            faults=[_summarize(text)],
            fault_count=1,
        )


def _summarize(text: str) -> str:
    """Return the cause of an error, its first line, and the last one, which has kopia's most specific words."""
    lines = text.splitlines() or [""]
    return ": ".join(dict.fromkeys((lines[0], lines[-1])))[:_CAUSE_CHARACTERS]
