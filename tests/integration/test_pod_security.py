"""Which mover pods a real API server takes in a namespace that enforces the Pod Security Standard `baseline`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from core.contract import VolumeMode
from core.kube.resources import PODS
from exposer.claims import build_backup_claim
from exposer.model import LocatedVolume
from exposer.placement import Placement
from exposer.pods import build_backup_pod, build_init_pod, build_pod_volume_pod, build_restore_pod
from exposer.settings import CacheVolume, ExposeSettings, PodSettings, StorageAccess
from exposer.template import AgentTemplate
from tests.exposer.support.inputs import pod_volume_request, restore_request, snapshot_request
from tests.testbed.api import ApiError

if TYPE_CHECKING:
    from core.models.base import JsonDict
    from tests.support.apiserver import ApiServer

pytestmark = pytest.mark.integration

_DAEMONSET = yaml.safe_load((Path(__file__).parents[2] / "deploy" / "agent" / "daemonset.yaml").read_text())
_MOVERS = "node-agent-mover"
_SETTINGS = ExposeSettings(AgentTemplate.parse(_DAEMONSET), PodSettings(service_account=_MOVERS))
_INHERITS = StorageAccess(inherits_credentials=True)
_OWN = StorageAccess()
_NAMESPACES = "/api/v1/namespaces"


@pytest.fixture(scope="module")
def baseline(apiserver: ApiServer) -> str:
    """A namespace that enforces `baseline`, with the accounts of `deploy/`."""
    name = apiserver.create_namespace()
    for account in ("node-agent", _MOVERS):
        apiserver.create_account(name, account)
    labels = {"pod-security.kubernetes.io/enforce": "baseline"}
    patch = {"metadata": {"labels": labels}}
    apiserver.api.request("PATCH", f"{_NAMESPACES}/{name}", body=patch, content_type="application/merge-patch+json")
    return name


def _data_upload(recording: str, storage: StorageAccess) -> JsonDict:
    mode = VolumeMode.BLOCK if recording.startswith("block") else VolumeMode.FILESYSTEM
    request = replace(snapshot_request(recording), settings=_SETTINGS)
    claim = build_backup_claim(request, size="1Gi", mode=mode)
    return build_backup_pod(request, claim, Placement(), storage=storage)


def _data_download(mode: VolumeMode, cache: CacheVolume | None = None) -> JsonDict:
    request = replace(restore_request(), settings=_SETTINGS)
    return build_restore_pod(request, mode, placement=Placement(), storage=_OWN, cache=cache)


def _pod_volume(recording: str, *, privileged: bool = False) -> JsonDict:
    settings = replace(_SETTINGS, pod=replace(_SETTINGS.pod, privileged_fs_backup=privileged))
    request = replace(pod_volume_request(recording), settings=settings)
    return build_pod_volume_pod(request, LocatedVolume("node-a", "/var/lib/kubelet/pods/x"), storage=_OWN)


def _agent(*, host_pods: bool) -> JsonDict:
    template = _DAEMONSET["spec"]["template"]
    spec: JsonDict = template["spec"]
    if not host_pods:
        (container,) = spec["containers"]
        mounts = [mount for mount in container["volumeMounts"] if mount["name"] != "host-pods"]
        volumes = [volume for volume in spec["volumes"] if volume["name"] != "host-pods"]
        spec = {**spec, "containers": [{**container, "volumeMounts": mounts}], "volumes": volumes}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "agent"}, "spec": spec}


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
        pytest.param(build_init_pod(snapshot_request().owner, _SETTINGS, storage=_OWN), id="repository"),
        pytest.param(_agent(host_pods=False), id="agent without pod volumes"),
    ],
)
def test_baseline_admits(apiserver: ApiServer, baseline: str, pod: JsonDict) -> None:
    _create(apiserver, baseline, pod)


@pytest.mark.parametrize(
    ("pod", "violation"),
    [
        pytest.param(_pod_volume("podvolumebackup"), "hostPath volumes", id="PodVolumeBackup"),
        pytest.param(_pod_volume("podvolumerestore"), "hostPath volumes", id="PodVolumeRestore"),
        pytest.param(_agent(host_pods=True), "hostPath volumes", id="agent"),
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


def test_a_privileged_mover_is_accepted_where_privileged_pods_are(apiserver: ApiServer, namespace: str) -> None:
    apiserver.create_account(namespace, _MOVERS)
    _create(apiserver, namespace, _pod_volume("podvolumebackup", privileged=True))
