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


async def test_each_agent_says_its_version() -> None:
    scene = UserScene()
    scene.kube.pages["velero", f"{LEADER_POD}:8085", "/status"] = {"version": "9.9.9"}
    found = await read_versions(scene.client, "velero")
    (agent,) = found.agents
    assert (agent.node, agent.version, agent.ready, found.notes) == ("a_1_b", "9.9.9", False, [])


async def test_agents_of_another_program_have_none() -> None:
    client: KubeClient = UserScene(serve=("serve", "--unknown")).client
    found = await read_versions(client, "velero")
    assert [one.version for one in found.agents] == [""]
    unknown = "DaemonSet velero/node-agent: unrecognized arguments: --unknown (see nodeagent serve --help)"
    assert found.notes == [f"the agents are not of this version: {unknown}"]
