"""An agent whose wall clock is a day ahead carries out a transfer."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from core.kube.resources import DATA_UPLOADS, PODS
from tests.cluster.apart import CLOCK_OFFSET
from tests.cluster.bed import Bed
from tests.cluster.scenes import Volume, wait_released
from tests.cluster.sharing import WITH_LOCKS, Shared, has_alone
from tests.cluster.workloads import wait_until
from tests.testbed.api import Json
from tests.testbed.demonstration.manifests import NAMESPACE
from tests.testbed.install import AGENT_LABEL, METRICS_PORT
from tests.testbed.processes import wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.lane(name="changing"), pytest.mark.timeout(WITH_LOCKS)]

_NODE = "bed-1"
"""The node of the volumes of the default class, so its agent prepares the transfer, whichever agent accepts it."""

_DAEMONSET = "daemonset/node-agent"
_SECONDS_A_DAY = 86_400
_TOLERANCE_SECONDS = 300


@contextmanager
def _clock_ahead(bed: Bed) -> Iterator[None]:
    """Have the agent of one node, and no other, read a wall clock that is a day ahead."""
    strategy = bed.user.kubectl("get", _DAEMONSET, "-n", NAMESPACE, "-o", "jsonpath={.spec.updateStrategy}")
    only_one = '{"spec":{"updateStrategy":{"$retainKeys":["type"],"type":"OnDelete"}}}'
    bed.user.kubectl("patch", _DAEMONSET, "-n", NAMESPACE, "-p", only_one)
    try:
        bed.user.kubectl("set", "env", _DAEMONSET, "-n", NAMESPACE, f"{CLOCK_OFFSET}=24h")
        _replace_agent(bed)
        yield
    finally:
        bed.user.kubectl("set", "env", _DAEMONSET, "-n", NAMESPACE, f"{CLOCK_OFFSET}-")
        _replace_agent(bed)
        bed.user.kubectl("patch", _DAEMONSET, "-n", NAMESPACE, "-p", f'{{"spec":{{"updateStrategy":{strategy}}}}}')


def _replace_agent(bed: Bed) -> None:
    """Delete the agent's pod of the node; return when its successor is Ready."""
    (before,) = _agents(bed)
    bed.user.kubectl("delete", "pod", before["metadata"]["name"], "-n", NAMESPACE, "--timeout=600s")
    wait_for("a new agent that is Ready", lambda: any(map(_is_ready, _agents(bed))))


def _agents(bed: Bed) -> list[Json]:
    """The agent's pods on the node."""
    pods = bed.api.objects(PODS, NAMESPACE, selector=AGENT_LABEL)
    return [pod for pod in pods if pod["spec"].get("nodeName") == _NODE]


def _is_ready(pod: Json) -> bool:
    conditions = pod["status"].get("conditions", [])
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


@pytest.mark.thorough
def test_an_agent_that_is_a_day_ahead_carries_out_a_data_upload(agent: Bed, space: str) -> None:
    volume, name = Volume(agent, space), f"{space}-du"
    volume.fill('open("/data/file", "w").write("content")')
    volume.take_snapshots([name])
    with has_alone(agent, Shared.AGENTS), _clock_ahead(agent):
        upload = volume.upload(name, snapshot=name, location="default")
        agent.user.apply(upload)
        status = wait_until(agent, upload, "Completed")["status"]
        wait_released(agent, DATA_UPLOADS, [name])
        lines = agent.user.metrics(NAMESPACE, AGENT_LABEL, port=METRICS_PORT)
    agent.user.kubectl("delete", "dataupload", name, "-n", NAMESPACE, "--wait=false")
    assert status["node"] == _NODE
    assert status["snapshotID"]
    skews = [float(line.split()[-1]) for line in lines if line.startswith("nodeagent_clock_skew_seconds{")]
    assert [abs(skew - _SECONDS_A_DAY) < _TOLERANCE_SECONDS for skew in sorted(skews)] == [False, True]
