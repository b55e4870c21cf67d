"""`nodeagent install` against a real API server: what it accepts, changes, takes over, and leaves alone."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from client.install.manifests import build_everything, build_installation, read_definitions
from client.install.options import InstallOptions
from client.permissions import grant_permissions, install_permissions, installer_permissions
from core.kube.resources import (
    BACKUP_STORAGE_LOCATIONS,
    CONFIG_MAPS,
    DAEMON_SETS,
    NAMESPACES,
    SECRETS,
    SERVICE_ACCOUNTS,
)
from core.models.base import JsonDict
from nodeagent.runtime.permissions import COPY_PERMISSIONS, MOVER_PERMISSIONS, agent_permissions
from tests.integration.installer import ALL_FLAGS, ALONE, Installer
from tests.support.tools import tool

pytestmark = pytest.mark.integration

_LONG = "x" * 100_000
"""Three of them are more than the annotations of an object may have."""


def _standard(installer: Installer) -> list[JsonDict]:
    return build_installation(InstallOptions(namespace=installer.namespace))


def test_the_objects_of_all_flags_are_accepted_and_stay_as_they_are(installer: Installer) -> None:
    first = installer.run(*ALL_FLAGS)
    assert first.code == 0, first.err
    assert first.err == (
        "checking permissions\nnote: --image-pull-secret: Secret pull does not exist, and pods need it: "
        f"kubectl -n {installer.namespace} create secret docker-registry pull ...\n"
    )
    results = [line.rpartition(": ")[2] for line in first.out.splitlines()]
    # The definitions exist already.
    assert set(results[6:]) == {"created"}
    dry = json.loads(installer.run("--dry-run", "-o", "json", *ALL_FLAGS).out)["items"]
    versions = installer.versions(dry)
    assert all(versions.values())
    second = installer.run(*ALL_FLAGS)
    assert {line.rpartition(": ")[2] for line in second.out.splitlines()} == {"unchanged"}
    assert installer.versions(dry) == versions


def test_the_role_of_the_person_who_installs_is_enough(installer: Installer) -> None:
    installer.become(installer_permissions([*read_definitions(), *build_everything(installer.namespace)]))
    done = installer.run(*ALL_FLAGS, "--wait", "--timeout=100ms")
    # No controller creates pods here.
    assert done.code == 1
    assert re.search("did not come up within .*: DaemonSet .*/node-agent is not observed yet", done.err)
    assert installer.get(DAEMON_SETS, "node-agent") is not None


def test_who_may_neither_grant_nor_do_what_agents_may_is_told_so(installer: Installer) -> None:
    objects = [*read_definitions(), *_standard(installer)]
    installer.become(install_permissions(objects))
    done = installer.run(*ALONE)
    assert (done.code, done.out) == (2, "")
    assert "error: nothing was applied: permissions missing in namespace" in done.err
    assert "escalate,bind roles (only node-agent, node-agent-mover) in its namespace" in done.err


def test_who_may_do_all_that_agents_may_needs_no_permission_to_grant(installer: Installer) -> None:
    objects = [*read_definitions(), *_standard(installer)]
    agents = (*agent_permissions(), *MOVER_PERMISSIONS, *COPY_PERMISSIONS)
    installer.become([*install_permissions(objects), *agents])
    done = installer.run(*ALONE)
    assert done.code == 0, done.err


def test_missing_permissions_are_named_and_nothing_is_applied(installer: Installer) -> None:
    objects = [*read_definitions(), *_standard(installer)]
    permissions = [one for one in install_permissions(objects) if one.resource is not DAEMON_SETS]
    installer.become([*permissions, *grant_permissions(objects)])
    done = installer.run(*ALONE, "--wait")
    assert done.code == 2
    assert "create daemonsets in its namespace; get,patch daemonsets (only node-agent) in its namespace" in done.err
    assert "list pods in its namespace; list events in its namespace: docs/install.md" in done.err
    assert installer.get(SERVICE_ACCOUNTS, "node-agent") is None


def test_a_field_of_another_manager_is_taken_over_and_named(installer: Installer) -> None:
    assert installer.run(*ALONE).code == 0
    container = {"name": "node-agent", "image": "mine", "command": ["x"]}
    spec = {"template": {"spec": {"containers": [container]}}}
    installer.change(DAEMON_SETS, "node-agent", {"spec": spec}, manager="kubectl-edit")
    versions = installer.versions(_standard(installer))
    refused = installer.run(*ALONE, "--force-conflicts=false")
    assert (refused.code, refused.out) == (1, "")
    assert "error: nothing was applied: " in refused.err
    image = '.spec.template.spec.containers[name="node-agent"].image of DaemonSet '
    assert f"{image}{installer.namespace}/node-agent, which kubectl-edit has set" in refused.err
    assert installer.versions(_standard(installer)) == versions
    done = installer.run(*ALONE)
    assert done.code == 0
    assert f"note: took over {image}{installer.namespace}/node-agent, which kubectl-edit has set\n" in done.err
    stored = installer.get(DAEMON_SETS, "node-agent") or {}
    assert stored["spec"]["template"]["spec"]["containers"][0]["image"].startswith("node-agent:")


def test_what_users_add_stays(installer: Installer) -> None:
    flags = ("--provider=aws", "--bucket=b", "--secret-file=keys")
    assert installer.run(*flags).code == 0
    installer.change(SERVICE_ACCOUNTS, "node-agent", {"imagePullSecrets": [{"name": "mine"}]})
    installer.change(SERVICE_ACCOUNTS, "node-agent", {"metadata": {"annotations": {"role": "r"}}})
    installer.change(SECRETS, "cloud-credentials", {"data": {"more": "eA=="}})
    installer.change(NAMESPACES, installer.namespace, {"metadata": {"labels": {"team": "a"}}})
    status = {"phase": "Available", "lastValidationTime": "2026-11-21T10:00:00Z"}
    installer.change(BACKUP_STORAGE_LOCATIONS, "default", {"status": status})
    (installer.folder / "keys").write_text("[default]\naws_access_key_id = other\n")
    done = installer.run(*flags)
    assert done.code == 0, done.err
    account = installer.get(SERVICE_ACCOUNTS, "node-agent") or {}
    assert account["imagePullSecrets"] == [{"name": "mine"}]
    assert account["metadata"]["annotations"] == {"role": "r"}
    assert set((installer.get(SECRETS, "cloud-credentials") or {})["data"]) == {"cloud", "more"}
    assert (installer.get(BACKUP_STORAGE_LOCATIONS, "default") or {})["status"] == status
    assert (installer.get(NAMESPACES, installer.namespace) or {})["metadata"]["labels"]["team"] == "a"


def test_a_label_of_the_namespace_of_another_manager_is_named(installer: Installer) -> None:
    label = "pod-security.kubernetes.io/enforce"
    body = {"metadata": {"name": installer.namespace, "labels": {label: "restricted", "own": "x"}}}
    installer.server.api.request("POST", NAMESPACES.path() + "?fieldManager=admin", body=body)
    done = installer.run(*ALONE)
    assert f"note: took over .metadata.labels.{label} of Namespace {installer.namespace}, which admin has" in done.err
    labels = (installer.get(NAMESPACES, installer.namespace) or {})["metadata"]["labels"]
    assert (labels[label], labels["own"]) == ("privileged", "x")


@pytest.mark.parametrize(
    ("flag", "data", "message"),
    [
        ("--node-agent-configmap", None, 'create configmap cm --from-literal=config.json=\'{"loadConcurrency": {'),
        ("--backup-repository-configmap", None, "create configmap cm --from-literal=kopia='{\"cacheLimitMB\": 2048}'"),
        ("--repo-maintenance-job-configmap", None, 'create configmap cm --from-literal=global=\'{"podResources": {'),
        ("--node-agent-configmap", {"a": "{}", "b": "{}"}, "is invalid: ConfigMap .* must have exactly one key"),
        (
            "--node-agent-configmap",
            {"a": '{"loadConcurrency": {"globalConfig": "x"}}'},
            "is invalid: loadConcurrency.globalConfig",
        ),
        ("--backup-repository-configmap", {"kopia": "nonsense"}, "is invalid: its key kopia is not JSON"),
        ("--repo-maintenance-job-configmap", {"global": "nonsense"}, "is invalid: global"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_configmap_must_exist_and_be_valid(
    installer: Installer, flag: str, data: dict[str, str] | None, message: str
) -> None:
    if data is not None:
        installer.create(NAMESPACES, installer.namespace)
        installer.create(CONFIG_MAPS, "cm", data=data)
    done = installer.run(*ALONE, f"{flag}=cm")
    assert (done.code, done.out) == (2, "")
    line = done.err.splitlines()[-1]
    assert line.startswith(f"error: nothing was applied: {flag}: ConfigMap {installer.namespace}/cm ")
    assert re.search(message, line), line
    assert installer.get(SERVICE_ACCOUNTS, "node-agent") is None


def test_the_command_for_a_missing_configmap_creates_a_valid_one(installer: Installer) -> None:
    flags = ("--node-agent-configmap=a", "--backup-repository-configmap=b", "--repo-maintenance-job-configmap=c")
    folder = tool("kubernetes", "kubectl").parent
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "KUBECONFIG": str(installer.server.kubeconfig)}
    for number, _ in enumerate(flags):
        command = installer.run(*ALONE, *flags).err.partition("to create it: ")[2]
        # The installation creates the namespace after its checks.
        assert command.startswith("kubectl create namespace ") is (number == 0)
        subprocess.run(["sh", "-c", command], env=environment, check=True, capture_output=True)
    done = installer.run(*ALONE, *flags)
    assert done.code == 0, done.err


def test_a_priority_class_that_does_not_exist_is_a_note(installer: Installer) -> None:
    done = installer.run(*ALONE, "--node-agent-priority-class-name=high", "--service-account-name=mine")
    assert done.code == 0, done.err
    assert (
        "note: --node-agent-priority-class-name: PriorityClass high does not exist, and pods need it: "
        "kubectl create priorityclass high --value=50\n"
    ) in done.err
    assert f"kubectl -n {installer.namespace} create serviceaccount mine\n" in done.err


def test_an_invalid_object_is_found_before_anything_is_applied(installer: Installer) -> None:
    installer.create(NAMESPACES, installer.namespace)
    versions = installer.versions(_standard(installer))
    done = installer.run(*ALONE, "--image-pull-secret=a", *(f"--sa-annotations={key}={_LONG}" for key in "abc"))
    assert done.code == 1
    assert "apply (dry run) ServiceAccount" in done.err
    assert installer.versions(_standard(installer)) == versions


def test_a_kind_that_the_cluster_does_not_have_is_found_before_anything_is_applied(installer: Installer) -> None:
    done = installer.run(*ALONE, "--openshift")
    assert (done.code, done.out) == (1, "")
    assert "securitycontextconstraints.security.openshift.io/v1 is not served" in done.err
    assert installer.get(NAMESPACES, installer.namespace) is None


def test_the_daemonset_of_velero_is_never_merged_with_ours(installer: Installer) -> None:
    api = installer.server.api
    installer.create(NAMESPACES, installer.namespace)
    path = Path(__file__).parents[1] / "data" / "velero-1.18.2" / "daemonset-plain.yaml"
    veleros = yaml.safe_load(path.read_text(encoding="utf-8"))
    veleros["metadata"]["namespace"] = installer.namespace
    stored = api.request("POST", DAEMON_SETS.path(installer.namespace), body=veleros)
    done = installer.run(*ALONE)
    assert (done.code, done.out) == (2, "")
    assert f"kubectl -n {installer.namespace} delete daemonset node-agent\n" in done.err
    assert installer.get(DAEMON_SETS, "node-agent") == stored
