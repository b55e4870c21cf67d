"""Whole manifests of mover pods, compared with golden files."""

from datetime import timedelta
from typing import Any

import pytest

from core.contract import VolumeMode
from core.models.base import JsonDict
from core.models.storage import BackupRepository
from exposer.model import (
    BackupPVCSettings,
    CacheVolume,
    LocatedVolume,
    MoverOptions,
    Owner,
    PodSettings,
)
from exposer.pod import build_backup_pod, build_init_pod, build_pod_volume_pod, build_restore_pod, init_pod_name
from exposer.snapshots import SnapshotSource
from exposer.template import AgentTemplate
from tests.exposer.inputs import pod_volume_request, restore_request, snapshot_request, template
from tests.support.golden import assert_golden, recorded


def source(mode: VolumeMode = VolumeMode.FILESYSTEM) -> SnapshotSource:
    return SnapshotSource(snapshot_uid="s", content="c", content_uid="u", size="2Gi", volume_mode=mode)


def backup_pod(recording: str = "dataupload", *, avoid: tuple[str, ...] = (), **changes: Any) -> JsonDict:
    mode = VolumeMode.BLOCK if recording.startswith("block") else VolumeMode.FILESYSTEM
    return build_backup_pod(snapshot_request(recording, **changes), source(mode), avoid)


def restore_pod(recording: str = "datadownload", *, node: str = "", **changes: Any) -> JsonDict:
    mode = VolumeMode.BLOCK if recording.startswith("block") else VolumeMode.FILESYSTEM
    return build_restore_pod(restore_request(recording, **changes), mode, node=node)


def pod_volume_pod(recording: str = "podvolumebackup", **changes: Any) -> JsonDict:
    folder = "/var/lib/kubelet/pods/e7f1/volumes/kubernetes.io~csi/pvc-3dcf/mount"
    tolerations = ({"operator": "Exists", "effect": "NoSchedule"}, {"key": "k", "effect": "NoExecute"})
    return build_pod_volume_pod(pod_volume_request(recording, **changes), LocatedVolume("node-a", folder, tolerations))


def init_pod() -> JsonDict:
    repository = BackupRepository.parse(recorded("backuprepository"))
    return build_init_pod(Owner.of(repository), template(), PodSettings(), MoverOptions())


PRIVILEGED = PodSettings(privileged_fs_backup=True)
LOUD = MoverOptions(timedelta(minutes=90), "debug", "json")
READ_ONLY = BackupPVCSettings(read_only=True)
CACHE = CacheVolume("fast", 7)


@pytest.mark.parametrize(
    ("name", "pod"),
    [
        ("pod-backup", backup_pod()),
        ("pod-backup-block", backup_pod("block-dataupload")),
        ("pod-backup-read-only", backup_pod(backup_pvc=READ_ONLY)),
        ("pod-backup-avoiding-nodes", backup_pod(avoid=("node-a", "node-b"))),
        ("pod-backup-windows", backup_pod(node_os="windows")),
        ("pod-backup-without-settings", backup_pod(template=template(), settings=PodSettings(), mover=LOUD)),
        ("pod-restore", restore_pod()),
        ("pod-restore-block", restore_pod("block-datadownload")),
        ("pod-restore-with-cache-on-node", restore_pod(cache=CACHE, node="node-b")),
        ("pod-volume-backup", pod_volume_pod()),
        ("pod-volume-restore", pod_volume_pod("podvolumerestore")),
        ("pod-volume-backup-privileged", pod_volume_pod(template=template(), settings=PRIVILEGED, mover=LOUD)),
        ("pod-init-repository", init_pod()),
    ],
)
def test_a_pod_is_its_golden_manifest(name: str, pod: JsonDict) -> None:
    assert_golden(name, pod)


def test_scratch_is_added_where_the_agent_has_none() -> None:
    pod = restore_pod(template=AgentTemplate("image"))
    container = pod["spec"]["containers"][0]

    assert {"name": "mover-scratch", "emptyDir": {}} in pod["spec"]["volumes"]
    assert {"name": "mover-scratch", "mountPath": "/scratch"} in container["volumeMounts"]
    assert [env["value"] for env in container["env"] if env["name"] == "VELERO_SCRATCH_DIR"] == ["/scratch"]


def test_a_read_only_root_is_inherited_but_by_restores() -> None:
    """kopia writes beside a restore's target, which stands in the root."""
    inherited = AgentTemplate("image", read_only_root=True)

    backup, restore = (
        pod["spec"]["containers"][0] for pod in (backup_pod(template=inherited), restore_pod(template=inherited))
    )

    assert backup["securityContext"] == {"readOnlyRootFilesystem": True}
    assert "securityContext" not in restore


def test_every_inherited_mount_has_its_volume() -> None:
    for pod in (backup_pod(), restore_pod(cache=CACHE), init_pod()):
        volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
        mounts = {mount["name"] for mount in pod["spec"]["containers"][0]["volumeMounts"]}
        assert mounts <= volumes


def test_a_long_name_fits_into_the_label() -> None:
    request = snapshot_request()
    owner = Owner("velero.io/v2alpha1", "DataUpload", "velero", "n" * 200, request.owner.uid)

    meta = backup_pod(owner=owner)["metadata"]

    assert len(meta["labels"]["velero.io/data-upload"]) == 63
    assert meta["name"] == owner.name


def test_building_changes_nothing_that_is_inherited() -> None:
    inherited = template()
    before = repr(inherited)

    backup_pod(template=inherited, settings=PodSettings())

    assert repr(inherited) == before


def test_the_init_pod_has_a_fixed_name() -> None:
    repository = Owner.of(BackupRepository.parse(recorded("backuprepository")))

    assert init_pod()["metadata"]["name"] == init_pod_name(repository) == f"{repository.name}-init"
