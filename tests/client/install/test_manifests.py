"""The objects of an installation: what each option changes is tested with its flag, in tests/nodeagent/cli."""

import re
from dataclasses import replace

import pytest

from client.install.manifests import build_installation, read_definitions
from client.install.options import InstallOptions
from core.models.base import JsonDict
from tests.deploy.install_cases import EVERYTHING
from tests.support.golden import assert_golden


def _keys(objects: list[JsonDict]) -> list[tuple[str, str, str]]:
    return [(one["kind"], one["metadata"].get("namespace", ""), one["metadata"]["name"]) for one in objects]


def test_two_installations_share_no_object() -> None:
    first, second = (build_installation(replace(EVERYTHING, namespace=name)) for name in ("velero", "second"))
    assert set(_keys(first)).isdisjoint(_keys(second))
    assert len(set(_keys(first))) == len(first)


def test_whole_manifests() -> None:
    assert_golden("cli/install-everything", {"items": build_installation(EVERYTHING)})


def test_nothing_is_installed_that_was_not_chosen() -> None:
    roles = {"ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding", "ServiceAccount"}
    assert {one["kind"] for one in build_installation(InstallOptions())} == roles | {"DaemonSet", "Namespace"}


def test_containers_get_the_proxies_that_were_chosen() -> None:
    """Source: Kubernetes v1.34, third_party/forked/golang/expansion/expand.go."""
    (daemonset,) = [one for one in build_installation(EVERYTHING) if one["kind"] == "DaemonSet"]
    env = daemonset["spec"]["template"]["spec"]["containers"][0]["env"]
    got = {
        one["name"]: re.sub(r"\$(?:(\$)|\(\w+\))", lambda found: found[1] or "10.0.0.1", one.get("value", ""))
        for one in env
    }
    proxy = EVERYTHING.proxy
    assert (got["HTTP_PROXY"], got["HTTPS_PROXY"]) == (proxy.http, proxy.https)
    assert got["NO_PROXY"] == f"10.0.0.1,{proxy.no_proxy}"


def test_credentials_are_not_in_the_representation_of_the_options() -> None:
    assert "hidden" not in repr(replace(EVERYTHING, credentials="hidden"))


@pytest.mark.parametrize("definition", read_definitions(), ids=lambda one: one["metadata"]["name"])
def test_definitions_are_marked_as_ours(definition: JsonDict) -> None:
    assert definition["kind"] == "CustomResourceDefinition"
    assert definition["metadata"]["labels"] == {"app.kubernetes.io/part-of": "node-agent"}
