"""`nodeagent schedule` on a real kubelet: its pods back up with their own account, and delete what is expired."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.bed import Bed
from tests.cluster.handkopia import open_kopia
from tests.cluster.scenes import Volume, open_place
from tests.cluster.sharing import WITH_LOCKS, Shared, relies_on
from tests.testbed.demonstration.manifests import NAMESPACE

pytestmark = [pytest.mark.cluster, pytest.mark.lane(name="failing"), pytest.mark.timeout(WITH_LOCKS)]

_FILL = "open('/data/file', 'w').write('what was there')"
_NEVER = "0 0 29 2 *"
"""Its runs are started by hand."""

_MOST_REQUESTS = 250
"""Of a run with one volume and two expired backups: 104, of which 60 wait for the transfer and three Jobs."""


class _Scene:
    """A PVC with data, a location, and the commands as a person runs them."""

    def __init__(self, bed: Bed, space: str) -> None:
        self.bed, self.space = bed, space
        self.selection = (f"--pvc={space}/data", f"--storage-location={space}")

    def start(self, job: str) -> str:
        """Start a run by a Job of the CronJob, wait until it has succeeded, and return its log."""
        own = ("-n", NAMESPACE)
        self.bed.user.kubectl("create", "job", job, f"--from=cronjob/{self.space}", *own)
        try:
            self.bed.user.kubectl("wait", f"job/{job}", "--for=condition=complete", "--timeout=600s", *own)
        finally:
            log = self.bed.user.kubectl("logs", f"job/{job}", *own, "--tail=-1")
            self.bed.user.kubectl("delete", "job", job, *own, "--wait=false")
        return log

    @property
    def backups(self) -> dict[str, Any]:
        found = self.bed.document("backup", "get", "-n", self.space)["backups"]
        return {one["name"]: one for one in found}

    @property
    def snapshots(self) -> set[str]:
        with open_kopia(self.bed, self.space, prefix=self.space) as kopia:
            return {one["id"] for one in kopia.json("snapshot", "list", "--all")}

    def requests(self) -> list[dict[str, Any]]:
        """Return the requests that the account of the schedule has sent, as the audit log has them."""
        user = f"system:serviceaccount:{NAMESPACE}:node-agent-schedule-{self.space}"
        with (self.bed.folder / "logs" / "audit.log").open() as log:
            events = [json.loads(line) for line in log if user in line]
        return [one for one in events if one["user"].get("username") == user and "objectRef" in one]


@pytest.fixture
def scene(agent: Bed, space: str) -> Iterator[_Scene]:
    Volume(agent, space).fill(_FILL)
    with open_place(agent, space), relies_on(agent, Shared.AGENTS):
        yield _Scene(agent, space)
    if space in agent.user.kubectl("get", "cronjobs", "-n", NAMESPACE, "-o", "name"):
        agent.said("schedule", "delete", space)


def test_runs_delete_what_the_plan_said_and_never_the_last_copy(scene: _Scene) -> None:
    space = scene.space
    for name in ("older", "old"):
        scene.bed.said("backup", "create", f"{space}-{name}", *scene.selection, "--ttl=1s", "--wait")
    # The schedules of other tests may have expired backups, too.
    expired = scene.bed.document("backup", "delete", "--expired", "--dry-run")["backups"]
    assert f"{space}-old" not in [one["name"] for one in expired]
    ((older, volumes),) = [(one["name"], one["volumes"]) for one in expired if space in one["name"]]
    assert (older, [one["snapshots"] for one in volumes]) == (f"{space}-older", [1])
    scene.bed.said("schedule", "create", space, f"--schedule={_NEVER}", *scene.selection, "--ttl=1s", "--verify")
    log = scene.start(f"{space}-1")
    assert f"verification of {space}/data: passed" in log
    for name in ("older", "old"):
        assert f"backup {space}-{name} was expired, and is deleted with 1 snapshots" in log
    ((name, last),) = scene.backups.items()
    assert (last["phase"], name.startswith(f"{space}-20")) == ("Completed", True)
    assert scene.snapshots == {one["snapshotId"] for one in last["volumes"]}
    requests = scene.requests()
    deleted = {one["objectRef"]["name"] for one in requests if _of_transfers(one) and one["verb"] == "delete"}
    assert {one.rpartition("-")[0] for one in deleted} == {f"{space}-older", f"{space}-old"}
    assert len(requests) <= _MOST_REQUESTS, [f"{one['verb']} {one['requestURI']}" for one in requests]
    # That one is expired too by now, and the only copy of the volume.
    plan = scene.bed.said("schedule", "run", space, "--dry-run")
    assert f"back up {space}/data by csi-snapshot" in plan
    assert name not in plan
    assert scene.bed.said("backup", "delete", name, "--confirm").endswith("was deleted, with 1 snapshot\n")
    assert (scene.backups, scene.snapshots) == ({}, set())


def _of_transfers(event: dict[str, Any]) -> bool:
    return event["objectRef"]["resource"] in {"datauploads", "podvolumebackups"}
