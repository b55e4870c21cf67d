"""Restores by block into existing volumes with a file system: their devices are shown by another PersistentVolume."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from core.errors import ExposeError
from core.kube.resources import PERSISTENT_VOLUME_CLAIMS, PERSISTENT_VOLUMES, PODS, VOLUME_SNAPSHOTS
from core.kube.transport import Request, Response
from core.models.names import IN_PLACE_CLAIM_ANNOTATION, IN_PLACE_LABEL
from exposer.leaked_objects import delete_leaked_objects, list_leaked_objects
from exposer.model import KeptVolume, Pending
from tests.exposer.support.cuts import CUTS, Cut, cut_short
from tests.exposer.support.in_place import HANDLE, OLD, RELEASED_UID, assert_returned, attach, give_back, restore
from tests.exposer.support.restore_steps import claim, clean_up, expose, volume
from tests.exposer.support.scenes import RestoreScene
from tests.exposer.support.world import no_guard
from tests.support.objects import JsonDict
from tests.support.versions import built

SHOWN = f"{OLD}-block"
RESTORING, TARGET = ("velero", "r2-9nft8"), ("app3", "data")
_KEPT = ("accessModes", "capacity", "csi", "storageClassName", "volumeMode")


def by_block(*, policy: str = "Delete", **spec: Any) -> RestoreScene:
    scene = RestoreScene(by_block=True)
    scene.put_existing(policy=policy, **spec)
    # The storage loses it if either of its PersistentVolumes is reclaimed.
    scene.world.disks.add(HANDLE)
    return scene


class Watched(Cut):
    """A transport that checks after each request that the volume is safe, whatever happens next."""

    def __init__(self, scene: RestoreScene, at: int = 0, *, applied: bool = False) -> None:
        super().__init__(scene.world.kube, at, applied=applied)
        self._scene = scene

    async def request(self, request: Request) -> Response:
        try:
            return await super().request(request)
        finally:
            assert_safe(self._scene)


def assert_safe(scene: RestoreScene) -> None:
    """Assert that the volume is there and unchanged, is not reclaimed, and is used neither twice nor by others."""
    before, given = built("persistentvolume"), volume(scene, OLD)
    shown = [one for one in volumes(scene) if one["metadata"]["name"] == SHOWN]
    assert given["metadata"]["uid"] == before["metadata"]["uid"]
    assert "deletionTimestamp" not in given["metadata"]
    assert {key: given["spec"][key] for key in _KEPT} == {key: before["spec"][key] for key in _KEPT}
    reference = given["spec"]["claimRef"]
    returned = _claim_of(given) == TARGET and reference.get("uid") != RELEASED_UID
    assert _claim_of(given) in {RESTORING, TARGET}
    assert given["spec"]["persistentVolumeReclaimPolicy"] == "Retain" or returned
    for one in shown:
        assert _claim_of(one) == RESTORING
        assert one["spec"]["persistentVolumeReclaimPolicy"] == "Retain"
        assert _claim_of(given) == RESTORING
        assert not reference.get("uid")
    assert _claim_of(given) == RESTORING or not scene.world.kube.objects(PODS)


def volumes(scene: RestoreScene) -> list[JsonDict]:
    return scene.world.kube.objects(PERSISTENT_VOLUMES)


def _claim_of(one: JsonDict) -> tuple[str, str]:
    return one["spec"]["claimRef"]["namespace"], one["spec"]["claimRef"]["name"]


def assert_given_back(scene: RestoreScene, *, policy: str = "Delete") -> None:
    scene.world.disks.remove(HANDLE)
    assert_returned(scene, policy=policy)


@pytest.mark.parametrize("policy", ["Delete", "Retain"])
async def test_the_device_is_shown_by_a_second_volume_and_the_first_one_returns_as_it_was(policy: str) -> None:
    scene = by_block(policy=policy, mountOptions=["noatime"])
    before = volume(scene, OLD)

    exposed = await expose(scene)
    await scene.exposer().confirm(scene.request)
    lent, shown, restoring = volume(scene, OLD), volume(scene, SHOWN), claim(scene, *RESTORING)
    kept = await scene.exposer().read_volume(scene.request)
    await restore(scene, kept=kept)

    assert "--volume-mode=Block" in exposed.pod["spec"]["containers"][0]["args"]
    assert (restoring["spec"]["volumeName"], restoring["spec"]["volumeMode"]) == (SHOWN, "Block")
    assert shown["spec"]["claimRef"]["uid"] == restoring["metadata"]["uid"]
    assert shown["spec"]["csi"] == before["spec"]["csi"]
    assert "mountOptions" not in shown["spec"]
    # By other marks, garbage collection of an earlier version would have it reclaimed.
    assert shown["metadata"]["labels"] == {IN_PLACE_LABEL: scene.request.owner.uid}
    assert not shown["metadata"].get("annotations")
    assert lent["status"]["phase"] == "Available"
    assert kept == KeptVolume(OLD, policy, provisioned=False)
    assert volume(scene, OLD)["metadata"]["uid"] == before["metadata"]["uid"]
    assert volume(scene, OLD)["spec"]["mountOptions"] == ["noatime"]
    assert_given_back(scene, policy=policy)


@CUTS
async def test_a_restore_interrupted_at_any_request_continues(applied: bool) -> None:
    at, cut = 0, True
    while cut:
        at, scene, kept = at + 1, by_block(), None
        transport = Watched(scene, at, applied=applied)
        cut = await cut_short(expose(scene, transport))
        if not cut:
            kept = await scene.exposer().read_volume(scene.request)
            cut = await cut_short(restore(scene, transport, kept))
        await scene.world.settle()

        await restore(scene, Watched(scene), kept)

        assert_given_back(scene)
    assert at > 25


@pytest.mark.parametrize(
    "leaked",
    [False, pytest.param(True, marks=pytest.mark.thorough)],
    ids=["cleaned up", "its transfer was deleted"],
)
@CUTS
async def test_the_volume_is_given_back_whenever_the_restore_ends(applied: bool, leaked: bool) -> None:
    at, cut = 0, True
    while cut:
        at, scene = at + 1, by_block()
        cut = await cut_short(restore(scene, Watched(scene, at, applied=applied)))
        await scene.world.settle()
        rest = Watched(scene)
        if leaked:
            await delete_leaked(scene, rest)
        # Garbage collection leaves a volume that was not taken.
        await give_back(scene, rest)
        await clean_up(scene, rest)
        assert_given_back(scene)
    assert at > 25


@pytest.mark.parametrize("leaked", [False, True], ids=["cleaned up", "its transfer was deleted"])
@CUTS
async def test_giving_back_continues_after_an_interruption(applied: bool, leaked: bool) -> None:
    at, cut = 0, True
    while cut:
        at, scene = at + 1, by_block()
        await expose(scene)
        give = delete_leaked if leaked else give_back
        cut = await cut_short(give(scene, Watched(scene, at, applied=applied)))
        await scene.world.settle()
        await give(scene, Watched(scene))
        await clean_up(scene)
        assert_given_back(scene)
    assert at > 10


async def delete_leaked(scene: RestoreScene, transport: Cut | None = None) -> None:
    client = scene.world.client_over(transport or scene.world.kube)
    left: list[str | None] = ["?"]
    while any(left):
        left = [
            await delete_leaked_objects(client, one) for one in (await list_leaked_objects(client, "velero")).values()
        ]
        await scene.world.settle()


async def test_no_volume_is_given_back_while_a_node_has_its_device() -> None:
    scene = by_block()
    await expose(scene)
    attach(scene, SHOWN, "node-a")
    kept = await scene.exposer().read_volume(scene.request)
    detaching = Pending("Detaching", f"PersistentVolume {SHOWN} is being detached from node node-a")

    await scene.exposer().give_back(scene.request)
    await scene.world.settle()
    assert await scene.exposer().give_back(scene.request) == detaching
    assert await scene.exposer().rebind(scene.request, kept) == detaching
    await scene.world.client.delete(PODS, *RESTORING)
    leaked = (await list_leaked_objects(scene.world.client, "velero"))[scene.request.owner.uid]
    await delete_leaked_objects(scene.world.client, leaked)
    await scene.world.settle()
    leaked = (await list_leaked_objects(scene.world.client, "velero"))[scene.request.owner.uid]
    assert await delete_leaked_objects(scene.world.client, leaked) == detaching.message

    assert IN_PLACE_LABEL in volume(scene, OLD)["metadata"]["labels"]
    assert_safe(scene)


async def test_the_only_volume_that_is_left_of_a_storage_stays() -> None:
    """The first one is deleted during the restore: it is retained, and the second one names its storage."""
    scene = by_block()
    await expose(scene)
    kept = await scene.exposer().read_volume(scene.request)
    await scene.world.client.delete(PERSISTENT_VOLUMES, "", OLD)
    await scene.world.settle()

    stays = f"PersistentVolume {SHOWN}, which stays, names its storage$"
    with pytest.raises(ExposeError, match=f"with the restored data no longer exists: {stays}"):
        await scene.exposer().read_volume(scene.request)
    with pytest.raises(ExposeError, match=f"{OLD} with the restored data was deleted: {stays}"):
        await scene.exposer().rebind(scene.request, kept)
    await give_back(scene)
    await clean_up(scene)
    await delete_leaked(scene)

    left = volume(scene, SHOWN)
    assert (left["status"]["phase"], left["spec"]["persistentVolumeReclaimPolicy"]) == ("Released", "Retain")
    assert HANDLE in scene.world.disks
    # Garbage collection, which repeats soon while something is left, does not look at it any more.
    assert await list_leaked_objects(scene.world.client, "velero") == {}


async def test_no_second_volume_is_named_that_was_never_created() -> None:
    scene = by_block(volumeMode="Block")
    await scene.world.client.patch(PERSISTENT_VOLUME_CLAIMS, *TARGET, {"spec": {"volumeMode": "Block"}})
    await expose(scene)
    kept = await scene.exposer().read_volume(scene.request)
    await scene.world.client.delete(PERSISTENT_VOLUMES, "", OLD)
    await scene.world.settle()

    with pytest.raises(ExposeError, match=f"{OLD} with the restored data was deleted$"):
        await scene.exposer().rebind(scene.request, kept)


async def test_a_policy_that_somebody_changes_does_not_lose_the_storage() -> None:
    scene = by_block()
    await expose(scene)
    await scene.world.client.patch(PERSISTENT_VOLUMES, "", SHOWN, {"spec": {"persistentVolumeReclaimPolicy": "Delete"}})
    # No provisioner reclaims a volume that names none.
    scene.world.reclaims = False

    await give_back(scene)
    await clean_up(scene)

    assert_given_back(scene)


def put_named(scene: RestoreScene, *, taker: str = "") -> None:
    labels = {IN_PLACE_LABEL: taker} if taker else {}
    spec = {"persistentVolumeReclaimPolicy": "Retain", "claimRef": {"namespace": "a", "name": "b", "uid": "c"}}
    scene.world.put(PERSISTENT_VOLUMES, SHOWN, labels=labels, spec=spec)


def put_pod(scene: RestoreScene) -> None:
    """A pod that uses the storage through a PersistentVolume of its own."""
    spec = {"csi": volume(scene, OLD)["spec"]["csi"], "claimRef": {"namespace": "app9", "name": "twin"}}
    scene.world.put(PERSISTENT_VOLUMES, "twin", spec=spec | {"persistentVolumeReclaimPolicy": "Retain"})
    volume_of = {"name": "v", "persistentVolumeClaim": {"claimName": "twin"}}
    scene.world.put(PODS, "db-0", namespace="app9", spec={"volumes": [volume_of]}, status={"phase": "Running"})


@pytest.mark.parametrize(
    ("change", "pending"),
    [
        pytest.param(
            lambda s: put_named(s, taker="uid-of-another"),
            Pending("NameTaken", f"PersistentVolume {SHOWN} of an earlier restore must be deleted first"),
            id="an earlier restore",
        ),
        pytest.param(
            put_pod,
            Pending(
                "VolumeInUse",
                f"PersistentVolume {OLD} is in use: pod app9/db-0 has PersistentVolume twin of the same storage",
                blocked=True,
            ),
            id="a pod",
        ),
        pytest.param(
            lambda s: attach(s, OLD, "node-b"),
            Pending("Detaching", f"PersistentVolume {OLD} is being detached from node node-b"),
            id="a node",
        ),
    ],
)
async def test_nothing_is_taken_while_the_volume_is_not_free(
    change: Callable[[RestoreScene], None], pending: Pending
) -> None:
    scene = by_block()
    change(scene)
    before = volumes(scene)

    assert await scene.exposer().check(scene.request, scene.world.client) == pending
    assert await scene.exposer().ensure(scene.request, no_guard) == pending

    assert volumes(scene) == before


@pytest.mark.cause("existing-volume-unusable")
@pytest.mark.parametrize(
    ("spec", "named", "message"),
    [
        pytest.param(
            {"csi": None, "local": {"path": "/mnt"}},
            "",
            f"PersistentVolume {OLD} to restore into by block is of no CSI driver: restore into a new volume",
            id="no device",
        ),
        pytest.param(
            {"csi": {"driver": "d", "volumeHandle": "h", "fsType": "ext4"}},
            "xfs",
            f"PersistentVolume {OLD} to restore into is mounted as ext4, and the backup has xfs",
            id="another file system",
        ),
        pytest.param(
            {"claimRef": {"namespace": "app3", "name": "bystander", "uid": "uid-bystander"}},
            "",
            f"PersistentVolume {OLD} to restore into belongs to PVC app3/bystander, not to PVC app3/data",
            id="of another PVC",
        ),
        pytest.param(
            {"volumeMode": "Block"},
            "",
            f"PersistentVolume {OLD} to restore into has volumeMode Block, and PVC app3/data has Filesystem",
            id="of another mode",
        ),
    ],
)
async def test_a_volume_that_can_never_be_restored_into_is_refused_untouched(
    spec: JsonDict, named: str, message: str
) -> None:
    scene = by_block(**spec)
    scene.request = replace(scene.request, fs_type=named)
    before = volumes(scene)

    for step in (
        scene.exposer().check(scene.request, scene.world.client),
        scene.exposer().ensure(scene.request, no_guard),
    ):
        with pytest.raises(ExposeError) as caught:
            await step
        assert str(caught.value) == message

    assert volumes(scene) == before


@pytest.mark.parametrize("restored", [False, True], ids=["a volume", "an existing one that is restored into"])
async def test_a_volume_of_no_restore_with_the_name_of_the_second_one_is_kept(restored: bool) -> None:
    scene = by_block()
    put_named(scene, taker="uid-of-another" if restored else "")
    if restored:
        marked: JsonDict = {"metadata": {"annotations": {IN_PLACE_CLAIM_ANNOTATION: "velero/app9/twin"}}}
        await scene.world.client.patch(PERSISTENT_VOLUMES, "", SHOWN, marked)
    before = volumes(scene)

    with pytest.raises(ExposeError, match=f"^PersistentVolume {SHOWN} already exists and was created by no restore: "):
        await scene.exposer().ensure(scene.request, no_guard)

    assert volumes(scene) == before


class Forbidding(Cut):
    """A transport of an agent that may not create PersistentVolumes."""

    async def request(self, request: Request) -> Response:
        if (request.method, request.path) == ("POST", "/api/v1/persistentvolumes"):
            body = {"kind": "Status", "message": "persistentvolumes is forbidden", "reason": "Forbidden", "code": 403}
            return Response(403, json.dumps(body).encode())
        return await super().request(request)


async def test_a_missing_permission_is_named_and_the_volume_returns() -> None:
    scene = by_block()

    with pytest.raises(
        ExposeError, match=r"^no permission to create persistentvolumes, .*: apply deploy/agent/rbac.yaml"
    ):
        await scene.exposer(Forbidding(scene.world.kube)).ensure(scene.request, no_guard)
    await give_back(scene)
    await clean_up(scene)

    assert_given_back(scene)


async def test_the_base_snapshot_of_a_server_is_deleted_at_the_end() -> None:
    """It is not needed: the device itself is compared."""
    scene = by_block()
    scene.request = replace(scene.request, base_snapshot=("app3", "base"))
    made = {"creationTimestamp": "2026-11-21T11:15:01Z", "labels": {"velero.io/restore-name": "r2"}}
    scene.world.put(VOLUME_SNAPSHOTS, "base", namespace="app3", spec={"source": {}}, **made)

    await restore(scene)

    assert_given_back(scene)
