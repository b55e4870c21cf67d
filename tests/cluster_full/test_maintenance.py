"""Maintenance Jobs that their node ends: out of memory, beyond their deadline, evicted; and a leader that is killed."""

import json
from collections.abc import Iterator

import pytest

from tests.cluster.bed import Bed
from tests.cluster.gate import Gate
from tests.cluster.interruptions import evict
from tests.cluster.upkeep import Upkeep, open_upkeep
from tests.testbed.install import AGENT_LABEL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

_MIB = 2**20


@pytest.fixture
def upkeep(agent: Bed, gate: Gate) -> Iterator[Upkeep]:
    """A namespace in which a test may run an agent, with a location behind the gate."""
    with open_upkeep(agent, gate) as upkeep:
        yield upkeep


def _limits(upkeep: Upkeep) -> list[int]:
    """Return the memory limit of each Job, in MiB."""
    containers = [job["spec"]["template"]["spec"]["containers"][0] for job in upkeep.jobs]
    return [int(one["resources"]["limits"]["memory"].removesuffix("Mi")) for one in containers]


def test_a_maintenance_that_is_out_of_memory_gets_twice_as_much_up_to_the_cap(upkeep: Upkeep) -> None:
    peaks = {"peakQuickBytes": 16 * _MIB, "peakFullBytes": 16 * _MIB}
    upkeep.start(annotations={"nodeagent.io/maintenance": json.dumps(peaks)})
    upkeep.configure(keepLatestMaintenanceJobs=20, memoryLimitMax="60Mi")
    upkeep.wait("an Event at the cap", lambda: upkeep.events("MaintenanceMemory"))
    failed = upkeep.wait_for_entry("Failed")
    assert failed["message"].startswith("out of memory: ")
    assert "completeTimestamp" not in failed
    assert "60 MiB: that is memoryLimitMax" in upkeep.events("MaintenanceMemory")[0]
    upkeep.configure(keepLatestMaintenanceJobs=20)
    upkeep.wait_for_entry("Succeeded")
    first, *limits = _limits(upkeep)
    assert first < limits[0] == 60
    doubled = [limit for limit in limits if limit > 60]
    assert doubled
    assert doubled == [120 * 2**number for number in range(len(doubled))]
    assert all("out of memory" in entry["message"] for entry in upkeep.history[:-1])


_CAUSES = {
    "deadline": ["it did not end before its deadline of 40s"],
    # The pod may be gone before an agent reads how it ended.
    "eviction": ["its pod was deleted before", "the data mover was stopped by SIGTERM"],
}


@pytest.mark.parametrize("end", _CAUSES)
def test_a_maintenance_that_its_node_ends_is_followed_by_another(upkeep: Upkeep, gate: Gate, end: str) -> None:
    own = upkeep.own
    upkeep.start()
    upkeep.wait_for_entry("Succeeded")
    upkeep.configure(keepLatestMaintenanceJobs=20, **({"activeDeadline": "40s"} if end == "deadline" else {}))
    gate.shut(passes_bytes=0)
    upkeep.make_due()
    job = upkeep.wait_for_run()
    before = len(upkeep.history)
    pod = upkeep.pod_of(job)
    assert pod is not None
    gate.wait_held(pod["status"]["podIP"])
    own.kubectl("delete", "pod", "-l", AGENT_LABEL, "--grace-period=0", "--force")
    own.ready_log()
    if end == "eviction":
        evict(own.bed, pod)
    upkeep.wait("the end of the Job", lambda: len(upkeep.history) > before)
    entry = upkeep.history[before]
    assert (entry["result"], entry["startTimestamp"]) == ("Failed", job["metadata"]["creationTimestamp"])
    assert any(cause in entry["message"] for cause in _CAUSES[end]), entry["message"]
    (ended,) = [one for one in upkeep.jobs if one["metadata"]["uid"] == job["metadata"]["uid"]]
    assert ended["status"]["failed"] == 1
    gate.open()
    upkeep.wait_for_entry("Succeeded")
    starts = [job["metadata"]["creationTimestamp"] for job in upkeep.jobs]
    assert len(set(starts)) == len(starts) == len(upkeep.history)
