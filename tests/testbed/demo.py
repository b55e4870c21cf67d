"""The demonstration: a volume of real files is backed up to an S3 bucket and restored, nothing lost.

Runs inside the test bed (`python -m tests.testbed demo`). What it prints is read back from the API
server and from the agent's `/metrics`.
"""

import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from core.kube.resources import DATA_DOWNLOADS, DATA_UPLOADS, Resource
from tests.testbed.api import Api, ApiError, Json
from tests.testbed.demonstration import manifests
from tests.testbed.demonstration.compare import Comparison, Survey, compare
from tests.testbed.demonstration.timeline import Timeline, follow, format_size
from tests.testbed.demonstration.user import User
from tests.testbed.install import AGENT_LABEL, METRICS_PORT, install_agent
from tests.testbed.processes import LIMIT_SECONDS, BedError

_SPACE = "demo"
_SIZE = "3Gi"
_OWNER_LABEL = "nodeagent.io/owner-uid"
_DATA_BYTES = 1_520_000_000
_LEAST_READINGS = 3
_DIFFERENCES_SHOWN = 20
_SCRIPTS = Path(__file__).parent / "demonstration"
_METRICS = ("nodeagent_moved_bytes_total", "nodeagent_sent_bytes_total")
_RATE = "nodeagent_rate_bytes_per_second"


@dataclass
class Demo:
    """One run of the demonstration.

    Attributes:
        least_readings: How often each resource must report its progress.
    """

    env: Mapping[str, str]
    user: User
    data_bytes: int = _DATA_BYTES
    least_readings: int = _LEAST_READINGS
    _uids: list[str] = field(default_factory=list)
    _began: float = field(default_factory=time.monotonic)
    _throughput: dict[str, None] = field(default_factory=dict)

    def run(self) -> list[str]:
        """Run all of it; returns what is wrong, nothing if all is well."""
        self._title("Install the node agent")
        install_agent(self.user, self.env)
        self._say("DaemonSet node-agent is ready")
        return self.move(self.fill())

    def move(self, before: Survey) -> list[str]:
        """Back the volume up and restore it; returns how it differs from `before`, nothing if all is well."""
        upload = self._upload()
        faults = self._check_end(upload, "DataUpload")
        if faults:
            return faults
        self._lose_the_volume()
        download = self._download(upload.last["status"])
        faults = self._check_end(download, "DataDownload")
        if faults:
            return faults
        result = compare(before, self._survey("restored"))
        self._show_comparison(result)
        self._show_metrics()
        return [*result.differences[:_DIFFERENCES_SHOWN], *self._check_leaks()]

    def fill(self) -> Survey:
        """Fill the volume; returns what is in it."""
        self._title("Fill a volume with real files")
        self.user.apply(manifests.build_namespace(_SPACE))
        self.user.apply(manifests.build_claim(_SPACE, "data", size=_SIZE))
        folders = {"/scripts": _SCRIPTS, "/machine": Path("/usr")}
        script = ["/scripts/fill.py", "/machine", "/data", str(self.data_bytes)]
        pod = manifests.build_pod(_SPACE, "fill", claim="data", script=script, folders=folders)
        self.user.run_pod(pod)
        survey = self._survey("data")
        found = compare(survey, survey)
        self._say(
            f"{found.files} files in {found.folders} folders, {found.links} links, {format_size(found.size_bytes)}"
        )
        return survey

    def _survey(self, claim: str) -> Survey:
        """Describe every entry of a claim's volume, from within a pod that mounts it."""
        output = Path(self.env["BED_DIR"]) / "surveys"
        output.mkdir(exist_ok=True)
        folders = {"/scripts": _SCRIPTS, "/out": output}
        script = ["/scripts/survey.py", "/data", f"/out/{claim}.json"]
        pod = manifests.build_pod(_SPACE, f"survey-{claim}", claim=claim, script=script, folders=folders)
        self.user.run_pod(pod)
        survey: Survey = json.loads((output / f"{claim}.json").read_text())
        return survey

    def _upload(self) -> Timeline:
        self._title("Take a snapshot and move it to the bucket: DataUpload demo-upload")
        self.user.apply(manifests.build_snapshot(_SPACE, "data-snapshot", claim="data"))
        ready = "jsonpath={.status.readyToUse}=true"
        self.user.wait("volumesnapshot/data-snapshot", ready, namespace=_SPACE)
        body = manifests.build_data_upload("demo-upload", namespace=_SPACE, claim="data", snapshot="data-snapshot")
        return self._follow(DATA_UPLOADS, body)

    def _lose_the_volume(self) -> None:
        self._title("Lose the volume")
        name = self.user.kubectl("get", "pvc", "data", "-n", _SPACE, "-o", "jsonpath={.spec.volumeName}")
        self.user.kubectl("delete", "pvc", "data", "-n", _SPACE, "--wait=true")
        self.user.wait(f"pv/{name}", "delete", namespace=_SPACE)
        self._say(f"claim data and volume {name} are deleted")

    def _download(self, uploaded: Json) -> Timeline:
        self._title("Restore it into a new claim: DataDownload demo-download")
        claim = manifests.build_claim(_SPACE, "restored", size=_SIZE, restored_into="demo.restored.x7k2p")
        self.user.apply(claim)
        body = manifests.build_data_download(
            "demo-download",
            namespace=_SPACE,
            claim="restored",
            snapshot_id=uploaded["snapshotID"],
            size_bytes=uploaded["progress"]["totalBytes"],
        )
        return self._follow(DATA_DOWNLOADS, body)

    def _follow(self, resource: Resource, body: Json) -> Timeline:
        self.user.apply(body)
        timeline = follow(self.user.api, resource, body, say=self._say_and_measure)
        self._uids.append(timeline.last["metadata"]["uid"])
        for line in self.user.kubectl("get", resource.plural, "-n", manifests.NAMESPACE).splitlines():
            print(f"    {line}")
        return timeline

    def _say_and_measure(self, line: str) -> None:
        """Print a line of a timeline; keep the throughput that `/metrics` reports while data moves."""
        print(line, flush=True)
        if "ETA" in line:
            self._throughput |= dict.fromkeys(line for line in self._metrics() if line.startswith(_RATE))

    def _metrics(self) -> list[str]:
        return self.user.metrics(manifests.NAMESPACE, AGENT_LABEL, port=METRICS_PORT)

    def _check_end(self, timeline: Timeline, kind: str) -> list[str]:
        faults = []
        if timeline.phase != "Completed":
            faults.append(f"{kind} ended {timeline.phase}: {timeline.last.get('status', {}).get('message')}")
        elif len(timeline.readings) < self.least_readings:
            faults.append(
                f"{kind} reported its progress {len(timeline.readings)} times, expected {self.least_readings}"
            )
        return faults

    def last_log_lines(self) -> str:
        """The end of the agent's log, in which its movers' logs are."""
        try:
            return self.user.kubectl("logs", "-n", manifests.NAMESPACE, "-l", AGENT_LABEL, "--tail=40")
        except BedError as error:
            return str(error)

    def _check_leaks(self) -> list[str]:
        """What the agent should have removed after itself; it may take a moment for that."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while (left := self._leaked()) and time.monotonic() < deadline:
            time.sleep(1)
        return [f"leaked: {name}" for name in left]

    def _leaked(self) -> list[str]:
        kinds = ["pods", "persistentvolumeclaims", "volumesnapshots"]
        options = ["-n", manifests.NAMESPACE, "-l", f"velero.io/volume-namespace={_SPACE}"]
        repository = self.user.kubectl("get", "backuprepositories", *options, "-o", "jsonpath={.items[*].metadata.uid}")
        ours = f"{_OWNER_LABEL} in ({','.join([*self._uids, *repository.split()])})"
        names = self.user.names([*kinds, "volumesnapshotcontents"], "-A", "-l", ours)
        names += self.user.names(kinds, "-n", _SPACE)
        return [name for name in names if name != "persistentvolumeclaim/restored"]

    def _show_comparison(self, result: Comparison) -> None:
        self._title("Compare every file: content, mode, owner, time, link target")
        self._say(
            f"{result.files} files, {result.folders} folders, {result.links} links, "
            f"{format_size(result.size_bytes)}: {len(result.differences) or 'no'} differences"
        )

    def _show_metrics(self) -> None:
        self._title("The agent's /metrics while data moved, and now")
        for line in self._throughput:
            print(f"    {line}")
        for line in self._metrics():
            if line.startswith(_METRICS) or ("_success_total" in line and not line.endswith(" 0.0")):
                print(f"    {line}")

    def _title(self, text: str) -> None:
        print(f"\n== {text}", flush=True)

    def _say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:6.1f} s  {text}", flush=True)


def main() -> int:
    """Run the demonstration; 0 only if everything was restored unchanged."""
    demo = Demo(os.environ, User(Api(Path(os.environ["KUBECONFIG"]))))
    try:
        faults = demo.run()
    except (BedError, ApiError, OSError) as error:
        faults = [str(error)]
    if faults:
        print("\nThe end of the agent's log:", file=sys.stderr)
        print(demo.last_log_lines(), file=sys.stderr)
    for fault in faults:
        print(f"FAILED: {fault}", file=sys.stderr)
    if not faults:
        print("\nThe volume was restored unchanged.")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
