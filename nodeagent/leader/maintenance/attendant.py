"""What is done about a maintenance Job that has not ended: labeled once its pod runs, given up, or found to be lost.

Every step starts from what the API server has, and may run twice. A Job gets the label by which a Velero server sees it
only once its pod runs, and no Job with that label is deleted before its end.
"""

import logging
from datetime import timedelta
from typing import Final

from core.errors import ExposeError
from core.kube.resources import JOBS
from core.kube.types import Pod
from core.models.names import REPO_NAME_LABEL, repo_name_label
from core.models.storage import BackupRepository
from exposer.causes import CauseFinder
from nodeagent.leader.context import Cluster
from nodeagent.leader.maintenance.absence import ServerAbsence
from nodeagent.leader.maintenance.history import HistoryWriter, starts_of
from nodeagent.maintenance.facts import record_of
from nodeagent.maintenance.jobs import JobEnd, MaintenanceJob, jobs_of, list_jobs, read_pod
from nodeagent.maintenance.record import RunningJob
from nodeagent.runtime.workqueue import Requeue, Timers

__all__ = ["LOOK_AGAIN_SECONDS", "START_SECONDS", "STEP_SECONDS", "JobAttendant", "explain_start"]

_log = logging.getLogger(__name__)

STEP_SECONDS: Final = 5.0
"""Between two steps of a repository that something is done about."""

LOOK_AGAIN_SECONDS: Final = 60.0
"""Between two decisions about a repository, whatever the last one said: what it depends on is not all watched."""

START_SECONDS: Final = 600.0
"""How long the pod of a Job may take to run; the Job, which no server sees, is deleted then."""

_ABANDONED_SECONDS: Final = 3600.0
"""How long a Job of a Velero server that is gone may have no pod."""

_OVER: Final = frozenset({"Succeeded", "Failed"})
"""Phases of a pod that writes no more."""


async def explain_start(causes: CauseFinder, pod: Pod | None) -> str:
    """Return that the pod of a Job did not start in time, and why; None: it has none."""
    cause = "the Job controller did not create it"
    if pod is not None:
        try:
            pending = await causes.explain(pod)
            cause = pending.message if pending is not None else "it is pending"
        except ExposeError as e:
            cause = str(e)
    return f"the pod of the Job did not start within {timedelta(seconds=START_SECONDS)}: {cause}"


class JobAttendant:
    """Attends the Jobs of all repositories of a namespace during one term of this leader."""

    def __init__(
        self, cluster: Cluster, causes: CauseFinder, *, history: HistoryWriter, absence: ServerAbsence, namespace: str
    ) -> None:
        """Attend the Jobs in `namespace`; ask `causes` why a pod is pending."""
        self._cluster = cluster
        self._causes = causes
        self._history = history
        self._absence = absence
        self._namespace = namespace
        self._ages = Timers(cluster.clock)

    def forget(self, name: str) -> None:
        """Drop what is remembered about a repository that was deleted."""
        self._ages.forget(name)

    async def attend(self, repository: BackupRepository, job: MaintenanceJob) -> Requeue:
        """Label the Job once its pod runs; delete one whose pod never comes."""
        cluster = self._cluster
        seconds = self._ages.seconds(repository.name, job.uid)
        running = record_of(repository).running
        if job.ours and (running is None or running.uid != job.uid) and job.created not in starts_of(repository):
            # An earlier leader created it, and could not store that.
            await self._history.note_started(repository, RunningJob(name=job.name, uid=job.uid, created=job.created))
            return Requeue(STEP_SECONDS)
        if job.labeled and job.ours:
            # It ends by itself: its pod has a deadline, and so has the Job.
            return Requeue(LOOK_AGAIN_SECONDS)
        pod = await read_pod(cluster.client, self._namespace, job.name)
        if not job.ours:
            if pod is None and seconds >= _ABANDONED_SECONDS and not await self._absence.look():
                await self.delete(job)
            return Requeue(LOOK_AGAIN_SECONDS)
        if job.created in starts_of(repository):
            # It was given up.
            await self.delete(job)
            return Requeue(STEP_SECONDS)
        phase = ((pod.get("status") or {}) if pod else {}).get("phase", "Pending")
        if phase == "Pending" and seconds < START_SECONDS:
            return Requeue(STEP_SECONDS)
        if phase == "Pending":
            await self._give_up(repository, job, pod)
            return Requeue(STEP_SECONDS)
        jobs = await list_jobs(cluster.client, self._namespace)
        others = [one for one in jobs_of(repository, jobs) if not one.ended and one.uid != job.uid]
        if any(one.labeled for one in others) or await self._absence.look():
            # Its pod ends by itself without the label.
            return Requeue(STEP_SECONDS)
        cluster.check_leading()
        meta = {"uid": job.uid, "labels": {REPO_NAME_LABEL: repo_name_label(repository.name)}}
        await cluster.client.patch(JOBS, self._namespace, job.name, {"metadata": meta})
        return Requeue(LOOK_AGAIN_SECONDS)

    async def _give_up(self, repository: BackupRepository, job: MaintenanceJob, pod: Pod | None) -> None:
        """Store that the Job's pod did not start, and why; then delete the Job."""
        message = await explain_start(self._causes, pod)
        await self._history.write(repository, [(job, JobEnd(job.failure(message)))])
        await self.delete(job)

    async def look_for(self, repository: BackupRepository, running: RunningJob) -> Requeue:
        """Store the loss of a Job that was deleted before it ended, once its pod is gone."""
        if running.created in starts_of(repository):
            # A Velero server has stored its end.
            await self._history.note_ended(repository)
            return Requeue(STEP_SECONDS)
        raw = await self._cluster.client.read(JOBS, self._namespace, running.name)
        if raw is not None and raw["metadata"]["uid"] == running.uid:
            # Not observed yet.
            return Requeue(STEP_SECONDS)
        pod = await read_pod(self._cluster.client, self._namespace, running.name)
        if pod is not None and (pod.get("status") or {}).get("phase") not in _OVER:
            # It may still write.
            return Requeue(STEP_SECONDS)
        await self._history.write_lost(repository, running)
        return Requeue(STEP_SECONDS)

    async def delete(self, job: MaintenanceJob) -> None:
        """Delete the Job as it was observed; one that a Velero server sees is left to the server."""
        if job.labeled and await self._absence.look():
            return
        self._cluster.check_leading()
        client = self._cluster.client
        await client.delete(JOBS, self._namespace, job.name, uid=job.uid, resource_version=job.version)
        _log.debug("deleted Job %s", job.name)
