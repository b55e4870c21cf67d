"""One repository that an agent of the test's own maintains: its history, its Jobs and their pods."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from core.kube.resources import BACKUP_REPOSITORIES, CONFIG_MAPS, EVENTS, JOBS, PODS
from tests.cluster.apart import CALM_NODE, OTHER_NODE, ApartAgent, installed_apart
from tests.cluster.bed import Bed, new_namespace
from tests.cluster.gate import Gate
from tests.cluster.handkopia import open_kopia
from tests.support.objects import build_object
from tests.testbed.api import Json
from tests.testbed.processes import wait_for

_CONFIG_MAP = "repo-maintenance"


@contextmanager
def open_upkeep(bed: Bed, gate: Gate, *, node: str = OTHER_NODE) -> Iterator["Upkeep"]:
    """A namespace with a location behind the gate, for an agent on that node, which is not started."""
    with new_namespace(bed) as space, installed_apart(bed, space, url=gate.url, node=node) as own:
        yield Upkeep(own)


@dataclass
class Upkeep:
    """The repository of the volumes in a namespace, empty: the agent's own, in its default location."""

    own: ApartAgent
    volumes: str = ""

    @property
    def name(self) -> str:
        return f"{self.volumes or self.own.space}-default-kopia"

    def configure(self, **common: object) -> None:
        """Write the key `global` of the ConfigMap for maintenance Jobs."""
        data = {"global": json.dumps(common)}
        self.own.bed.user.apply(build_object(CONFIG_MAPS, _CONFIG_MAP, self.own.space, data=data))

    def keep_calm(self) -> list[str]:
        """Write a configuration that keeps Jobs on a node which no test taints; return the agent's flags for it."""
        calm = {"nodeSelector": {"matchLabels": {"kubernetes.io/hostname": CALM_NODE}}}
        self.configure(keepLatestMaintenanceJobs=10, loadAffinity=[calm])
        return [f"--repo-maintenance-job-configmap={_CONFIG_MAP}"]

    def start(
        self,
        *,
        annotations: dict[str, str] | None = None,
        arguments: Sequence[str] = (),
        change: Callable[[Json], None] = lambda _: None,
    ) -> None:
        """Run the agent, which does not wait for an hour, as `ApartAgent.run`, and create the repository."""
        self.own.run(change, arguments=["--repo-maintenance=on", *self.keep_calm(), *arguments])
        self.own.ready_log()
        spec = {
            "backupStorageLocation": "default",
            "maintenanceFrequency": "5s",
            "repositoryConfig": {"fullMaintenanceInterval": "eagerGC"},
            "repositoryType": "kopia",
            "volumeNamespace": self.own.space,
        }
        meta = {"annotations": annotations or {}}
        repository = build_object(BACKUP_REPOSITORIES, self.name, self.own.space, metadata=meta, spec=spec)
        self.own.bed.user.apply(repository)

    def make_due(self) -> None:
        """Make quick maintenance due in kopia's schedule, and wake the repository: nothing has changed in it."""
        with open_kopia(self.own.bed, self.own.space) as kopia:
            kopia.run("maintenance", "set", "--pause-quick=0s")
        self.own.kubectl("annotate", "backuprepository", self.name, "nodeagent.io/maintenance-")

    @property
    def status(self) -> Json:
        found = self.own.bed.api.get(BACKUP_REPOSITORIES, self.own.space, self.name) or {}
        status: Json = found.get("status", {})
        return status

    @property
    def annotations(self) -> dict[str, str]:
        found = self.own.bed.api.get(BACKUP_REPOSITORIES, self.own.space, self.name) or {"metadata": {}}
        return dict(found["metadata"].get("annotations") or {})

    @property
    def history(self) -> list[Json]:
        return list(self.status.get("recentMaintenance") or [])

    @property
    def jobs(self) -> list[Json]:
        """The Jobs, oldest first."""
        found = self.own.bed.api.objects(JOBS, self.own.space)
        return sorted(found, key=lambda job: str(job["metadata"]["name"]))

    def pod_of(self, job: Json) -> Json | None:
        """Return the Job's only pod; None if it has none."""
        pods = self.own.bed.api.objects(PODS, self.own.space, selector=f"job-name={job['metadata']['name']}")
        assert len(pods) <= 1, pods
        return pods[0] if pods else None

    def wait(self, what: str, condition: Callable[[], object]) -> None:
        def show() -> str:
            shown = (self.own.kubectl("get", "jobs,pods"), self.own.kubectl("get", "events"), *self.own.ready_log())
            return "\n".join([f"{what}: {self.status}", *shown])

        wait_for(show, condition, pause_seconds=0.5)

    def wait_for_entry(self, result: str) -> Json:
        """Return the newest entry of the history, once it has this result."""
        self.wait(f"{result} maintenance", lambda: [one["result"] for one in self.history][-1:] == [result])
        return self.history[-1]

    def wait_for_run(self) -> Json:
        """Return the only Job that has not ended, once its pod runs and the leader has labeled it."""

        def running() -> list[Json]:
            return [
                job
                for job in self.jobs
                if not job["status"].get("conditions")
                and "velero.io/repo-name" in job["metadata"]["labels"]
                and ((self.pod_of(job) or {}).get("status") or {}).get("phase") == "Running"
            ]

        self.wait("a maintenance that runs", running)
        (job,) = running()
        return job

    def events(self, reason: str) -> list[str]:
        found = self.own.bed.api.objects(EVENTS, self.own.space)
        return [event["message"] for event in found if event["reason"] == reason]
