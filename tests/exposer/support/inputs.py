"""Inputs of the recorded cluster: Velero's DaemonSet and configuration, and requests."""

from dataclasses import fields
from typing import Any

from core.contract import MoverVerb
from core.models.transfers import DataDownload, DataUpload, PodVolumeBackup, PodVolumeRestore
from exposer.model import Owner, PodVolumeRequest, RestoreRequest, SnapshotRequest, WorkloadRef
from exposer.settings import BackupPVCSettings, ExposeSettings, PodSettings
from exposer.template import AgentTemplate
from tests.support.golden import recorded
from tests.support.objects import JsonDict

_CREDENTIALS = (
    "GOOGLE_APPLICATION_CREDENTIALS",
    "AWS_SHARED_CREDENTIALS_FILE",
    "AZURE_CREDENTIALS_FILE",
    "ALIBABA_CLOUD_CREDENTIALS_FILE",
)

POD_SETTINGS = PodSettings(
    priority_class_name="data-mover-low",
    resources={
        "limits": {"cpu": "4", "memory": "2Gi"},
        "requests": {"cpu": "100m", "memory": "64Mi"},
    },
    labels={"team": "storage"},
    annotations={"note": "x"},
)
"""The pod settings of the recorded ConfigMap."""


def daemonset() -> JsonDict:
    """Return Velero's DaemonSet, as created by `velero install --use-node-agent`."""
    field_env = {"NODE_NAME": "spec.nodeName", "VELERO_NAMESPACE": "metadata.namespace"}
    env: list[JsonDict] = [
        {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}
        for name, path in field_env.items()
    ]
    env.append({"name": "VELERO_SCRATCH_DIR", "value": "/scratch"})
    env += [{"name": name, "value": "/credentials/cloud"} for name in _CREDENTIALS]
    host = "HostToContainer"
    container: JsonDict = {
        "name": "node-agent",
        "image": "velero/velero:v1.18.2",
        "command": ["/velero"],
        "args": ["node-agent", "server"],
        "env": env,
        "ports": [{"name": "metrics", "containerPort": 8085}],
        "readinessProbe": {"httpGet": {"path": "/readyz", "port": 8085}},
        "livenessProbe": {"httpGet": {"path": "/healthz", "port": 8085}},
        "resources": {"limits": {"memory": "512Mi"}},
        "volumeMounts": [
            {"name": "host-pods", "mountPath": "/host_pods", "mountPropagation": host},
            {"name": "host-plugins", "mountPath": "/var/lib/kubelet/plugins", "mountPropagation": host},
            {"name": "scratch", "mountPath": "/scratch"},
            {"name": "cloud-credentials", "mountPath": "/credentials"},
        ],
    }
    spec: JsonDict = {
        "serviceAccountName": "velero",
        "securityContext": {"runAsUser": 0},
        "tolerations": [
            {"key": "CriticalAddonsOnly", "operator": "Exists"},
            {"key": "dedicated", "operator": "Exists"},
        ],
        "volumes": [
            {"name": "host-pods", "hostPath": {"path": "/var/lib/kubelet/pods", "type": ""}},
            {"name": "host-plugins", "hostPath": {"path": "/var/lib/kubelet/plugins", "type": ""}},
            {"name": "scratch", "emptyDir": {}},
            {"name": "cloud-credentials", "secret": {"defaultMode": 292, "secretName": "cloud-credentials"}},
        ],
        "containers": [container],
    }
    labels = {"name": "node-agent", "role": "node-agent", "azure.workload.identity/use": "true"}
    annotations = {"iam.amazonaws.com/role": "mover", "prometheus.io/scrape": "true"}
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": "node-agent", "namespace": "velero"},
        "spec": {"template": {"metadata": {"labels": labels, "annotations": annotations}, "spec": spec}},
    }


def template(**changes: Any) -> AgentTemplate:
    """Return the template of movers; `changes` replace fields of the DaemonSet's pod spec."""
    raw = daemonset()
    raw["spec"]["template"]["spec"] |= changes
    return AgentTemplate.parse(raw)


def expose_settings(**changes: Any) -> ExposeSettings:
    """The settings of the recorded cluster, whose DaemonSet had no tolerations; `changes` replace fields."""
    values: dict[str, Any] = {
        "template": template(tolerations=[]),
        "pod": POD_SETTINGS,
        "backup_pvcs": {"hostpath": BackupPVCSettings(annotations={"a/b": "c"})},
    }
    return ExposeSettings(**(values | changes))


def snapshot_request(recording: str = "dataupload", **changes: Any) -> SnapshotRequest:
    """Return the request for a recorded DataUpload; `changes` replace fields of the request or its settings."""
    du = DataUpload.parse(recorded(recording))
    csi = du.spec.csi_snapshot
    assert csi is not None
    values: dict[str, Any] = {
        "owner": Owner.of(du),
        "source_namespace": du.spec.source_namespace,
        "source_claim": du.spec.source_pvc,
        "volume_snapshot": csi.volume_snapshot,
        "storage_class": csi.storage_class,
        "location": du.spec.backup_storage_location,
        "operation_timeout": du.operation_timeout,
        "requested_at": du.metadata.creation_timestamp,
    }
    return SnapshotRequest(**_with_settings(values, changes))


def pod_volume_request(recording: str = "podvolumebackup", **changes: Any) -> PodVolumeRequest:
    """Return the request for a recorded PodVolumeBackup or PodVolumeRestore; `changes` replace fields as above."""
    backup = recording == "podvolumebackup"
    cr = (PodVolumeBackup if backup else PodVolumeRestore).parse(recorded(recording))
    assert isinstance(cr, PodVolumeBackup | PodVolumeRestore)
    values: dict[str, Any] = {
        "owner": Owner.of(cr),
        "verb": MoverVerb.BACKUP if backup else MoverVerb.RESTORE,
        "workload": WorkloadRef(cr.spec.pod.namespace, cr.spec.pod.name, cr.spec.pod.uid),
        "volume": cr.spec.volume,
        "location": cr.spec.backup_storage_location,
        "restore": cr.restore_uid,
    }
    return PodVolumeRequest(**_with_settings(values, changes))


def restore_request(recording: str = "datadownload", **changes: Any) -> RestoreRequest:
    """Return the request for a recorded DataDownload; `changes` replace fields as above."""
    dd = DataDownload.parse(recorded(recording))
    values: dict[str, Any] = {
        "owner": Owner.of(dd),
        "target_namespace": dd.spec.target_volume.namespace,
        "target_claim": dd.spec.target_volume.pvc,
        "location": dd.spec.backup_storage_location,
        "operation_timeout": dd.operation_timeout,
        "requested_at": dd.metadata.creation_timestamp,
        "restore": dd.metadata.labels.get("velero.io/restore-name"),
    }
    return RestoreRequest(**_with_settings(values, changes))


def _with_settings(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a request; changes of `ExposeSettings` go to its `settings`."""
    names = {field.name for field in fields(ExposeSettings)} - {"cache"}
    of_settings = {name: value for name, value in changes.items() if name in names}
    rest = {name: value for name, value in changes.items() if name not in names}
    return values | {"settings": expose_settings(**of_settings)} | rest
