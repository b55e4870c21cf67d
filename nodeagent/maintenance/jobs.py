"""Jobs of maintenance and verification as the leader finds them: whose they are, whether they have ended, and how.

Jobs of a Velero server count, too: one that still runs is waited for, and its end is history.
Source: Velero v1.18, pkg/repository/maintenance/maintenance.go, as recorded in
tests/recordings/velero-1.18.2/maintenance.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, Self

from core.contract import MAINTENANCE_ERROR, MaintenanceCause, MaintenanceMode, MaintenanceResult, parse_result
from core.errors import ResultError
from core.kube.client import KubeClient, Selection, select_labels
from core.kube.resources import JOBS, PODS
from core.kube.types import Condition, Job, Pod
from core.models import names
from core.models.base import parse_time
from core.models.storage import BackupRepository, MaintenanceEntry, MaintenanceOutcome
from core.models.units import format_duration, parse_quantity
from exposer.pod_status import memory_limit, parse_pod_end
from nodeagent.maintenance.record import FailureCause

_OUT_OF_MEMORY: Final = "OOMKilled"
DEADLINE: Final = "DeadlineExceeded"
"""Source: Kubernetes v1.34, pkg/kubelet/active_deadline.go; batch/v1, JobReasonDeadlineExceeded."""

_CAUSES: Final[Mapping[str, FailureCause]] = {
    MaintenanceCause.CLOCK_SKEW: FailureCause.CLOCK_SKEW,
    MaintenanceCause.WRONG_PASSWORD: FailureCause.NEEDS_CHANGE,
    MaintenanceCause.NOT_OWNER: FailureCause.NEEDS_CHANGE,
    MaintenanceCause.OTHER_REPOSITORY: FailureCause.NEEDS_CHANGE,
    MaintenanceCause.OUT_OF_MEMORY: FailureCause.OUT_OF_MEMORY,
}

_OVER: Final = frozenset({"Succeeded", "Failed"})
"""Phases of a pod that writes no more."""

_JOB_NAME_LABEL: Final = "job-name"
_NOT_FOUND: Final = "Repo maintenance failed but result is not retrieveable"
"""What Velero 1.18 writes, misspelled, for a Job whose pod left no result."""
SUSPENDED: Final = "the Job is suspended (spec.suspend)"
POD_DELETED: Final = "its pod was deleted before its result was read, as a drain or an eviction does"


@dataclass(frozen=True)
class MaintenanceJob:
    """One Job of the namespace.

    `owner_uid` is the value of our label, and `repo_name` of the one by which a Velero server sees it and waits for it;
    None: it has none. `reason` and `message` are of its failure. `verifies` is the UID of the BackupRepository that it
    verifies instead; None: it is of another kind. `restores` is the PVC whose restore it tests; None: it reads shares.
    `suspended`: it has no pod, and none of its deadlines counts, until that changes.
    """

    name: str
    uid: str
    created: datetime
    version: str = ""
    owner_uid: str | None = None
    repo_name: str | None = None
    ended: bool = False
    succeeded: bool = False
    completed: datetime | None = None
    reason: str = ""
    message: str = ""
    verifies: str | None = None
    restores: str | None = None
    suspended: bool = False

    @classmethod
    def parse(cls, raw: Job) -> Self:
        """Return the Job `raw`, a batch/v1 Job as JSON dict; ContractError: a time is invalid.

        As in Velero, its counters show whether it has ended. Its condition counts too: a Job that ran into its own
        deadline before it had a pod has counted none. Until its pods have ended, another condition has the reason.
        Source: Kubernetes v1.34, pkg/controller/job/job_controller.go (delayTerminalCondition).
        """
        meta, status = raw["metadata"], raw.get("status") or {}
        labels = meta.get("labels") or {}
        conditions = {one["type"]: one for one in status.get("conditions") or [] if one.get("status") == "True"}
        failed = conditions.get("Failed") or conditions.get("FailureTarget") or Condition()
        completed = status.get("completionTime")
        # The counter may come before the time.
        succeeded = "Complete" in conditions or bool(status.get("succeeded") and completed)
        ended_at = completed or failed.get("lastTransitionTime")
        return cls(
            name=meta["name"],
            uid=meta["uid"],
            version=meta["resourceVersion"],
            created=parse_time(meta.get("creationTimestamp", "")),
            owner_uid=labels.get(names.OWNER_UID_LABEL),
            repo_name=labels.get(names.REPO_NAME_LABEL),
            ended=succeeded or "Failed" in conditions or bool(status.get("failed")),
            succeeded=succeeded,
            completed=parse_time(ended_at) if ended_at else None,
            reason=failed.get("reason", ""),
            message=failed.get("message", ""),
            verifies=labels.get(names.VERIFIED_REPOSITORY_LABEL),
            restores=(meta.get("annotations") or {}).get(names.RESTORE_TEST_ANNOTATION) or None,
            suspended=bool((raw.get("spec") or {}).get("suspend")),
        )

    @property
    def ours(self) -> bool:
        """Whether an agent created it."""
        return self.owner_uid is not None

    @property
    def labeled(self) -> bool:
        """Whether a Velero server sees it."""
        return self.repo_name is not None

    def maintains(self, name: str, uid: str) -> bool:
        """Return whether it is one of the BackupRepository: ours, a server's, or of an earlier one of that name."""
        return self.owner_uid == uid or self.repo_name == names.repo_name_label(name)

    def failure(self, message: str) -> MaintenanceEntry:
        """Return the entry of a failure: without a completion, which a Velero server would take for a success."""
        return MaintenanceEntry(result=MaintenanceOutcome.FAILED, start_timestamp=self.created, message=message)


@dataclass(frozen=True)
class JobEnd:
    """How a Job ended: its entry of the history, None where it ran nothing, and what follows for the next one.

    `limit_bytes` is the memory limit that its pod had; None: none, or it is not known.
    """

    entry: MaintenanceEntry | None
    result: MaintenanceResult | None = None
    cause: FailureCause = FailureCause.OTHER
    limit_bytes: int | None = None


class RepositoryJobs:
    """Jobs of a namespace by the repositories that they are of: there may be thousands of both.

    `running` is how many of the leader's run; one that has failed, and whose pod stays on a lost node, does not.
    """

    def __init__(self, jobs: Iterable[MaintenanceJob] = ()) -> None:
        self.all = sorted(jobs, key=_age)
        self.running = sum((job.ours or job.verifies is not None) and not (job.ended or job.reason) for job in self.all)
        self._by_label: dict[tuple[str, str | None], list[MaintenanceJob]] = {}
        for job in self.all:
            for label in (("uid", job.owner_uid), ("name", job.repo_name), ("verifies", job.verifies)):
                self._by_label.setdefault(label, []).append(job)

    def of(self, repository: BackupRepository) -> list[MaintenanceJob]:
        """Return those that maintain the repository, the oldest first."""
        labels = ("uid", repository.uid), ("name", names.repo_name_label(repository.name))
        return sorted({job.uid: job for one in labels for job in self._by_label.get(one, ())}.values(), key=_age)

    def verifying(self, repository: BackupRepository) -> list[MaintenanceJob]:
        """Return those by which the leader verifies it, the oldest first."""
        return self._by_label.get(("verifies", repository.uid), [])


def _age(job: MaintenanceJob) -> tuple[datetime, str]:
    return job.created, job.name


async def list_jobs(client: KubeClient, namespace: str) -> RepositoryJobs:
    """Return all Jobs of the namespace; a ContractError: the creation time of one is invalid."""
    return RepositoryJobs(MaintenanceJob.parse(raw) for raw in await client.list(Selection(JOBS, namespace)))


async def read_pod(client: KubeClient, namespace: str, job_name: str) -> Pod | None:
    """Return the pod of the Job, the newest if there are several; None if there is none."""
    selector = select_labels({_JOB_NAME_LABEL: job_name})
    pods = await client.list(Selection(PODS, namespace, label_selector=selector))
    return max(pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")), default=None)


def has_started(pod: Pod | None) -> bool:
    """Return whether the pod runs, or has ended."""
    return pod is not None and (pod.get("status") or {}).get("phase", "Pending") != "Pending"


def may_write(pod: Pod | None) -> bool:
    """Return whether the pod may still write, although its Job, which counts a deleted pod as failed, has ended.

    Source: Kubernetes v1.34, pkg/controller/job/job_controller.go (isPodFailed).
    """
    return pod is not None and has_started(pod) and (pod.get("status") or {}).get("phase") not in _OVER


def describe_end(job: MaintenanceJob, pod: Pod | None) -> JobEnd:
    """Return how the Job ended, from itself and its pod: a result counts, whatever else ended the pod meanwhile."""
    end = parse_pod_end(pod) if pod is not None else None
    if not job.succeeded and not (job.ours and end is not None and end.exit_code == 0):
        return describe_failure(job, pod)
    entry = MaintenanceEntry(
        result=MaintenanceOutcome.SUCCEEDED, start_timestamp=job.created, complete_timestamp=job.completed
    )
    if not job.ours:
        return JobEnd(entry)
    if end is None:
        # It may have had nothing to do.
        return JobEnd(job.failure(POD_DELETED))
    try:
        result = parse_result(MaintenanceResult, end.message)
    except ResultError as e:
        return JobEnd(job.failure(str(e)))
    return JobEnd(None if result.mode is MaintenanceMode.NONE else entry, result)


def describe_failure(job: MaintenanceJob, pod: Pod | None) -> JobEnd:
    """Return why the Job failed, from itself and its pod."""
    text, cause = _explain_failure(job, pod)
    limit = memory_limit(pod) if pod is not None else None
    return JobEnd(job.failure(text), cause=cause, limit_bytes=int(parse_quantity(limit)) if limit else None)


def _explain_failure(job: MaintenanceJob, pod: Pod | None) -> tuple[str, FailureCause]:
    end = parse_pod_end(pod) if pod is not None else None
    if end is not None and end.reason == _OUT_OF_MEMORY:
        text = f"{MaintenanceCause.OUT_OF_MEMORY}: the memory limit of its pod is {end.memory_limit or 'not set'}"
        return text, FailureCause.OUT_OF_MEMORY
    if job.reason == DEADLINE or (end is not None and end.reason == DEADLINE):
        return f"it did not end before its deadline{_deadline(pod)}", FailureCause.OTHER
    if end is None:
        ours = job.ours or job.verifies is not None
        return POD_DELETED if ours else ": ".join(filter(None, (_NOT_FOUND, job.message))), FailureCause.OTHER
    _, found, cause = end.message.rpartition(MAINTENANCE_ERROR)
    if found:
        return cause, _CAUSES.get(cause.partition(":")[0], FailureCause.OTHER)
    if not end.plain:
        return ": ".join(filter(None, (end.reason, end.message))), FailureCause.OTHER
    return end.message or end.reason or f"exit code {end.exit_code}", FailureCause.OTHER


def _deadline(pod: Pod | None) -> str:
    seconds = pod["spec"].get("activeDeadlineSeconds") if pod else None
    return f" of {format_duration(timedelta(seconds=seconds))}" if seconds else ""
