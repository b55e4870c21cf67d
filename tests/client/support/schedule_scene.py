"""A cluster with PVCs, old backups and a bucket, as a schedule finds it."""

from dataclasses import dataclass, field, replace
from typing import Any

from client.backups.plan import Choice, ClaimName
from client.schedules.request import ScheduleRequest
from client.schedules.scheduled_run import ScheduleTools
from core.kube.resources import CRON_JOBS, DATA_UPLOADS, POD_VOLUME_BACKUPS
from core.models.backups import RetentionReport
from core.snapshot_contract import TransferToDelete
from tests.client.support.backup_scene import BackupScene, SteppingClock
from tests.client.support.deletion_scene import DeletionScene
from tests.support.objects import JsonDict

DATA = ClaimName("app", "data")


@dataclass
class ScheduleScene:
    """The PVCs of a BackupScene and the bucket of a DeletionScene in one cluster; it is noon."""

    lines: list[str] = field(default_factory=list)
    reports: list[RetentionReport] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clock = SteppingClock()
        self.old = DeletionScene(self.clock)
        self.claims = BackupScene(self.clock, make_kube=lambda _: self.old.kube)
        self.old.put_agents()
        self.kube = self.old.kube

    def tools(self, job: str = "") -> ScheduleTools:
        deletion = replace(self.old.tools, in_pod=bool(job))
        return ScheduleTools(deletion, lambda _: None, self.lines.append, self.reports.append, job)

    def end_backups(self, phase: str = "Completed") -> None:
        """Let every transfer that has no phase end, at the next look at it."""

        def end() -> None:
            for resource in (DATA_UPLOADS, POD_VOLUME_BACKUPS):
                for raw in self.kube.objects(resource):
                    if "status" not in raw:
                        self._end(raw, phase)

        self.clock.steps.append(end)

    def _end(self, raw: JsonDict, phase: str) -> None:
        meta = raw["metadata"]
        snapshot = f"s-{meta['name']}"
        self.kube.put(raw | {"status": {"phase": phase, "snapshotID": snapshot}})
        if phase == "Completed":
            backup = meta["annotations"]["nodeagent.io/backup"]
            self.kube.bucket[snapshot] = TransferToDelete("app", backup, meta["uid"])

    @staticmethod
    def request(*claims: ClaimName, **more: Any) -> ScheduleRequest:
        return ScheduleRequest("night", "velero", Choice(claims or (DATA,)), **more)

    @property
    def made(self) -> list[JsonDict]:
        """The transfers of the schedule."""
        found = [*self.kube.objects(DATA_UPLOADS), *self.kube.objects(POD_VOLUME_BACKUPS)]
        return [one for one in found if "nodeagent.io/schedule" in one["metadata"]["labels"]]

    @property
    def cron_jobs(self) -> list[JsonDict]:
        return self.kube.objects(CRON_JOBS)
