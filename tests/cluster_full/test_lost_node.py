"""A node that is killed for good while movers move data, without retries. It comes last: the node does not come back.

`test_interruptions` has what is retried.
"""

from collections.abc import Iterator

import pytest

from tests.cluster.bed import Bed
from tests.cluster.configuration import change
from tests.cluster.gate import Gate
from tests.cluster.interruptions import cordoned
from tests.cluster.upkeep import Upkeep, open_upkeep
from tests.cluster_full.quartet import Quartet, open_seed, wait_leaked
from tests.cluster_full.respawn import kill_node

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

_NODE, _OTHER = "bed-2", "bed-1"
_FAILED_SECONDS = 240
"""The node controller alone takes 50 s to set a lost node to not Ready."""

_DETACHED_SECONDS = 480
"""Kubernetes detaches volumes from a node that is gone after 6 minutes (kube-controller-manager, attach-detach
controller, maxWaitForUnmountDuration); until then their driver deletes neither them nor their snapshots."""


@pytest.fixture
def quick_to_fail(quick_to_notice: Bed) -> Bed:
    """Agents that soon notice the loss of a node, and retry nothing."""
    change(quick_to_notice, **{"nodeagent.io": {"retry": {"enabled": False}}})
    return quick_to_notice


@pytest.fixture
def held(quick_to_fail: Bed) -> Iterator[Quartet]:
    """A transfer of each kind whose mover is on the node, held while data moves."""
    with open_seed(quick_to_fail, node=_NODE) as seed:
        quartet = Quartet(seed, "held")
        with cordoned(quick_to_fail, _OTHER):
            quartet.hold()
        assert {mover["spec"]["nodeName"] for mover in quartet.pods()} == {_NODE}
        yield quartet
        seed.gate.open()


@pytest.fixture
def upkeep(quick_to_fail: Bed, gate: Gate) -> Iterator[Upkeep]:
    """A repository that an agent on the other node maintains, by a Job whose pod is held on the node."""
    with open_upkeep(quick_to_fail, gate, node=_OTHER) as upkeep:
        upkeep.start()
        upkeep.wait_for_entry("Succeeded")
        there = {"nodeSelector": {"matchLabels": {"kubernetes.io/hostname": _NODE}}}
        upkeep.configure(keepLatestMaintenanceJobs=20, loadAffinity=[there])
        gate.shut(passes_bytes=0)
        upkeep.make_due()
        pod = upkeep.pod_of(upkeep.wait_for_run())
        assert pod is not None
        assert pod["spec"]["nodeName"] == _NODE
        gate.wait_held(pod["status"]["podIP"])
        yield upkeep


def test_its_transfers_and_maintenance_fail(held: Quartet, upkeep: Upkeep, gate: Gate, quick_to_fail: Bed) -> None:
    job, before = upkeep.wait_for_run(), len(upkeep.history)
    kill_node()
    held.wait("Failed", seconds=_FAILED_SECONDS)
    for each in held.transfers:
        assert _NODE in each.last["status"]["message"], f"{each.name}: {each.last['status']}"
        assert each.last["status"]["completionTimestamp"]
    # Its pods end when the administrator deletes the Node, because it will not come back.
    # Its maintenance may still write until then, so none follows.
    assert (len(upkeep.jobs), len(upkeep.history)) == (before + 1, before)
    quick_to_fail.user.kubectl("delete", "node", _NODE)
    upkeep.configure(keepLatestMaintenanceJobs=20)
    upkeep.wait("the end of the Job", lambda: len(upkeep.history) > before)
    entry = upkeep.history[before]
    assert (entry["result"], entry["startTimestamp"]) == ("Failed", job["metadata"]["creationTimestamp"])
    gate.open()
    upkeep.wait_for_entry("Succeeded")
    assert wait_leaked(quick_to_fail, seconds=_DETACHED_SECONDS) == []
