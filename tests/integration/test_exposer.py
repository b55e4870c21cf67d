"""What exposers write, against the validation and admission of a real API server."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from client.install.daemonset import build_daemonset
from client.install.manifests import build_namespace
from client.install.options import AgentOptions, InstallOptions
from core.contract import VolumeMode
from core.kube import resources
from core.kube.client import KubeClient
from core.kube.resources import NAMESPACES, PODS, PRIORITY_CLASSES
from exposer.manifests import build_backup_claim
from exposer.model import LocatedVolume
from exposer.pod_manifest import Placement
from exposer.pods import build_backup_pod, build_init_pod, build_pod_volume_pod, build_restore_pod, build_validation_pod
from exposer.settings import CacheVolume, ExposeSettings, PodSettings, StorageAccess
from exposer.template import AgentTemplate
from tests.exposer.support.inputs import pod_volume_request, restore_request, snapshot_request
from tests.nodeagent.support.configured import build_settings
from tests.support.apiserver import ApiServer
from tests.support.objects import JsonDict, build_object
from tests.testbed.api import ApiError

pytestmark = pytest.mark.integration

_GOLDEN = Path(__file__).parents[1] / "golden"
_DAEMONSET = yaml.safe_load((Path(__file__).parents[2] / "deploy" / "agent" / "daemonset.yaml").read_text())
_MOVERS = "node-agent-mover"
_TEMPLATE = AgentTemplate.parse(_DAEMONSET)
_SETTINGS = ExposeSettings(_TEMPLATE, PodSettings(service_account=_MOVERS))
_INHERITS = StorageAccess(inherits_credentials=True)
_OWN = StorageAccess()
_REPOSITORY = replace(snapshot_request().owner, kind="BackupRepository")


@pytest.fixture(scope="module")
def spaces(apiserver: ApiServer) -> dict[str, str]:
    """Namespaces with the accounts of `deploy/`, by what they enforce: a standard, or the labels of an installation."""
    labels = {level: {"pod-security.kubernetes.io/enforce": level} for level in ("baseline", "restricted")}
    labels["installed"] = build_namespace(InstallOptions())["metadata"]["labels"]
    found = {enforced: apiserver.create_namespace() for enforced in labels}
    for enforced, name in found.items():
        for account in ("node-agent", _MOVERS):
            apiserver.create_account(name, account)
        apiserver.api.patch(NAMESPACES, {"metadata": {"labels": labels[enforced]}}, name=name)
    return found


def _data_upload(recording: str, storage: StorageAccess) -> JsonDict:
    mode = VolumeMode.BLOCK if recording.startswith("block") else VolumeMode.FILESYSTEM
    request = replace(snapshot_request(recording), settings=_SETTINGS)
    claim: JsonDict = build_backup_claim(request, size="1Gi", mode=mode)
    return build_backup_pod(request, claim, Placement(), storage=storage)


def _data_download(mode: VolumeMode, cache: CacheVolume | None = None) -> JsonDict:
    request = replace(restore_request(), settings=_SETTINGS)
    return build_restore_pod(request, mode, placement=Placement(), storage=_OWN, cache=cache)


def _pod_volume(recording: str, *, privileged: bool = False) -> JsonDict:
    settings = replace(_SETTINGS, pod=replace(_SETTINGS.pod, privileged_fs_backup=privileged))
    request = replace(pod_volume_request(recording), settings=settings)
    return build_pod_volume_pod(request, LocatedVolume("node-a", "/var/lib/kubelet/pods/x"), storage=_OWN)


def _agent(*, host_path: bool = True, privileged: bool = False) -> JsonDict:
    """The agent's pod with these options of an installation."""
    options = AgentOptions(host_path=host_path, privileged=privileged)
    daemonset = build_daemonset(InstallOptions(agent=options))
    return build_object(PODS, "agent", spec=daemonset["spec"]["template"]["spec"])


def _create(server: ApiServer, namespace: str, item: JsonDict) -> JsonDict:
    """Create an object without storing it; a field that the server does not know is an error."""
    resource = resources.BY_KIND[item["kind"]]
    if resource.namespaced:
        item["metadata"]["namespace"] = namespace
    return server.api.request("POST", f"{resource.path(namespace)}?dryRun=All&fieldValidation=Strict", body=item)


_FILES, _DEVICE = VolumeMode.FILESYSTEM, VolumeMode.BLOCK
_ADMITTED = {
    "DataUpload": ("baseline", _data_upload("dataupload", _OWN)),
    "DataUpload with the agent's credentials": ("baseline", _data_upload("dataupload", _INHERITS)),
    "DataUpload of a device": ("baseline", _data_upload("block-dataupload", _OWN)),
    "DataDownload": ("baseline", _data_download(_FILES)),
    "DataDownload with a cache": ("baseline", _data_download(_FILES, CacheVolume("fast", 5000))),
    "DataDownload of a device": ("baseline", _data_download(_DEVICE)),
    "repository": ("baseline", build_init_pod(_REPOSITORY, _SETTINGS, storage=_OWN)),
    "agent without pod volumes": ("restricted", _agent(host_path=False)),
    "PodVolumeBackup": ("installed", _pod_volume("podvolumebackup")),
    "privileged PodVolumeBackup": ("installed", _pod_volume("podvolumebackup", privileged=True)),
    "agent": ("installed", _agent()),
    "privileged agent": ("installed", _agent(privileged=True)),
}


@pytest.mark.parametrize(("enforced", "pod"), _ADMITTED.values(), ids=_ADMITTED)
def test_a_namespace_that_enforces_a_standard_admits(
    apiserver: ApiServer, spaces: dict[str, str], enforced: str, pod: JsonDict
) -> None:
    _create(apiserver, spaces[enforced], pod)


@pytest.mark.parametrize(
    "pod",
    [
        pytest.param(_pod_volume("podvolumebackup"), id="PodVolumeBackup"),
        pytest.param(_pod_volume("podvolumerestore"), id="PodVolumeRestore"),
        pytest.param(_agent(), id="agent"),
    ],
)
def test_baseline_rejects_folders_of_the_node_and_nothing_else(
    apiserver: ApiServer, spaces: dict[str, str], pod: JsonDict
) -> None:
    with pytest.raises(ApiError, match='violates PodSecurity "baseline:latest": ') as caught:
        _create(apiserver, spaces["baseline"], pod)
    found = str(caught.value).partition('"baseline:latest": ')[2]
    assert found.startswith("hostPath volumes")
    assert not any(other in found for other in ("capabilities", "seccomp", "host namespaces", "privileged"))


async def test_every_golden_manifest_is_accepted(apiserver: ApiServer, namespace: str, client: KubeClient) -> None:
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
            answer = _create(apiserver, namespace, manifest)
            assert answer.get("spec", {}).keys() >= manifest.get("spec", {}).keys(), path.name
            accepted += 1
    assert accepted >= 80


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
    for writes, pod in _movers(settings):
        stored = _create(apiserver, namespace, pod)
        mounts = stored["spec"]["containers"][0]["volumeMounts"]
        (mount,) = [each for each in mounts if each["name"] == "mover-repository"]
        (volume,) = [each for each in stored["spec"]["volumes"] if each["name"] == "mover-repository"]
        (source,) = [value for key, value in volume.items() if key != "name"]
        assert (mount.get("readOnly", False), source.get("readOnly", False)) == (not writes, not writes)
