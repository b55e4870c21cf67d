"""The controller of maintenance, for namespaces without a Velero server: one Job at a time for each repository.

It runs no kopia: a Job does. When one is due is in `nodeagent.maintenance.rules`, and each step in
`nodeagent.leader.maintenance.steps`. A server that appears finds Jobs and a history like its own. Beside a server, too,
repositories are verified where that is configured (`nodeagent.leader.maintenance.verifications`), by Jobs that share
the places of maintenance.
"""

import asyncio
import logging
from collections.abc import Iterable, Iterator
from typing import Final

from core.contract import MaintenanceMode
from core.errors import AgentError
from core.kube.client import Selection
from core.kube.resources import BACKUP_REPOSITORIES, JOBS
from core.kube.types import RepositoryObject
from core.kube.velero_server import ServerAbsence
from core.models.base import JsonDict, format_time
from core.models.names import repo_name_label
from core.models.storage import REPOSITORY_TYPE, BackupRepository
from nodeagent import metrics as metric
from nodeagent.leader.context import Cluster
from nodeagent.leader.maintenance.jobs import Places
from nodeagent.leader.maintenance.steps import MaintenanceSources, MaintenanceSteps
from nodeagent.leader.maintenance.verifications import VerificationSteps
from nodeagent.maintenance.jobs import MaintenanceJob, RepositoryJobs
from nodeagent.maintenance.rules import Decision, Hold, is_full_incomplete, record_of
from nodeagent.runtime.informer import Informer
from nodeagent.runtime.settings import MaintenanceSwitch
from nodeagent.runtime.workqueue import ObjectSteps, Requeue, WorkQueue, run_restarting

_log = logging.getLogger(__name__)

_WORKERS: Final = 4
_FAULT_SECONDS: Final = 60.0

_LEFT_JOBS: Final = ""
"""The key for the Jobs of repositories that no longer exist."""


class MaintenanceController:
    """Maintains backup repositories while this agent is the leader and there is no Velero server."""

    def __init__(
        self, cluster: Cluster, sources: MaintenanceSources, *, namespace: str, switch: MaintenanceSwitch
    ) -> None:
        self._cluster = cluster
        self._sources = sources
        self._namespace = namespace
        self._switch = switch
        kind, failed = BACKUP_REPOSITORIES.kind, "maintaining the repository failed"
        self._steps = ObjectSteps(_log, kind=kind, namespace=namespace, failed=failed)
        failed = "verifying the repository failed"
        self._verification_steps = ObjectSteps(_log, kind=kind, namespace=namespace, failed=failed)
        self._uids: dict[str, str] = {}
        self._decisions: dict[str, JsonDict] = {}
        self._waiting: set[str] = set()

    async def run(self) -> None:
        """Maintain the repositories until canceled, and verify them; each unless that is switched off."""
        await run_restarting(self._run_once, self._cluster.clock, name="maintenance controller")

    def report(self) -> JsonDict:
        """Return the maintenance part of `/status`: of each repository, why nothing runs, and when it is due."""
        return dict(sorted(self._decisions.items()))

    async def _run_once(self) -> None:
        """Maintain the repositories until canceled, or until a first list is rejected."""
        cluster, client, clock, namespace = self._cluster, self._cluster.client, self._cluster.clock, self._namespace
        queue: WorkQueue[str] = WorkQueue(clock, name="maintenance", workers=_WORKERS)
        every = Selection(BACKUP_REPOSITORIES, namespace)
        repositories: Informer[RepositoryObject] = Informer(
            client, every, clock=clock, trim=lambda raw: raw, on_change=lambda raw: queue.add(raw["metadata"]["name"])
        )

        known: RepositoryJobs | None = None

        def enqueue(job: MaintenanceJob) -> None:
            nonlocal known
            known = None
            # Before all are listed, none of them is news: each repository is looked at then anyway.
            for name in self._find_concerned(job, repositories.items()) if jobs.synced.is_set() else ():
                queue.add(name)

        jobs = Informer(client, Selection(JOBS, namespace), clock=clock, trim=MaintenanceJob.parse, on_change=enqueue)

        def look() -> RepositoryJobs:
            nonlocal known
            known = known or RepositoryJobs(jobs.items())
            return known

        absence = ServerAbsence(client, clock, namespace)
        # Two repositories must not both take the last place of maxConcurrentJobs.
        places = Places(clock, self._sources.settings)
        steps = MaintenanceSteps(
            cluster, self._sources, absence, namespace=namespace, switch=self._switch, places=places
        )
        verifications = VerificationSteps(cluster, self._sources, namespace=namespace, places=places)

        async def handle(name: str) -> Requeue | None:
            raw = repositories.get(namespace, name)
            uid = None if raw is None else raw["metadata"]["uid"]
            if self._uids.pop(name, uid) != uid:
                # It was deleted, and another one may have its name: no event came in between.
                self._forget(steps, name)
                verifications.forget(name)
                queue.add(_LEFT_JOBS)
            if name == _LEFT_JOBS:
                return await self._clean_up(steps, jobs.items(), repositories.items())
            if raw is None:
                return None
            self._uids[name] = raw["metadata"]["uid"]
            # What fails is tried again, and stops no other repository.
            again = [
                await self._steps.take(name, self._maintain(steps, raw, look())),
                await self._verification_steps.take(name, self._verify(verifications, raw, look())),
            ]
            return min(filter(None, again), key=lambda one: one.after_seconds, default=None)

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(repositories.run(), name="repositories to maintain")
                group.create_task(jobs.run(), name="maintenance jobs")
                await repositories.synced.wait()
                await jobs.synced.wait()
                await absence.look()
                group.create_task(absence.run(), name="velero server")
                # Repositories may have been deleted before this term.
                queue.add(_LEFT_JOBS)
                await queue.run(handle)
        finally:
            self._decisions.clear()
            self._waiting.clear()

    def _find_concerned(self, job: MaintenanceJob, repositories: Iterable[RepositoryObject]) -> Iterator[str]:
        """Yield the Job's repository, after those that wait for its place if it has ended: due for longest goes first.

        Others look at each minute whether there is a place.
        """
        if not (job.ours or job.labeled or job.verifies is not None):
            return
        if job.ended:
            yield from sorted(self._waiting, key=self._when_due)
        for meta in (raw["metadata"] for raw in repositories):
            if job.verifies == meta["uid"] or job.maintains(meta["name"], meta["uid"]):
                yield meta["name"]

    def _when_due(self, name: str) -> tuple[str, str]:
        return str(self._decisions[name]["due"]), name

    def _note(self, name: str, decision: Decision | None) -> None:
        """Note what was decided about a repository; None: what was before may be wrong."""
        self._decisions.pop(name, None)
        self._waiting.discard(name)
        if decision is not None:
            due = format_time(decision.due_at) if decision.due_at is not None else ""
            self._decisions[name] = {"hold": str(decision.hold or ""), "due": due, "overdue": decision.overdue}
            if decision.hold is Hold.CONCURRENCY:
                self._waiting.add(name)

    def _forget(self, steps: MaintenanceSteps, name: str) -> None:
        self._note(name, None)
        self._steps.forget(name)
        self._verification_steps.forget(name)
        steps.forget(name)
        self._cluster.metrics.forget(*metric.MAINTENANCE_GAUGES, repository_name=name)

    async def _maintain(self, steps: MaintenanceSteps, raw: RepositoryObject, jobs: RepositoryJobs) -> Requeue | None:
        if self._switch is MaintenanceSwitch.OFF:
            return None
        decision: Decision | None = None
        try:
            repository = BackupRepository.parse(raw)
            if not _is_kept(repository):
                return None
            requeue, decision = await steps.step(repository, jobs)
        finally:
            self._note(raw["metadata"]["name"], decision)
        self._publish(repository, decision)
        return requeue

    async def _verify(
        self, verifications: VerificationSteps, raw: RepositoryObject, jobs: RepositoryJobs
    ) -> Requeue | None:
        repository = BackupRepository.parse(raw)
        if not _is_kept(repository):
            return None
        return await verifications.step(repository, jobs, waiting=len(self._waiting))

    def _publish(self, repository: BackupRepository, decision: Decision) -> None:
        """Set the gauges of the repository by what is stored, so that a new leader has them, too."""
        metrics, name, record = self._cluster.metrics, repository.name, record_of(repository)
        if decision.hold is Hold.SERVER:
            # The result of the server's maintenance is not known to the agents.
            metrics.forget(*metric.MAINTENANCE_GAUGES, repository_name=name)
            return
        for counter in (metric.MAINTENANCE_SUCCESS, metric.MAINTENANCE_FAILURE):
            # From 0 on, an increase is seen.
            metrics.inc(counter, name, by=0)
        metrics.set(metric.MAINTENANCE_OVERDUE, decision.hold is not None and decision.overdue, name)
        if record.orphans is None:
            metrics.forget(metric.ORPHAN_SNAPSHOTS, metric.ORPHAN_SNAPSHOT_BYTES, repository_name=name)
        else:
            metrics.set(metric.ORPHAN_SNAPSHOTS, record.orphans.count, name)
            metrics.set(metric.ORPHAN_SNAPSHOT_BYTES, record.orphans.bytes, name)
        incomplete = is_full_incomplete(record, tuple(repository.status.recent_maintenance))
        metrics.set(metric.MAINTENANCE_INCOMPLETE, incomplete, name)
        if record.at is None:
            return
        if record.index_blobs is not None and record.contents is not None:
            metrics.set(metric.INDEX_BLOBS, record.index_blobs, name)
            metrics.set(metric.CONTENTS, record.contents, name)
        for mode, at in ((record.mode, record.at), (MaintenanceMode.FULL, record.last_full)):
            if at is not None and mode is not MaintenanceMode.NONE:
                metrics.set(metric.MAINTENANCE_LAST_SUCCESS, at.timestamp(), name, str(mode))

    async def _clean_up(
        self, steps: MaintenanceSteps, jobs: list[MaintenanceJob], repositories: list[RepositoryObject]
    ) -> Requeue | None:
        """Delete the Jobs of BackupRepositories that no longer exist; one that runs is looked at again."""
        uids = {one["metadata"]["uid"] for one in repositories}
        # What is labeled is history of the one that has the name now.
        labels = {repo_name_label(one["metadata"]["name"]) for one in repositories}
        left = False
        for job in jobs:
            if job.owner_uid is None or job.owner_uid in uids or job.repo_name in labels:
                continue
            try:
                left |= await steps.delete_left(job)
            except AgentError as e:
                _log.debug("could not delete Job %s, will retry: %s", job.name, e)
                left = True
        return Requeue(_FAULT_SECONDS) if left else None


def _is_kept(repository: BackupRepository) -> bool:
    return not repository.deleting and repository.key.repository_type == REPOSITORY_TYPE
