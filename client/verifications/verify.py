"""Verifies volumes of a backup, and records each result on its transfer: in an annotation and an Event."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from client.collections.models import BackupVolume
from client.session import Session
from client.verifications.read_back import VerificationWork, find_repository, verify_snapshots
from client.verifications.report import VerifiedVolume, describe_faults, describe_volume
from client.verifications.scratch import NotRestoredError, compare_restored, remove_abandoned
from core.errors import AgentError
from core.kube.client import Selection
from core.kube.errors import KubeError
from core.kube.events import EventRecorder, ObjectRef
from core.kube.resources import BY_KIND
from core.models.names import VERIFICATION_ANNOTATION
from core.models.storage import RepositoryKey
from core.models.verification import WHOLE_PERCENT, Verification, VerificationOutcome, VerifiedSnapshot, is_damaged

_CAUSE_CHARACTERS = 1000


@dataclass(frozen=True)
class VerificationRequest:
    """How volumes are verified: by reading `percent` of their files, or by a restore; `timeout` applies to each Job.

    With `storage_class`, they are restored into volumes of that class.
    """

    percent: float
    restore: bool
    timeout: timedelta
    storage_class: str | None = None


async def verify_volumes(
    tools: Session, volumes: Sequence[BackupVolume], request: VerificationRequest
) -> list[VerifiedVolume]:
    """Return what came of the verification of each volume; one repository is read after the other.

    What makes it impossible to verify one repository, or one volume, does not keep the others from it.
    """
    if request.restore:
        await remove_abandoned(tools, tools.now())
    groups: dict[RepositoryKey, list[BackupVolume]] = {}
    for volume in volumes:
        groups.setdefault(RepositoryKey(volume.namespace, volume.location), []).append(volume)
    verified = []
    for key, group in groups.items():
        # With --restore, one at a time needs room for one.
        for part in [[one] for one in group] if request.restore else [group]:
            verified += await _Run(tools, request, key, part).run()
    return verified


@dataclass(frozen=True)
class _Run:
    """The verification of volumes in one repository; of one volume, if it is restored.

    `found` are the results by the IDs of the snapshots; `recorded` is when they were recorded, by the transfers.
    """

    tools: Session
    request: VerificationRequest
    key: RepositoryKey
    volumes: Sequence[BackupVolume]
    found: dict[str, VerifiedSnapshot] = field(default_factory=dict)
    recorded: dict[str, datetime | None] = field(default_factory=dict)

    async def run(self) -> list[VerifiedVolume]:
        """Return what came of each volume; those that were not verified have the cause."""
        tools, request, faults = self.tools, self.request, list[str]()
        percent = WHOLE_PERCENT if request.restore else request.percent
        try:
            repository = await find_repository(tools, self.key)
            snapshots = tuple(dict.fromkeys(volume.snapshot_id for volume in self.volumes))
            work = VerificationWork(repository, snapshots, percent, request.timeout)
            await (self._restore(work) if request.restore else verify_snapshots(tools, work, self._keep))
        except AgentError as e:
            faults.append(" ".join(str(e).split())[:_CAUSE_CHARACTERS])
        verified = []
        for volume in self.volumes:
            name = volume.snapshot_id
            unknown = VerifiedSnapshot(id=name, percent=percent, faults=faults, fault_count=len(faults))
            found, at = self.found.get(name, unknown), self.recorded.get(volume.transfer)
            verified.append(describe_volume(volume, found, restored=request.restore, at=at))
        return verified

    async def _restore(self, work: VerificationWork) -> None:
        (volume,) = self.volumes
        try:
            chosen = self.request.storage_class
            await compare_restored(self.tools, volume, work, self._keep, storage_class=chosen)
        except NotRestoredError:
            # Damaged data keeps a volume from being restored, and so does much else.
            await verify_snapshots(self.tools, work, self._keep_failed)
            raise

    async def _keep_failed(self, found: Mapping[str, VerifiedSnapshot]) -> None:
        await self._keep({name: one for name, one in found.items() if one.outcome is VerificationOutcome.FAILED})

    async def _keep(self, found: Mapping[str, VerifiedSnapshot]) -> None:
        """Record results at once: what comes next may be interrupted."""
        self.found.update(found)
        for volume in self.volumes:
            if volume.snapshot_id in found and volume.transfer not in self.recorded:
                one = found[volume.snapshot_id]
                at = await _record(self.tools, volume, one, restored=self.request.restore)
                self.recorded[volume.transfer] = at


async def _record(tools: Session, volume: BackupVolume, found: VerifiedSnapshot, *, restored: bool) -> datetime | None:
    """Record the result on the transfer of the volume, and return when; None: it is not recorded."""
    if found.outcome is None:
        return None
    at = tools.now().replace(microsecond=0)
    text = Verification(at=at, outcome=found.outcome, percent=found.percent).to_json()
    patch = {"metadata": {"annotations": {VERIFICATION_ANNOTATION: text}}}
    place = f"{volume.kind} {tools.namespace}/{volume.transfer}"
    try:
        in_part = found.outcome is VerificationOutcome.PASSED and found.percent < WHOLE_PERCENT
        if in_part and await _has_failed(tools, volume):
            tools.on_note(f"{place} stays failed: only reading all of its files shows that they are right")
            return None
        transfer = await tools.client.patch(BY_KIND[volume.kind], tools.namespace, volume.transfer, patch)
    except KubeError as e:
        tools.on_note(f"the result could not be recorded on {place}, so no metric and no alert has it: {e}")
        return None
    failed = found.outcome is VerificationOutcome.FAILED
    recorder = EventRecorder(tools.client, tools.clock, component="nodeagent", host="")
    try:
        reason = "VerificationFailed" if failed else "Verified"
        await recorder.record(ObjectRef.of(transfer), reason, _describe(found, restored=restored), warning=failed)
    except KubeError as e:
        tools.on_note(f"no Event on {place} was recorded: {e}")
    return at


async def _has_failed(tools: Session, volume: BackupVolume) -> bool:
    """Return whether the last verification of the volume that is recorded has failed."""
    selection = Selection(BY_KIND[volume.kind], tools.namespace, field_selector=f"metadata.name={volume.transfer}")
    listed = [one["metadata"].get("annotations") or {} for one in await tools.client.list(selection)]
    return any(map(is_damaged, map(Verification.from_annotations, listed)))


def _describe(found: VerifiedSnapshot, *, restored: bool) -> str:
    if found.outcome is VerificationOutcome.FAILED:
        return f"kopia snapshot {found.id}: {describe_faults(found)}"
    how = "restored and compared" if restored else f"read {found.percent:g} % of its files"
    return f"kopia snapshot {found.id}: {how}: {found.files} files with {found.bytes} bytes are right"
