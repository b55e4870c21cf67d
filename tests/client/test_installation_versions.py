"""The versions of the agents, as their status pages say them."""

from client.installation import read_versions
from core.kube.client import KubeClient
from tests.client.support.user_scene import LEADER_POD, UserScene


async def test_each_agent_says_its_version() -> None:
    scene = UserScene()
    scene.kube.pages["velero", f"{LEADER_POD}:8085", "/status"] = {"version": "9.9.9"}
    found = await read_versions(scene.client, "velero")
    (agent,) = found.agents
    assert (agent.node, agent.version, agent.ready, found.notes) == ("a_1_b", "9.9.9", False, [])


async def test_an_agent_that_does_not_answer_has_none_and_a_note() -> None:
    scene = UserScene()
    scene.hush()
    found = await read_versions(scene.client, "velero")
    assert [one.version for one in found.agents] == [""]
    assert found.notes[0].startswith(f"Pod velero/{LEADER_POD} did not answer: ")


async def test_agents_of_another_program_have_none() -> None:
    client: KubeClient = UserScene(serve=("--unknown",)).client
    found = await read_versions(client, "velero")
    assert [one.version for one in found.agents] == [""]
    assert found.notes[0].startswith("the agents are not of this version: DaemonSet velero/node-agent")
