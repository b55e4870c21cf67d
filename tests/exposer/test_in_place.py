"""Restore into an existing volume: what takes it, and what gives it back; a second volume shows a device."""

import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from core.errors import ExposeError
from core.kube.resources import PERSISTENT_VOLUME_CLAIMS, PERSISTENT_VOLUMES, VOLUME_ATTACHMENTS
from core.models.names import IN_PLACE_CLAIM_ANNOTATION, IN_PLACE_LABEL, OWNER_UID_LABEL
from exposer.leaked_objects import delete_leaked_objects, list_leaked_objects
from exposer.model import KeptVolume, NotOwnerError, Pending
from tests.exposer.support.cuts import CUTS, interruptions
from tests.exposer.support.in_place import (
    HANDLE,
    LEFT,
    OLD,
    RELEASED_UID,
    SHOWN,
    TARGET,
    Watched,
    assert_returned,
    assert_safe,
    assert_unmarked,
    attach,
    give_back,
    in_place,
    restore,
)
from tests.exposer.support.scenes import RestoreScene
from tests.exposer.support.steps import GuardAt, Restore, begun, check, claim, clean_up, collect, ensure, expose, volume

BY_BLOCK = pytest.mark.parametrize("by_block", [False, True], ids=["files", "by block"])
LEAKED = pytest.mark.parametrize("leaked", [False, True], ids=["cleaned up", "its transfer was deleted"])


@pytest.mark.parametrize("policy", ["Delete", "Retain"])
async def test_an_existing_volume_is_restored_into_and_returns_to_its_pvc(policy: str) -> None:
    scene = in_place(policy=policy)
    exposed = await expose(scene)
    lent, restored = volume(scene, OLD), claim(scene, "velero", "r2-9nft8")
    whole = await begun(scene)
    await whole.carry()
    assert exposed.pod["status"]["phase"] == "Running"
    assert lent["spec"]["persistentVolumeReclaimPolicy"] == "Retain"
    assert lent["spec"]["claimRef"]["uid"] == restored["metadata"]["uid"]
    # Agents of earlier versions delete what has the owner label, or was provisioned for the restore PVC.
    assert OWNER_UID_LABEL not in lent["metadata"]["labels"]
    assert lent["metadata"]["annotations"]["pv.kubernetes.io/bound-by-controller"] == "yes"
    assert restored["spec"]["volumeName"] == OLD
    assert whole.kept == KeptVolume(OLD, policy, provisioned=False)
    assert_returned(scene, policy=policy)


async def test_the_device_is_shown_by_a_second_volume_and_the_first_one_returns_as_it_was() -> None:
    scene = in_place(by_block=True, mountOptions=["noatime"])
    before = volume(scene, OLD)
    exposed = await expose(scene)
    await scene.exposer().confirm(scene.request)
    lent, shown, restoring = volume(scene, OLD), volume(scene, SHOWN), claim(scene, "velero", "r2-9nft8")
    whole = await begun(scene)
    await whole.carry()
    assert "--volume-mode=Block" in exposed.pod["spec"]["containers"][0]["args"]
    assert (restoring["spec"]["volumeName"], restoring["spec"]["volumeMode"]) == (SHOWN, "Block")
    assert shown["spec"]["claimRef"]["uid"] == restoring["metadata"]["uid"]
    assert shown["spec"]["csi"] == before["spec"]["csi"]
    assert "mountOptions" not in shown["spec"]
    # By other marks, garbage collection of an earlier version would have it reclaimed.
    assert shown["metadata"]["labels"] == {IN_PLACE_LABEL: scene.request.owner.uid}
    assert not shown["metadata"].get("annotations")
    assert lent["status"]["phase"] == "Available"
    assert whole.kept == KeptVolume(OLD, "Delete", provisioned=False)
    assert volume(scene, OLD)["metadata"]["uid"] == before["metadata"]["uid"]
    assert volume(scene, OLD)["spec"]["mountOptions"] == ["noatime"]
    assert_returned(scene)


async def test_a_volume_that_is_not_retained_is_retained_until_it_returns() -> None:
    reserved = {"namespace": "app3", "name": "data"}
    scene = in_place(policy="Retain", claimRef=reserved, persistentVolumeReclaimPolicy="Delete")
    await expose(scene)
    assert volume(scene, OLD)["spec"]["persistentVolumeReclaimPolicy"] == "Retain"
    await restore(scene)
    assert_returned(scene)


@CUTS
@BY_BLOCK
async def test_a_restore_interrupted_at_any_request_continues(applied: bool, by_block: bool) -> None:
    def build() -> Restore:
        return Restore(in_place(by_block=by_block))

    async for whole in interruptions(build, Restore.carry, applied=applied, least=20, over=Watched):
        await whole.carry(Watched(whole))
        assert_returned(whole.scene)


@CUTS
@BY_BLOCK
@LEAKED
async def test_the_volume_is_given_back_whenever_the_restore_ends(applied: bool, by_block: bool, leaked: bool) -> None:
    """Garbage collection finds it by its label, if the transfer was deleted by force."""
    build = partial(in_place, by_block=by_block)
    async for scene in interruptions(build, restore, applied=applied, least=20, over=Watched):
        if leaked:
            await collect(scene, Watched(scene))
        if not leaked or volume(scene, OLD)["spec"]["claimRef"].get("uid") == RELEASED_UID:
            # Garbage collection leaves a volume that was not taken.
            await give_back(scene, Watched(scene))
            await clean_up(scene, Watched(scene))
        assert_returned(scene)


@CUTS
@BY_BLOCK
@pytest.mark.parametrize("give", [give_back, collect])
async def test_giving_back_continues_after_an_interruption(
    applied: bool, by_block: bool, give: Callable[..., Awaitable[None]]
) -> None:
    build = partial(in_place, by_block=by_block)
    async for scene in interruptions(build, give, applied=applied, least=5, prepare=expose, over=Watched):
        await give(scene, Watched(scene))
        await clean_up(scene)
        assert_returned(scene)


@BY_BLOCK
async def test_no_volume_is_given_back_while_a_node_has_it(by_block: bool) -> None:
    scene, name = in_place(by_block=by_block), SHOWN if by_block else OLD
    whole = await begun(scene)
    attach(scene, name, "node-a")
    detaching = Pending("Detaching", f"PersistentVolume {name} is being detached from node node-a")
    await scene.exposer().give_back(scene.request)
    await scene.world.settle()
    assert await scene.exposer().give_back(scene.request) == detaching
    assert await scene.exposer().rebind(scene.request, whole.kept) == detaching
    said = []
    for _ in range(2):
        (leaked,) = (await list_leaked_objects(scene.world.client, "velero")).values()
        said.append(await delete_leaked_objects(scene.world.client, leaked))
        await scene.world.settle()
    assert said[1] == detaching.message
    assert IN_PLACE_LABEL in volume(scene, OLD)["metadata"]["labels"]
    assert_safe(scene)
    await scene.world.delete(VOLUME_ATTACHMENTS, f"{name}-node-a")
    await collect(scene)
    assert_returned(scene)


async def test_a_volume_of_another_installation_is_left_to_that() -> None:
    scene = in_place()
    annotations = {IN_PLACE_CLAIM_ANNOTATION: "other/app3/data"}
    await scene.world.patch(PERSISTENT_VOLUMES, OLD, labels={IN_PLACE_LABEL: "uid"}, annotations=annotations)
    assert await list_leaked_objects(scene.world.client, "velero") == {}


async def test_a_volume_without_its_pvc_is_reserved_for_it() -> None:
    scene = in_place()
    await expose(scene)
    await scene.world.delete(PERSISTENT_VOLUME_CLAIMS, "app3/data", settle=True)
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
    assert_returned(scene)


@LEAKED
async def test_a_volume_that_was_given_to_another_pvc_stays_there(leaked: bool) -> None:
    scene = in_place()
    await expose(scene)
    reference = {"namespace": "app3", "name": "bystander", "uid": "uid-bystander"}
    await scene.world.patch(PERSISTENT_VOLUMES, OLD, spec={"claimRef": reference})
    await scene.world.settle()
    attach(scene, OLD, "node-a")
    if leaked:
        await collect(scene)
    else:
        await give_back(scene)
        await clean_up(scene)
    given = volume(scene, OLD)
    assert scene.world.names() == LEFT
    assert given["spec"]["claimRef"].items() >= reference.items()
    assert claim(scene, "app3", "bystander")["status"]["phase"] == given["status"]["phase"] == "Bound"
    assert_unmarked(given, policy="Retain")


async def test_a_pvc_that_was_made_meanwhile_keeps_its_own_volume() -> None:
    scene = in_place()
    whole = await begun(scene)
    await scene.world.patch(PERSISTENT_VOLUME_CLAIMS, "app3/data", spec={"volumeName": "pvc-other"})
    before = claim(scene, "app3", "data")
    with pytest.raises(ExposeError, match="PVC app3/data was bound to PersistentVolume pvc-other meanwhile"):
        await whole.rebind()
    await give_back(scene)
    await clean_up(scene)
    assert claim(scene, "app3", "data")["spec"] == before["spec"]
    assert volume(scene, OLD)["status"]["phase"] == "Available"
    assert scene.world.disks == {HANDLE}


def record(restore: str) -> dict[str, str]:
    recreated = {"metadata": {"namespace": "app3", "name": "data"}}
    return {
        "nodeagent.io/released-claim": json.dumps({"restore": restore, "claim": recreated}),
        "nodeagent.io/reclaim-policy": "Delete",
    }


@pytest.mark.parametrize("step", ["recorded", "PVC being deleted", "PVC deleted", "PVC recreated"])
async def test_cleanup_leaves_a_volume_to_the_later_restore_that_has_released_it(step: str) -> None:
    scene = in_place()
    await expose(scene)
    await give_back(scene)
    assert_returned(scene)
    retained = {"persistentVolumeReclaimPolicy": "Retain"}
    await scene.world.patch(PERSISTENT_VOLUMES, OLD, annotations=record("r3"), spec=retained)
    if step != "recorded":
        await scene.world.delete(PERSISTENT_VOLUME_CLAIMS, "app3/data", settle=step != "PVC being deleted")
    if step == "PVC recreated":
        scene.world.put(PERSISTENT_VOLUME_CLAIMS, "data", namespace="app3", uid="uid-again", spec={"volumeName": OLD})
    before = volume(scene, OLD)
    await scene.exposer().give_back(scene.request)
    assert volume(scene, OLD) == before


async def test_cleanup_leaves_a_volume_to_a_later_restore_of_a_velero_server() -> None:
    scene = in_place()
    await scene.world.patch(PERSISTENT_VOLUME_CLAIMS, "app3/data", labels={"velero.io/restore-name": "r3"})
    before = volume(scene, OLD)
    await give_back(scene)
    assert volume(scene, OLD) == before


async def test_a_volume_that_was_not_taken_is_given_back_once_to_the_restore_that_released_it() -> None:
    scene = in_place(policy="Retain")
    scene.request = replace(scene.request, restore="again")
    await scene.world.patch(PERSISTENT_VOLUMES, OLD, annotations=record("again"))
    await give_back(scene)
    assert_returned(scene)
    before = volume(scene, OLD)
    await give_back(scene)
    assert volume(scene, OLD) == before


async def test_a_missing_volume_fails_the_restore() -> None:
    scene = RestoreScene()
    scene.request = replace(scene.request, volume=OLD)
    with pytest.raises(ExposeError, match=f"^PersistentVolume {OLD} to restore into does not exist$"):
        await check(scene)
    await give_back(scene)


async def test_a_late_binding_class_needs_no_consumer_and_no_node() -> None:
    """The scheduler knows which nodes can reach an existing volume."""
    scene = RestoreScene(binding="WaitForFirstConsumer", node="node-gone")
    scene.put_existing(policy="Delete")
    affinity = (await expose(scene)).pod["spec"]["affinity"]["nodeAffinity"]
    (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert "matchFields" not in term
    await restore(scene)
    assert_returned(scene)


async def test_a_transfer_that_has_ended_takes_no_volume() -> None:
    scene = in_place()
    before = volume(scene, OLD)
    with pytest.raises(NotOwnerError):
        await scene.exposer().ensure(scene.request, GuardAt(1, ended=True))
    assert volume(scene, OLD) == before


async def test_the_only_volume_that_is_left_of_a_storage_stays() -> None:
    """The first one is deleted during the restore: it is retained, and the second one names its storage."""
    scene = in_place(by_block=True)
    whole = await begun(scene)
    await scene.world.delete(PERSISTENT_VOLUMES, OLD, settle=True)
    stays = f"PersistentVolume {SHOWN}, which stays, names its storage$"
    with pytest.raises(ExposeError, match=f"with the restored data no longer exists: {stays}"):
        await scene.exposer().read_volume(scene.request)
    with pytest.raises(ExposeError, match=f"{OLD} with the restored data was deleted: {stays}"):
        await whole.rebind()
    await give_back(scene)
    await clean_up(scene)
    await collect(scene)
    left = volume(scene, SHOWN)
    assert (left["status"]["phase"], left["spec"]["persistentVolumeReclaimPolicy"]) == ("Released", "Retain")
    assert HANDLE in scene.world.disks
    # Garbage collection, which repeats soon while something is left, does not look at it any more.
    assert await list_leaked_objects(scene.world.client, "velero") == {}


async def test_no_second_volume_is_named_that_was_never_created() -> None:
    scene = in_place(by_block=True, volumeMode="Block")
    await scene.world.patch(PERSISTENT_VOLUME_CLAIMS, "app3/data", spec={"volumeMode": "Block"})
    whole = await begun(scene)
    await scene.world.delete(PERSISTENT_VOLUMES, OLD, settle=True)
    with pytest.raises(ExposeError, match=f"{OLD} with the restored data was deleted$"):
        await whole.rebind()


async def test_a_policy_that_a_user_changes_does_not_lose_the_storage() -> None:
    scene = in_place(by_block=True)
    await expose(scene)
    # No provisioner reclaims a volume that names none, but one that is deleted without Retain.
    scene.world.reclaims = False
    deleting = {"persistentVolumeReclaimPolicy": "Delete"}
    await scene.world.patch(PERSISTENT_VOLUMES, SHOWN, finalizers=["test/provisioner"], spec=deleting)
    await give_back(scene)
    await clean_up(scene)
    assert_returned(scene)


@pytest.mark.parametrize(
    ("marks", "found"),
    [
        ({"labels": {IN_PLACE_LABEL: "uid-of-another"}}, "of an earlier restore must be deleted first"),
        ({}, "already exists and was created by no restore: a restore by block needs its name"),
        # An existing volume that is restored into, whose name happens to end so.
        (
            {
                "labels": {IN_PLACE_LABEL: "uid-of-another"},
                "annotations": {IN_PLACE_CLAIM_ANNOTATION: "velero/app9/twin"},
            },
            "already exists and was created by no restore: a restore by block needs its name",
        ),
    ],
    ids=["of an earlier restore", "of none", "of none, and being restored into"],
)
async def test_another_volume_with_the_name_of_the_second_one_is_kept(marks: dict[str, Any], found: str) -> None:
    scene = in_place(by_block=True)
    spec = {"persistentVolumeReclaimPolicy": "Retain", "claimRef": {"namespace": "a", "name": "b", "uid": "c"}}
    scene.world.put(PERSISTENT_VOLUMES, SHOWN, spec=spec, **marks)
    before = scene.world.kube.objects(PERSISTENT_VOLUMES)
    message = f"PersistentVolume {SHOWN} {found}"
    for step in (check, ensure):
        if "earlier" in found:
            assert await step(scene) == Pending("NameTaken", message)
        else:
            with pytest.raises(ExposeError, match=f"^{message}$"):
                await step(scene)
    assert scene.world.kube.objects(PERSISTENT_VOLUMES) == before


async def test_a_missing_permission_is_named_and_the_volume_returns() -> None:
    scene = in_place(by_block=True)
    scene.world.kube.fail_next("POST", "/persistentvolumes", 403)
    message = r"^no permission to create persistentvolumes, .*: apply deploy/agent/rbac.yaml"
    with pytest.raises(ExposeError, match=message):
        await ensure(scene)
    await give_back(scene)
    await clean_up(scene)
    assert_returned(scene)
