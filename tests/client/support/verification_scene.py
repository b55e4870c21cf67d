"""A cluster whose Jobs of verifications end, and whose restores do, as `nodeagent backup verify` finds it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta

from client.collections.collection import Backups
from client.collections.models import Backup
from client.session import Session
from client.verifications.report import VerifiedVolume
from client.verifications.verify import VerificationRequest, verify_volumes
from core.kube.resources import DATA_UPLOADS, EVENTS, JOBS, PODS
from core.kube.types import OwnerRef
from core.models.verification import (
    VERIFIED_LINE,
    SnapshotVerification,
    Verification,
    VerificationOutcome,
    VerifiedSnapshot,
)
from tests.client.support.job_pods import ended
from tests.client.support.restore_scene import RestoreScene
from tests.support.clock import LoopClock
from tests.support.job_output import seal
from tests.support.objects import JsonDict


def passed(snapshot_id: str) -> VerifiedSnapshot:
    """Return the result of a snapshot that passed."""
    return VerifiedSnapshot(id=snapshot_id, outcome=VerificationOutcome.PASSED, files=3, bytes=2**20)


def failed(snapshot_id: str) -> VerifiedSnapshot:
    """Return the result of a snapshot with two faults, of which one is named."""
    fault = "sub/first: object 1 is backed by missing blob p1"
    return VerifiedSnapshot(id=snapshot_id, outcome=VerificationOutcome.FAILED, faults=[fault], fault_count=2)


@dataclass
class VerificationScene:
    """The backup `night` of the volumes app/data (s1) and db/files (s2).

    `results` are those of Jobs that read; other snapshots pass. Those of Jobs that compare are `compared`. The Jobs of
    the repositories in `broken` fail, those in `slow` do not end, after `logged` of their snapshots. Restores end in
    the phase `restored`; empty: they do not end. `seen` are the Jobs in their order, `on_job` is called when there is
    one.
    """

    base: RestoreScene = field(default_factory=RestoreScene)
    results: dict[str, VerifiedSnapshot] = field(default_factory=dict)
    compared: dict[str, VerifiedSnapshot] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)
    slow: set[str] = field(default_factory=set)
    logged: int = 0
    restored: str = "Completed"
    volume: str = ""
    seen: list[JsonDict] = field(default_factory=list)
    progress: list[str] = field(default_factory=list)
    on_job: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.base.user.put_repository(name="db-default-kopia")

    @property
    def jobs(self) -> list[JsonDict]:
        return self.base.kube.objects(JOBS)

    @property
    def events(self) -> list[tuple[str, str, str]]:
        """Type, reason and message of each Event."""
        return [(one["type"], one["reason"], one["message"]) for one in self.base.kube.objects(EVENTS)]

    @property
    def outcomes(self) -> dict[str, str]:
        """The recorded outcome of each transfer that has one."""
        transfers = [one["metadata"] for one in self.base.kube.objects(DATA_UPLOADS)]
        found = {meta["name"]: Verification.from_annotations(meta["annotations"]) for meta in transfers}
        return {name: str(one.outcome) for name, one in found.items() if one is not None}

    async def backup(self) -> Backup:
        return await Backups(self.base.client, "velero").get_own("night")

    async def run(
        self, *, percent: float = 100.0, restore: bool = False, claims: tuple[str, ...] = ("data", "files")
    ) -> list[VerifiedVolume]:
        """Verify the volumes of these PVCs, while Jobs and restores end."""
        volumes = [one for one in (await self.backup()).volumes if one.claim in claims]
        async with self.working() as tools:
            return await verify_volumes(tools, volumes, VerificationRequest(percent, restore, timedelta(minutes=5)))

    @asynccontextmanager
    async def working(self, owners: Sequence[OwnerRef] = ()) -> AsyncIterator[Session]:
        """Yield what volumes are verified with, while Jobs and restores end."""
        clock = LoopClock()
        notes, progress = self.base.notes.append, self.progress.append
        tools = Session(self.base.client, clock, "velero", notes, progress, now=clock.now, owners=owners)
        kubelet = asyncio.create_task(self._end_all(), name="kubelet")
        try:
            yield tools
        finally:
            kubelet.cancel()
            await asyncio.wait({kubelet})

    async def _end_all(self) -> None:
        while True:
            await asyncio.sleep(0.3)
            for download in self.base.downloads:
                if self.restored and not download.get("status"):
                    self._end_restore(download)
            pods = {one["metadata"]["name"] for one in self.base.kube.objects(PODS)}
            for job in self.jobs:
                if f"{job['metadata']['name']}-x" not in pods:
                    self.on_job()
                    self._end(job)

    def _end_restore(self, download: JsonDict) -> None:
        target = download["spec"]["targetVolume"]
        claim = self.base.claims[f"{target['namespace']}/{target['pvc']}"]
        if self.volume:
            self.base.kube.put(claim | {"spec": claim["spec"] | {"volumeName": self.volume}})
        message = "" if self.restored == "Completed" else "no node has room"
        self.base.kube.put(download | {"status": {"phase": self.restored, "message": message}})

    def _end(self, job: JsonDict) -> None:
        args = job["spec"]["template"]["spec"]["containers"][0]["args"]
        compares = any(one.startswith("--volume-path=") for one in args)
        if compares and self.restored != "Completed":
            return
        self.seen.append(job)
        ids = [one.removeprefix("--snapshot=") for one in args if one.startswith("--snapshot=")]
        broken, slow = (
            any(f"--backup-repository={name}" in args for name in names) for names in (self.broken, self.slow)
        )
        results = self.compared if compares else self.results
        lines = [VERIFIED_LINE.format(results.get(one) or passed(one)) for one in ids]
        message = "no memory" if broken else seal(SnapshotVerification(snapshots=len(ids)), *lines)
        name = job["metadata"]["name"]
        status = {"phase": "Running"} if slow else ended(int(broken), message)
        self.base.user.put("Pod", f"{name}-x", "v1", labels={"job-name": name}, status=status)
        shown = lines[: self.logged] if broken or slow else lines
        self.base.kube.logs["velero", f"{name}-x"] = "\n".join(["time=1 level=info msg=x", *shown, ""])
