"""The agent's own pod: how it is found, and what is written to it."""

from typing import Any

import pytest

from core.kube.client import Selection
from core.kube.errors import ConflictError
from core.kube.events import EventRecorder
from core.kube.resources import EVENTS, PODS
from core.kube.types import Pod
from nodeagent.runtime.own_pod import OwnPod
from tests.support.clock import LoopClock
from tests.support.fakekube import FakeKube
from tests.support.objects import build_object

pytestmark = pytest.mark.looptime


def _pod(name: str, *, node: str = "node-1", labels: dict[str, str] | None = None, **meta: Any) -> dict[str, Any]:
    meta = {"labels": labels or {"role": "node-agent"}} | meta
    return build_object(PODS, name, "velero", metadata=meta, spec={"nodeName": node})


def _own(kube: FakeKube, hostname: str, pod: Pod | None = None) -> OwnPod:
    clock = LoopClock()
    client = kube.client
    recorder = EventRecorder(client, clock, component="node-agent", host="node-1")
    return OwnPod(client, recorder, pod, namespace="velero", node="node-1", hostname=hostname)


_LEAVING: dict[str, Any] = {"deletionTimestamp": "2026-11-21T12:00:00Z", "finalizers": ["example.com/hold"]}


@pytest.mark.parametrize(
    ("hostname", "others", "found"),
    [
        ("agent-a", [], "agent-a"),
        ("agent-a", [_pod("agent-b"), _pod("agent-c", node="node-2")], "agent-a"),
        ("node-1", [], "agent-a"),
        ("node-1", [_pod("agent-b", **_LEAVING)], "agent-a"),
        ("node-1", [_pod("mover", labels={"a": "b"})], "agent-a"),
        ("laptop", [_pod("agent-b")], None),
    ],
    ids=["alone", "by its name", "in the node's network", "after a roll-out", "beside movers", "which of two"],
)
async def test_reports_go_to_the_own_pod_and_to_the_log(
    hostname: str, others: list[dict[str, Any]], found: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    kube = FakeKube()
    for pod in [_pod("agent-a"), *others]:
        kube.put(pod)
    own = _own(kube, hostname)
    await own.report("ConfigRejected", "it is no JSON", warning=True)
    await own.annotate({"nodeagent.io/config": "abc"})
    recorded = [event["involvedObject"]["name"] for event in kube.objects(EVENTS)]
    annotated = [pod["metadata"]["name"] for pod in kube.objects(PODS) if pod["metadata"].get("annotations")]
    assert recorded == annotated == ([found] if found else [])
    assert "it is no JSON" in caplog.text


@pytest.mark.parametrize("known", [False, True])
async def test_the_pod_is_read_once_if_at_all_and_an_unchanged_annotation_not_written(known: bool) -> None:
    kube = FakeKube()
    kube.put(_pod("agent-a", annotations={"nodeagent.io/config": "abc"}))
    (pod,) = await kube.client.list(Selection(PODS, "velero"))
    kube.requests.clear()
    own = _own(kube, "node-1", pod) if known else _own(kube, "agent-a")
    for digest in ("abc", "def", "def", "ghi"):
        await own.annotate({"nodeagent.io/config": digest})
    requests = [(request.method, request.path.rpartition("/")[2]) for request in kube.requests]
    assert requests == [*([] if known else [("GET", "agent-a")]), ("PATCH", "agent-a"), ("PATCH", "agent-a")]


async def test_a_pod_that_replaced_ours_is_not_written_to() -> None:
    kube = FakeKube()
    kube.put(_pod("agent-a"))
    own = _own(kube, "agent-a")
    await own.annotate({"nodeagent.io/config": "abc"})
    await kube.client.delete(PODS, "velero", "agent-a")
    kube.put(_pod("agent-a"))
    with pytest.raises(ConflictError):
        await own.annotate({"nodeagent.io/config": "def"})
    assert "annotations" not in kube.objects(PODS)[0]["metadata"]


async def test_an_event_that_cannot_be_recorded_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    kube = FakeKube()
    kube.put(_pod("agent-a"))
    kube.fail_next("POST", "events", 403)
    await _own(kube, "agent-a").report("ConfigRejected", "it is no JSON", warning=True)
    assert "could not record" in caplog.text
