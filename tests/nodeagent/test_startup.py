"""What an agent is built from: its configuration, and its clock, which tests may move."""

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Literal

import pytest

from core.errors import ConfigError
from core.kube.resources import CONFIG_MAPS, DAEMON_SETS, NAMESPACES, PODS
from exposer.template import AgentTemplate
from nodeagent.config.expose_settings import build_defaults, read_cluster
from nodeagent.runtime.permissions import Permission, copy_permissions
from nodeagent.runtime.settings import Settings
from nodeagent.startup import AgentSpec, read_spec
from tests.support.fakekube import FakeKube
from tests.support.objects import build_object

pytestmark = pytest.mark.looptime


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[Permission]:
    """The permissions that are checked; the cluster is as it should be."""
    found: list[Permission] = []

    async def check(_client: object, _namespace: str, permissions: Iterable[Permission]) -> None:
        found.extend(permissions)

    monkeypatch.setattr("nodeagent.startup.check_cluster", check)
    monkeypatch.setattr("nodeagent.startup.check_permissions", check)
    return found


async def _read_spec(document: str | None = None, **settings: str) -> AgentSpec:
    """Read what an agent with that configuration is built from."""
    kube = FakeKube()
    if document is not None:
        kube.put(build_object(CONFIG_MAPS, "agent-config", "velero", data={"a": document}))
        settings["config_map_name"] = "agent-config"
    return await read_spec(kube.client, Settings("node-a", **settings), "velero")  # type: ignore[arg-type] # texts


@pytest.mark.usefixtures("checked")
async def test_no_agent_is_built_with_a_value_that_ends_veleros() -> None:
    """`test_parse.py` has all of them."""
    with pytest.raises(ConfigError, match=r"^ConfigMap velero/agent-config: loadAffinity: expected a list"):
        await _read_spec('{"loadAffinity": {}}')


async def test_the_cluster_is_known_by_the_uid_of_kube_system() -> None:
    kube = FakeKube()
    client = kube.client
    assert not await read_cluster(client)
    kube.put(build_object(NAMESPACES, "kube-system"))
    assert await read_cluster(client) == kube.objects(NAMESPACES)[0]["metadata"]["uid"] != ""


@pytest.mark.parametrize(("status", "starts"), [(403, True), (429, True), (500, True), ("lost", False)])
async def test_an_agent_starts_without_a_cluster_id(status: Literal[403, 429, 500, "lost"], *, starts: bool) -> None:
    kube = FakeKube()
    kube.fail_next("GET", "/namespaces/kube-system", status, times=100)
    client = kube.client
    with nullcontext() if starts else pytest.raises(ConfigError, match=r"^Namespace kube-system cannot be read: .+"):
        assert not await read_cluster(client)


async def test_no_agent_is_built_without_the_config_map_of_maintenance_jobs(checked: list[Permission]) -> None:
    with pytest.raises(ConfigError, match=r"^ConfigMap velero/maintenance-config does not exist"):
        await _read_spec(mover_service_account="movers", maintenance_config_map="maintenance-config")
    assert [each.verbs for each in checked if each.names == ("maintenance-config",)] == [("get",)]


async def test_the_permissions_for_copies_are_checked_where_some_are_configured(checked: list[Permission]) -> None:
    with pytest.raises(ConfigError, match="DaemonSet velero/node-agent does not exist"):
        await _read_spec('{"restorePVC": {"secretNames": ["token"]}}', mover_service_account="movers")
    assert [each.names for each in checked if each in copy_permissions(("token",), ())] == [(), ("token",)]


def test_mover_pods_have_the_account_of_the_flag_and_are_told_which_cluster_they_run_in() -> None:
    settings = Settings("node-a", mover_service_account="movers")
    defaults = build_defaults(settings, AgentTemplate("mover:1"), "uid-1")
    assert (defaults.pod.service_account, defaults.mover.cluster) == ("movers", "uid-1")


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize(("status", "image"), [(None, "mover:1"), (403, "mover:2")], ids=["running", "unknown"])
async def test_movers_have_the_agents_image(status: int | None, image: str, caplog: pytest.LogCaptureFixture) -> None:
    kube, labels = FakeKube(), {"role": "node-agent"}
    containers = [{"name": "node-agent", "image": "mover:2"}]
    template = {"metadata": {"labels": labels}, "spec": {"containers": containers}}
    kube.put(build_object(DAEMON_SETS, "node-agent", "velero", spec={"template": template}))
    spec = {"nodeName": "node-a", "containers": [{**containers[0], "image": "mover:1"}]}
    kube.put(build_object(PODS, "agent-a", "velero", metadata={"labels": labels}, spec=spec))
    if status is not None:
        kube.fail_next("GET", "/pods", status)
    settings = Settings("node-a", mover_service_account="movers")
    found = await read_spec(kube.client, settings, "velero")
    assert found.template.image == image
    assert ("the agent's pod cannot be read" in caplog.text) == (status is not None)
    # An API server that does not answer says nothing about the image.
    kube.fail_next("GET", "/pods", 503, times=99)
    with pytest.raises(ConfigError, match="the agent's pod cannot be read: "):
        await read_spec(kube.client, settings, "velero")
