"""An agent of a test's own that moves data behind a gate, and what Prometheus would scrape from it."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from core.kube.resources import PODS
from core.models.backups import Shrinkage
from core.models.names import SHRUNK_ANNOTATION, VERIFICATION_ANNOTATION
from tests.cluster.gate import HELD_BYTES, Gate
from tests.cluster.scenes import Volume, wait_until
from tests.cluster.upkeep import Upkeep
from tests.cluster.workloads import Workload
from tests.testbed.api import Json
from tests.testbed.install import AGENT_LABEL, METRICS_PORT

_FILLED = {"data": 2_000_000, "scratch": 2 * HELD_BYTES}
_CLAIM = "writer"


@dataclass
class Monitored:
    """The agent, its only volume, the completed backup of that, and the name of the one that is held."""

    upkeep: Upkeep
    gate: Gate
    backup: Json = field(default_factory=dict)
    held: str = ""

    def start(
        self,
        *,
        backup_interval: str,
        verification_interval: str,
        arguments: Sequence[str] = (),
        change: Callable[[Json], None] = lambda _: None,
    ) -> None:
        """Fill a volume that is to be backed up and verified in these intervals, then run the agent."""
        own = self.upkeep.own
        self._workload.start()
        self._workload.wait_ready()
        intervals = {"backup": backup_interval, "verification": verification_interval}
        wanted = [f"nodeagent.io/{what}-interval={interval}" for what, interval in intervals.items()]
        own.kubectl("annotate", "pvc", _CLAIM, *wanted)
        self.upkeep.start(arguments=arguments, change=change)

    def back_up(self, volume: str) -> None:
        """Back the volume up, to the end."""
        item = self._create_backup(volume)
        self.backup = wait_until(self.upkeep.own.bed, item, "Completed")

    def verify(self, outcome: str) -> None:
        found = {"at": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"), "outcome": outcome, "percent": 100}
        self._annotate(VERIFICATION_ANNOTATION, json.dumps(found))

    def shrink(self) -> None:
        """Write that the backup has far less than the one before."""
        self._annotate(SHRUNK_ANNOTATION, Shrinkage(bytes=1, full_bytes=1 << 30).to_json())

    def _annotate(self, key: str, text: str) -> None:
        name = self.backup["metadata"]["name"]
        self.upkeep.own.kubectl("annotate", "--overwrite", "podvolumebackup", name, f"{key}={text}")

    def hold(self) -> None:
        """Let a backup run whose data does not pass the gate."""
        own = self.upkeep.own
        self.gate.shut()
        item = self._create_backup("scratch")
        self.held = item["metadata"]["name"]
        wait_until(own.bed, item, "InProgress")
        mover = own.bed.api.get(PODS, own.space, item["metadata"]["name"])
        assert mover is not None
        self.gate.wait_held(str(mover["status"]["podIP"]))

    def leave_pending(self, name: str = "pending", **spec: str) -> Json:
        """Create and return a DataUpload whose location does not exist; `spec` changes it."""
        own = self.upkeep.own
        item = Volume(own.bed, own.space, _CLAIM).upload(name, snapshot="absent", location="absent")
        item["metadata"]["namespace"] = own.space
        item["spec"] |= spec
        own.bed.user.apply(item)
        return item

    def scrape(self) -> dict[str, list[float]]:
        """Return the samples that the agent serves now, by the names of the metrics."""
        own = self.upkeep.own
        found: dict[str, list[float]] = {}
        for line in own.bed.user.metrics(own.space, AGENT_LABEL, port=METRICS_PORT):
            series, value = line.rsplit(" ", 1)
            found.setdefault(series.partition("{")[0], []).append(float(value))
        return found

    @property
    def _workload(self) -> Workload:
        own = self.upkeep.own
        return Workload(own.bed, own.space, _CLAIM, _FILLED, on=own.node)

    def _create_backup(self, volume: str) -> Json:
        item = self._workload.backup(volume)
        item["metadata"]["namespace"] = self.upkeep.own.space
        if volume == "data":
            item["metadata"]["annotations"] = {"velero.io/pvc-name": _CLAIM}
        self.upkeep.own.bed.user.apply(item)
        return item
