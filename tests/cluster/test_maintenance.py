"""Maintenance of a repository without a Velero server: Jobs on a real kubelet, by an agent of the test's own."""

from collections.abc import Iterator

import pytest

from tests.cluster.apart import installed_apart
from tests.cluster.bed import Bed
from tests.cluster.handkopia import open_kopia
from tests.cluster.upkeep import Upkeep
from tests.testbed.api import Json

pytestmark = [pytest.mark.cluster, pytest.mark.lane(name="apart"), pytest.mark.timeout(1800)]


@pytest.fixture
def upkeep(agent: Bed, space: str) -> Iterator[Upkeep]:
    """A namespace in which a test may run an agent."""
    with installed_apart(agent, space) as own:
        yield Upkeep(own)


def _ask(upkeep: Upkeep, *words: str) -> Json:
    """Return what `nodeagent repo` prints to a user of the cluster."""
    found: Json = upkeep.own.bed.document("repo", *words, "--namespace", upkeep.own.space)
    return found


def test_a_repository_is_maintained_by_a_job_and_its_failure_is_named(upkeep: Upkeep) -> None:
    upkeep.start()
    entry = upkeep.wait_for_entry("Succeeded")
    (job,) = [one for one in upkeep.jobs if one["metadata"]["creationTimestamp"] == entry["startTimestamp"]]
    assert entry["completeTimestamp"] == job["status"]["completionTime"]
    assert upkeep.status["lastMaintenanceTime"] >= entry["completeTimestamp"]
    assert job["metadata"]["labels"]["velero.io/repo-name"] == upkeep.name
    pod = upkeep.pod_of(job)
    assert pod is not None
    container = pod["spec"]["containers"][0]
    assert pod["spec"]["serviceAccountName"] == "node-agent-mover"
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert container["resources"]["limits"]["memory"] == "512Mi"
    own = upkeep.own
    with open_kopia(own.bed, own.space) as kopia:
        info = kopia.json("maintenance", "info")
        assert info["full"]["interval"] == 6 * 3600 * 10**9
        assert info["schedule"]["runs"]["cleanup-logs"][0]["success"]
        kopia.run("maintenance", "set", "--owner=another@host")
    (shown,) = _ask(upkeep, "get")["repositories"]
    assert (shown["name"], shown["phase"], shown["lastMaintenance"]) == (
        upkeep.name,
        "Ready",
        entry["completeTimestamp"],
    )
    details = _ask(upkeep, "describe", upkeep.name)
    assert [one["result"] for one in details["history"]] == ["Succeeded"]
    assert details["next"]["fromLeader"]
    report = _ask(upkeep, "report", upkeep.name)
    assert (report["repository"], report["snapshots"]) == (upkeep.name, [])
    assert len(upkeep.jobs) == 1
    # A change wakes the repository: it was maintained, and nothing has happened since.
    own.kubectl("annotate", "backuprepository", upkeep.name, "nodeagent.io/maintenance-")
    failed = upkeep.wait_for_entry("Failed")
    assert failed["message"] == "not the owner: maintenance belongs to another@host, not to default@default"
    assert "completeTimestamp" not in failed
