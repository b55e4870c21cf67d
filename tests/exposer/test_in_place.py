"""Restore into an existing volume: what takes it, what gives it back, and what uses it."""

from dataclasses import replace
from typing import Any

import pytest

from core.errors import ExposeError
from core.kube.resources import PERSISTENT_VOLUME_CLAIMS, PERSISTENT_VOLUMES, PODS, VOLUME_ATTACHMENTS
from core.models.base import JsonDict
from core.models.names import IN_PLACE_CLAIM_ANNOTATION, IN_PLACE_LABEL, OWNER_UID_LABEL
from exposer.leaked_objects import delete_leaked_objects, list_leaked_objects
from exposer.model import KeptVolume, NotOwnerError, Pending
from tests.exposer.support.restore_steps import claim, clean_up, expose, rebind, volume
from tests.exposer.support.scenes import RestoreScene
from tests.exposer.support.world import CUTS, Cut, cut_short

OLD = "pv-old"
TARGET = "PersistentVolumeClaim app3/data"
LEFT = {"PersistentVolumeClaim app3/bystander", TARGET, f"PersistentVolume /{OLD}"}


def in_place(*, policy: str = "Retain", **spec: Any) -> RestoreScene:
    scene = RestoreScene()
    scene.put_existing(policy=policy, **spec)
    return scene


async def give_back(scene: RestoreScene, transport: Cut | None = None) -> None:
    exposer = scene.exposer(transport)
    await scene.world.until_none(lambda: exposer.give_back(scene.request))


async def restore(scene: RestoreScene, transport: Cut | None = None, kept: KeptVolume | None = None) -> KeptVolume:
    if kept is None:
        await expose(scene, transport)
        kept = await scene.exposer(transport).read_volume(scene.request)
    await rebind(scene, kept, transport)
    await clean_up(scene, transport)
    return kept


def assert_returned(scene: RestoreScene, *, policy: str = "Retain") -> None:
    """Assert that the target has its volume again, and nothing tells of the restore."""
    target, given = claim(scene, "app3", "data"), volume(scene, OLD)
    assert scene.world.names() == LEFT
    assert scene.world.disks == {OLD}
    assert target["spec"]["volumeName"] == OLD
    assert target["status"]["phase"] == given["status"]["phase"] == "Bound"
    assert given["spec"]["claimRef"]["uid"] == target["metadata"]["uid"]
    assert_unmarked(given, policy=policy)


def assert_unmarked(given: JsonDict, *, policy: str) -> None:
    assert given["spec"]["persistentVolumeReclaimPolicy"] == policy
    marks = {**given["metadata"].get("labels", {}), **given["metadata"].get("annotations", {})}
    assert [key for key in marks if key.startswith("nodeagent.io/")] == []


@pytest.mark.parametrize("policy", ["Delete", "Retain"])
async def test_an_existing_volume_is_restored_into_and_returns_to_its_pvc(policy: str) -> None:
    scene = in_place(policy=policy)

    exposed = await expose(scene)
    lent, restored = volume(scene, OLD), claim(scene, "velero", "r2-9nft8")
    kept = await scene.exposer().read_volume(scene.request)
    await restore(scene, kept=kept)

    assert exposed.pod["status"]["phase"] == "Running"
    assert lent["spec"]["persistentVolumeReclaimPolicy"] == "Retain"
    assert lent["spec"]["claimRef"]["uid"] == restored["metadata"]["uid"]
    assert restored["spec"]["volumeName"] == OLD
    assert kept == KeptVolume(OLD, policy, provisioned=False)
    assert_returned(scene, policy=policy)


async def test_a_volume_that_is_not_retained_is_retained_until_it_returns() -> None:
    reserved = {"namespace": "app3", "name": "data"}
    scene = in_place(claimRef=reserved, persistentVolumeReclaimPolicy="Delete")

    await expose(scene)
    assert volume(scene, OLD)["spec"]["persistentVolumeReclaimPolicy"] == "Retain"
    await restore(scene)

    assert_returned(scene, policy="Delete")


@CUTS
async def test_a_restore_interrupted_at_any_request_continues(applied: bool) -> None:
    at, cut = 0, True
    while cut:
        at, scene, kept = at + 1, in_place(policy="Delete"), None
        transport = Cut(scene.world.kube, at, applied=applied)
        cut = await cut_short(expose(scene, transport))
        if not cut:
            kept = await scene.exposer().read_volume(scene.request)
            cut = await cut_short(restore(scene, transport, kept))
        await scene.world.settle()

        await restore(scene, kept=kept)

        assert_returned(scene, policy="Delete")
    assert at > 20


@pytest.mark.parametrize("policy", ["Delete", "Retain"])
@CUTS
async def test_the_volume_is_given_back_whenever_the_restore_ends(applied: bool, policy: str) -> None:
    at, cut = 0, True
    while cut:
        at, scene = at + 1, in_place(policy=policy)
        cut = await cut_short(restore(scene, Cut(scene.world.kube, at, applied=applied)))
        await scene.world.settle()

        await give_back(scene)
        await clean_up(scene)

        assert_returned(scene, policy=policy)
    assert at > 20


@CUTS
async def test_giving_back_continues_after_an_interruption(applied: bool) -> None:
    at, cut = 0, True
    while cut:
        at, scene = at + 1, in_place(policy="Delete")
        await expose(scene)
        cut = await cut_short(give_back(scene, Cut(scene.world.kube, at, applied=applied)))
        await scene.world.settle()

        await give_back(scene)
        await clean_up(scene)

        assert_returned(scene, policy="Delete")
    assert at > 5


@CUTS
async def test_the_volume_of_a_deleted_transfer_is_given_back(applied: bool) -> None:
    """Without its finalizer: garbage collection finds the volume by its label."""
    at, cut = 0, True
    while cut:
        at, scene = at + 1, in_place(policy="Delete")
        cut = await cut_short(restore(scene, Cut(scene.world.kube, at, applied=applied)))
        await scene.world.settle()
        left = "?"
        while left:
            found = await list_leaked_objects(scene.world.client, "velero")
            left = " ".join([await delete_leaked_objects(scene.world.client, one) for one in found.values()])
            await scene.world.settle()

        assert scene.world.disks == {OLD}
        given = volume(scene, OLD)
        if given["spec"]["claimRef"].get("uid") != "uid-deleted":
            # It was taken.
            assert_returned(scene, policy="Delete")
    assert at > 20


async def test_a_volume_of_another_installation_is_left_to_that() -> None:
    scene = in_place()
    marks = {"labels": {IN_PLACE_LABEL: "uid"}, "annotations": {IN_PLACE_CLAIM_ANNOTATION: "other/app3/data"}}
    await scene.world.client.patch(PERSISTENT_VOLUMES, "", OLD, {"metadata": marks})

    assert await list_leaked_objects(scene.world.client, "velero") == {}


async def test_a_volume_without_its_pvc_is_reserved_for_it() -> None:
    scene = in_place(policy="Delete")
    await expose(scene)
    await scene.world.client.delete(PERSISTENT_VOLUME_CLAIMS, "app3", "data")
    await scene.world.settle()

    await give_back(scene)
    await clean_up(scene)

    given = volume(scene, OLD)
    assert scene.world.names() == LEFT - {TARGET}
    assert given["status"]["phase"] == "Available"
    reference = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "namespace": "app3", "name": "data"}
    assert given["spec"]["claimRef"] == reference
    assert_unmarked(given, policy="Delete")
    scene.put_target("data")
    await scene.world.settle()
    assert_returned(scene, policy="Delete")


async def test_a_pvc_that_was_made_meanwhile_keeps_its_own_volume() -> None:
    scene = in_place()
    await expose(scene)
    kept = await scene.exposer().read_volume(scene.request)
    await scene.world.client.patch(PERSISTENT_VOLUME_CLAIMS, "app3", "data", {"spec": {"volumeName": "pvc-other"}})
    before = claim(scene, "app3", "data")

    with pytest.raises(ExposeError, match="PVC app3/data was bound to PersistentVolume pvc-other meanwhile"):
        await scene.exposer().rebind(scene.request, kept)
    await give_back(scene)
    await clean_up(scene)

    assert claim(scene, "app3", "data")["spec"] == before["spec"]
    assert volume(scene, OLD)["status"]["phase"] == "Available"
    assert scene.world.disks == {OLD}


async def test_the_volume_is_not_given_back_while_it_is_attached() -> None:
    scene = in_place()
    await expose(scene)
    attach(scene, OLD, "node-a")
    await scene.exposer().give_back(scene.request)
    await scene.world.settle()

    found = await scene.exposer().give_back(scene.request)

    assert found == Pending("Detaching", f"PersistentVolume {OLD} is being detached from node node-a")
    assert IN_PLACE_LABEL in volume(scene, OLD)["metadata"]["labels"]


def attach(scene: RestoreScene, name: str, node: str) -> None:
    spec = {"attacher": "d", "nodeName": node, "source": {"persistentVolumeName": name}}
    scene.world.put(VOLUME_ATTACHMENTS, f"{name}-{node}", spec=spec)


def put_twin(scene: RestoreScene, handle: str = "handle-old") -> None:
    """Store another PersistentVolume of the same storage, whose PVC is app9/twin."""
    csi = {"driver": "hostpath.csi.k8s.io", "volumeHandle": handle}
    spec = {"csi": csi, "claimRef": {"namespace": "app9", "name": "twin", "uid": "uid-twin"}}
    scene.world.put(PERSISTENT_VOLUMES, "pv-twin", spec=spec | {"persistentVolumeReclaimPolicy": "Retain"})


def put_user(scene: RestoreScene, *, phase: str = "Running", owned: bool = True) -> None:
    owner = {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "db", "uid": "u", "controller": True}
    spec = {"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "twin"}}]}
    owners = [owner] if owned else []
    scene.world.put(PODS, "db-0", namespace="app9", spec=spec, status={"phase": phase}, ownerReferences=owners)


SAME = "PersistentVolume pv-twin of the same storage"


@pytest.mark.cause("volume-in-use")
@pytest.mark.parametrize(
    ("phase", "owned", "attached", "message"),
    [
        pytest.param("Running", True, False, f"pod app9/db-0 of StatefulSet db has {SAME}", id="pod with an owner"),
        pytest.param("Pending", False, True, f"pod app9/db-0 has {SAME}", id="pod that starts"),
        pytest.param("Succeeded", True, True, f"{SAME} is on node node-b", id="attached for no pod"),
        pytest.param("Failed", True, False, "", id="pod that has ended"),
    ],
)
async def test_a_volume_whose_storage_is_in_use_is_not_taken(
    phase: str, owned: bool, attached: bool, message: str
) -> None:
    scene = in_place()
    put_twin(scene)
    put_user(scene, phase=phase, owned=owned)
    if attached:
        attach(scene, "pv-twin", "node-b")
    before = volume(scene, OLD)

    found = await scene.exposer().check(scene.request, scene.world.client)

    assert found == (
        Pending("VolumeInUse", f"PersistentVolume {OLD} is in use: {message}", blocked=True) if message else None
    )
    assert volume(scene, OLD) == before


async def test_a_share_of_nfs_is_used_through_every_volume_of_it() -> None:
    share = {"server": "nfs.example", "path": "/export/data"}
    scene = in_place(csi=None, nfs=share)
    spec = {"nfs": share, "claimRef": {"namespace": "app9", "name": "twin"}, "persistentVolumeReclaimPolicy": "Retain"}
    scene.world.put(PERSISTENT_VOLUMES, "pv-twin", spec=spec)
    put_user(scene)

    found = await scene.exposer().check(scene.request, scene.world.client)

    assert found is not None
    assert found.message == f"PersistentVolume {OLD} is in use: pod app9/db-0 of StatefulSet db has {SAME}"


async def test_a_volume_whose_storage_gets_into_use_is_not_written_to() -> None:
    scene = in_place()
    await expose(scene)
    await scene.exposer().confirm(scene.request)
    put_twin(scene)
    put_user(scene)

    with pytest.raises(
        ExposeError, match=f"^PersistentVolume {OLD} is in use: pod app9/db-0 of StatefulSet db has {SAME}$"
    ):
        await scene.exposer().confirm(scene.request)


async def test_a_volume_of_other_storage_does_not_matter() -> None:
    scene = in_place()
    put_twin(scene, handle="handle-other")
    put_user(scene)

    assert await scene.exposer().check(scene.request, scene.world.client) is None


async def test_an_attached_volume_is_taken_once_it_is_detached() -> None:
    scene = in_place()
    attach(scene, OLD, "node-a")

    found = await scene.exposer().ensure(scene.request, guard)
    assert found == Pending("Detaching", f"PersistentVolume {OLD} is being detached from node node-a")
    assert scene.world.names() == LEFT
    await scene.world.client.delete(VOLUME_ATTACHMENTS, "", f"{OLD}-node-a")

    await restore(scene)
    assert_returned(scene)


async def guard(*, sure: bool) -> None:
    pass


async def test_two_restores_never_share_a_volume() -> None:
    scene, other = in_place(), in_place()
    await expose(scene)
    mark = {"metadata": {"labels": {IN_PLACE_LABEL: "uid-of-another"}}}
    await scene.world.client.patch(PERSISTENT_VOLUMES, "", OLD, mark)

    found = await other.exposer(scene.world.kube).check(other.request, scene.world.client)

    assert found == Pending(
        "VolumeInUse", f"PersistentVolume {OLD} is being restored by another DataDownload", blocked=True
    )
    before = volume(scene, OLD)
    await give_back(scene)
    assert volume(scene, OLD) == before


@pytest.mark.cause("existing-volume-unusable")
@pytest.mark.parametrize(
    ("spec", "message"),
    [
        pytest.param(
            {"claimRef": {"namespace": "app3", "name": "bystander", "uid": "uid-bystander"}},
            f"PersistentVolume {OLD} to restore into belongs to PVC app3/bystander, not to PVC app3/data",
            id="of another PVC",
        ),
        pytest.param(
            {"claimRef": {"namespace": "app3", "name": "data", "uid": "uid-data"}},
            f"PersistentVolume {OLD} to restore into is bound to PVC app3/data: it must be released first",
            id="still bound",
        ),
        pytest.param(
            {"volumeMode": "Block"},
            f"PersistentVolume {OLD} to restore into has volumeMode Block, and PVC app3/data has Filesystem",
            id="of another mode",
        ),
    ],
)
async def test_only_the_released_volume_of_the_target_is_taken(spec: JsonDict, message: str) -> None:
    scene = in_place(**spec)
    before = volume(scene, OLD)

    with pytest.raises(ExposeError) as caught:
        await scene.exposer().check(scene.request, scene.world.client)

    assert str(caught.value) == message
    assert volume(scene, OLD) == before


async def test_a_missing_volume_fails_the_restore() -> None:
    scene = RestoreScene()
    scene.request = replace(scene.request, volume=OLD)

    with pytest.raises(ExposeError, match=f"^PersistentVolume {OLD} to restore into does not exist$"):
        await scene.exposer().check(scene.request, scene.world.client)
    await give_back(scene)


async def test_a_late_binding_class_needs_no_consumer_and_no_node() -> None:
    """The scheduler knows which nodes can reach an existing volume."""
    scene = RestoreScene(binding="WaitForFirstConsumer", node="node-gone")
    scene.put_existing()

    exposed = await expose(scene)

    (term,) = exposed.pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
        "nodeSelectorTerms"
    ]
    assert "matchFields" not in term
    await restore(scene)
    assert_returned(scene)


async def test_a_transfer_that_has_ended_takes_no_volume() -> None:
    scene = in_place()
    before = volume(scene, OLD)

    async def ended(*, sure: bool) -> None:
        raise NotOwnerError("final", ended=True)

    with pytest.raises(NotOwnerError):
        await scene.exposer().ensure(scene.request, ended)

    assert volume(scene, OLD) == before


async def test_agents_of_earlier_versions_do_not_take_the_volume_for_their_own() -> None:
    """They delete what has the owner label, or was provisioned for the restore PVC."""
    scene = in_place()
    await expose(scene)

    meta = volume(scene, OLD)["metadata"]
    assert OWNER_UID_LABEL not in meta["labels"]
    assert meta["annotations"]["pv.kubernetes.io/bound-by-controller"] == "yes"
