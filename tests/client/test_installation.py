"""The settings of the installed agents, from the command line in their DaemonSet; their versions, from their pages."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from client.installation import read_settings, read_versions, serve_words
from core.errors import ConfigError
from core.kube.client import KubeClient
from nodeagent.runtime.settings import MaintenanceSwitch, parse_serve
from tests.client.support.user_scene import LEADER_POD, UserScene
from tests.support.objects import only

_VELERO = Path(__file__).parents[1] / "data" / "velero-1.18.2"


@pytest.mark.parametrize(
    ("container", "words"),
    [
        ({"command": ["python", "-m", "nodeagent"], "args": ["serve", "--log-level=debug"]}, ["--log-level=debug"]),
        ({"command": ["/velero"], "args": ["node-agent", "server", "--log-level", "info"]}, ["--log-level", "info"]),
        ({"args": ["serve"]}, []),
    ],
    ids=["ours", "Velero's", "without flags"],
)
def test_the_arguments_are_those_of_serve(container: dict[str, Any], words: list[str]) -> None:
    assert serve_words(only(spec={"template": {"spec": {"containers": [container]}}})) == words


@pytest.mark.parametrize("name", ["plain", "all-flags", "no-host-path"])
def test_a_daemonset_of_velero_has_settings(name: str) -> None:
    daemonset = yaml.safe_load((_VELERO / f"daemonset-{name}.yaml").read_text())
    assert parse_serve(serve_words(daemonset)).namespace is None


@pytest.mark.parametrize("spec", [{}, {"containers": []}, {"containers": [{"args": ["sleep"]}]}], ids=str)
def test_a_daemonset_that_starts_something_else_is_an_error(spec: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="does not start an agent"):
        serve_words(only(spec={"template": {"spec": spec}}))


async def test_the_settings_are_those_that_serve_would_have() -> None:
    scene = UserScene(serve=["serve", "--repo-maintenance=on", "--repo-maintenance-job-configmap", "m"])
    settings = await read_settings(scene.client, "velero")
    assert (settings.maintenance, settings.maintenance_config_map) == (MaintenanceSwitch.ON, "m")


@pytest.mark.parametrize(
    ("serve", "status", "message"),
    [
        (["serve", "--new-flag"], None, "velero/node-agent: unrecognized arguments: --new-flag"),
        (["serve"], 403, "cannot be read: .*403"),
        (["serve"], 404, "does not exist: use --namespace, or install the agent"),
    ],
    ids=["unknown flag", "forbidden", "absent"],
)
async def test_settings_that_cannot_be_read_are_an_error(serve: list[str], status: int | None, message: str) -> None:
    scene = UserScene(serve=serve)
    if status is not None:
        scene.kube.fail_next("GET", "/daemonsets", status)
    with pytest.raises(ConfigError, match=message):
        await read_settings(scene.client, "velero")


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
