"""The settings of the installed agents, from the command line in their DaemonSet."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from client.installation import read_settings, serve_words
from core.errors import ConfigError
from nodeagent.runtime.settings import MaintenanceSwitch, parse_serve
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
