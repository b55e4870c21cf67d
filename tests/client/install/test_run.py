"""The wait for an installation: when it ends, and the cause that it shows."""

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest

from client.install.apply import Applied, ApplyResult
from client.install.run import WaitError, wait_installation
from client.session import Session
from core.errors import ExposeError
from core.kube.client import KubeClient
from core.kube.transport import Retry
from tests.nodeagent.support.hand_clock import FreeClock
from tests.support.fakekube import FakeKube
from tests.support.objects import JsonDict

_LABELS = {"name": "node-agent"}
_WAITING = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}}
_ENDED = {"terminated": {"exitCode": 2, "message": "INFO starting\nerror: permissions missing: list nodes\n\n"}}
_KILLED = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}


@dataclass
class _Scene:
    """A DaemonSet and a location that were just applied."""

    kube: FakeKube = field(default_factory=lambda: FakeKube(FreeClock()))
    shown: list[str] = field(default_factory=list)

    def put(self, kind: str, version: str, name: str, **more: Any) -> JsonDict:
        meta = {"name": name, "namespace": "velero", **more.pop("metadata", {})}
        return self.kube.put({"apiVersion": version, "kind": kind, "metadata": meta, **more})

    def put_daemonset(self, desired: int = 2, ready: int = 2, **status: Any) -> JsonDict:
        state = {"desiredNumberScheduled": desired, "numberAvailable": ready, "updatedNumberScheduled": desired}
        spec, found = {"selector": {"matchLabels": _LABELS}, "template": {}}, {"observedGeneration": 1}
        return self.put(
            "DaemonSet", "apps/v1", "node-agent", metadata={"generation": 1}, spec=spec, status=state | found | status
        )

    def put_location(self, **status: Any) -> JsonDict:
        spec = {"provider": "aws", "objectStorage": {"bucket": "b"}}
        return self.put("BackupStorageLocation", "velero.io/v1", "default", spec=spec, status=status)

    def put_pod(self, name: str, *, ready: bool = False, **state: Any) -> JsonDict:
        conditions = [{"type": "Ready", "status": str(ready)}]
        status = {"phase": "Running", "conditions": conditions}
        status["containerStatuses"] = [{"name": "node-agent", **state}]
        spec = {"nodeName": "a", "containers": []}
        return self.put("Pod", "v1", name, metadata={"labels": _LABELS}, spec=spec, status=status)

    def warn(self, about: JsonDict, reason: str, message: str) -> None:
        involved = {"uid": about["metadata"]["uid"]}
        self.put("Event", "v1", f"e-{reason}", type="Warning", reason=reason, message=message, involvedObject=involved)

    async def wait(self, *stored: JsonDict, result: ApplyResult = ApplyResult.UNCHANGED, seconds: float = 1.5) -> None:
        client = KubeClient(self.kube, Retry(FreeClock(), attempts=1))
        applied, timeout = [Applied(one, result) for one in stored], timedelta(seconds=seconds)
        session = Session(client, FreeClock(), "velero", lambda _: None, self.shown.append)
        await wait_installation(session, applied, timeout)


@pytest.fixture
def scene() -> _Scene:
    return _Scene()


async def test_it_ends_when_agents_and_location_are_ready(scene: _Scene) -> None:
    # An API server that restarts does not end it.
    daemonset = scene.put_daemonset()
    scene.kube.fail_next("GET", "/daemonsets/", "lost", times=9)
    await scene.wait(daemonset, scene.put_location(phase="Available"))


async def test_a_daemonset_without_pods_shows_why_they_cannot_be_created(scene: _Scene) -> None:
    daemonset = scene.put_daemonset(ready=0)
    scene.warn(daemonset, "FailedCreate", 'pods "node-agent-" is forbidden:\n no PriorityClass high')
    cause = 'FailedCreate: pods "node-agent-" is forbidden: no PriorityClass high'
    text = f"DaemonSet velero/node-agent: 0 of 2 agents are ready: {cause}"
    with pytest.raises(WaitError, match=r"the agents did not come up within 1\.5s: ") as raised:
        await scene.wait(daemonset)
    assert str(raised.value).endswith(text)
    assert scene.shown == [text]


@pytest.mark.parametrize(
    ("state", "cause"),
    [
        ({"state": _WAITING, "lastState": _ENDED}, "b ended with exit code 2: error: permissions missing: list nodes"),
        ({"state": _ENDED}, "b ended with exit code 2: error: permissions missing: list nodes"),
        ({"state": _KILLED}, "b ended with exit code 137: OOMKilled"),
        ({"state": {"running": {}}}, "Unhealthy: Readiness probe failed: 503"),
    ],
    ids=["restarting", "ended", "killed", "not ready"],
)
async def test_an_agent_that_is_not_ready_shows_its_cause(scene: _Scene, state: JsonDict, cause: str) -> None:
    daemonset = scene.put_daemonset(ready=1)
    scene.put_pod("node-agent-a", ready=True)
    scene.warn(scene.put_pod("node-agent-b", **state), "Unhealthy", "Readiness probe failed: 503")
    with pytest.raises(WaitError, match="1 of 2 agents are ready: ") as raised:
        await scene.wait(daemonset)
    assert str(raised.value).endswith(cause)


@pytest.mark.parametrize(
    ("meta", "status", "cause"),
    [
        ({}, {"phase": "Failed", "reason": "Evicted", "message": "low on disk"}, "b failed: Evicted: low on disk"),
        ({"deletionTimestamp": "2026-11-21T12:00:00Z"}, {}, "Pod velero/node-agent-b on node a is being deleted"),
    ],
    ids=["evicted", "being deleted"],
)
async def test_an_agent_that_is_ended_shows_that(scene: _Scene, meta: JsonDict, status: JsonDict, cause: str) -> None:
    pod = scene.put_pod("node-agent-b", state=_KILLED)
    # A finalizer keeps a pod that is being deleted.
    pod["metadata"] |= meta | {"finalizers": ["example.com/kept"]}
    scene.kube.put(pod | {"status": pod["status"] | status})
    daemonset = scene.put_daemonset(ready=1)
    with pytest.raises(WaitError, match="1 of 2 agents are ready: ") as raised:
        await scene.wait(daemonset)
    assert str(raised.value).endswith(cause)
    if meta:
        scene.put_pod("node-agent-c", state=_ENDED)
        with pytest.raises(WaitError, match="node-agent-c ended with exit code 2"):
            await scene.wait(daemonset)


async def test_an_image_that_can_never_be_pulled_ends_the_wait(scene: _Scene) -> None:
    pod = scene.put_pod("node-agent-a", state={"waiting": {"reason": "InvalidImageName", "message": "no"}})
    pod["status"]["phase"] = "Pending"
    scene.kube.put(pod)
    with pytest.raises(ExposeError, match=r"^Pod velero/node-agent-a cannot start on node a: InvalidImageName: no"):
        await scene.wait(scene.put_daemonset(ready=0), seconds=1e6)


@pytest.mark.parametrize(
    ("status", "text"),
    [({"observedGeneration": 0}, "not observed yet"), ({"updatedNumberScheduled": 1}, "1 of 2 agents are ready")],
)
async def test_a_rollout_that_is_not_finished_is_waited_for(scene: _Scene, status: JsonDict, text: str) -> None:
    with pytest.raises(WaitError, match=text):
        await scene.wait(scene.put_daemonset(**status))


async def test_a_daemonset_without_an_eligible_node_ends_the_wait(scene: _Scene) -> None:
    with pytest.raises(WaitError, match=r"^DaemonSet velero/node-agent: no node is eligible for its pods"):
        await scene.wait(scene.put_daemonset(desired=0, ready=0), seconds=1e6)


async def test_a_location_is_waited_for_unless_nobody_validates_it(scene: _Scene) -> None:
    with pytest.raises(WaitError, match="is Unavailable: no such bucket"):
        await scene.wait(scene.put_daemonset(), scene.put_location(phase="Unavailable", message="no such bucket"))
    old = {"phase": "Available", "lastValidationTime": "2026-11-21T10:00:00Z"}
    location = scene.put_location(**old)
    with pytest.raises(WaitError, match="is not validated yet"):
        await scene.wait(location, result=ApplyResult.CHANGED)
    scene.put_location(**old | {"lastValidationTime": "2026-11-21T10:01:00Z"})
    await scene.wait(location, result=ApplyResult.CHANGED)
    location = scene.put_location()
    location["spec"]["validationFrequency"] = "0s"
    await scene.wait(scene.kube.put(location))


async def test_what_was_deleted_ends_the_wait(scene: _Scene) -> None:
    daemonset = _Scene().put_daemonset()
    with pytest.raises(WaitError, match="DaemonSet velero/node-agent was deleted"):
        await scene.wait(daemonset, seconds=1e6)
