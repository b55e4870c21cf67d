"""Restore into an existing volume: what takes it, and what gives it back."""

import json
from dataclasses import replace
from functools import partial

import pytest

from core.errors import ExposeError
from core.kube.resources import PERSISTENT_VOLUME_CLAIMS, PERSISTENT_VOLUMES, PODS, VOLUME_ATTACHMENTS
from core.models.names import IN_PLACE_CLAIM_ANNOTATION, IN_PLACE_LABEL, OWNER_UID_LABEL
from exposer.leaked_objects import delete_leaked_objects, list_leaked_objects
from exposer.model import KeptVolume, NotOwnerError, Pending
from tests.exposer.support.cuts import CUTS, Cut, cut_short, interruptions
from tests.exposer.support.in_place import (
    LEFT,
    OLD,
    RELEASED_UID,
    TARGET,
    assert_returned,
    assert_unmarked,
    attach,
    give_back,
    in_place,
    restore,
)
from tests.exposer.support.restore_steps import claim, clean_up, expose, volume
from tests.exposer.support.scenes import RestoreScene
from tests.exposer.test_csi_snapshot_guard import Guard


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
    async for scene in interruptions(partial(in_place, policy=policy), restore, applied=applied, least=20):
        await give_back(scene)
        await clean_up(scene)
        assert_returned(scene, policy=policy)


@CUTS
async def test_giving_back_continues_after_an_interruption(applied: bool) -> None:
    build = partial(in_place, policy="Delete")
    async for scene in interruptions(build, give_back, applied=applied, least=5, prepare=expose):
        await give_back(scene)
        await clean_up(scene)
        assert_returned(scene, policy="Delete")


@CUTS
async def test_the_volume_of_a_deleted_transfer_is_given_back(applied: bool) -> None:
    """Without its finalizer: garbage collection finds the volume by its label."""
    async for scene in interruptions(partial(in_place, policy="Delete"), restore, applied=applied, least=20):
        left = "?"
        while left:
            found = await list_leaked_objects(scene.world.client, "velero")
            left = " ".join([await delete_leaked_objects(scene.world.client, one) or "" for one in found.values()])
            await scene.world.settle()

        assert scene.world.disks == {OLD}
        given = volume(scene, OLD)
        if given["spec"]["claimRef"].get("uid") != RELEASED_UID:
            # It was taken.
            assert_returned(scene, policy="Delete")


async def test_the_volume_of_a_deleted_transfer_is_given_back_once_it_is_detached() -> None:
    scene = in_place()
    client = scene.world.client
    await expose(scene)
    await client.delete(PODS, "velero", scene.request.owner.name)
    await client.delete(PERSISTENT_VOLUME_CLAIMS, "velero", scene.request.owner.name)
    await scene.world.settle()
    attach(scene, OLD, "node-a")
    (leaked,) = (await list_leaked_objects(client, "velero")).values()

    assert await delete_leaked_objects(client, leaked) == f"PersistentVolume {OLD} is being detached from node node-a"
    assert IN_PLACE_LABEL in volume(scene, OLD)["metadata"]["labels"]
    await client.delete(VOLUME_ATTACHMENTS, "", f"{OLD}-node-a")
    assert await delete_leaked_objects(client, leaked) is None

    await scene.world.settle()
    assert_returned(scene)


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


@pytest.mark.parametrize("leaked", [False, True], ids=["cleanup", "garbage collection"])
async def test_a_volume_that_was_given_to_another_pvc_stays_there(leaked: bool) -> None:
    scene = in_place(policy="Delete")
    await expose(scene)
    reference = {"namespace": "app3", "name": "bystander", "uid": "uid-bystander"}
    await scene.world.client.patch(PERSISTENT_VOLUMES, "", OLD, {"spec": {"claimRef": reference}})
    await scene.world.settle()
    attach(scene, OLD, "node-a")

    if leaked:
        for _ in range(5):
            for one in (await list_leaked_objects(scene.world.client, "velero")).values():
                await delete_leaked_objects(scene.world.client, one)
            await scene.world.settle()
    else:
        await give_back(scene)
        await clean_up(scene)

    assert scene.world.names() == LEFT
    given = volume(scene, OLD)
    assert given["spec"]["claimRef"].items() >= reference.items()
    assert claim(scene, "app3", "bystander")["status"]["phase"] == given["status"]["phase"] == "Bound"
    assert_unmarked(given, policy="Retain")


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


def record(restore: str) -> dict[str, str]:
    recreated = {"metadata": {"namespace": "app3", "name": "data"}}
    return {
        "nodeagent.io/released-claim": json.dumps({"restore": restore, "claim": recreated}),
        "nodeagent.io/reclaim-policy": "Delete",
    }


@pytest.mark.parametrize("step", ["recorded", "PVC being deleted", "PVC deleted", "PVC recreated"])
async def test_cleanup_leaves_a_volume_to_the_later_restore_that_has_released_it(step: str) -> None:
    scene = in_place(policy="Delete")
    await expose(scene)
    await give_back(scene)
    assert_returned(scene, policy="Delete")
    client = scene.world.client
    retained = {"spec": {"persistentVolumeReclaimPolicy": "Retain"}}
    await client.patch(PERSISTENT_VOLUMES, "", OLD, {"metadata": {"annotations": record("r3")}} | retained)
    if step != "recorded":
        await client.delete(PERSISTENT_VOLUME_CLAIMS, "app3", "data")
    if step in {"PVC deleted", "PVC recreated"}:
        await scene.world.settle()
    if step == "PVC recreated":
        scene.world.put(PERSISTENT_VOLUME_CLAIMS, "data", namespace="app3", uid="uid-again", spec={"volumeName": OLD})
    before = volume(scene, OLD)

    await scene.exposer().give_back(scene.request)

    assert volume(scene, OLD) == before


async def test_cleanup_leaves_a_volume_to_a_later_restore_of_a_velero_server() -> None:
    scene = in_place()
    label = {"metadata": {"labels": {"velero.io/restore-name": "r3"}}}
    await scene.world.client.patch(PERSISTENT_VOLUME_CLAIMS, "app3", "data", label)
    before = volume(scene, OLD)

    await give_back(scene)

    assert volume(scene, OLD) == before


async def test_a_volume_that_was_not_taken_is_given_back_once_to_the_restore_that_released_it() -> None:
    scene = in_place()
    scene.request = replace(scene.request, restore="again")
    await scene.world.client.patch(PERSISTENT_VOLUMES, "", OLD, {"metadata": {"annotations": record("again")}})

    await give_back(scene)
    assert_returned(scene, policy="Delete")
    before = volume(scene, OLD)
    await give_back(scene)

    assert volume(scene, OLD) == before


async def test_the_volume_is_not_given_back_while_it_is_attached() -> None:
    scene = in_place()
    await expose(scene)
    attach(scene, OLD, "node-a")
    await scene.exposer().give_back(scene.request)
    await scene.world.settle()

    found = await scene.exposer().give_back(scene.request)

    assert found == Pending("Detaching", f"PersistentVolume {OLD} is being detached from node node-a")
    assert IN_PLACE_LABEL in volume(scene, OLD)["metadata"]["labels"]


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

    with pytest.raises(NotOwnerError):
        await scene.exposer().ensure(scene.request, Guard(1, ended=True))

    assert volume(scene, OLD) == before


async def test_agents_of_earlier_versions_do_not_take_the_volume_for_their_own() -> None:
    """They delete what has the owner label, or was provisioned for the restore PVC."""
    scene = in_place()
    await expose(scene)

    meta = volume(scene, OLD)["metadata"]
    assert OWNER_UID_LABEL not in meta["labels"]
    assert meta["annotations"]["pv.kubernetes.io/bound-by-controller"] == "yes"
