"""A cluster with agents, old backups and a bucket, whose Jobs run at once and delete snapshots."""

import json
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from email.utils import format_datetime
from typing import Any

from client.backups.delete import DeletionPlan, DeletionWish, check_plan, execute_plan, plan_deletion
from client.backups.deletion_jobs import hold_deletions
from client.session import Session
from core.kube.client import KubeClient
from core.kube.resources import DATA_UPLOADS, Resource
from core.kube.transport import Request, Response, Retry
from core.models.backups import SavedClaim
from core.models.base import format_time
from core.models.verification import VERIFIED_LINE, SnapshotVerification, VerificationOutcome, VerifiedSnapshot
from core.mover_specs import DeleteSnapshots, VerifySnapshots, parse_spec
from core.snapshot_contract import (
    CHECKED_LINE,
    DELETED_LINE,
    CheckedCopy,
    DeletedSnapshot,
    SnapshotDeletion,
    TransferToDelete,
)
from nodeagent.runtime.connection import ServerTime
from tests.client.support.job_pods import ended
from tests.nodeagent.support.hand_clock import NOON, HandClock
from tests.support.fakekube import FakeKube
from tests.support.job_output import seal
from tests.support.objects import JsonDict

CLUSTER = "uid-of-this-cluster"


@dataclass
class _RightClock:
    """The clock of the API server: as the hand clock, without its skew."""

    hand_clock: HandClock

    def now(self) -> datetime:
        return self.hand_clock.now() - self.hand_clock.skew

    def monotonic(self) -> float:
        return self.hand_clock.monotonic()

    async def sleep(self, seconds: float) -> None:
        await self.hand_clock.sleep(seconds)


class JobKube(FakeKube):
    """Runs each Job of a deletion when it is created; its answers have a Date.

    `bucket` has the transfers of the snapshots by their IDs, `pinned` the snapshots that something names, `rootless`
    those whose root cannot be read. `failure` is what a Job that is no dry run ends with, and `refused` what any ends
    with; empty: it succeeds. `places` has the locations of the snapshots. `dates_ahead` moves the Dates of answers,
    `pod_ahead` the clocks of pods. `verified` is the outcome of verifications; None: they cannot be carried out.
    """

    def __init__(self, clock: HandClock) -> None:
        super().__init__(_RightClock(clock))
        self.hand_clock = clock
        self.dated = True
        self.bucket: dict[str, TransferToDelete] = {}
        self.places: dict[str, str] = {}
        self.pinned: set[str] = set()
        self.rootless: set[str] = set()
        self.dates_ahead = self.pod_ahead = timedelta()
        self.refused = self.failure = ""
        self.verified: VerificationOutcome | None = VerificationOutcome.PASSED
        self.ran: list[DeleteSnapshots] = []

    async def request(self, request: Request) -> Response:
        """Respond, and run the Job that was created."""
        response = await super().request(request)
        if request.method == "POST" and request.path.endswith("/jobs") and response.status < 300:
            self._run(json.loads(response.body))
        date = format_datetime(self.time + self.dates_ahead, usegmt=True) if self.dated else None
        return Response(response.status, response.body, response.retry_after, date)

    @property
    def time(self) -> datetime:
        """The right time, which stamps objects."""
        return self.hand_clock.now() - self.hand_clock.skew

    def _run(self, job: JsonDict) -> None:
        meta, (container,) = job["metadata"], job["spec"]["template"]["spec"]["containers"]
        options = parse_spec(container["args"])
        if isinstance(options, VerifySnapshots):
            results = [VerifiedSnapshot(id=one, outcome=self.verified) for one in options.snapshots]
            result = SnapshotVerification(snapshots=len(results))
            lines = [VERIFIED_LINE.format(one) for one in results]
            self._end(meta["name"], "", seal(result, *lines), lines)
            return
        assert isinstance(options, DeleteSnapshots)
        assert options.cluster == CLUSTER
        self.ran.append(options)
        error = self.refused or ("" if options.dry_run else self.failure)
        here = {key for key in self.bucket if self.places.get(key, "default") == options.name}
        found = {} if error else {key: self.bucket[key] for key in here if self.bucket[key] in options.transfers}
        kept = self.pinned & found.keys()
        if not options.dry_run:
            self.bucket = {key: one for key, one in self.bucket.items() if key not in found or key in kept}
        pinned = dict.fromkeys(kept, "DataDownload velero/back names it")
        deleted = [
            DeletedSnapshot.like(one, id=key, transfer_uid=one.uid, bytes=2**30, kept=pinned.get(key))
            for key, one in found.items()
        ]
        checked = [CheckedCopy.like(one, fault=self._find_fault(one.snapshot_id, here)) for one in options.checks]
        totals = SnapshotDeletion(now=self.time + self.pod_ahead)
        log = [*map(DELETED_LINE.format, deleted), *map(CHECKED_LINE.format, checked)]
        self._end(meta["name"], error, error or seal(totals, *log), log)

    def _find_fault(self, snapshot: str, here: set[str]) -> str:
        if snapshot not in here:
            return f"snapshot {snapshot} is not in the repository"
        return f"root directory of snapshot {snapshot}: it is lost" if snapshot in self.rootless else ""

    def _end(self, job: str, error: str, message: str, lines: Iterable[str]) -> None:
        name = f"{job}-x"
        pod = {"name": name, "namespace": "velero", "labels": {"job-name": job}}
        self.put({"apiVersion": "v1", "kind": "Pod", "metadata": pod, "status": ended(12 if error else 0, message)})
        self.logs["velero", name] = "".join(f"{line}\n" for line in lines)


@dataclass
class DeletionScene:
    """The cluster at noon: `put_backup` adds backups, the agents and a location are there."""

    clock: HandClock = field(default_factory=HandClock)
    notes: list[str] = field(default_factory=list)
    make_kube: Callable[[HandClock], JobKube] = JobKube

    def __post_init__(self) -> None:
        self.kube = self.make_kube(self.clock)
        self.time = ServerTime(self.kube, self.clock)
        self.put_agents()
        self.put_location("default")
        meta = {"name": "kube-system", "uid": CLUSTER}
        self.kube.put({"apiVersion": "v1", "kind": "Namespace", "metadata": meta})

    def put(
        self, kind: str, name: str, version: str = "velero.io/v1", *, meta: JsonDict | None = None, **more: Any
    ) -> JsonDict:
        metadata = {"name": name, "namespace": "velero"} | (meta or {})
        return self.kube.put({"apiVersion": version, "kind": kind, "metadata": metadata, **more})

    def put_agents(self) -> None:
        container = {"name": "node-agent", "image": "mover:1", "command": ["python", "-m", "nodeagent"]}
        template = {"spec": {"containers": [container | {"args": ["serve"]}]}}
        self.put("DaemonSet", "node-agent", "apps/v1", spec={"template": template})

    def put_location(self, name: str, phase: str = "Available", **spec: Any) -> None:
        whole = {"provider": "aws", "objectStorage": {"bucket": "b"}} | spec
        self.put("BackupStorageLocation", name, spec=whole, status={"phase": phase})

    def put_backup(
        self,
        name: str,
        days_old: float,
        *claims: str,
        ttl: str = "24h",
        location: str = "default",
        pods: Collection[str] = (),
        schedule: str = "",
        keep: str = "",
        **status: Any,
    ) -> None:
        """Store a completed backup of these PVCs of the namespace `app`, each with a snapshot in the bucket.

        Those of `pods` are backed up by PodVolumeBackups. `keep` is the policy of its `schedule`, in place of a `ttl`.
        """
        for claim in claims or ("data",):
            uid = f"uid-{name}-{claim}"
            saved = SavedClaim(namespace="app", name=claim, size="1Gi")
            annotations = {"nodeagent.io/backup": name, "nodeagent.io/backup-volumes": str(len(claims) or 1)}
            annotations["nodeagent.io/claim"] = saved.text
            annotations |= (
                {"nodeagent.io/backup-keep": keep} if keep else {"nodeagent.io/backup-ttl": ttl} if ttl else {}
            )
            labels = {"nodeagent.io/backup": name} | ({"nodeagent.io/schedule": schedule} if schedule else {})
            meta: JsonDict = {"uid": uid, "labels": labels, "annotations": annotations}
            meta["creationTimestamp"] = format_time(NOON - timedelta(days=days_old))
            spec: JsonDict = {"snapshotType": "CSI", "sourceNamespace": "app", "sourcePVC": claim}
            spec |= {"backupStorageLocation": location, "operationTimeout": "10m0s"}
            kind, version = "DataUpload", "velero.io/v2alpha1"
            if claim in pods:
                kind, version = "PodVolumeBackup", "velero.io/v1"
                annotations |= {"velero.io/pvc-name": claim}
                spec |= {"pod": {"namespace": "app", "name": "web"}, "volume": "vol", "node": "a"}
            done = {"phase": "Completed", "snapshotID": f"s-{name}-{claim}", "progress": {"totalBytes": 2**30}}
            self.put(kind, f"{name}-{claim}", version, meta=meta, spec=spec, status=done | status)
            if (done | status)["phase"] == "Completed":
                self.kube.bucket[f"s-{name}-{claim}"] = TransferToDelete("app", name, uid)
                self.kube.places[f"s-{name}-{claim}"] = location

    @property
    def client(self) -> KubeClient:
        return KubeClient(self.time, Retry(self.clock, attempts=1))

    @property
    def tools(self) -> Session:
        return Session(
            self.client, self.clock, "velero", self.notes.append, date=lambda: self.time.date, now=self.time.now
        )

    async def check(self, name: str | None = None) -> DeletionPlan:
        """Return the plan to delete the backup of that name, or all expired ones, as Jobs have checked it."""
        plan = await plan_deletion(self.tools, DeletionWish(name))
        return (await check_plan(self.tools, plan))[0]

    async def execute(self, plan: DeletionPlan) -> list[DeletedSnapshot]:
        async with hold_deletions(self.tools) as guard:
            return await execute_plan(self.tools, plan, guard)

    async def run(self) -> list[DeletedSnapshot]:
        """Delete what is expired, as a schedule does."""
        async with hold_deletions(self.tools) as guard:
            return await execute_plan(self.tools, await self.check(), guard)

    def change(self, name: str, **more: Any) -> None:
        """Change parts of a stored DataUpload."""
        (raw,) = [one for one in self.kube.objects(DATA_UPLOADS) if one["metadata"]["name"] == name]
        self.kube.put(raw | {key: raw[key] | value for key, value in more.items()})

    def names(self, resource: Resource = DATA_UPLOADS) -> set[str]:
        """The names of the stored objects."""
        return {one["metadata"]["name"] for one in self.kube.objects(resource)}
