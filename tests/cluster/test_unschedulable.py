"""A node that takes no new pods still runs the transfers of the pods that it has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from core.models.names import PENDING_REASON_ANNOTATION
from core.models.units import parse_quantity
from tests.cluster.configuration import ONE_SLOT, configured
from tests.cluster.sharing import Shared, has_alone
from tests.cluster.workloads import BACKUPS, Workload, back_up, expect_nothing_left, wait_until
from tests.testbed.api import Resource
from tests.testbed.demonstration.user import PODS
from tests.testbed.settings import PAUSE_IMAGE

if TYPE_CHECKING:
    from tests.cluster.conftest import Bed
    from tests.testbed.api import Json

pytestmark = [pytest.mark.cluster, pytest.mark.lane(name="changing"), pytest.mark.timeout(400)]

_NODES = Resource("/api/v1", "nodes", namespaced=False)


def test_an_unschedulable_node_still_runs_the_transfers_of_its_pods(agent: Bed, space: str) -> None:
    writer = Workload(agent, space, "writer", {"scratch": 100_000}, on=ONE_SLOT)
    writer.start()
    writer.wait_ready()
    # The repository's own pod is bound to no node, and would have none to run on.
    before = wait_until(agent, BACKUPS, back_up(writer, "data"), "Completed")
    node = writer.node
    with has_alone(agent, Shared.GROUND):
        try:
            agent.user.kubectl("cordon", node)
            agent.user.kubectl("taint", "node", node, "maintenance=soon:NoSchedule")
            found = wait_until(agent, BACKUPS, back_up(writer, "scratch"), "Completed")
        finally:
            agent.user.kubectl("taint", "node", node, "maintenance=soon:NoSchedule-")
            agent.user.kubectl("uncordon", node)

    expect_nothing_left(agent, before, found)


def test_a_full_node_is_tried_until_it_has_room(agent: Bed, space: str) -> None:
    """The kubelet rejects the mover pod: its reason is reported, and a later pod completes the transfer."""
    writer = Workload(agent, space, "writer", {"scratch": 100_000}, on=ONE_SLOT)
    writer.start()
    writer.wait_ready()
    before = wait_until(agent, BACKUPS, back_up(writer, "data"), "Completed")
    with has_alone(agent, Shared.GROUND), configured(agent, podResources={"cpuRequest": "50m"}):
        agent.user.apply(_filler(space, milli_cpu=_free_milli_cpu(agent, ONE_SLOT)))
        agent.user.wait("pod/filler", "condition=Ready", namespace=space)
        item = back_up(writer, "scratch")
        full = wait_until(
            agent, BACKUPS, item, "Accepted", when=lambda it: "OutOfcpu" in it["status"].get("message", "")
        )
        agent.user.kubectl("delete", "pod", "filler", "-n", space, "--wait=true")
        found = wait_until(agent, BACKUPS, item, "Completed")

    assert full["metadata"]["annotations"][PENDING_REASON_ANNOTATION] == "OutOfcpu"
    assert "was rejected by its kubelet, will be recreated: OutOfcpu: Pod was rejected" in full["status"]["message"]
    assert "message" not in found["status"]
    expect_nothing_left(agent, before, found)


def _free_milli_cpu(bed: Bed, node: str) -> int:
    """How much CPU the pods of a node have not requested."""
    found = bed.api.get(_NODES, "", node) or {}
    pods = [pod for pod in bed.api.objects(PODS) if pod["spec"].get("nodeName") == node]
    requests = [
        container.get("resources", {}).get("requests", {}).get("cpu", "0")
        for pod in pods
        if pod["status"]["phase"] in {"Pending", "Running"}
        for container in pod["spec"]["containers"]
    ]
    free = parse_quantity(found["status"]["allocatable"]["cpu"]) - sum(map(parse_quantity, requests))
    return int(free * 1000)


def _filler(space: str, *, milli_cpu: int) -> Json:
    """A pod that takes so much of the node's CPU."""
    resources = {"requests": {"cpu": f"{milli_cpu}m"}}
    container = {"name": "pause", "image": PAUSE_IMAGE, "imagePullPolicy": "IfNotPresent", "resources": resources}
    spec = {"nodeName": ONE_SLOT, "terminationGracePeriodSeconds": 0, "containers": [container]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"namespace": space, "name": "filler"}, "spec": spec}
