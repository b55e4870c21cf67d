"""The settings of the installed agents, from the command line in their DaemonSet; their versions, from their pages."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from client.installation import read_versions, serve_words
from core.errors import ConfigError
from core.kube.client import KubeClient
from nodeagent.runtime.settings import parse_serve
from tests.client.support.user_scene import UserScene
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
    # A sidecar may be the first.
    containers = [{"name": "sidecar", "args": ["x"]}, container | {"name": "node-agent"}]
    assert serve_words(only(spec={"template": {"spec": {"containers": containers}}})) == words


@pytest.mark.parametrize("name", ["plain", "all-flags", "no-host-path"])
def test_a_daemonset_of_velero_has_settings(name: str) -> None:
    daemonset = yaml.safe_load((_VELERO / f"daemonset-{name}.yaml").read_text())
    assert parse_serve(serve_words(daemonset)).namespace is None


@pytest.mark.parametrize("spec", [{}, {"containers": []}, {"containers": [{"args": ["sleep"]}]}], ids=str)
def test_a_daemonset_that_starts_something_else_is_an_error(spec: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="does not start an agent"):
        serve_words(only(spec={"template": {"spec": spec}}))


async def test_agents_of_another_program_have_none() -> None:
    client: KubeClient = UserScene(serve=("serve", "--unknown")).client
    found = await read_versions(client, "velero")
    assert [one.version for one in found.agents] == [""]
    unknown = "DaemonSet velero/node-agent: unrecognized arguments: --unknown (see nodeagent serve --help)"
    assert found.notes == [f"the agents are not of this version: {unknown}"]
