"""Inputs of the recorded cluster: Velero's DaemonSet and configuration, and requests."""

from copy import deepcopy
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from core.contract import MoverVerb
from core.models.transfers import DataDownload, DataUpload, PodVolumeBackup, PodVolumeRestore
from exposer.model import Owner, PodVolumeRequest, RestoreRequest, SnapshotRequest
from exposer.settings import BackupPVCSettings, ExposeSettings, PodSettings
from exposer.template import AgentTemplate
from tests.support.golden import recorded
from tests.support.objects import JsonDict

_DAEMONSET = Path(__file__).parents[2] / "data" / "velero-1.18.2" / "daemonset-plain.yaml"

POD_SETTINGS = PodSettings(
    priority_class_name="data-mover-low",
    resources={"limits": {"cpu": "4", "memory": "2Gi"}, "requests": {"cpu": "100m", "memory": "64Mi"}},
    labels={"team": "storage"},
    annotations={"note": "x"},
)
"""The pod settings of the recorded ConfigMap."""


@cache
def _read_daemonset() -> JsonDict:
    read: JsonDict = yaml.safe_load(_DAEMONSET.read_text(encoding="utf-8"))
    return read


def daemonset() -> JsonDict:
    """Return Velero's DaemonSet, as created by `velero install --use-node-agent`, with more that movers may inherit."""
    raw = deepcopy(_read_daemonset())
    meta, spec = raw["spec"]["template"]["metadata"], raw["spec"]["template"]["spec"]
    meta["labels"]["azure.workload.identity/use"] = "true"
    meta["annotations"] = {"iam.amazonaws.com/role": "mover", "prometheus.io/scrape": "true"}
    spec["tolerations"] = [
        {"key": "CriticalAddonsOnly", "operator": "Exists"},
        {"key": "dedicated", "operator": "Exists"},
    ]
    (container,) = spec["containers"]
    container["image"] = "velero/velero:v1.18.2"
    container["readinessProbe"] = {"httpGet": {"path": "/readyz", "port": 8085}}
    container["resources"] = {"limits": {"memory": "512Mi"}}
    for variable in container["env"][:2]:
        variable["valueFrom"]["fieldRef"]["apiVersion"] = "v1"
    return raw


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
        "workload": cr.spec.pod,
        "volume": cr.spec.volume,
        "location": cr.spec.backup_storage_location,
        "requested_at": cr.metadata.creation_timestamp,
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
