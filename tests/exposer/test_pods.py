"""Whole manifests of mover pods, compared with golden files."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from core.contract import MoverMethod, VolumeMode
from core.kube.types import NodeSelectorTerm
from core.models.storage import BackupRepository
from core.models.transfer_settings import Compression
from exposer.manifests import build_backup_claim
from exposer.model import LocatedVolume, Owner
from exposer.pods import (
    build_backup_pod,
    build_init_pod,
    build_pod_volume_pod,
    build_restore_pod,
    build_validation_pod,
    init_pod_name,
)
from exposer.settings import (
    BackupPVCSettings,
    CacheVolume,
    CompressionRules,
    ExposeSettings,
    MoverOptions,
    PodSettings,
    RepositoryMount,
    StorageAccess,
)
from exposer.template import Placement, PlacementRule, PlacementRules
from exposer.workload import build_volume_directory
from tests.exposer.support.inputs import (
    pod_volume_request,
    restore_request,
    snapshot_request,
    template,
)
from tests.support.golden import assert_golden, recorded
from tests.support.objects import JsonDict

ANYWHERE = Placement()
MODE = VolumeMode.FILESYSTEM
OWN_CREDENTIALS = StorageAccess()
AGENT_CREDENTIALS = StorageAccess(inherits_credentials=True)
CACHE = CacheVolume("fast", 5000)


def mode_of(recording: str) -> VolumeMode:
    return VolumeMode.BLOCK if recording.startswith("block") else VolumeMode.FILESYSTEM


def backup_pod(
    recording: str = "dataupload",
    *,
    placement: Placement = ANYWHERE,
    storage: StorageAccess = OWN_CREDENTIALS,
    **changes: Any,
) -> JsonDict:
    request = snapshot_request(recording, **changes)
    claim: JsonDict = build_backup_claim(request, size="2Gi", mode=mode_of(recording))
    return build_backup_pod(request, claim, placement, storage=storage)


def restore_pod(
    recording: str = "datadownload", *, placement: Placement = ANYWHERE, cached: bool = False, **changes: Any
) -> JsonDict:
    request = restore_request(recording, **changes)
    cache = CACHE if cached else None
    return build_restore_pod(request, mode_of(recording), placement=placement, storage=OWN_CREDENTIALS, cache=cache)


def pod_volume_pod(recording: str = "podvolumebackup", *, cached: bool = False, **changes: Any) -> JsonDict:
    tolerations: JsonDict = ({"operator": "Exists", "effect": "NoSchedule"}, {"key": "k", "effect": "NoExecute"})
    request = pod_volume_request(recording, **changes)
    root = request.settings.template.kubelet_root
    pv: JsonDict = {"metadata": {"name": "pvc-3dcf"}, "spec": {"csi": {}}}
    directory = build_volume_directory(root, "e7f1", {"name": "fs"}, pv=pv)
    cache = CACHE if cached else None
    located = LocatedVolume("node-a", directory, tolerations)
    return build_pod_volume_pod(request, located, storage=OWN_CREDENTIALS, cache=cache)


def init_pod(settings: PodSettings | None = None) -> JsonDict:
    repository = BackupRepository.parse(recorded("backuprepository"))
    expose = ExposeSettings(template(), settings or PodSettings())
    return build_init_pod(Owner.of(repository), expose, storage=OWN_CREDENTIALS)


def validation_pod() -> JsonDict:
    location = Owner("velero.io/v1", "BackupStorageLocation", "velero", "default", "uid-of-default")
    return build_validation_pod(location, ExposeSettings(template(), PodSettings()), storage=OWN_CREDENTIALS)


def expression(key: str, *values: str, operator: str = "In") -> JsonDict:
    return {"key": key, "operator": operator, "values": list(values)}


PRIVILEGED = PodSettings(privileged_fs_backup=True)
LOUD = MoverOptions(timedelta(minutes=90), "debug", "json")
READ_ONLY = BackupPVCSettings(read_only=True)
NO_RELABELING = BackupPVCSettings(read_only=True, no_relabeling=True)
WRITABLE_NO_RELABELING = BackupPVCSettings(no_relabeling=True)
ZONES = tuple(
    NodeSelectorTerm(matchExpressions=[expression("topology.kubernetes.io/zone", zone)]) for zone in ("a", "b")
)
RULES = PlacementRules(
    (
        PlacementRule((expression("disk", "ssd"), {"key": "spot", "operator": "DoesNotExist"}), "fast"),
        PlacementRule((expression("pool", "movers"),)),
        PlacementRule((expression("pool", "spare"),)),
    )
)
ANY_RULE = replace(RULES, any_of=True)
CONFIGURED = PodSettings(
    service_account="node-agent-mover",
    priority_class_name="data-mover-low",
    resources={"requests": {"cpu": "500m", "ephemeral-storage": "6Gi"}, "limits": {"memory": "2Gi"}},
    labels={"team": "storage"},
    annotations={"sidecar.istio.io/inject": "false"},
    tolerations=({"key": "storage", "operator": "Exists", "effect": "NoSchedule"},),
)
INHERITING = PodSettings(labels={}, annotations={}, inherit_tolerations=True)
"""Nothing replaced, and all tolerations of the agent."""
PULLING = template(
    imagePullSecrets=[{"name": "pull"}], dnsPolicy="None", dnsConfig={"nameservers": ["10.0.0.1"]}, tolerations=[]
)


@pytest.mark.parametrize("read_only", [False, True])
def test_a_claim_for_one_pod_is_labeled_as_it_is_mounted(*, read_only: bool) -> None:
    request = snapshot_request(backup_pvcs={"hostpath": BackupPVCSettings(one_pod=True, read_only=read_only)})
    claim: JsonDict = build_backup_claim(request, size="2Gi", mode=MODE)
    # Settings may change between the claim and its pod.
    pod = build_backup_pod(snapshot_request(), claim, ANYWHERE, storage=StorageAccess())
    found = claim["spec"]["accessModes"], pod["spec"]["securityContext"].get("seLinuxChangePolicy")
    assert found == ((["ReadOnlyMany"], None) if read_only else (["ReadWriteOncePod"], "MountOption"))


def test_only_a_backup_may_write_to_the_directory_of_a_repository() -> None:
    mount: JsonDict = {"name": "nfs", "mountPath": "/backups"}
    volume: JsonDict = {"name": "nfs", "nfs": {"server": "s", "path": "/"}}
    inherited = replace(template(), volumes=(volume,), volume_mounts=(mount,))
    access = StorageAccess(directory="/backups")
    claim: JsonDict = build_backup_claim(snapshot_request(), size="2Gi", mode=MODE)
    backup = build_backup_pod(snapshot_request(template=inherited), claim, ANYWHERE, storage=access)
    restore = build_restore_pod(restore_request(template=inherited), MODE, placement=ANYWHERE, storage=access)
    mounts = [
        next(m for m in pod["spec"]["containers"][0]["volumeMounts"] if m["name"] == "nfs") for pod in (backup, restore)
    ]
    assert mounts == [mount, mount | {"readOnly": True}]


SHARED = (
    RepositoryMount("/backups", {"persistentVolumeClaim": {"claimName": "shared"}}),
    RepositoryMount("/backups/far", {"nfs": {"server": "nfs.example.com", "path": "/export"}}),
)
"""Shared volumes, of which one is mounted in the other's path."""


def shared_mount(pod: JsonDict) -> tuple[JsonDict, JsonDict] | None:
    """Return the volume with the repository and its mount."""
    spec, name = pod["spec"], "mover-repository"
    volumes = [volume for volume in spec["volumes"] if volume["name"] == name]
    mounts = [mount for mount in spec["containers"][0]["volumeMounts"] if mount["name"] == name]
    assert len(volumes) == len(mounts) <= 1
    return (volumes[0], mounts[0]) if volumes else None


@pytest.mark.parametrize(
    ("directory", "source", "path"),
    [
        ("/backups", {"persistentVolumeClaim": {"claimName": "shared"}}, "/backups"),
        ("/backups/near/", {"persistentVolumeClaim": {"claimName": "shared"}}, "/backups"),
        ("/backups/far/away", {"nfs": {"server": "nfs.example.com", "path": "/export"}}, "/backups/far"),
    ],
)
def test_a_shared_volume_is_mounted_by_the_movers_of_its_locations_and_is_read_only_for_a_restore(
    directory: str, source: JsonDict, path: str
) -> None:
    storage = StorageAccess(directory=directory)
    backup = backup_pod(repository_volumes=SHARED, storage=storage)
    restore = build_restore_pod(restore_request(repository_volumes=SHARED), MODE, placement=ANYWHERE, storage=storage)
    of_a_read_only_location = backup_pod(repository_volumes=SHARED, storage=replace(storage, read_only=True))
    ((kind, fields),) = source.items()
    volume, mount = {"name": "mover-repository", **source}, {"name": "mover-repository", "mountPath": path}
    only_read = ({"name": "mover-repository", kind: {**fields, "readOnly": True}}, mount | {"readOnly": True})

    assert shared_mount(backup) == (volume, mount)
    assert shared_mount(restore) == only_read
    assert shared_mount(of_a_read_only_location) == only_read


@pytest.mark.parametrize("directory", ["", "/backup", "/backups-2", "/backups/../other"])
def test_a_shared_volume_is_not_mounted_by_other_movers(directory: str) -> None:
    assert shared_mount(backup_pod(repository_volumes=SHARED, storage=StorageAccess(directory=directory))) is None


def test_a_shared_volume_replaces_a_mount_of_the_agent_at_its_path() -> None:
    mount: JsonDict = {"name": "nfs", "mountPath": "/backups/"}
    volume: JsonDict = {"name": "nfs", "nfs": {"server": "s", "path": "/"}}
    inherited = replace(template(), volumes=(volume,), volume_mounts=(mount,))

    pod = backup_pod(template=inherited, repository_volumes=SHARED, storage=StorageAccess(directory="/backups"))

    assert shared_mount(pod) is not None
    assert not any(each["name"] == "nfs" for each in pod["spec"]["volumes"])


@pytest.mark.parametrize(
    ("name", "pod"),
    [
        ("pod-backup", backup_pod()),
        ("pod-backup-block", backup_pod("block-dataupload")),
        ("pod-backup-read-only", backup_pod(backup_pvcs={"hostpath": READ_ONLY})),
        ("pod-backup-avoiding-nodes", backup_pod(placement=Placement(avoid_nodes=("node-a", "node-b")))),
        (
            "pod-backup-without-settings",
            backup_pod(template=template(), pod=PodSettings(), mover=LOUD, operation_timeout=LOUD.resource_timeout),
        ),
        ("pod-backup-configured", backup_pod(pod=CONFIGURED)),
        (
            "pod-backup-block-configured",
            backup_pod("block-dataupload", pod=CONFIGURED, backup_pvcs={"hostpath": READ_ONLY}),
        ),
        ("pod-backup-with-credentials-of-the-agent", backup_pod(storage=AGENT_CREDENTIALS)),
        ("pod-backup-inheriting", backup_pod(template=template(), pod=INHERITING)),
        ("pod-backup-pull-secrets-and-dns", backup_pod(template=PULLING)),
        ("pod-backup-no-relabeling", backup_pod(backup_pvcs={"hostpath": NO_RELABELING})),
        ("pod-backup-of-a-ruled-class", backup_pod(placement=Placement(alternatives=RULES.choose("fast")))),
        ("pod-backup-in-any-pool", backup_pod(placement=Placement(alternatives=ANY_RULE.choose("slow")))),
        (
            "pod-backup-in-zones-and-pool",
            backup_pod(placement=Placement(alternatives=RULES.choose("slow"), topology=ZONES, avoid_nodes=("node-c",))),
        ),
        ("pod-restore", restore_pod()),
        ("pod-restore-block", restore_pod("block-datadownload")),
        ("pod-restore-with-cache-on-node", restore_pod(cached=True, placement=Placement(node="node-b"))),
        ("pod-restore-configured", restore_pod(pod=CONFIGURED)),
        ("pod-restore-inheriting", restore_pod(template=template(), pod=INHERITING)),
        ("pod-restore-of-a-ruled-class", restore_pod(placement=Placement(alternatives=RULES.choose("fast")))),
        ("pod-volume-backup", pod_volume_pod()),
        ("pod-volume-backup-configured", pod_volume_pod(pod=CONFIGURED)),
        ("pod-volume-backup-privileged", pod_volume_pod(template=template(), pod=PRIVILEGED, mover=LOUD)),
        ("pod-volume-restore", pod_volume_pod("podvolumerestore")),
        ("pod-volume-restore-configured", pod_volume_pod("podvolumerestore", pod=CONFIGURED)),
        ("pod-volume-restore-inheriting", pod_volume_pod("podvolumerestore", template=template(), pod=INHERITING)),
        ("pod-volume-restore-with-cache", pod_volume_pod("podvolumerestore", cached=True)),
        ("pod-init-repository", init_pod()),
        ("pod-init-repository-configured", init_pod(CONFIGURED)),
        ("pod-validate-location", validation_pod()),
    ],
)
def test_a_pod_is_its_golden_manifest(name: str, pod: JsonDict) -> None:
    assert_golden(name, pod)


def test_a_mover_is_told_what_is_about_its_direction() -> None:
    """One that makes snapshots knows the cluster, and one that restores what is required."""
    mover = MoverOptions(cluster="uid-1", require_attributes=True)
    pods = {
        "data-upload": backup_pod(mover=mover),
        "data-download": restore_pod(mover=mover),
        "pod-volume-backup": pod_volume_pod(mover=mover),
        "pod-volume-restore": pod_volume_pod("podvolumerestore", mover=mover),
    }
    informed = {kind for kind, pod in pods.items() if "--cluster=uid-1" in pod["spec"]["containers"][0]["args"]}
    assert informed == {"data-upload", "pod-volume-backup"}
    strict = {kind for kind, pod in pods.items() if "--require-attributes" in pod["spec"]["containers"][0]["args"]}
    assert strict == {"data-download", "pod-volume-restore"}


def test_settings_without_effect_build_the_same_pod() -> None:
    """An empty set of labels replaces none, and no relabeling requires a read-only volume."""
    assert backup_pod(backup_pvcs={"hostpath": WRITABLE_NO_RELABELING}) == backup_pod()
    bare = PodSettings()
    assert restore_pod(pod=replace(bare, labels={}, annotations={})) == restore_pod(pod=bare)


def test_every_inherited_mount_has_its_volume() -> None:
    for pod in (backup_pod(), restore_pod(cached=True), init_pod()):
        volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
        mounts = {mount["name"] for mount in pod["spec"]["containers"][0]["volumeMounts"]}
        assert mounts <= volumes


def test_a_long_name_is_shortened_in_the_label() -> None:
    request = snapshot_request()
    owner = Owner("velero.io/v2alpha1", "DataUpload", "velero", "n" * 200, request.owner.uid)

    meta = backup_pod(owner=owner)["metadata"]

    assert len(meta["labels"]["velero.io/data-upload"]) == 63
    assert meta["name"] == owner.name


def test_building_does_not_modify_inherited_fields() -> None:
    inherited = template()
    before = repr(inherited)

    backup_pod(template=inherited, pod=PodSettings())

    assert repr(inherited) == before


def test_the_init_pod_has_a_fixed_name() -> None:
    repository = Owner.of(BackupRepository.parse(recorded("backuprepository")))

    assert init_pod()["metadata"]["name"] == init_pod_name(repository) == f"{repository.name}-init"


def _algorithms(pod: JsonDict) -> list[str]:
    return [word for word in pod["spec"]["containers"][0]["args"] if word.startswith("--compression=")]


@pytest.mark.parametrize(
    ("by_class", "flags"),
    [("zstd", ["--compression=zstd"]), ("none", []), ("", ["--compression=s2-default"])],
    ids=["of the class", "not of the class", "of no class"],
)
def test_a_backup_is_compressed_as_its_class_is(by_class: str, flags: list[str]) -> None:
    classes = {name: Compression(by_class) for name in ("standard", "fast") if by_class}
    settings = ExposeSettings(template(), compression=CompressionRules(Compression.S2, classes))
    upload = replace(snapshot_request(), storage_class="fast")
    claim: JsonDict = build_backup_claim(upload, size="2Gi", mode=MODE)
    upload, backup = replace(upload, settings=settings), replace(pod_volume_request(), settings=settings)
    located = LocatedVolume("node-a", "/directory", storage_class="fast")

    assert _algorithms(build_backup_pod(upload, claim, ANYWHERE, storage=OWN_CREDENTIALS)) == flags
    assert _algorithms(build_pod_volume_pod(backup, located, storage=OWN_CREDENTIALS)) == flags


def test_transfers_are_told_how_to_run_kopia_unless_it_is_plain() -> None:
    for mover, flags in ((MoverMethod.PLAIN, []), (MoverMethod.ONE_OPEN, ["--mover=one-open"])):
        settings = ExposeSettings(template(), mover=MoverOptions(method=mover))
        upload = replace(snapshot_request(), settings=settings)
        backup, back = (
            replace(one, settings=settings) for one in (pod_volume_request(), pod_volume_request("podvolumerestore"))
        )
        claim: JsonDict = build_backup_claim(upload, size="2Gi", mode=MODE)
        located = LocatedVolume("node-a", "/directory")
        pods = (
            build_backup_pod(upload, claim, ANYWHERE, storage=OWN_CREDENTIALS),
            build_pod_volume_pod(backup, located, storage=OWN_CREDENTIALS),
            build_pod_volume_pod(back, located, storage=OWN_CREDENTIALS),
        )
        found = [[word for word in pod["spec"]["containers"][0]["args"] if "--mover" in word] for pod in pods]
        assert found == [flags] * 3


def test_rules_in_files_and_all_files_are_read_in_backups_of_the_namespaces_that_are_named() -> None:
    allowed = frozenset({snapshot_request().source_namespace, pod_volume_request().workload.namespace})
    for namespaces in (allowed, frozenset[str]()):
        settings = ExposeSettings(template(), ignore_files_namespaces=namespaces, read_all_files_namespaces=namespaces)
        upload = replace(snapshot_request(), settings=settings)
        backup, back = (
            replace(one, settings=settings) for one in (pod_volume_request(), pod_volume_request("podvolumerestore"))
        )
        claim: JsonDict = build_backup_claim(upload, size="2Gi", mode=MODE)
        located = LocatedVolume("node-a", "/directory")
        pods = (
            build_backup_pod(upload, claim, ANYWHERE, storage=OWN_CREDENTIALS),
            *(build_pod_volume_pod(one, located, storage=OWN_CREDENTIALS) for one in (backup, back)),
        )
        for flag in ("--ignore-files", "--read-all-files"):
            flags = [flag in pod["spec"]["containers"][0]["args"] for pod in pods]
            assert flags == [bool(namespaces), bool(namespaces), False]


def test_a_restore_is_given_no_algorithm() -> None:
    settings = ExposeSettings(template(), compression=CompressionRules(Compression.ZSTD))
    download = replace(restore_request(), settings=settings)
    back = replace(pod_volume_request("podvolumerestore"), settings=settings)

    assert not _algorithms(build_restore_pod(download, MODE, placement=ANYWHERE, storage=OWN_CREDENTIALS))
    assert not _algorithms(build_pod_volume_pod(back, LocatedVolume("node-a", "/d"), storage=OWN_CREDENTIALS))
