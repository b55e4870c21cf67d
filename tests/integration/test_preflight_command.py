"""`nodeagent preflight` against a real API server: its objects are accepted, and an interrupted run leaves nothing."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from client.permissions import VOLUME_CHECK_PERMISSIONS
from client.volume_check_plan import CheckPlan
from core.kube.resources import (
    DAEMON_SETS,
    DATA_DOWNLOADS,
    DATA_UPLOADS,
    EVENTS,
    NAMESPACES,
    PERSISTENT_VOLUME_CLAIMS,
    PODS,
    SERVICE_ACCOUNTS,
    STORAGE_CLASSES,
    VOLUME_SNAPSHOT_CLASSES,
    VOLUME_SNAPSHOTS,
)
from nodeagent.runtime.permissions import Scope
from tests.integration.installer import Installer
from tests.support.terminal import run_interrupted

pytestmark = pytest.mark.integration


@pytest.fixture
def installer(installer: Installer) -> Installer:
    """A cluster with agents that are ready, as its API server shows them, and a user who may run the command."""
    assert installer.run("--provider=aws", "--bucket=b", "--no-secret").code == 0
    counts = {"currentNumberScheduled": 1, "desiredNumberScheduled": 1, "numberMisscheduled": 0, "numberReady": 1}
    api, space = installer.server.api, installer.namespace
    api.patch(DAEMON_SETS, {"status": counts}, name="node-agent", namespace=space, sub="status")
    driver = f"{space}.example.com"
    installer.create(STORAGE_CLASSES, space, provisioner=driver)
    installer.create(VOLUME_SNAPSHOT_CLASSES, space, driver=driver, deletionPolicy="Delete")
    installer.create(NAMESPACES, f"{space}-test")
    installer.server.create_account(f"{space}-test", "default")
    return installer


def _words(installer: Installer) -> list[str]:
    return [f"--storage-class={installer.namespace}", f"--namespace-for-test={installer.namespace}-test"]


@contextmanager
def _claims_end(installer: Installer) -> Iterator[None]:
    """Do what the controller of claims does with those that are deleted: no controller runs here."""
    stop, api = threading.Event(), installer.server.api
    space = f"{installer.namespace}-test"

    def finish() -> None:
        while not stop.wait(0.2):
            for one in api.objects(PERSISTENT_VOLUME_CLAIMS, space):
                if one["metadata"].get("deletionTimestamp"):
                    body = {"metadata": {"finalizers": None}}
                    api.patch(PERSISTENT_VOLUME_CLAIMS, body, name=one["metadata"]["name"], namespace=space)

    thread = threading.Thread(target=finish, name="claims")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _left(installer: Installer) -> list[str]:
    space, api = f"{installer.namespace}-test", installer.server.api
    kinds = (PODS, PERSISTENT_VOLUME_CLAIMS, VOLUME_SNAPSHOTS)
    return [one["metadata"]["name"] for kind in kinds for one in api.objects(kind, space)]


def test_without_a_kubelet_the_step_and_its_cause_are_named_and_nothing_is_left(installer: Installer) -> None:
    with _claims_end(installer):
        done = installer.run(*_words(installer), "--timeout=2s", command="preflight")
    assert done.code == 1
    assert re.search(r"(?m)^prepare +[0-9.]+ s +ok$", done.out), done.out
    assert re.search(r"(?m)^volume +[0-9.]+ s +failed$", done.out), done.out
    assert re.search(r"(?m)^clean up +[0-9.]+ s +ok$", done.out), done.out
    assert re.search(r"(?m)^error: preflight failed at volume: not within 2s \(--timeout\): Pod ", done.err), done.err
    assert _left(installer) == []


def test_every_object_is_accepted_where_pods_must_be_restricted(installer: Installer) -> None:
    space, api = f"{installer.namespace}-test", installer.server.api
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    api.patch(NAMESPACES, {"metadata": {"labels": labels}}, name=space)
    name = installer.namespace
    plan = CheckPlan("x", name, space, "i", "64Mi", name, name, "d", "default")
    for manifest, resource, namespace in (
        (plan.build_claim(plan.name), PERSISTENT_VOLUME_CLAIMS, space),
        (plan.build_claim(plan.restored), PERSISTENT_VOLUME_CLAIMS, space),
        (plan.build_pod(plan.name), PODS, space),
        (plan.build_pod(plan.restored), PODS, space),
        (plan.build_snapshot(), VOLUME_SNAPSHOTS, space),
        (plan.build_upload(), DATA_UPLOADS, name),
        (plan.build_download("k1"), DATA_DOWNLOADS, name),
    ):
        stored = api.request("POST", f"{resource.path(namespace)}?fieldValidation=Strict", body=manifest)
        assert stored["metadata"]["labels"] == {"nodeagent.io/preflight": "true"}


@pytest.mark.processes
def test_an_interrupted_run_leaves_nothing(installer: Installer) -> None:
    kubeconfig = f"--kubeconfig={installer.server.kubeconfig}"
    words = ["preflight", "-n", installer.namespace, kubeconfig, *_words(installer)]
    with _claims_end(installer):
        run_interrupted(words, lambda: len(_left(installer)) == 2)
    assert _left(installer) == []


def test_a_missing_permission_is_named(installer: Installer) -> None:
    installer.namespace, agents = f"{installer.namespace}-user", installer.namespace
    permissions = [one for one in VOLUME_CHECK_PERMISSIONS if one.resource is not VOLUME_SNAPSHOTS]
    installer.become(permissions)
    done = installer.run(f"--storage-class={agents}", command="preflight")
    assert done.code == 2
    missing = "permissions missing: get,list,create,delete volumesnapshots in every namespace: docs/permissions.md"
    assert missing in done.err


def test_a_namespace_of_the_user_needs_permissions_in_it_alone(installer: Installer) -> None:
    agents, space = installer.namespace, f"{installer.namespace}-user"
    installer.namespace = space
    moved = {NAMESPACES, SERVICE_ACCOUNTS, PERSISTENT_VOLUME_CLAIMS, PODS, VOLUME_SNAPSHOTS, EVENTS}
    here = [one for one in VOLUME_CHECK_PERMISSIONS if one.resource in moved - {PODS}]
    rest = [one for one in VOLUME_CHECK_PERMISSIONS if one.resource not in moved]
    installer.become([*rest, *(replace(one, scope=Scope.OWN_NAMESPACE) for one in here)])
    done = installer.run(f"--storage-class={agents}", f"--namespace-for-test={space}", command="preflight")
    assert done.code == 2
    assert f"permissions missing: get,list,create,delete pods in namespace {space}: docs/permissions.md" in done.err
