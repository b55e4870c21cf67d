"""Many repositories over days of simulated time: the real steps of maintenance, and leaders that come and go.

Job controller, kubelet and kopia are stand-ins; everything that decides when a Job starts, and what its pod does, is
the product's. Does not know targets.
"""

import asyncio
import heapq
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Final

from benchmarks.repository.schedule import Schedule, seconds_of
from core.errors import AgentError
from core.kube.client import KubeClient, Selection, select_labels
from core.kube.resources import BACKUP_REPOSITORIES, JOBS, PODS
from core.kube.retry import Retry
from core.models.base import JsonDict
from core.models.names import OWNER_UID_LABEL, REPO_NAME_LABEL
from core.models.storage import BackupRepository, RepositoryKey
from nodeagent.config.maintenance import MaintenanceSettings
from nodeagent.leader.maintenance.absence import ServerAbsence
from nodeagent.leader.maintenance.steps import MaintenanceSteps
from nodeagent.maintenance.jobs import MaintenanceJob
from nodeagent.maintenance.rules import Hold
from tests.nodeagent.support.clusters import build_cluster
from tests.nodeagent.support.hand_clock import HandClock
from tests.nodeagent.support.maintenance_scene import MaintenanceScene, build_sources, repository_object
from tests.support.fakekube import FakeKube

__all__ = ["JobCounts", "LeaderPlan", "count_jobs"]

_HOUR: Final = 3600.0
_DAY: Final = 24 * _HOUR

_OVERLAP_SECONDS: Final = 120.0
"""How long a leader still works that does not know yet that there is another one."""

_START_SECONDS: Final = 3.0
_RETRY_SECONDS: Final = 5.0
_NAMESPACE: Final = "velero"
_KOPIA: Final = "-default-kopia"


@dataclass(frozen=True)
class LeaderPlan:
    """How many repositories, how many of them without any backup, and for how long.

    Jobs are counted after `settle_days`: a repository that was never maintained gets four full runs first.
    """

    repositories: int
    idle: int
    settle_days: int
    days: int
    term_hours: float = 7.0


@dataclass(frozen=True)
class JobCounts:
    """What was started: `duplicates` are pods of one repository at the same time, and full runs within an interval."""

    jobs_per_idle_repository_per_day: float
    jobs_per_busy_repository_per_day: float
    duplicates: int
    leaders: int
    jobs: int


def count_jobs(plan: LeaderPlan) -> JobCounts:
    """Run the plan in simulated time, and return what was started."""
    return asyncio.run(_Many(plan).run())


@dataclass
class _Scene(MaintenanceScene):
    """A namespace whose repositories have backups of their own."""

    finished: dict[str, list[str]] = field(default_factory=dict)

    def backups_of(self, key: RepositoryKey) -> list[str]:
        return self.finished.get(key.volume_namespace, [])


class _Leader:
    """The maintenance of one leader, and whether it still works."""

    def __init__(self, scene: _Scene) -> None:
        client = KubeClient(scene.kube, Retry(scene.clock))
        self.works = True
        self.absence = ServerAbsence(client, scene.clock, _NAMESPACE)
        self.steps = MaintenanceSteps(
            build_cluster(client, scene.clock, metrics=scene.metrics),
            build_sources(scene, client, scene.clock),
            self.absence,
            namespace=_NAMESPACE,
            switch=scene.switch,
        )


class _Many:
    """One run of a plan: what happens next is done, and time moves on to it."""

    def __init__(self, plan: LeaderPlan) -> None:
        self._plan = plan
        self._clock = HandClock()
        self._scene = _Scene(kube=FakeKube(self._clock), clock=self._clock, settings=MaintenanceSettings(keep_jobs=1))
        self._client = KubeClient(self._scene.kube, Retry(self._clock))
        names = ["app", *(f"r{number}" for number in range(1, plan.repositories))]
        self._idle, self._busy = names[: plan.idle], names[plan.idle :]
        self._schedules = {f"{name}{_KOPIA}": Schedule() for name in names}
        self._next: list[tuple[float, int, Callable[[], Awaitable[None]]]] = []
        self._numbers = count()
        self._looks: dict[tuple[int, str], int] = {}
        self._leaders: list[_Leader] = []
        self._active: Counter[str] = Counter()
        self._jobs: Counter[str] = Counter()
        self._overlaps = 0
        self._unfinished: dict[str, JsonDict] = {}
        self._waiting: set[str] = set()
        self._seen: set[str] = set()
        self._released: set[str] = set()

    async def run(self) -> JobCounts:
        """Return what was started."""
        plan = self._plan
        for name in self._schedules:
            self._scene.kube.put(repository_object(name))
        self._after(0.0, self._start_leader)
        self._after(0.0, self._back_up)
        self._after(_HOUR, self._collect_garbage)
        await self._until(plan.settle_days * _DAY)
        self._jobs.clear()
        await self._until((plan.settle_days + plan.days) * _DAY)
        early = sum(schedule.early_fulls for schedule in self._schedules.values())
        return JobCounts(
            jobs_per_idle_repository_per_day=self._daily(self._idle),
            jobs_per_busy_repository_per_day=self._daily(self._busy),
            duplicates=self._overlaps + early,
            leaders=len(self._leaders),
            jobs=self._jobs.total(),
        )

    def _daily(self, names: Sequence[str]) -> float:
        """Return the Jobs per repository and day."""
        jobs = sum(self._jobs[f"{name}{_KOPIA}"] for name in names)
        return jobs / max(1, len(names)) / self._plan.days

    async def _until(self, seconds: float) -> None:
        """Do all that happens until then."""
        while self._next and self._next[0][0] <= seconds:
            self._clock.seconds, _, act = heapq.heappop(self._next)
            await act()
        self._clock.seconds = seconds

    def _after(self, seconds: float, act: Callable[[], Awaitable[None]]) -> int:
        number = next(self._numbers)
        heapq.heappush(self._next, (self._clock.seconds + seconds, number, act))
        return number

    async def _start_leader(self) -> None:
        """Let a new leader look at each repository; the one before still works for a while."""
        before = [leader for leader in self._leaders if leader.works]
        leader = _Leader(self._scene)
        await leader.absence.look()
        self._leaders.append(leader)
        for name in self._schedules:
            self._look_after(0.0, leader, name)

        async def stop() -> None:
            for one in before:
                one.works = False

        self._after(_OVERLAP_SECONDS, stop)
        self._after(self._plan.term_hours * _HOUR, self._start_leader)

    async def _back_up(self) -> None:
        """Finish a backup of each busy repository every hour."""
        for name in self._busy:
            finished = self._scene.finished.setdefault(name, [])
            finished.append(f"{name}-{len(finished)}")
            self._wake(f"{name}{_KOPIA}")
        self._after(_HOUR, self._back_up)

    def _wake(self, name: str) -> None:
        for leader in self._leaders:
            if leader.works:
                self._look_after(0.0, leader, name)

    def _look_after(self, seconds: float, leader: _Leader, name: str) -> None:
        """Let the leader look at the repository then, and not when it would have looked before."""
        key = (id(leader), name)

        async def look() -> None:
            if leader.works and self._looks.get(key) == number:
                await self._look(leader, name)

        self._looks[key] = number = self._after(seconds, look)

    async def _look(self, leader: _Leader, name: str) -> None:
        """Take a step; what time alone ends is not looked at before its end, since each change here wakes."""
        raw = await self._client.get(BACKUP_REPOSITORIES, _NAMESPACE, name)
        repository = BackupRepository.parse(raw)
        others = [job for other, job in self._unfinished.items() if other != name]
        jobs = [MaintenanceJob.parse(job) for job in (*await self._list_jobs(repository), *others)]
        try:
            requeue, decision = await leader.steps.step(repository, jobs)
        except AgentError:
            # As the work queue does: the repository, or a Job, has changed.
            self._look_after(_RETRY_SECONDS, leader, name)
            return
        seconds = requeue.after_seconds
        if decision.wait_until is not None and decision.hold is not Hold.JOB_UNFINISHED:
            seconds = max(seconds, (decision.wait_until - self._clock.now()).total_seconds())
        if decision.hold is Hold.CONCURRENCY:
            self._waiting.add(name)
        else:
            self._look_after(seconds, leader, name)
        if decision.hold is Hold.JOB_UNFINISHED:
            await self._follow(repository)

    async def _list_jobs(self, repository: BackupRepository) -> list[JsonDict]:
        owned = select_labels({OWNER_UID_LABEL: repository.uid})
        return await self._client.list(Selection(JOBS, _NAMESPACE, label_selector=owned))

    async def _follow(self, repository: BackupRepository) -> None:
        """Start the pod of a new Job, and what it does once a leader has released it."""
        for job in await self._list_jobs(repository):
            uid = job["metadata"]["uid"]
            if not job.get("status") and uid not in self._seen:
                self._seen.add(uid)
                self._unfinished[repository.name] = job
                self._after(_START_SECONDS, partial(self._start_pod, repository.name, job))
            if REPO_NAME_LABEL in job["metadata"]["labels"] and uid not in self._released:
                self._released.add(uid)
                await self._maintain(repository.name, job)

    async def _start_pod(self, name: str, job: JsonDict) -> None:
        self._scene.start_pod(job)
        self._wake(name)

    async def _maintain(self, name: str, job: JsonDict) -> None:
        """Begin the maintenance that is due, which ends later."""
        self._jobs[name] += 1
        self._active[name] += 1
        self._overlaps += self._active[name] > 1
        schedule, began = self._schedules[name], self._clock.now()
        mode = schedule.begin(began)

        async def end() -> None:
            self._active[name] -= 1
            await self._end(job["metadata"]["name"], schedule.finish(mode, began).to_json())
            del self._unfinished[name]
            self._wake(name)
            waiting, self._waiting = self._waiting, set()
            for one in sorted(waiting):
                self._wake(one)

        self._after(seconds_of(mode), end)

    async def _end(self, name: str, message: str) -> None:
        job = await self._client.get(JOBS, _NAMESPACE, name)
        pod = await self._client.get(PODS, _NAMESPACE, f"{name}-x")
        self._scene.end_pod(job, pod, 0, message)

    async def _collect_garbage(self) -> None:
        """Delete the pods of Jobs that were deleted, and what the fake API server keeps of the past."""
        kube = self._scene.kube
        jobs = {job["metadata"]["name"] for job in kube.objects(JOBS)}
        for pod in kube.objects(PODS):
            if pod["metadata"]["labels"]["job-name"] not in jobs:
                await self._client.delete(PODS, _NAMESPACE, pod["metadata"]["name"])
        kube.requests.clear()
        kube.compact()
        self._after(_HOUR, self._collect_garbage)
