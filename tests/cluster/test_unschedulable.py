"""A node that takes no new pods still runs the transfers of the pods that it has."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from core.kube.resources import DAEMON_SETS, NODES, PODS
from core.models.names import PENDING_REASON_ANNOTATION
from core.models.units import parse_quantity
from tests.cluster.bed import Bed
from tests.cluster.configuration import ONE_SLOT, configured
from tests.cluster.processes import Process, wait_for_one
from tests.cluster.scenes import wait_until
from tests.cluster.sharing import WITH_LOCKS, Shared, has_alone
from tests.cluster.workloads import Workload, back_up, expect_nothing_left
from tests.support.objects import build_object
from tests.testbed.api import Json
from tests.testbed.demonstration.manifests import NAMESPACE
from tests.testbed.install import AGENT_LABEL
from tests.testbed.settings import PAUSE_IMAGE

pytestmark = [pytest.mark.cluster, pytest.mark.lane(name="changing"), pytest.mark.timeout(WITH_LOCKS)]

_AGENT = "node-agent"
_KEY = "maintenance.node-agent.test"
_TOLERATION = {"key": _KEY, "operator": "Exists", "effect": "NoExecute"}
_MARGIN_MILLI_CPU = 300
"""What other pods that begin meanwhile may request."""
_WAITS = "jsonpath={.status.initContainerStatuses[0].started}=true"


def test_an_unschedulable_node_still_runs_the_transfers_of_its_pods(agent: Bed, space: str) -> None:
    """It is cordoned, has taints of both effects, and the scheduler is stopped; the restore has a cache volume."""
    writer = Workload(agent, space, "writer", {"scratch": 100_000}, on=ONE_SLOT)
    reader = Workload(agent, space, "reader", on=ONE_SLOT)
    writer.start()
    reader.start()
    writer.wait_ready()
    # The repository's own pod is bound to no node, and would have none to run on.
    before = wait_until(agent, back_up(writer, "data"), "Completed")
    agent.user.wait("pod/reader", _WAITS, namespace=space)
    with ExitStack() as closed:
        # While the scheduler is stopped, other tests would wait for it.
        closed.enter_context(has_alone(agent, Shared.AGENTS))
        closed.enter_context(has_alone(agent, Shared.GROUND))
        closed.enter_context(configured(agent, cachePVC={"storageClass": "bed-wait"}))
        closed.enter_context(_agents_staying(agent, ONE_SLOT))
        _tolerate(agent, space, writer.name)
        _tolerate(agent, space, reader.name)
        closed.enter_context(_closed(agent, ONE_SLOT))
        found = wait_until(agent, back_up(writer, "scratch"), "Completed")
        restore = reader.restore("scratch", backup=found)
        agent.user.apply(restore)
        restored = wait_until(agent, restore, "Completed")
        names = agent.user.names(["pods"], "-n", space)

    assert sorted(names) == ["pod/reader", "pod/writer"]
    expect_nothing_left(agent, before, found, restored)


@pytest.mark.thorough
def test_a_full_node_is_tried_until_it_has_room(agent: Bed, space: str) -> None:
    """The kubelet rejects the mover pod: its reason is reported, and a later pod completes the transfer."""
    writer = Workload(agent, space, "writer", {"scratch": 100_000}, on=ONE_SLOT)
    writer.start()
    writer.wait_ready()
    before = wait_until(agent, back_up(writer, "data"), "Completed")
    with ExitStack() as filled:
        filled.enter_context(has_alone(agent, Shared.GROUND))
        free = _free_milli_cpu(agent, ONE_SLOT)
        agent.user.apply(_filler(space, milli_cpu=free - _MARGIN_MILLI_CPU))
        agent.user.wait("pod/filler", "condition=Ready", namespace=space)
        # Far more than the node's other pods request, of which one may end meanwhile. Those of other tests request it
        # too, so the filler is there before.
        filled.enter_context(configured(agent, podResources={"cpuRequest": f"{free // 2}m"}))
        item = back_up(writer, "scratch")
        full = wait_until(
            agent,
            item,
            "Accepted",
            when=lambda it: "was rejected by its kubelet" in it["status"].get("message", ""),
        )
        agent.user.kubectl("delete", "pod", "filler", "-n", space, "--wait=true")
        found = wait_until(agent, item, "Completed")

    assert full["metadata"]["annotations"][PENDING_REASON_ANNOTATION] == "OutOfcpu"
    assert "was rejected by its kubelet, will be recreated: OutOfcpu: Pod was rejected" in full["status"]["message"]
    assert "message" not in found["status"]
    expect_nothing_left(agent, before, found)


@contextmanager
def _agents_staying(bed: Bed, node: str) -> Iterator[None]:
    """Let the node agent of a node tolerate its taint, without a restart of any agent."""
    found = bed.api.get(DAEMON_SETS, NAMESPACE, _AGENT) or {}
    before = {"updateStrategy": found["spec"]["updateStrategy"], "template": {"spec": {"tolerations": None}}}
    staying = {
        "updateStrategy": {"type": "OnDelete", "rollingUpdate": None},
        "template": {"spec": {"tolerations": [_TOLERATION]}},
    }
    bed.api.patch(DAEMON_SETS, {"spec": staying}, name=_AGENT, namespace=NAMESPACE)
    try:
        for pod in bed.api.objects(PODS, NAMESPACE, selector=AGENT_LABEL):
            if pod["spec"]["nodeName"] == node:
                _tolerate(bed, NAMESPACE, pod["metadata"]["name"])
        yield
    finally:
        bed.api.patch(DAEMON_SETS, {"spec": before}, name=_AGENT, namespace=NAMESPACE)


def _tolerate(bed: Bed, namespace: str, pod: str) -> None:
    """Let a pod that runs tolerate the taint."""
    added = [{"op": "add", "path": "/spec/tolerations/-", "value": _TOLERATION}]
    bed.user.kubectl("patch", "pod", pod, "-n", namespace, "--type=json", "-p", json.dumps(added))


@contextmanager
def _closed(bed: Bed, node: str) -> Iterator[None]:
    """Keep new pods off a node in every way, and evict those that do not tolerate its taint."""
    scheduler = wait_for_one("the scheduler", _is_scheduler)
    try:
        bed.user.kubectl("cordon", node)
        bed.user.kubectl("taint", "node", node, f"{_KEY}=soon:NoSchedule", f"{_KEY}=now:NoExecute")
        scheduler.hold()
        yield
    finally:
        scheduler.go_on()
        bed.user.kubectl("taint", "node", node, f"{_KEY}-")
        bed.user.kubectl("uncordon", node)


def _is_scheduler(process: Process) -> bool:
    return Path(process.argv[0]).name == "kube-scheduler"


def _free_milli_cpu(bed: Bed, node: str) -> int:
    """How much CPU the pods of a node have not requested."""
    found = bed.api.get(NODES, "", node) or {}
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
    return build_object(PODS, "filler", space, spec=spec)
