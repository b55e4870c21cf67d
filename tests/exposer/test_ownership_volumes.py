"""Volumes of exposes: none that was provisioned outlives its transfer, and none that existed before is changed."""

from collections.abc import Awaitable, Callable

import pytest

from core.errors import ExposeError
from core.kube.resources import (
    EVENTS,
    PERSISTENT_VOLUME_CLAIMS,
    PERSISTENT_VOLUMES,
    PODS,
    VOLUME_SNAPSHOT_CONTENTS,
    VOLUME_SNAPSHOTS,
)
from core.kube.transport import Request, Response
from core.models.names import SELECTED_NODE_ANNOTATION
from exposer.manifests import VOLUME_ANNOTATION
from exposer.model import NotOwnerError, Pending
from exposer.ownership import is_being_provisioned, is_provisioned
from tests.exposer.support.cuts import Cut, cut_short
from tests.exposer.support.scenes import BackupScene, RestoreScene
from tests.exposer.support.steps import (
    AnyScene,
    GuardAt,
    begun,
    bind_target_elsewhere,
    clean_up,
    collect,
    ensure,
    expose,
    remove_target,
    volume,
)
from tests.exposer.support.world import World
from tests.support.objects import JsonDict

by_scene = pytest.mark.parametrize("build", [BackupScene, RestoreScene], ids=["backup", "restore"])
by_end = pytest.mark.parametrize("end", [clean_up, collect], ids=["cleaned up", "collected"])
End = Callable[[AnyScene], Awaitable[None]]


class Meanwhile(Cut):
    """A transport that deletes a PVC only after the controllers have run."""

    def __init__(self, world: World) -> None:
        super().__init__(world.kube)
        self._world = world

    async def request(self, request: Request) -> Response:
        if request.method == "DELETE" and PERSISTENT_VOLUME_CLAIMS.plural in request.path:
            await self._world.settle()
        return await super().request(request)


async def writes_of(build: type[AnyScene]) -> list[int]:
    scene = build(reclaim="Retain")
    cut = Cut(scene.world.kube)
    await expose(scene, cut)
    return [number for number, call in enumerate(cut.calls, start=1) if not call.startswith("GET")]


@by_scene
@pytest.mark.parametrize("provisioned", [True, False], ids=["provisioned", "being provisioned"])
@by_end
async def test_no_volume_is_left_when_a_transfer_ends_after_any_write(
    build: type[AnyScene], provisioned: bool, end: End
) -> None:
    for at in await writes_of(build):
        scene = build(reclaim="Retain")
        scene.world.provisions = provisioned
        assert await cut_short(expose(scene, Cut(scene.world.kube, at, applied=True)))
        await scene.world.settle()
        if not provisioned:
            await clean_up_once(scene)
            scene.world.provisions = True
        await end(scene)
        assert scene.world.disks == set()
        assert scene.world.violations == []
        assert not any("PersistentVolume /" in name for name in scene.world.names())


async def clean_up_once(scene: AnyScene, transport: Cut | None = None) -> Pending | None:
    found = await scene.exposer(transport).clean_up(scene.request)  # type: ignore[arg-type] # its own
    await scene.world.settle()
    return found


@pytest.mark.parametrize(
    ("build", "at"), [*((BackupScene, at) for at in range(1, 7)), *((RestoreScene, at) for at in range(1, 4))]
)
async def test_no_volume_is_left_by_an_expose_that_outlives_its_transfer(build: type[AnyScene], at: int) -> None:
    scene = build(reclaim="Retain")
    with pytest.raises(NotOwnerError):
        await expose(scene, guard=GuardAt(at, ended=True))
    await collect(scene)
    assert scene.world.disks == set()


@pytest.mark.parametrize("provisioned", [True, False], ids=["provisioned", "being provisioned"])
@pytest.mark.parametrize(("build", "creates_pod"), [(BackupScene, 5), (RestoreScene, 2)], ids=["backup", "restore"])
async def test_no_volume_is_left_by_a_later_expose_that_outlives_its_transfer(
    build: type[AnyScene], creates_pod: int, provisioned: bool
) -> None:
    """An earlier one has created the PVC, and no pod."""
    scene = build(reclaim="Retain")
    scene.world.provisions = provisioned
    for guard in (GuardAt(creates_pod, ended=False), GuardAt(1, ended=True)):
        with pytest.raises(NotOwnerError):
            await expose(scene, guard=guard)
        await scene.world.settle()
    scene.world.provisions = True
    await collect(scene)
    assert scene.world.disks == set()
    assert scene.world.violations == []


async def begin_provisioning(scene: AnyScene) -> JsonDict:
    """Expose until a provisioner is asked for the volume, and does not answer; return the PVC."""
    scene.world.provisions = False
    await cut_short(expose(scene, Cut(scene.world.kube, 60)))
    return scene.world.find(PERSISTENT_VOLUME_CLAIMS, scene.request.owner.name)


async def end_provisioning(scene: AnyScene) -> None:
    """Let the provisioner answer, and clean up."""
    scene.world.provisions = True
    await scene.world.settle()
    await clean_up(scene)
    assert scene.world.disks == set()
    assert scene.world.violations == []


async def test_a_claim_whose_provisioning_begins_before_it_is_deleted_is_kept() -> None:
    scene = RestoreScene(reclaim="Retain")
    scene.world.provisions = False
    await ensure(scene)
    for _ in range(3):
        await scene.exposer(Meanwhile(scene.world)).clean_up(scene.request)
    await end_provisioning(scene)


async def test_a_claim_whose_node_has_no_room_is_deleted() -> None:
    """The provisioner has removed the node, for the scheduler to select another one."""
    scene = BackupScene(reclaim="Retain", binding="WaitForFirstConsumer")
    claim = await begin_provisioning(scene)
    assert await is_being_provisioned(scene.world.client, claim)
    place = f"velero/{scene.request.owner.name}"
    await scene.world.patch(PERSISTENT_VOLUME_CLAIMS, place, annotations={SELECTED_NODE_ANNOTATION: None})
    await clean_up(scene)
    assert scene.world.handles == {"other"}


@pytest.mark.parametrize(
    ("code", "delete", "retain"),
    [
        pytest.param(None, True, True, id="it was not answered before"),
        pytest.param("Aborted", True, True, id="it goes on"),
        pytest.param("DeadlineExceeded", True, True, id="it has not answered"),
        pytest.param("Internal", False, True, id="it may mean anything"),
        pytest.param("ResourceExhausted", False, False, id="it refuses"),
    ],
)
@pytest.mark.parametrize("reclaim", ["Delete", "Retain"])
async def test_a_claim_is_kept_while_its_driver_may_copy_the_snapshot(
    reclaim: str, code: str | None, *, delete: bool, retain: bool
) -> None:
    """Without PVC and snapshot, the provisioner would not ask again, and a volume that is complete later would stay."""
    scene, kept = BackupScene(reclaim=reclaim), delete if reclaim == "Delete" else retain
    claim = await begin_provisioning(scene)
    errors = [f"rpc error: code = {found} desc = clone" for found in ("NotFound", code) if code]
    reported = [("Provisioning", "for the first time"), *(("ProvisioningFailed", error) for error in errors)]
    for second, (reason, message) in enumerate(reported):
        scene.world.put(
            EVENTS,
            f"event-{second}",
            namespace="velero",
            involvedObject={"uid": claim["metadata"]["uid"]},
            reason=reason,
            message=message,
            lastTimestamp=f"2026-11-21T12:00:0{second}Z",
        )
    for _ in range(4):
        await clean_up_once(scene)
    left = {"PersistentVolumeClaim velero/b1-q9txn", "VolumeSnapshot velero/b1-q9txn"} & scene.world.names()
    assert len(left) == (2 if kept else 0)
    if kept:
        await end_provisioning(scene)


@by_end
async def test_what_a_provisioner_without_a_volume_leaves_on_the_snapshot_keeps_nothing(end: End) -> None:
    scene = BackupScene()
    await begin_provisioning(scene)
    left = ["provisioner.storage.kubernetes.io/volumesnapshot-as-source-protection"]
    await scene.world.patch(VOLUME_SNAPSHOTS, f"velero/{scene.request.owner.name}", finalizers=left)
    await end(scene)
    assert "VolumeSnapshot velero/b1-q9txn" not in scene.world.names()
    assert scene.world.handles == {"other"}


async def test_a_claim_that_is_being_provisioned_is_reported() -> None:
    scene = RestoreScene(reclaim="Retain")
    await begin_provisioning(scene)
    text = "PersistentVolumeClaim velero/r2-9nft8 is being provisioned, will be deleted with its volume"
    assert [await clean_up_once(scene) for _ in range(3)][-1] == Pending("CleaningUp", text)
    await end_provisioning(scene)


@pytest.mark.parametrize("reclaim", ["Delete", "Retain"])
async def test_a_claim_that_is_not_being_provisioned_is_deleted_at_once(reclaim: str) -> None:
    """Not before a provisioner was asked, nor where the volume is reclaimed by its own policy."""
    scene = RestoreScene(reclaim=reclaim)
    scene.world.provisions = False
    await ensure(scene)
    if reclaim == "Delete":
        await scene.world.settle()
    await clean_up(scene)
    await end_provisioning(scene)
    assert "PersistentVolumeClaim velero/r2-9nft8" not in scene.world.names()


UID = "067d6f98-aeaa-4bf8-93d7-24a9f1508ec3"
PROVISIONED_BY = {"pv.kubernetes.io/provisioned-by": "hostpath.csi.k8s.io"}
BOUND_BY_CONTROLLER = {"pv.kubernetes.io/bound-by-controller": "yes"}


@pytest.mark.parametrize(
    ("name", "annotations", "provisioned"),
    [
        pytest.param(f"pvc-{UID}", PROVISIONED_BY, True, id="provisioned"),
        pytest.param(f"vol-{UID}", BOUND_BY_CONTROLLER, True, id="provisioned by the volume controller itself"),
        pytest.param("csivol-067d6f98ae", PROVISIONED_BY, True, id="provisioned, with a short name"),
        pytest.param("csivol-067d6f98ae", PROVISIONED_BY | BOUND_BY_CONTROLLER, False, id="released and bound again"),
        pytest.param("pvc-40d5", PROVISIONED_BY | BOUND_BY_CONTROLLER, False, id="of another PVC"),
        pytest.param("disk-7", BOUND_BY_CONTROLLER, False, id="static"),
        pytest.param("disk-7", {}, False, id="static, bound by its reference"),
    ],
)
def test_a_volume_is_provisioned_if_it_was_created_for_its_pvc(
    name: str, annotations: dict[str, str], provisioned: bool
) -> None:
    reference = {"namespace": "velero", "name": "du-1", "uid": UID}
    found: JsonDict = {"metadata": {"name": name, "annotations": annotations}, "spec": {"claimRef": reference}}
    assert is_provisioned(found) is provisioned
    assert not is_provisioned(found | {"spec": {}}), "without a PVC"


async def expose_found(scene: AnyScene, *, policy: str = "Retain") -> None:
    """Expose in a cluster where a volume of the same class is Available, which Kubernetes then binds."""
    scene.world.put_available("precious", policy=policy)
    await expose(scene)


def policy_of(scene: AnyScene) -> str:
    return str(volume(scene, "precious")["spec"]["persistentVolumeReclaimPolicy"])


@by_end
@by_scene
async def test_a_volume_that_existed_before_outlives_the_transfer(build: type[AnyScene], end: End) -> None:
    scene = build()
    await expose_found(scene)
    await end(scene)
    assert policy_of(scene) == "Retain"
    assert scene.world.disks == {"precious"}
    assert {name for name in scene.world.names() if "velero/" in name or "VolumeSnapshotContent /b1" in name} == set()


async def test_only_a_volume_that_was_created_from_the_snapshot_confirms_its_backup() -> None:
    """Others than CSI drivers ignore that the PVC names a snapshot: the backup of an empty volume would be complete."""
    scene = BackupScene()
    await expose_found(scene)
    text = (
        "^PersistentVolumeClaim velero/b1-q9txn was bound to the existing PersistentVolume precious, "
        "which was not created from VolumeSnapshot velero/b1-q9txn$"
    )
    with pytest.raises(ExposeError, match=text):
        await scene.exposer().confirm(scene.request)
    scene = BackupScene()
    await expose(scene)
    await scene.exposer().confirm(scene.request)
    (found,) = scene.world.kube.objects(PERSISTENT_VOLUMES)
    nfs = {"csi": None, "nfs": {"server": "s", "path": "/"}}
    await scene.world.patch(PERSISTENT_VOLUMES, found["metadata"]["name"], spec=nfs)
    with pytest.raises(ExposeError, match=r"not created from .*/b1-q9txn: StorageClass hostpath is of no CSI driver$"):
        await scene.exposer().confirm(scene.request)
    migrated = {"pv.kubernetes.io/migrated-to": "ebs.csi.aws.com"}
    await scene.world.patch(PERSISTENT_VOLUME_CLAIMS, "velero/b1-q9txn", annotations=migrated)
    await scene.exposer().confirm(scene.request)


@pytest.mark.parametrize("policy", ["Delete", "Retain"])
async def test_a_restore_into_a_volume_that_existed_before_is_bound_to_the_target(policy: str) -> None:
    scene = RestoreScene()
    await expose_found(scene, policy=policy)
    await (await begun(scene)).carry()
    given = volume(scene, "precious")
    assert given["spec"]["claimRef"]["uid"] == "uid-data"
    assert given["spec"]["persistentVolumeReclaimPolicy"] == policy
    assert "nodeagent.io/owner-uid" not in given["metadata"]["labels"]


@pytest.mark.parametrize("steps", range(4))
@pytest.mark.parametrize("lost", [remove_target, bind_target_elsewhere])
async def test_a_volume_that_existed_before_outlives_a_failed_rebind(
    lost: Callable[[RestoreScene], Awaitable[None]], steps: int
) -> None:
    scene = RestoreScene()
    await expose_found(scene)
    one = await begun(scene)
    for _ in range(steps):
        await scene.exposer().rebind(scene.request, one.kept)
    await lost(scene)
    await one.drop()
    await clean_up(scene)
    await collect(scene)
    assert policy_of(scene) == "Retain"
    assert scene.world.disks == {"precious"}
    assert "PersistentVolumeClaim velero/r2-9nft8" not in scene.world.names()


@pytest.mark.parametrize("collected", [False, True], ids=["cleaned up", "collected"])
async def test_a_recorded_volume_whose_pvc_others_have_deleted_is_not_left(*, collected: bool) -> None:
    scene = BackupScene(reclaim="Retain")
    await expose(scene)
    client, name = scene.world.client, scene.request.owner.name
    (found,) = scene.world.kube.objects(PERSISTENT_VOLUMES)
    recorded = {"metadata": {"annotations": {VOLUME_ANNOTATION: found["metadata"]["name"]}}}
    await client.patch(VOLUME_SNAPSHOT_CONTENTS, "", name, recorded)
    for resource in (PODS, PERSISTENT_VOLUME_CLAIMS):
        await client.delete(resource, "velero", name)
        await scene.world.settle()
    assert volume(scene, found["metadata"]["name"])["status"]["phase"] == "Released"
    await (collect(scene) if collected else clean_up(scene))
    assert scene.world.disks == set()
    assert scene.world.violations == []
