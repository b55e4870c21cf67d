"""The leader's status page, read through the API server."""

from collections.abc import Callable

import pytest

from client.leader_page import LeaderDecision, LeaderUnavailableError, read_leader_decisions
from core.errors import AgentError
from core.kube.errors import ForbiddenError, NotFoundError
from nodeagent.runtime.settings import parse_serve
from tests.client.support.user_scene import LEADER_POD, NAME, UserScene


@pytest.fixture
def scene() -> UserScene:
    return UserScene()


async def _ask(scene: UserScene, *serve: str) -> dict[str, LeaderDecision]:
    return await read_leader_decisions(scene.client, "velero", parse_serve(serve))


@pytest.mark.parametrize(
    ("serve", "port"),
    [([], 8085), (["--metrics-address=:9000"], 9000), (["--status-address=0.0.0.0:9001"], 9001)],
    ids=["default", "metrics", "status"],
)
async def test_the_page_is_read_on_the_port_of_the_agents(scene: UserScene, serve: list[str], port: int) -> None:
    scene.kube.pages.clear()
    scene.answer({NAME: {"hold": "idle", "due": "", "overdue": True}}, port=port)
    assert await _ask(scene, *serve) == {NAME: LeaderDecision(hold="idle", overdue=True)}


async def test_the_leader_is_the_agent_on_the_node_of_the_lease(scene: UserScene) -> None:
    scene.put("Pod", "node-agent-a", "v1", labels={"role": "node-agent"}, spec={"nodeName": "other"})
    scene.put("Pod", "job", "v1", spec={"nodeName": "a_1_b"})
    assert NAME in await _ask(scene)


def _hold(scene: UserScene, holder: str) -> None:
    scene.put("Lease", "node-agent-dispatcher", "coordination.k8s.io/v1", spec={"holderIdentity": holder})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda scene: _hold(scene, ""), "no holder"),
        (lambda scene: scene.kube.fail_next("GET", "/leases", 404), "does not exist"),
        (lambda scene: _hold(scene, "b_1"), "held by node b, which has no agent pod"),
        (lambda scene: scene.answer({}, leading=False), f"{LEADER_POD} is not the leader any more"),
        (lambda scene: scene.answer({NAME: {"hold": 1}}), "is of another version"),
    ],
    ids=["released", "no lease", "no pod", "another leads", "another version"],
)
async def test_a_leader_that_cannot_be_asked_is_an_error_that_says_why(
    scene: UserScene, change: Callable[[UserScene], object], message: str
) -> None:
    change(scene)
    with pytest.raises(LeaderUnavailableError, match=message):
        await _ask(scene)


@pytest.mark.parametrize("address", ["127.0.0.1:8086", "[::1]:8086", "localhost:8086"])
async def test_a_page_that_only_the_pod_itself_reaches_is_not_asked_for(scene: UserScene, address: str) -> None:
    with pytest.raises(LeaderUnavailableError, match="inside of their pods"):
        await _ask(scene, f"--status-address={address}")
    assert scene.kube.requests == []


@pytest.mark.parametrize(
    ("status", "error"),
    [(403, ForbiddenError), (404, NotFoundError), (503, AgentError)],
    ids=["forbidden", "pod gone", "pod does not answer"],
)
async def test_a_request_that_fails_names_the_pod(scene: UserScene, status: int, error: type[AgentError]) -> None:
    scene.hush(status)
    with pytest.raises(error, match=f"get /status of Pod velero/{LEADER_POD} on port 8085: {status}"):
        await _ask(scene)
