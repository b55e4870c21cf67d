"""A node that takes no new pods still runs the transfers of the pods that it has."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from core.kube.resources import DAEMON_SETS, PODS
from tests.cluster.bed import Bed
from tests.cluster.configuration import ONE_SLOT, configured
from tests.cluster.processes import is_program, wait_for_one
from tests.cluster.scenes import wait_until
from tests.cluster.sharing import WITH_LOCKS, Shared, has_alone
from tests.cluster.workloads import Workload, back_up, expect_nothing_left
from tests.testbed.demonstration.manifests import NAMESPACE
from tests.testbed.install import AGENT_LABEL

pytestmark = [pytest.mark.cluster, pytest.mark.lane(name="changing"), pytest.mark.timeout(WITH_LOCKS)]

_AGENT = "node-agent"
_KEY = "maintenance.node-agent.test"
_TOLERATION = {"key": _KEY, "operator": "Exists", "effect": "NoExecute"}
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
    scheduler = wait_for_one("the scheduler", is_program("kube-scheduler"))
    try:
        bed.user.kubectl("cordon", node)
        bed.user.kubectl("taint", "node", node, f"{_KEY}=soon:NoSchedule", f"{_KEY}=now:NoExecute")
        scheduler.hold()
        yield
    finally:
        scheduler.go_on()
        bed.user.kubectl("taint", "node", node, f"{_KEY}-")
        bed.user.kubectl("uncordon", node)
