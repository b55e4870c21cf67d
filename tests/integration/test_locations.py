"""What locations need of a real API server: the status that the leader writes, and pods with a shared volume."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from core.clock import SystemClock
from core.contract import VolumeMode
from core.kube.client import KubeClient
from core.kube.resources import BACKUP_STORAGE_LOCATIONS, PODS
from core.kube.velero_server import VeleroServerCheck
from exposer.causes import CauseFinder
from exposer.manifests import build_backup_claim
from exposer.model import LocatedVolume
from exposer.pod_manifest import Placement
from exposer.pods import (
    build_backup_pod,
    build_init_pod,
    build_pod_volume_pod,
    build_restore_pod,
    build_validation_pod,
)
from exposer.settings import ExposeSettings, StorageAccess
from exposer.template import AgentTemplate
from nodeagent.leader.repositories.init_pod import InitPods
from nodeagent.leader.repositories.locations import LocationController, LocationProbes, Verdict
from nodeagent.runtime.settings import RepositoryControllerMode
from tests.exposer.support.inputs import pod_volume_request, restore_request, snapshot_request
from tests.nodeagent.support.clusters import build_cluster
from tests.nodeagent.support.configured import build_settings
from tests.support.apiserver import ApiServer
from tests.support.objects import JsonDict, build_object

pytestmark = pytest.mark.integration

_TEMPLATE = AgentTemplate.parse(
    yaml.safe_load((Path(__file__).parents[2] / "deploy" / "agent" / "daemonset.yaml").read_text())
)
_VOLUMES = {
    "claim": {"mountPath": "/backups", "persistentVolumeClaim": "shared-backups"},
    "nfs": {"mountPath": "/backups", "nfs": {"server": "nfs.example.com", "path": "/export/backups"}},
}
_STORAGE = StorageAccess(directory="/backups/a")


def _movers(settings: ExposeSettings) -> Iterator[tuple[bool, JsonDict]]:
    """Yield a pod of each kind, and whether it may write to the repository."""
    upload = replace(snapshot_request(), settings=settings)
    claim: JsonDict = build_backup_claim(upload, size="1Gi", mode=VolumeMode.FILESYSTEM)
    yield True, build_backup_pod(upload, claim, Placement(), storage=_STORAGE)
    download = replace(restore_request(), settings=settings)
    yield False, build_restore_pod(download, VolumeMode.FILESYSTEM, placement=Placement(), storage=_STORAGE)
    for recording, writes in {"podvolumebackup": True, "podvolumerestore": False}.items():
        request = replace(pod_volume_request(recording), settings=settings)
        located = LocatedVolume("node-a", "/var/lib/kubelet/pods/x")
        yield writes, build_pod_volume_pod(request, located, storage=_STORAGE)
    repository, location = (replace(upload.owner, kind=kind) for kind in ("BackupRepository", "BackupStorageLocation"))
    yield True, build_init_pod(repository, settings, storage=_STORAGE)
    yield False, build_init_pod(repository, settings, storage=replace(_STORAGE, read_only=True))
    yield False, build_validation_pod(location, settings, storage=_STORAGE)


@pytest.mark.parametrize("kind", _VOLUMES)
def test_pods_of_every_kind_with_a_shared_volume_are_accepted(apiserver: ApiServer, namespace: str, kind: str) -> None:
    settings = build_settings({"nodeagent.io": {"repositoryVolumes": [_VOLUMES[kind]]}}, _TEMPLATE)
    apiserver.create_account(namespace, "node-agent")
    path = f"{PODS.path(namespace)}?dryRun=All&fieldValidation=Strict"
    for writes, pod in _movers(settings):
        pod["metadata"] |= {"namespace": namespace}
        stored = apiserver.api.request("POST", path, body=pod)
        mounts = stored["spec"]["containers"][0]["volumeMounts"]
        (mount,) = [each for each in mounts if each["name"] == "mover-repository"]
        (volume,) = [each for each in stored["spec"]["volumes"] if each["name"] == "mover-repository"]
        (source,) = [value for key, value in volume.items() if key != "name"]
        assert (mount.get("readOnly", False), source.get("readOnly", False)) == (not writes, not writes)


async def test_the_status_of_a_location_is_stored_as_it_is_written(client: KubeClient, namespace: str) -> None:
    clock = SystemClock()
    verdicts = [Verdict("the bucket does not exist"), Verdict()]

    async def validate(_: str) -> Verdict:
        return verdicts.pop(0)

    cluster = build_cluster(client, clock)
    controller = LocationController(
        cluster,
        InitPods(cluster, lambda: build_settings({}, _TEMPLATE), CauseFinder(client, clock)),
        server=VeleroServerCheck(client, clock, namespace),
        mode=RepositoryControllerMode.AUTO,
        validate=validate,
        probes=LocationProbes(clock),
    )
    spec = {"provider": "velero.io/aws", "objectStorage": {"bucket": "b"}, "validationFrequency": "5m"}
    synced = {"lastSyncedTime": "2026-11-20T10:00:00Z"}
    location = build_object(BACKUP_STORAGE_LOCATIONS, "default", namespace, spec=spec, status=synced)
    await client.create(BACKUP_STORAGE_LOCATIONS, location)
    task = asyncio.create_task(controller.run(), name="locations")
    try:
        status = await _until_phase(client, namespace, "Unavailable")
        message = 'BackupStorageLocation "default" is unavailable: the bucket does not exist'
        assert status.pop("lastValidationTime")
        assert status == {"phase": "Unavailable", "message": message, "lastSyncedTime": "2026-11-20T10:00:00Z"}
        await client.patch(BACKUP_STORAGE_LOCATIONS, namespace, "default", {"spec": {"objectStorage": {"bucket": "c"}}})
        assert "message" not in await _until_phase(client, namespace, "Available")
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _until_phase(client: KubeClient, namespace: str, phase: str) -> JsonDict:
    async with asyncio.timeout(300):
        while True:
            found = await client.get(BACKUP_STORAGE_LOCATIONS, namespace, "default")
            status: JsonDict = found.get("status") or {}
            if status.get("phase") == phase:
                return status
            await asyncio.sleep(0.05)
