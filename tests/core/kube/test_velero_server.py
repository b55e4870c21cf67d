"""How a Velero server in the namespace is seen."""

import asyncio
from typing import Any

import pytest

from core.clock import SystemClock
from core.kube.client import KubeClient
from core.kube.resources import DEPLOYMENTS
from core.kube.transport import Retry
from core.kube.velero_server import VeleroServerCheck, has_velero_server
from tests.support.clock import LoopClock
from tests.support.fakekube import FakeKube

_BY_CHART = {"app.kubernetes.io/name": "velero", "app.kubernetes.io/instance": "backup", "component": "velero"}


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        pytest.param({"labels": {"component": "velero"}}, True, id="velero install"),
        pytest.param({"labels": _BY_CHART, "name": "backup-velero"}, True, id="chart"),
        pytest.param({"labels": {"component": "velero"}, "kind": "DaemonSet"}, False, id="Velero's agents"),
        pytest.param({"labels": {"component": "velero"}, "namespace": "other"}, False, id="another namespace"),
        pytest.param({"labels": {}, "name": "velero"}, True, id="by its name"),
        pytest.param({"labels": {"component": "ui"}, "name": "velero-ui"}, False, id="another Deployment"),
    ],
)
async def test_a_server_is_its_deployment_whatever_its_replicas(found: dict[str, Any], expected: bool) -> None:
    kube = FakeKube()
    meta = {"name": found.get("name", "velero"), "namespace": found.get("namespace", "velero")}
    kube.put(
        {
            "apiVersion": "apps/v1",
            "kind": found.get("kind", "Deployment"),
            "metadata": meta | {"labels": found["labels"]},
            "spec": {"replicas": 0},
        }
    )
    assert await has_velero_server(KubeClient(kube, Retry(SystemClock())), "velero") is expected


@pytest.mark.looptime
async def test_an_answer_is_used_for_ten_seconds_unless_a_fresh_one_is_needed() -> None:
    kube, clock = FakeKube(), LoopClock()
    check = VeleroServerCheck(KubeClient(kube, Retry(clock)), clock, "velero")
    assert [await check.finds() for _ in range(3)] == [False] * 3
    meta = {"name": "velero", "namespace": "velero"}
    kube.put({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": meta})
    assert not await check.finds()
    await asyncio.sleep(10)
    assert await check.finds()
    await KubeClient(kube, Retry(clock)).delete(DEPLOYMENTS, "velero", "velero")
    assert await check.finds()
    assert not await check.finds(fresh=True)
    assert len([one for one in kube.requests if one.method == "GET"]) == 3
