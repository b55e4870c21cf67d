"""`nodeagent preflight` against a real API server: its objects are accepted, and an interrupted run leaves nothing."""

import json
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from client.permissions import VOLUME_CHECK_PERMISSIONS
from client.volume_check_plan import CheckPlan
from core.kube.resources import (
    DAEMON_SETS,
    EVENTS,
    NAMESPACES,
    PERSISTENT_VOLUME_CLAIMS,
    PODS,
    SERVICE_ACCOUNTS,
    STORAGE_CLASSES,
    VOLUME_SNAPSHOT_CLASSES,
    VOLUME_SNAPSHOTS,
    Resource,
)
from core.kube.transport import MERGE_PATCH
from nodeagent.runtime.permissions import Scope
from tests.integration.installer import Installer
from tests.support.apiserver import ApiServer
from tests.support.interrupts import run_interruptible

pytestmark = pytest.mark.integration


@pytest.fixture
def installer(
    apiserver: ApiServer, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Installer:
    """A cluster with agents that are ready, as its API server shows them, and a user who may run the command."""
    monkeypatch.chdir(tmp_path)
    installer = Installer(apiserver, capsys, tmp_path)
    assert installer.run("--provider=aws", "--bucket=b", "--no-secret").code == 0
    path = DAEMON_SETS.path(installer.namespace, "node-agent", subresource="status")
    counts = {"currentNumberScheduled": 1, "desiredNumberScheduled": 1, "numberMisscheduled": 0, "numberReady": 1}
    apiserver.api.request("PATCH", path, body={"status": counts}, content_type=MERGE_PATCH)
    driver = f"{installer.namespace}.example.com"
    _create(apiserver, STORAGE_CLASSES, installer.namespace, provisioner=driver)
    _create(apiserver, VOLUME_SNAPSHOT_CLASSES, installer.namespace, driver=driver, deletionPolicy="Delete")
    _create(apiserver, NAMESPACES, f"{installer.namespace}-test")
    apiserver.create_account(f"{installer.namespace}-test", "default")
    return installer


def _create(apiserver: ApiServer, resource: Resource, name: str, **more: Any) -> None:
    body = {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": {"name": name}, **more}
    apiserver.api.request("POST", resource.path(), body=body)


def _words(installer: Installer) -> list[str]:
    return [f"--storage-class={installer.namespace}", f"--namespace-for-test={installer.namespace}-test"]


@contextmanager
def _claims_end(installer: Installer) -> Iterator[None]:
    """Do what the controller of claims does with those that are deleted: no controller runs here."""
    stop, api = threading.Event(), installer.server.api
    path = PERSISTENT_VOLUME_CLAIMS.path(f"{installer.namespace}-test")

    def finish() -> None:
        while not stop.wait(0.2):
            for one in api.request("GET", path)["items"]:
                if one["metadata"].get("deletionTimestamp"):
                    body = {"metadata": {"finalizers": None}}
                    api.request("PATCH", f"{path}/{one['metadata']['name']}", body=body, content_type=MERGE_PATCH)

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
    return [one["metadata"]["name"] for kind in kinds for one in api.request("GET", kind.path(space))["items"]]


def test_without_a_kubelet_the_step_and_its_cause_are_named_and_nothing_is_left(installer: Installer) -> None:
    with _claims_end(installer):
        done = installer.run(*_words(installer), "--timeout=2s", command="preflight")
    assert done.code == 1
    assert re.search(r"(?m)^prepare +[0-9.]+ s +ok$", done.out), done.out
    assert re.search(r"(?m)^volume +[0-9.]+ s +failed$", done.out), done.out
    assert re.search(r"(?m)^clean up +[0-9.]+ s +ok$", done.out), done.out
    assert re.search(r"(?m)^error: preflight failed at volume: not within 2s \(--timeout\): Pod ", done.err), done.err
    assert _left(installer) == []


def test_programs_get_the_steps(installer: Installer) -> None:
    with _claims_end(installer):
        done = installer.run(*_words(installer), "--timeout=100ms", "-o", "json", command="preflight")
    document = json.loads(done.out)
    assert [(step["name"], bool(step["error"])) for step in document["steps"]] == [
        ("prepare", False),
        ("volume", True),
        ("clean up", False),
    ]


def test_every_object_is_accepted_where_pods_must_be_restricted(installer: Installer) -> None:
    space, api = f"{installer.namespace}-test", installer.server.api
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    api.request("PATCH", NAMESPACES.path("", space), body={"metadata": {"labels": labels}}, content_type=MERGE_PATCH)
    name = installer.namespace
    plan = CheckPlan("x", name, space, "i", "64Mi", name, name, "d", "default")
    for manifest, kind, plural, namespace in (
        (plan.build_claim(), "/api/v1", "persistentvolumeclaims", space),
        (plan.build_target(), "/api/v1", "persistentvolumeclaims", space),
        (plan.build_writer(), "/api/v1", "pods", space),
        (plan.build_reader(), "/api/v1", "pods", space),
        (plan.build_snapshot(), "/apis/snapshot.storage.k8s.io/v1", "volumesnapshots", space),
        (plan.build_upload(), "/apis/velero.io/v2alpha1", "datauploads", name),
        (plan.build_download("k1"), "/apis/velero.io/v2alpha1", "datadownloads", name),
    ):
        path = f"{kind}/namespaces/{namespace}/{plural}?fieldValidation=Strict"
        stored = api.request("POST", path, body=manifest)
        assert stored["metadata"]["labels"] == {"nodeagent.io/preflight": "true"}


@pytest.mark.processes
def test_an_interrupted_run_leaves_nothing(installer: Installer) -> None:
    kubeconfig = f"--kubeconfig={installer.server.kubeconfig}"
    words = ["preflight", "-n", installer.namespace, kubeconfig, *_words(installer)]
    with _claims_end(installer), run_interruptible(words) as process:
        until = time.monotonic() + 60
        while len(_left(installer)) < 2 and process.poll() is None and time.monotonic() < until:
            time.sleep(0.1)
        assert len(_left(installer)) == 2
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
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


@pytest.mark.parametrize("size", ["lots", "1Mi"])
def test_a_wrong_size_is_one_line(installer: Installer, size: str) -> None:
    done = installer.run(f"--size={size}", command="preflight")
    assert done.code == 2
    assert (
        done.err == f'error: --size: "{size}" is not allowed: expected a quantity such as 64Mi or 1Gi, at least 2Mi\n'
    )
