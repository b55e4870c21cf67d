"""`nodeagent uninstall` and `nodeagent version` against a real API server."""

import json
import re
from pathlib import Path

import pytest

from client.install.manifests import build_everything, read_definitions
from client.installation import explain_no_agents
from client.permissions import UNINSTALL_PERMISSIONS, VERSION_PERMISSIONS, delete_permissions, installer_permissions
from core.kube.resources import (
    BACKUP_REPOSITORIES,
    CLUSTER_ROLE_BINDINGS,
    CLUSTER_ROLES,
    CONFIG_MAPS,
    DAEMON_SETS,
    DATA_UPLOADS,
    DEPLOYMENTS,
    JOBS,
    LEASES,
    NAMESPACES,
    PODS,
    PRIORITY_CLASSES,
    SECRETS,
)
from core.version import VERSION
from tests.integration.installer import ALL_FLAGS, ALONE, Installer
from tests.support.objects import JsonDict

pytestmark = pytest.mark.integration

_POD = {"containers": [{"name": "c", "image": "i"}]}


def _create_upload(installer: Installer, name: str, phase: str) -> None:
    spec = {"snapshotType": "CSI", "sourceNamespace": "a", "backupStorageLocation": "default", "operationTimeout": "1m"}
    status = {"phase": phase} if phase else {}
    installer.create(DATA_UPLOADS, name, spec=spec | {"sourcePVC": "p"}, status=status)


def _present(installer: Installer) -> set[str]:
    """Everything in the namespace, and what is cluster-wide and has its name, as kind/name."""
    found, api, space = set(), installer.server.api, installer.namespace
    for resource in api.served():
        if resource.namespaced:
            found |= {f"{resource.kind} {space}/{item['metadata']['name']}" for item in api.objects(resource, space)}
        elif resource in {CLUSTER_ROLES, CLUSTER_ROLE_BINDINGS, PRIORITY_CLASSES}:
            names = [item["metadata"]["name"] for item in api.objects(resource)]
            found |= {f"{resource.kind} {name}" for name in names if space in name}
    return found


def test_what_is_left_is_what_was_there_before_and_what_is_listed_as_kept(installer: Installer) -> None:
    installer.create(NAMESPACES, installer.namespace)
    before = _present(installer)
    assert installer.run(*ALL_FLAGS).code == 0
    installer.create(LEASES, "node-agent-dispatcher", spec={})
    installer.create(CONFIG_MAPS, "node-agent-admissions")
    installer.create(SECRETS, "velero-repo-credentials")
    installer.create(BACKUP_REPOSITORIES, "app-default-kopia", spec=_repository())
    _create_upload(installer, "done", "Completed")
    labels = {"velero.io/repo-name": "app-default-kopia", "nodeagent.io/owner-uid": "u"}
    template = {"spec": {**_POD, "restartPolicy": "Never"}}
    installer.create(JOBS, "job", metadata={"labels": labels}, spec={"template": template})
    done = installer.run("--yes", command="uninstall")
    assert done.code == 0, done.err
    kept = done.out.partition("Kept:\n")[2].partition("\nDaemonSet")[0]
    left = _present(installer) - before
    assert left == {
        f"Secret {installer.namespace}/cloud-credentials",
        f"Secret {installer.namespace}/velero-repo-credentials",
        f"BackupStorageLocation {installer.namespace}/default",
        f"BackupRepository {installer.namespace}/app-default-kopia",
        f"DataUpload {installer.namespace}/done",
    }
    for name in left - {f"DataUpload {installer.namespace}/done"}:
        assert f"  {name}\n" in f"{kept}\n"
    assert "  1 DataUploads\n" in f"{kept}\n"
    assert f"  Namespace {installer.namespace}\n" in kept
    assert f"  kubectl delete namespace {installer.namespace}\n" in done.out
    again = installer.run("--yes", command="uninstall")
    assert (again.code, again.err) == (
        0,
        f"note: there is no installation of ours in namespace {installer.namespace}\n",
    )


def _repository() -> dict[str, str]:
    spec = {"volumeNamespace": "app", "backupStorageLocation": "default", "repositoryType": "kopia"}
    return spec | {"maintenanceFrequency": "1h"}


def test_another_installation_stays_as_it_is(installer: Installer, tmp_path: Path) -> None:
    other = Installer(installer.server, installer.capsys, tmp_path)
    other.namespace = f"{installer.namespace}-2"
    for one in (installer, other):
        assert one.run(*ALL_FLAGS).code == 0
    objects = json.loads(other.run("--dry-run", "-o", "json", *ALL_FLAGS).out)["items"]
    versions = other.versions(objects)
    assert installer.run("-y", command="uninstall").code == 0
    assert installer.get(CLUSTER_ROLES, f"{installer.namespace}-node-agent") is None
    assert other.versions(objects) == versions


def test_transfers_that_have_not_ended_are_interrupted_only_by_force(installer: Installer) -> None:
    assert installer.run(*ALONE).code == 0
    for number in range(7):
        _create_upload(installer, f"u{number}", "InProgress" if number else "")
    refused = installer.run("--yes", command="uninstall")
    assert (refused.code, refused.out) == (1, "")
    assert "DataUpload u0 (New), DataUpload u1 (InProgress)" in refused.err
    assert "and 2 more" in refused.err
    assert installer.get(DAEMON_SETS, "node-agent") is not None
    done = installer.run("--force", command="uninstall")
    assert done.code == 0
    assert "note: 7 transfers keep a finalizer" in done.err
    assert installer.get(DAEMON_SETS, "node-agent") is None


@pytest.mark.parametrize(("answer", "code", "is_left"), [("y\n", 0, False), ("n\n", 0, True), ("", 2, True)])
def test_it_asks(
    installer: Installer, monkeypatch: pytest.MonkeyPatch, answer: str, code: int, *, is_left: bool
) -> None:
    assert installer.run(*ALONE).code == 0
    answers = iter(answer.splitlines())

    def ask(_: str) -> str:
        for line in answers:
            return line
        raise EOFError

    monkeypatch.setattr("click.termui.visible_prompt_func", ask)
    done = installer.run(command="uninstall")
    assert done.code == code, done.err
    assert (installer.get(DAEMON_SETS, "node-agent") is not None) is is_left


def test_a_release_of_helm_is_left_to_helm(installer: Installer) -> None:
    assert installer.run(*ALONE).code == 0
    annotations = {"meta.helm.sh/release-name": "agents"}
    installer.change(DAEMON_SETS, "node-agent", {"metadata": {"annotations": annotations}})
    done = installer.run("--force", command="uninstall")
    assert done.code == 2
    assert f"belongs to a release of Helm: helm -n {installer.namespace} uninstall agents\n" in done.err
    refused = installer.run(*ALONE)
    assert (refused.code, refused.out) == (2, "")
    assert f"belongs to a release of Helm: use helm -n {installer.namespace} upgrade agents\n" in refused.err


def test_the_permissions_that_are_listed_are_enough(installer: Installer) -> None:
    everything: list[JsonDict] = build_everything(installer.namespace)
    names = ["node-agent-admissions", "node-agent-config"]
    created: list[JsonDict] = [{"kind": "ConfigMap", "metadata": {"name": name}} for name in names]
    installing = installer_permissions([*read_definitions(), *everything])
    installer.become([*installing, *UNINSTALL_PERMISSIONS, *delete_permissions([*everything, *created])])
    assert installer.run(*ALL_FLAGS).code == 0
    done = installer.run("--yes", command="uninstall")
    assert done.code == 0, done.err


def test_no_command_is_shown_that_deletes_what_a_server_needs(installer: Installer) -> None:
    assert installer.run(*ALONE).code == 0
    labels = {"app": "velero"}
    template = {"metadata": {"labels": labels}, "spec": _POD}
    installer.create(DEPLOYMENTS, "velero", spec={"selector": {"matchLabels": labels}, "template": template})
    done = installer.run("--yes", command="uninstall")
    assert done.code == 0, done.err
    assert "kubectl delete" not in done.out
    assert f"note: deleting the namespace {installer.namespace} would also delete the Velero server\n" in done.err
    assert "note: deleting the custom resource definitions would also delete the Velero server" in done.err


def test_without_the_permission_to_delete_nothing_is_removed(installer: Installer) -> None:
    installing = installer_permissions([*read_definitions(), *build_everything(installer.namespace)])
    installer.become([*installing, *UNINSTALL_PERMISSIONS])
    assert installer.run(*ALONE).code == 0
    done = installer.run(command="uninstall")
    assert (done.code, done.out) == (2, "")
    missing = f"nothing was removed: permissions missing in namespace {installer.namespace}: "
    assert f"{missing}delete daemonsets (only node-agent) in its namespace; " in done.err


def test_all_that_is_read_is_permitted_or_named_in_one_line(installer: Installer) -> None:
    installer.become([])
    done = installer.run(command="uninstall")
    assert (done.code, done.out) == (2, "")
    missing = f"nothing was removed: permissions missing in namespace {installer.namespace}: list datauploads in its "
    assert done.err.startswith(f"error: {missing}")
    assert re.search(r" and \d+ more: docs/permissions.md lists what uninstall needs", done.err), done.err
    assert done.err.count("\n") == 1


def test_versions_of_client_and_agents(installer: Installer) -> None:
    alone = installer.run("--client-only", command="version")
    assert (alone.code, alone.out, alone.err) == (0, f"client: {VERSION}\n", "")
    installer.become(VERSION_PERMISSIONS)
    none = installer.run(command="version")
    assert none.err == f"note: there are no agents in namespace {installer.namespace}\n"
    labels = {"role": "node-agent"}
    installer.kubeconfig, user = None, installer.kubeconfig
    installer.server.create_account(installer.namespace, "default")
    installer.create(PODS, "agent", metadata={"labels": labels}, spec={"nodeName": "node-a", **_POD})
    status = {"conditions": [{"type": "Ready", "status": "True"}]}
    api, space = installer.server.api, installer.namespace
    api.patch(PODS, {"status": status}, name="agent", namespace=space, sub="status")
    installer.kubeconfig = user
    found = installer.run("-o", "json", command="version")
    document = json.loads(found.out)
    assert document["client"] == VERSION
    assert document["agents"] == [{"node": "node-a", "pod": "agent", "version": "", "image": "i", "ready": True}]
    absent = explain_no_agents(installer.namespace)
    assert document["notes"] == [f"the agents are not of this version: {absent}"]
