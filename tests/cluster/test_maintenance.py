"""Maintenance of a repository without a Velero server: Jobs on a real kubelet, by an agent of the test's own."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from tests.cluster.apart import ApartAgent, installed_apart
from tests.cluster.handkopia import open_kopia
from tests.testbed.api import Resource
from tests.testbed.demonstration.user import PODS
from tests.testbed.processes import BedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.conftest import Bed
    from tests.testbed.api import Json

pytestmark = [pytest.mark.cluster, pytest.mark.lane(name="apart"), pytest.mark.timeout(500)]

_REPOSITORIES = Resource("/apis/velero.io/v1", "backuprepositories")
_JOBS = Resource("/apis/batch/v1", "jobs")
_SECONDS = 90
_POLL_SECONDS = 0.5


@pytest.fixture
def own(agent: Bed, space: str) -> Iterator[ApartAgent]:
    """A namespace in which a test may run an agent."""
    with installed_apart(agent, space) as apart:
        yield apart


def _name(own: ApartAgent) -> str:
    return f"{own.space}-default-kopia"


def _build_repository(own: ApartAgent) -> Json:
    spec = {
        "backupStorageLocation": "default",
        "maintenanceFrequency": "5s",
        "repositoryConfig": {"fullMaintenanceInterval": "eagerGC"},
        "repositoryType": "kopia",
        "volumeNamespace": own.space,
    }
    meta = {"namespace": own.space, "name": _name(own)}
    return {"apiVersion": "velero.io/v1", "kind": "BackupRepository", "metadata": meta, "spec": spec}


def _status(own: ApartAgent) -> Json:
    found = own.bed.api.get(_REPOSITORIES, own.space, _name(own)) or {}
    status: Json = found.get("status", {})
    return status


def _wait_for_entry(own: ApartAgent, result: str) -> Json:
    """Return the newest entry of the history, once it has this result."""
    deadline = time.monotonic() + _SECONDS
    while time.monotonic() < deadline:
        history = _status(own).get("recentMaintenance") or [{}]
        if history[-1].get("result") == result:
            entry: Json = history[-1]
            return entry
        time.sleep(_POLL_SECONDS)
    shown = (own.kubectl("get", "jobs,pods"), own.kubectl("get", "events"), *own.ready_log())
    raise BedError("\n".join([f"no maintenance has {result}: {_status(own)}", *shown]))


def test_a_repository_is_maintained_by_a_job_and_its_failure_is_named(own: ApartAgent) -> None:
    own.run(arguments=["--repo-maintenance=on"])
    own.ready_log()
    own.bed.user.apply(_build_repository(own))

    entry = _wait_for_entry(own, "Succeeded")
    (job,) = [
        one
        for one in own.bed.api.objects(_JOBS, own.space)
        if one["metadata"]["creationTimestamp"] == entry["startTimestamp"]
    ]
    assert entry["completeTimestamp"] == job["status"]["completionTime"]
    assert _status(own)["lastMaintenanceTime"] >= entry["completeTimestamp"]
    assert job["metadata"]["labels"]["velero.io/repo-name"] == _name(own)
    (pod,) = own.bed.api.objects(PODS, own.space, selector=f"job-name={job['metadata']['name']}")
    container = pod["spec"]["containers"][0]
    assert pod["spec"]["serviceAccountName"] == "node-agent-mover"
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert container["resources"]["limits"]["memory"] == "512Mi"
    with open_kopia(own.bed, own.space) as kopia:
        kopia.connect()
        info = kopia.json("maintenance", "info")
        assert info["full"]["interval"] == 6 * 3600 * 10**9
        assert info["schedule"]["runs"]["cleanup-logs"][0]["success"]
        kopia.run("maintenance", "set", "--owner=somebody@else")

    # A change wakes the repository: it was maintained, and nothing has happened since.
    own.bed.user.kubectl("annotate", "backuprepository", _name(own), "-n", own.space, "nodeagent.io/maintenance-")
    failed = _wait_for_entry(own, "Failed")
    assert failed["message"] == "not the owner: maintenance belongs to somebody@else, not to default@default"
    assert "completeTimestamp" not in failed
