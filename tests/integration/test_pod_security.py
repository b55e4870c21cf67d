"""Which pods a real API server takes in namespaces that enforce a Pod Security Standard."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from client.install.daemonset import build_daemonset
from client.install.manifests import build_namespace
from client.install.options import AgentOptions, InstallOptions
from core.contract import VolumeMode
from core.kube.resources import NAMESPACES, PODS
from exposer.manifests import build_backup_claim
from exposer.model import LocatedVolume
from exposer.pod_manifest import Placement
from exposer.pods import build_backup_pod, build_init_pod, build_pod_volume_pod, build_restore_pod
from exposer.settings import CacheVolume, ExposeSettings, PodSettings, StorageAccess
from exposer.template import AgentTemplate
from tests.exposer.support.inputs import pod_volume_request, restore_request, snapshot_request
from tests.support.apiserver import ApiServer
from tests.support.objects import JsonDict, build_object
from tests.testbed.api import ApiError

pytestmark = pytest.mark.integration

_DAEMONSET = yaml.safe_load((Path(__file__).parents[2] / "deploy" / "agent" / "daemonset.yaml").read_text())
_MOVERS = "node-agent-mover"
_SETTINGS = ExposeSettings(AgentTemplate.parse(_DAEMONSET), PodSettings(service_account=_MOVERS))
_INHERITS = StorageAccess(inherits_credentials=True)
_OWN = StorageAccess()
_REPOSITORY = replace(snapshot_request().owner, kind="BackupRepository")


@pytest.fixture(scope="module")
def baseline(apiserver: ApiServer) -> str:
    """A namespace that enforces `baseline`, with the accounts of `deploy/`."""
    return _enforcing(apiserver, {"pod-security.kubernetes.io/enforce": "baseline"})


@pytest.fixture(scope="module")
def restricted(apiserver: ApiServer) -> str:
    """The same with `restricted`."""
    return _enforcing(apiserver, {"pod-security.kubernetes.io/enforce": "restricted"})


@pytest.fixture(scope="module")
def installed(apiserver: ApiServer) -> str:
    """The same with the labels of the namespace that is installed."""
    return _enforcing(apiserver, build_namespace(InstallOptions())["metadata"]["labels"])


def _enforcing(server: ApiServer, labels: dict[str, str]) -> str:
    name = server.create_namespace()
    for account in ("node-agent", _MOVERS):
        server.create_account(name, account)
    patch = {"metadata": {"labels": labels}}
    server.api.patch(NAMESPACES, patch, name=name)
    return name


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


def _create(server: ApiServer, namespace: str, pod: JsonDict) -> None:
    pod["metadata"] |= {"namespace": namespace}
    server.api.request("POST", f"{PODS.path(namespace)}?dryRun=All&fieldValidation=Strict", body=pod)


@pytest.mark.parametrize(
    "pod",
    [
        pytest.param(_data_upload("dataupload", _OWN), id="DataUpload"),
        pytest.param(_data_upload("dataupload", _INHERITS), id="DataUpload with the agent's credentials"),
        pytest.param(_data_upload("block-dataupload", _OWN), id="DataUpload of a device"),
        pytest.param(_data_download(VolumeMode.FILESYSTEM), id="DataDownload"),
        pytest.param(_data_download(VolumeMode.FILESYSTEM, CacheVolume("fast", 5000)), id="DataDownload with a cache"),
        pytest.param(_data_download(VolumeMode.BLOCK), id="DataDownload of a device"),
        pytest.param(build_init_pod(_REPOSITORY, _SETTINGS, storage=_OWN), id="repository"),
    ],
)
def test_baseline_admits(apiserver: ApiServer, baseline: str, pod: JsonDict) -> None:
    _create(apiserver, baseline, pod)


def test_an_agent_without_pod_volumes_is_restricted(apiserver: ApiServer, restricted: str) -> None:
    _create(apiserver, restricted, _agent(host_path=False))


@pytest.mark.parametrize(
    ("pod", "violation"),
    [
        pytest.param(_pod_volume("podvolumebackup"), "hostPath volumes", id="PodVolumeBackup"),
        pytest.param(_pod_volume("podvolumerestore"), "hostPath volumes", id="PodVolumeRestore"),
        pytest.param(_agent(), "hostPath volumes", id="agent"),
    ],
)
def test_baseline_rejects_folders_of_the_node_and_nothing_else(
    apiserver: ApiServer, baseline: str, pod: JsonDict, violation: str
) -> None:
    with pytest.raises(ApiError, match='violates PodSecurity "baseline:latest": ') as caught:
        _create(apiserver, baseline, pod)

    found = str(caught.value).partition('"baseline:latest": ')[2]
    assert found.startswith(violation)
    assert not any(other in found for other in ("capabilities", "seccomp", "host namespaces", "privileged"))


@pytest.mark.parametrize(
    "pod",
    [
        pytest.param(_pod_volume("podvolumebackup"), id="PodVolumeBackup"),
        pytest.param(_pod_volume("podvolumebackup", privileged=True), id="privileged PodVolumeBackup"),
        pytest.param(_agent(), id="agent"),
        pytest.param(_agent(privileged=True), id="privileged agent"),
    ],
)
def test_the_namespace_that_is_installed_admits(apiserver: ApiServer, installed: str, pod: JsonDict) -> None:
    _create(apiserver, installed, pod)
