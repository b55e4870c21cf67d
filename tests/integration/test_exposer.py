"""What exposers write, against the validation and admission of a real API server."""

import json
from pathlib import Path

import pytest

from core.clock import SystemClock
from core.kube import resources
from core.kube.client import KubeClient
from core.kube.resources import (
    PERSISTENT_VOLUME_CLAIMS,
    PERSISTENT_VOLUMES,
    PRIORITY_CLASSES,
)
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
from tests.exposer.support.world import no_guard
from tests.support.apiserver import ApiServer
from tests.support.objects import build_object

pytestmark = pytest.mark.integration

_GOLDEN = Path(__file__).parents[1] / "golden"
_KINDS = resources.BY_KIND


_CLAIM: JsonDict = {
    "accessModes": ["ReadWriteOnce"],
    "resources": {"requests": {"storage": "1Gi"}},
    "storageClassName": "hostpath",
}
_VOLUME: JsonDict = {
    "accessModes": ["ReadWriteOnce"],
    "capacity": {"storage": "1Gi"},
    "csi": {"driver": "hostpath.csi.k8s.io", "volumeHandle": "v"},
    "storageClassName": "hostpath",
}


async def test_every_golden_manifest_is_accepted(apiserver: ApiServer, namespace: str, client: KubeClient) -> None:
    """Each is created without being stored; a field that the server does not know is an error."""
    for account in ("velero", "node-agent-mover"):
        apiserver.create_account(namespace, account)
    await client.create(PRIORITY_CLASSES, build_object(PRIORITY_CLASSES, "data-mover-low", value=10))
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


async def test_a_volume_is_rebound(apiserver: ApiServer, namespace: str, client: KubeClient) -> None:
    """The rebind, with the test as volume controller."""
    owner = Owner("velero.io/v2alpha1", "DataDownload", namespace, "r2", "067d6f98-aeaa-4bf8-93d7-24a9f1508ec3")
    request = RestoreRequest(owner, namespace, "data", "default", ExposeSettings(AgentTemplate("image")))
    volume, kept = f"pv-{namespace}", KeptVolume(f"pv-{namespace}", "Delete")
    selector = {"selector": {"matchLabels": {"velero.io/dynamic-pv-restore": "x"}}}
    claim = build_object(PERSISTENT_VOLUME_CLAIMS, "data", namespace, spec=_CLAIM | selector)
    target = await client.create(PERSISTENT_VOLUME_CLAIMS, claim)
    restored = await client.create(PERSISTENT_VOLUME_CLAIMS, build_restore_claim(owner, target, node="", excluded=()))
    reference = {key: restored["metadata"][key] for key in ("namespace", "name", "uid", "resourceVersion")}
    meta = {"annotations": {"pv.kubernetes.io/bound-by-controller": "yes"}}
    taken = _VOLUME | {"claimRef": reference, "persistentVolumeReclaimPolicy": "Delete"}
    await client.create(PERSISTENT_VOLUMES, build_object(PERSISTENT_VOLUMES, volume, metadata=meta, spec=taken))
    exposer = GenericRestoreExposer(client, CauseFinder(client, SystemClock()))

    steps = [await exposer.rebind(request, kept)]
    retained = await client.get(PERSISTENT_VOLUMES, "", volume)
    free = {"metadata": {"finalizers": None}}
    await client.patch(PERSISTENT_VOLUME_CLAIMS, namespace, "r2", free)
    steps.append(await exposer.rebind(request, kept))
    for resource, name, place in ((PERSISTENT_VOLUMES, volume, ""), (PERSISTENT_VOLUME_CLAIMS, "data", namespace)):
        apiserver.api.patch(resource, {"status": {"phase": "Bound"}}, name=name, namespace=place, sub="status")
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


async def test_an_existing_volume_is_taken_and_given_back(namespace: str, client: KubeClient) -> None:
    """A reference without a UID is accepted both times, and nothing of the restore is left on the volume."""
    owner = Owner("velero.io/v2alpha1", "DataDownload", namespace, "r2", "067d6f98-aeaa-4bf8-93d7-24a9f1508ec3")
    settings, volume = ExposeSettings(AgentTemplate("image")), f"old-{namespace}"
    request = RestoreRequest(owner, namespace, "data", "default", settings, volume=volume)
    meta = {"namespace": namespace, "name": "data"}
    wanted = build_object(PERSISTENT_VOLUME_CLAIMS, "data", namespace, spec=_CLAIM)
    target = await client.create(PERSISTENT_VOLUME_CLAIMS, wanted)
    released = {"kind": "PersistentVolumeClaim", **meta, "uid": "ec8dd43f-deleted", "resourceVersion": "7"}
    kept = _VOLUME | {"claimRef": released, "persistentVolumeReclaimPolicy": "Retain"}
    annotations = {"annotations": {RECLAIM_POLICY_ANNOTATION: "Delete"}}
    await client.create(PERSISTENT_VOLUMES, build_object(PERSISTENT_VOLUMES, volume, metadata=annotations, spec=kept))

    found = await check_existing(request, target=target, reader=client)
    assert found is not None
    async with ExposeRun(client, owner, no_guard) as run:
        taken = await ensure_taken(client, run, request=request, volume=found)
        claim = build_restore_claim(owner, target, node="", excluded=(), volume=taken)
        await run.ensure(PERSISTENT_VOLUME_CLAIMS, claim)
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
