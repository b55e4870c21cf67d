"""Objects of others where `nodeagent install` has its own: what is merged, refused, and kept by uninstall."""

import json
from typing import Any

import pytest

from core.kube.resources import (
    BACKUP_STORAGE_LOCATIONS,
    CLUSTER_ROLES,
    CONFIG_MAPS,
    DAEMON_SETS,
    NAMESPACES,
    NETWORK_POLICIES,
    ROLES,
    SECRETS,
    SERVICE_ACCOUNTS,
    Resource,
)
from tests.integration.installer import ALONE, Installer

pytestmark = pytest.mark.integration

_KEY = "node-agent-config.json"


@pytest.fixture
def installer(installer: Installer) -> Installer:
    """With a namespace that exists."""
    installer.create(NAMESPACES, installer.namespace)
    return installer


def test_what_others_have_created_is_merged_and_uninstall_keeps_it(installer: Installer) -> None:
    theirs: list[tuple[Resource, str, dict[str, Any]]] = [
        (SERVICE_ACCOUNTS, "node-agent", {}),
        (SECRETS, "cloud-credentials", {"data": {"mine": "eA=="}}),
        (BACKUP_STORAGE_LOCATIONS, "default", {"spec": {"provider": "gcp", "objectStorage": {"bucket": "mine"}}}),
        (CONFIG_MAPS, "node-agent-config", {"data": {_KEY: "{}"}}),
        (NETWORK_POLICIES, "node-agent", {"spec": {"podSelector": {}}}),
    ]
    for resource, name, more in theirs:
        installer.create(resource, name, **more)
    flags = ("--provider=aws", "--bucket=b", "--secret-file=keys", "--node-agent-config=config.json")
    for _ in range(2):
        done = installer.run(*flags, "--monitoring-namespace=m")
        assert done.code == 0, done.err
        places = ", ".join(f"{one.kind} {installer.namespace}/{name}" for one, name, _ in theirs)
        assert f"note: what others have created stays theirs, and nodeagent uninstall keeps it: {places}\n" in done.err
    assert set((installer.get(SECRETS, "cloud-credentials") or {})["data"]) == {"cloud", "mine"}
    removed = installer.run("--yes", command="uninstall")
    assert removed.code == 0, removed.err
    assert installer.get(DAEMON_SETS, "node-agent") is None
    assert installer.get(SERVICE_ACCOUNTS, "node-agent-mover") is None
    for resource, name, _ in theirs:
        assert "labels" not in (installer.get(resource, name) or {})["metadata"], name


def test_without_force_the_fields_of_others_are_refused(installer: Installer) -> None:
    installer.create(CONFIG_MAPS, "node-agent-config", data={_KEY: "{}"})
    done = installer.run(*ALONE, "--node-agent-config=config.json", "--force-conflicts=false")
    assert (done.code, done.out) == (1, "")
    assert f".data.{_KEY} of ConfigMap {installer.namespace}/node-agent-config, which" in done.err


@pytest.mark.parametrize("resource", [ROLES, CLUSTER_ROLES], ids=lambda one: one.kind)
def test_a_role_of_others_is_refused_until_it_is_handed_over(installer: Installer, resource: Resource) -> None:
    name, where = f"{installer.namespace}-node-agent", ""
    if resource is ROLES:
        name, where = "node-agent", f"-n {installer.namespace} "
    installer.create(resource, name, rules=[])
    done = installer.run(*ALONE)
    assert (done.code, done.out) == (2, "")
    command = f"kubectl {where}label {resource.kind.lower()} {name} app.kubernetes.io/part-of=node-agent"
    assert f"{name} is not ours: delete it, or hand it over: {command}\n" in done.err
    assert not (installer.get(resource, name) or {})["rules"]
    assert installer.get(SERVICE_ACCOUNTS, "node-agent") is None
    installer.change(resource, name, {"metadata": {"labels": {"app.kubernetes.io/part-of": "node-agent"}}})
    assert installer.run(*ALONE).code == 0
    assert (installer.get(resource, name) or {})["rules"]


def test_the_configuration_is_put_under_the_key_that_the_configmap_has(installer: Installer) -> None:
    installer.create(CONFIG_MAPS, "node-agent-config", data={"mine": "{}"})
    done = installer.run(*ALONE, "--node-agent-config=config.json")
    assert done.code == 0, done.err
    data = (installer.get(CONFIG_MAPS, "node-agent-config") or {})["data"]
    assert {key: json.loads(text) for key, text in data.items()} == {"mine": {"loadConcurrency": {"globalConfig": 3}}}


def test_a_configmap_with_several_keys_is_refused(installer: Installer) -> None:
    installer.create(CONFIG_MAPS, "node-agent-config", data={"b": "{}", "a": "{}"})
    done = installer.run(*ALONE, "--node-agent-config=config.json")
    assert (done.code, done.out) == (2, "")
    place = f"ConfigMap {installer.namespace}/node-agent-config"
    assert f"error: nothing was applied: {place} has the keys a, b, and agents accept only one" in done.err
    assert installer.get(SERVICE_ACCOUNTS, "node-agent") is None
