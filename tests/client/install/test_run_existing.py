"""Objects that exist before an installation: those of an earlier version of ours."""

import pytest

from client.install.run import note_former_agents
from core.kube.client import KubeClient
from core.kube.resources import DAEMON_SETS
from core.kube.transport import Retry
from tests.support.clock import LoopClock
from tests.support.fakekube import FakeKube

_OURS = {"app.kubernetes.io/part-of": "node-agent"}
_NOTE = (
    "DaemonSet velero/node-agent-windows of an earlier version moves no data: "
    "kubectl -n velero delete daemonset node-agent-windows"
)


@pytest.mark.parametrize(
    ("labels", "status", "expected"),
    [(_OURS, 200, [_NOTE]), ({"component": "velero"}, 200, []), (_OURS, 403, [])],
    ids=["ours", "Velero's", "no permission"],
)
async def test_a_former_daemonset_for_windows_is_named(
    labels: dict[str, str], status: int, expected: list[str]
) -> None:
    kube, notes = FakeKube(), list[str]()
    meta = {"namespace": "velero", "name": "node-agent-windows", "labels": labels}
    kube.put({"apiVersion": DAEMON_SETS.api_version, "kind": DAEMON_SETS.kind, "metadata": meta, "spec": {}})
    if status != 200:
        kube.fail_next("GET", "/daemonsets/node-agent-windows", status)

    await note_former_agents(KubeClient(kube, Retry(LoopClock())), "velero", notes.append)

    assert notes == expected
