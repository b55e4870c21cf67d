"""What exposers write, against the validation and admission of a real API server."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from core.clock import SystemClock
from core.kube.client import KubeClient
from core.kube.resources import (
    CLUSTER_ROLE_BINDINGS,
    CLUSTER_ROLES,
    CONFIG_MAPS,
    CRON_JOBS,
    DATA_DOWNLOADS,
    DATA_UPLOADS,
    JOBS,
    LEASES,
    PERSISTENT_VOLUME_CLAIMS,
    PERSISTENT_VOLUMES,
    POD_VOLUME_BACKUPS,
    POD_VOLUME_RESTORES,
    PODS,
    PRIORITY_CLASSES,
    ROLE_BINDINGS,
    ROLES,
    SERVICE_ACCOUNTS,
    VOLUME_SNAPSHOT_CONTENTS,
    VOLUME_SNAPSHOTS,
    Resource,
)
from core.kube.transport import MERGE_PATCH, Retry
from core.models.base import JsonDict
from core.models.names import RECLAIM_POLICY_ANNOTATION
from exposer.causes import CauseFinder
from exposer.expose_run import ExposeRun
from exposer.generic_restore import GenericRestoreExposer
from exposer.in_place import check_existing, ensure_taken
from exposer.manifests import build_restore_claim
from exposer.model import KeptVolume, Owner, Pending, RestoreRequest
from exposer.settings import ExposeSettings
from exposer.template import AgentTemplate
from nodeagent.runtime.transport import load_transport
from tests.support.apiserver import ApiServer

pytestmark = pytest.mark.integration

_GOLDEN = Path(__file__).parents[1] / "golden"
_KINDS = {
    resource.kind: resource
    for resource in (
        JOBS,
        LEASES,
        PODS,
        PERSISTENT_VOLUME_CLAIMS,
        VOLUME_SNAPSHOTS,
        VOLUME_SNAPSHOT_CONTENTS,
        DATA_UPLOADS,
        DATA_DOWNLOADS,
        POD_VOLUME_BACKUPS,
        POD_VOLUME_RESTORES,
        SERVICE_ACCOUNTS,
        ROLES,
        ROLE_BINDINGS,
        CLUSTER_ROLES,
        CLUSTER_ROLE_BINDINGS,
        CONFIG_MAPS,
        CRON_JOBS,
    )
}


@pytest.fixture
async def client(apiserver: ApiServer) -> AsyncIterator[KubeClient]:
    transport, _ = await load_transport(str(apiserver.kubeconfig))
    yield KubeClient(transport, Retry(SystemClock()))
    await transport.close()


def _priority_class(name: str) -> JsonDict:
    kind = PRIORITY_CLASSES
    return {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": {"name": name}, "value": 10}


async def test_every_golden_manifest_is_accepted(apiserver: ApiServer, namespace: str, client: KubeClient) -> None:
    """Each is created without being stored; a field that the server does not know is an error."""
    for account in ("velero", "node-agent-mover"):
        apiserver.create_account(namespace, account)
    await client.create(PRIORITY_CLASSES, _priority_class("data-mover-low"))
    accepted = 0

    for path in sorted(_GOLDEN.rglob("*.json")):
        if path.parent.name == "cli":
            # What commands print.
            continue
        stored: JsonDict = json.loads(path.read_text())
        for manifest in stored.get("items", [stored]):
            resource = _KINDS[manifest["kind"]]
            if resource.namespaced:
                manifest["metadata"]["namespace"] = namespace
            url = f"{resource.path(namespace)}?dryRun=All&fieldValidation=Strict"
            answer = apiserver.api.request("POST", url, body=manifest)
            assert answer.get("spec", {}).keys() >= manifest.get("spec", {}).keys(), path.name
            accepted += 1

    assert accepted >= 80


def _set_status(apiserver: ApiServer, resource: Resource, namespace: str, name: str) -> None:
    """Report that the volume controller has bound the object."""
    body = {"status": {"phase": "Bound"}}
    path = resource.path(namespace, name, subresource="status")
    apiserver.api.request("PATCH", path, body=body, content_type=MERGE_PATCH)


async def test_a_volume_is_rebound(apiserver: ApiServer, namespace: str, client: KubeClient) -> None:
    """The rebind, with the test as volume controller."""
    owner = Owner("velero.io/v2alpha1", "DataDownload", namespace, "r2", "067d6f98-aeaa-4bf8-93d7-24a9f1508ec3")
    request = RestoreRequest(owner, namespace, "data", "default", ExposeSettings(AgentTemplate("image")))
    volume, kept = f"pv-{namespace}", KeptVolume(f"pv-{namespace}", "Delete")
    spec = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "1Gi"}},
        "storageClassName": "hostpath",
    }
    selector = {"selector": {"matchLabels": {"velero.io/dynamic-pv-restore": "x"}}}
    kind: JsonDict = {"apiVersion": "v1", "kind": "PersistentVolumeClaim"}
    target = await client.create(
        PERSISTENT_VOLUME_CLAIMS,
        kind | {"metadata": {"namespace": namespace, "name": "data"}, "spec": spec | selector},
    )
    restored = await client.create(PERSISTENT_VOLUME_CLAIMS, build_restore_claim(owner, target, node="", excluded=()))
    reference = {key: restored["metadata"][key] for key in ("namespace", "name", "uid", "resourceVersion")}
    await client.create(
        PERSISTENT_VOLUMES,
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": volume, "annotations": {"pv.kubernetes.io/bound-by-controller": "yes"}},
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "capacity": {"storage": "1Gi"},
                "claimRef": reference,
                "csi": {"driver": "hostpath.csi.k8s.io", "volumeHandle": "v"},
                "persistentVolumeReclaimPolicy": "Delete",
                "storageClassName": "hostpath",
            },
        },
    )
    exposer = GenericRestoreExposer(client, CauseFinder(client, SystemClock()))

    steps = [await exposer.rebind(request, kept)]
    retained = await client.get(PERSISTENT_VOLUMES, "", volume)
    free = {"metadata": {"finalizers": None}}
    await client.patch(PERSISTENT_VOLUME_CLAIMS, namespace, "r2", free)
    steps.append(await exposer.rebind(request, kept))
    _set_status(apiserver, PERSISTENT_VOLUMES, "", volume)
    _set_status(apiserver, PERSISTENT_VOLUME_CLAIMS, namespace, "data")
    steps.append(await exposer.rebind(request, kept))

    assert [step.reason if isinstance(step, Pending) else None for step in steps] == [
        "CleaningUp",
        "Binding",
        None,
    ]
    assert retained["spec"]["persistentVolumeReclaimPolicy"] == "Retain"
    rebound = await client.get(PERSISTENT_VOLUMES, "", volume)
    assert rebound["spec"]["persistentVolumeReclaimPolicy"] == "Delete"
    assert rebound["spec"]["claimRef"]["uid"] == target["metadata"]["uid"]
    assert "resourceVersion" not in rebound["spec"]["claimRef"]
    assert rebound["metadata"]["labels"] == {"velero.io/dynamic-pv-restore": "x"}
    assert "annotations" not in rebound["metadata"]
    bound = await client.get(PERSISTENT_VOLUME_CLAIMS, namespace, "data")
    assert bound["spec"]["volumeName"] == volume


async def _no_guard(*, sure: bool) -> None:
    """The transfer stays this agent's."""


async def test_an_existing_volume_is_taken_and_given_back(namespace: str, client: KubeClient) -> None:
    """A reference without a UID is accepted both times, and nothing of the restore is left on the volume."""
    owner = Owner("velero.io/v2alpha1", "DataDownload", namespace, "r2", "067d6f98-aeaa-4bf8-93d7-24a9f1508ec3")
    settings, volume = ExposeSettings(AgentTemplate("image")), f"old-{namespace}"
    request = RestoreRequest(owner, namespace, "data", "default", settings, volume=volume)
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}, "storageClassName": "a"}
    meta = {"namespace": namespace, "name": "data"}
    target = await client.create(
        PERSISTENT_VOLUME_CLAIMS, {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": meta, "spec": spec}
    )
    released = {"kind": "PersistentVolumeClaim", **meta, "uid": "ec8dd43f-deleted", "resourceVersion": "7"}
    before: JsonDict = {
        "accessModes": ["ReadWriteOnce"],
        "capacity": {"storage": "1Gi"},
        "csi": {"driver": "hostpath.csi.k8s.io", "volumeHandle": "v"},
        "storageClassName": "a",
    }
    manifest: JsonDict = {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": volume}}
    manifest["metadata"]["annotations"] = {RECLAIM_POLICY_ANNOTATION: "Delete"}
    policy = {"persistentVolumeReclaimPolicy": "Retain"}
    await client.create(PERSISTENT_VOLUMES, manifest | {"spec": before | policy | {"claimRef": released}})

    found = await check_existing(request, target=target, reader=client)
    assert found is not None
    assert not isinstance(found, Pending)
    async with ExposeRun(client, owner, _no_guard) as run:
        taken = await ensure_taken(client, run, request=request, volume=found)
        claim = build_restore_claim(owner, target, node="", excluded=(), volume=taken)
        assert not isinstance(await run.ensure(PERSISTENT_VOLUME_CLAIMS, claim), Pending)
    exposer = GenericRestoreExposer(client, CauseFinder(client, SystemClock()))
    steps = [await exposer.give_back(request)]
    await client.patch(PERSISTENT_VOLUME_CLAIMS, namespace, "r2", {"metadata": {"finalizers": None}})
    steps.append(await exposer.give_back(request))

    assert [step.reason if step else None for step in steps] == ["CleaningUp", None]
    reserved = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "namespace": namespace}
    assert taken["spec"]["claimRef"] == reserved | {"name": "r2"}
    assert taken["spec"]["persistentVolumeReclaimPolicy"] == "Retain"
    given = await client.get(PERSISTENT_VOLUMES, "", volume)
    assert given["spec"]["claimRef"] == reserved | {"name": "data"}
    assert given["spec"]["persistentVolumeReclaimPolicy"] == "Delete"
    assert given["metadata"].keys().isdisjoint({"labels", "annotations"})
