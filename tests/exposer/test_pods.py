"""Whole manifests of mover pods, compared with golden files."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from core.contract import MoverMethod, VolumeMode
from core.kube.types import NodeSelectorTerm
from core.models.storage import BackupRepository
from core.models.transfer_settings import Compression, Exclusions
from exposer.manifests import build_backup_claim
from exposer.model import LocatedVolume, Owner
from exposer.pod_manifest import Placement
from exposer.pods import build_backup_pod, build_init_pod, build_pod_volume_pod, build_restore_pod, build_validation_pod
from exposer.settings import (
    BackupPVCSettings,
    CacheVolume,
    CompressionRules,
    ExclusionRule,
    ExclusionRules,
    ExposeSettings,
    MoverOptions,
    PlacementRule,
    PlacementRules,
    PodSettings,
    RepositoryMount,
    StorageAccess,
)
from exposer.template import AgentTemplate
from tests.exposer.support.inputs import pod_volume_request, restore_request, snapshot_request, template
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
    excluded: str | None = None,
    **changes: Any,
) -> JsonDict:
    request = snapshot_request(recording, **changes)
    claim: JsonDict = build_backup_claim(request, size="2Gi", mode=mode_of(recording))
    return build_backup_pod(request, claim, placement, storage=storage, excluded=excluded)


def restore_pod(
    recording: str = "datadownload",
    *,
    placement: Placement = ANYWHERE,
    storage: StorageAccess = OWN_CREDENTIALS,
    cached: bool = False,
    **changes: Any,
) -> JsonDict:
    request, cache = restore_request(recording, **changes), CACHE if cached else None
    return build_restore_pod(request, mode_of(recording), placement=placement, storage=storage, cache=cache)


def pod_volume_pod(
    recording: str = "podvolumebackup", *, cached: bool = False, storage_class: str | None = None, **changes: Any
) -> JsonDict:
    tolerations: JsonDict = ({"operator": "Exists", "effect": "NoSchedule"}, {"key": "k", "effect": "NoExecute"})
    directory = "/var/lib/kubelet/pods/e7f1/volumes/kubernetes.io~csi/pvc-3dcf/mount"
    located = LocatedVolume("node-a", directory, tolerations, storage_class)
    request, cache = pod_volume_request(recording, **changes), CACHE if cached else None
    return build_pod_volume_pod(request, located, storage=OWN_CREDENTIALS, cache=cache)


BARE = ExposeSettings(template(), PodSettings())
REPOSITORY = Owner.of(BackupRepository.parse(recorded("backuprepository")))
LOCATION = Owner("velero.io/v1", "BackupStorageLocation", "velero", "default", "uid-of-default")


def expression(key: str, *values: str, operator: str = "In") -> JsonDict:
    return {"key": key, "operator": operator, "values": list(values)}


PRIVILEGED = PodSettings(privileged_fs_backup=True)
LOUD = MoverOptions(timedelta(minutes=90), "debug", "json")
TWO_GIB = PodSettings(resources={"limits": {"ephemeral-storage": "2Gi"}})
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


def inheriting(path: str) -> AgentTemplate:
    """Return the template of an agent that has a share of NFS at this path."""
    volume: JsonDict = {"name": "nfs", "nfs": {"server": "s", "path": "/"}}
    mount: JsonDict = {"name": "nfs", "mountPath": path}
    return replace(template(), volumes=(volume,), volume_mounts=(mount,))


def test_only_a_backup_may_write_to_the_directory_of_a_repository() -> None:
    access, mount = StorageAccess(directory="/backups"), {"name": "nfs", "mountPath": "/backups"}
    for build, expected in ((backup_pod, mount), (restore_pod, mount | {"readOnly": True})):
        pod = build(template=inheriting("/backups"), storage=access)
        assert expected in pod["spec"]["containers"][0]["volumeMounts"]


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
    ((kind, fields),) = source.items()
    volume, mount = {"name": "mover-repository", **source}, {"name": "mover-repository", "mountPath": path}
    only_read = ({"name": "mover-repository", kind: {**fields, "readOnly": True}}, mount | {"readOnly": True})
    assert shared_mount(backup_pod(repository_volumes=SHARED, storage=storage)) == (volume, mount)
    assert shared_mount(restore_pod(repository_volumes=SHARED, storage=storage)) == only_read
    of_a_read_only_location = replace(storage, read_only=True)
    assert shared_mount(backup_pod(repository_volumes=SHARED, storage=of_a_read_only_location)) == only_read


@pytest.mark.parametrize("directory", ["", "/backup", "/backups-2", "/backups/../other"])
def test_a_shared_volume_is_not_mounted_by_other_movers(directory: str) -> None:
    assert shared_mount(backup_pod(repository_volumes=SHARED, storage=StorageAccess(directory=directory))) is None


def test_a_shared_volume_replaces_a_mount_of_the_agent_at_its_path() -> None:
    storage, inherited = StorageAccess(directory="/backups"), inheriting("/backups/")
    pod = backup_pod(template=inherited, repository_volumes=SHARED, storage=storage)
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
        ("pod-volume-backup", pod_volume_pod()),
        ("pod-volume-backup-privileged", pod_volume_pod(template=template(), pod=PRIVILEGED, mover=LOUD)),
        ("pod-volume-restore", pod_volume_pod("podvolumerestore")),
        ("pod-volume-restore-with-cache", pod_volume_pod("podvolumerestore", cached=True)),
        ("pod-init-repository", build_init_pod(REPOSITORY, BARE, storage=OWN_CREDENTIALS)),
        ("pod-validate-location", build_validation_pod(LOCATION, BARE, storage=OWN_CREDENTIALS)),
    ],
)
def test_a_pod_is_its_golden_manifest(name: str, pod: JsonDict) -> None:
    assert_golden(name, pod)


def arguments(storage_class: str | None = None, **settings: Any) -> list[list[str]]:
    """Return the arguments of the movers of all kinds, of volumes of that class: two backups, then two restores."""
    of_class: dict[str, Any] = {} if storage_class is None else {"storage_class": storage_class}
    pods = (
        backup_pod(**of_class, **settings),
        pod_volume_pod(storage_class=storage_class, **settings),
        restore_pod(**settings),
        pod_volume_pod("podvolumerestore", **settings),
    )
    return [pod["spec"]["containers"][0]["args"] for pod in pods]


BACKUPS, RESTORES = [True, True, False, False], [False, False, True, True]
NAMESPACES = frozenset({snapshot_request().source_namespace, pod_volume_request().workload.namespace})
ZSTD = dict.fromkeys(("standard", "fast"), Compression.ZSTD)


@pytest.mark.parametrize(
    ("settings", "flag", "given"),
    [
        ({"mover": MoverOptions(cluster="uid-1")}, "--cluster=uid-1", BACKUPS),
        ({"mover": MoverOptions(require_attributes=True)}, "--require-attributes", RESTORES),
        ({"ignore_files_namespaces": NAMESPACES}, "--ignore-files", BACKUPS),
        ({"read_all_files_namespaces": NAMESPACES}, "--read-all-files", BACKUPS),
        ({"compression": CompressionRules(Compression.S2)}, "--compression=s2-default", BACKUPS),
        ({"compression": CompressionRules(Compression.S2, ZSTD)}, "--compression=zstd", BACKUPS),
        (
            {"exclusions": ExclusionRules((ExclusionRule(Exclusions(patterns=("a",))),))},
            '--exclude={"patterns":["a"]}',
            BACKUPS,
        ),
        ({"pod": TWO_GIB}, "--cache-limit-mib=1706", [True] * 4),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mover_is_told_what_is_about_its_direction(settings: dict[str, Any], flag: str, given: list[bool]) -> None:
    """One that makes snapshots knows the cluster, and one that restores what is required."""
    assert [flag in args for args in arguments("fast", **settings)] == given
    name = flag.partition("=")[0]
    assert [any(word.startswith(name) for word in args) for args in arguments("fast", **settings)] == given
    assert not any(word.startswith(name) for args in arguments("fast") for word in args)


@pytest.mark.parametrize(("method", "flags"), [(MoverMethod.PLAIN, []), (MoverMethod.ONE_OPEN, ["--mover=one-open"])])
def test_transfers_are_told_how_to_run_kopia_unless_it_is_plain(method: MoverMethod, flags: list[str]) -> None:
    for args in arguments(mover=MoverOptions(method=method)):
        assert [word for word in args if word.startswith("--mover")] == flags


def test_a_class_may_be_excepted_from_compression() -> None:
    rules = CompressionRules(Compression.S2, {"fast": Compression.NONE})
    assert not any(word.startswith("--compression") for args in arguments("fast", compression=rules) for word in args)


def test_the_annotation_of_a_pvc_adds_to_the_rules_for_its_namespace_and_class() -> None:
    namespace = snapshot_request().source_namespace
    rules = ExclusionRules(
        (
            ExclusionRule(Exclusions(patterns=("a",))),
            ExclusionRule(Exclusions(patterns=("b",)), frozenset({namespace}), frozenset({"fast"})),
            ExclusionRule(Exclusions(patterns=("c",)), frozenset({"other"})),
        ),
        frozenset({namespace}),
    )
    pod = backup_pod(storage_class="fast", exclusions=rules, excluded="d\n!e")
    assert '--exclude={"patterns":["a","b","d"]}' in pod["spec"]["containers"][0]["args"]
    foreign = replace(rules, annotation_namespaces=frozenset())
    assert foreign.exclude(namespace, "slow", "d") == '{"patterns":["a"]}'
    assert ExclusionRules().exclude(namespace, "slow", "d") is None


def test_a_pattern_of_a_tenant_names_no_variable_of_the_data_mover() -> None:
    """Kubernetes would put its value, such as a key of the storage, into the rules."""
    rules = ExclusionRules(annotation_namespaces=NAMESPACES)
    pod = backup_pod(exclusions=rules, excluded="$(AWS_SECRET_ACCESS_KEY)\n~$a")
    assert '--exclude={"patterns":["$$(AWS_SECRET_ACCESS_KEY)","~$$a"]}' in pod["spec"]["containers"][0]["args"]


def test_settings_without_effect_build_the_same_pod() -> None:
    """An empty set of labels replaces none, and no relabeling requires a read-only volume."""
    assert backup_pod(backup_pvcs={"hostpath": WRITABLE_NO_RELABELING}) == backup_pod()
    bare = PodSettings()
    assert restore_pod(pod=replace(bare, labels={}, annotations={})) == restore_pod(pod=bare)


def test_a_long_name_is_shortened_in_the_label() -> None:
    owner = replace(snapshot_request().owner, name="n" * 200)
    meta = backup_pod(owner=owner)["metadata"]
    assert len(meta["labels"]["velero.io/data-upload"]) == 63
    assert meta["name"] == owner.name


def test_building_does_not_modify_inherited_fields() -> None:
    inherited = template()
    before = repr(inherited)
    backup_pod(template=inherited, pod=PodSettings())
    assert repr(inherited) == before
