"""A new volume on its way into a pod and on to the claim that waits for it."""

import json
from dataclasses import replace

import pytest

from core.errors import ExposeError
from core.kube.errors import ForbiddenError
from core.kube.resources import PERSISTENT_VOLUME_CLAIMS, PERSISTENT_VOLUMES, STORAGE_CLASSES
from core.kube.transport import Request, Response
from core.models.base import JsonDict
from exposer.model import CacheVolume, Exposed, KeptVolume, NotOwnerError, Waiting
from tests.exposer.scenes import RestoreScene
from tests.exposer.world import Cut, cut_short, no_guard
from tests.support.fakekube import FakeKube

BYSTANDERS = {"PersistentVolumeClaim app3/bystander"}
TARGET = "PersistentVolumeClaim app3/data"
MADE = {"Pod velero/r2-9nft8", "PersistentVolumeClaim velero/r2-9nft8"}


async def expose(scene: RestoreScene, transport: Cut | None = None) -> Exposed:
    exposer = scene.exposer(transport)
    return await scene.world.until_exposed(lambda: exposer.ensure(scene.request, no_guard))


async def rebind(scene: RestoreScene, kept: KeptVolume, transport: Cut | None = None) -> None:
    exposer = scene.exposer(transport)
    await scene.world.until_none(lambda: exposer.rebind(scene.request, kept))


async def drop_volume(scene: RestoreScene, kept: KeptVolume, transport: Cut | None = None) -> None:
    exposer = scene.exposer(transport)
    await scene.world.until_none(lambda: exposer.drop_volume(scene.request, kept))


async def clean_up(scene: RestoreScene, transport: Cut | None = None) -> None:
    exposer = scene.exposer(transport)
    await scene.world.until_none(lambda: exposer.clean_up(scene.request))


def claim(scene: RestoreScene, namespace: str, name: str) -> JsonDict:
    claims = scene.world.kube.objects(PERSISTENT_VOLUME_CLAIMS)
    meta = {"namespace": namespace, "name": name}
    found: JsonDict = next(c for c in claims if {key: c["metadata"][key] for key in meta} == meta)
    return found


def volume(scene: RestoreScene, name: str) -> JsonDict:
    volumes = scene.world.kube.objects(PERSISTENT_VOLUMES)
    found: JsonDict = next(v for v in volumes if v["metadata"]["name"] == name)
    return found


def assert_handed_over(scene: RestoreScene, kept: KeptVolume) -> None:
    """The target has the volume as if it had been provisioned for it, and nothing else is left."""
    target, given = claim(scene, "app3", "data"), volume(scene, kept.pv_name)
    assert scene.world.names() == BYSTANDERS | {TARGET, f"PersistentVolume /{kept.pv_name}"}
    assert target["spec"]["volumeName"] == kept.pv_name
    assert target["status"]["phase"] == given["status"]["phase"] == "Bound"
    assert given["spec"]["claimRef"]["uid"] == target["metadata"]["uid"]
    assert given["spec"]["persistentVolumeReclaimPolicy"] == kept.reclaim_policy
    assert given["metadata"]["labels"] == target["spec"]["selector"]["matchLabels"]
    assert scene.world.disks == {kept.pv_name}


def assert_clean(scene: RestoreScene) -> None:
    assert scene.world.names() == BYSTANDERS | {TARGET}
    assert scene.world.disks == set()


async def test_a_new_volume_is_exposed_and_handed_to_its_claim() -> None:
    scene = RestoreScene()

    exposed = await expose(scene)
    kept = await scene.exposer().read_volume(scene.request)
    await rebind(scene, kept)
    await clean_up(scene)

    assert exposed.pod["status"]["phase"] == "Running"
    assert kept.reclaim_policy == "Delete"
    assert_handed_over(scene, kept)


@pytest.mark.parametrize(
    ("mode", "reclaim", "binding", "node"),
    [
        ("Block", "Delete", "Immediate", ""),
        ("Filesystem", "Retain", "Immediate", ""),
        ("Filesystem", "Delete", "WaitForFirstConsumer", "node-b"),
    ],
)
async def test_other_volumes_come_through_as_well(mode: str, reclaim: str, binding: str, node: str) -> None:
    scene = RestoreScene(mode=mode, reclaim=reclaim, binding=binding, node=node)

    await expose(scene)
    kept = await scene.exposer().read_volume(scene.request)
    restored = claim(scene, "velero", "r2-9nft8")
    await rebind(scene, kept)

    assert restored["spec"]["volumeMode"] == mode
    assert restored["metadata"].get("annotations", {}).get("volume.kubernetes.io/selected-node", "") == node
    assert kept.reclaim_policy == reclaim
    assert_handed_over(scene, kept)


@pytest.mark.parametrize("reclaim", ["Delete", "Retain"])
async def test_a_restore_that_failed_leaves_nothing(reclaim: str) -> None:
    scene = RestoreScene(reclaim=reclaim)
    scene.request = replace(scene.request, cache=CacheVolume("hostpath", 6))
    await expose(scene)
    assert len(scene.world.disks) == 2

    await clean_up(scene)

    assert_clean(scene)


async def test_clean_up_of_what_never_began_touches_nothing() -> None:
    scene = RestoreScene()

    await clean_up(scene)

    assert_clean(scene)


async def test_a_cache_has_a_claim_of_its_own() -> None:
    scene = RestoreScene()
    scene.request = replace(scene.request, cache=CacheVolume("hostpath", 6))

    exposed = await expose(scene)

    cache = claim(scene, "velero", "r2-9nft8-cache")
    assert cache["spec"]["resources"]["requests"]["storage"] == "6Gi"
    path = f"/{scene.request.owner.uid}-cache"
    assert f"--cache-volume-path={path}" in exposed.pod["spec"]["containers"][0]["args"]


class Load:
    """One load as agents carry it; `kept` is what its custom resource would remember."""

    def __init__(self, scene: RestoreScene) -> None:
        self._scene = scene
        self.kept: KeptVolume | None = None

    async def carry(self, transport: Cut | None = None) -> None:
        """Take the load to its end from wherever it is."""
        scene = self._scene
        if self.kept is None:
            await expose(scene, transport)
            self.kept = await scene.exposer(transport).read_volume(scene.request)
        await rebind(scene, self.kept, transport)
        await clean_up(scene, transport)


@pytest.mark.parametrize("applied", [False, True], ids=["before", "after"])
async def test_a_restore_that_is_cut_at_any_request_goes_on(applied: bool) -> None:
    at, cut = 0, True
    while cut:
        at, scene = at + 1, RestoreScene()
        load = Load(scene)
        cut = await cut_short(load.carry(Cut(scene.world.kube, at, applied=applied)))
        await scene.world.settle()

        await load.carry()

        assert load.kept is not None
        assert_handed_over(scene, load.kept)
    assert at > 20


@pytest.mark.parametrize("applied", [False, True], ids=["before", "after"])
async def test_a_restore_that_is_cut_before_the_data_moved_is_cleaned_up(applied: bool) -> None:
    at, cut = 0, True
    while cut:
        at, scene = at + 1, RestoreScene(reclaim="Retain")
        cut = await cut_short(expose(scene, Cut(scene.world.kube, at, applied=applied)))
        await scene.world.settle()

        await clean_up(scene)

        assert_clean(scene)
    assert at > 5


@pytest.mark.parametrize("applied", [False, True], ids=["before", "after"])
async def test_a_rebind_that_is_cut_anywhere_can_still_be_given_up(applied: bool) -> None:
    """Whatever the rebind had done: afterwards the target has the volume, or it is gone."""
    at, cut = 0, True
    while cut:
        at, scene = at + 1, RestoreScene()
        await expose(scene)
        kept = await scene.exposer().read_volume(scene.request)
        cut = await cut_short(rebind(scene, kept, Cut(scene.world.kube, at, applied=applied)))

        await drop_volume(scene, kept)
        await clean_up(scene)

        if claim(scene, "app3", "data")["spec"].get("volumeName"):
            assert_handed_over(scene, kept)
        else:
            assert_clean(scene)
    assert at > 10


@pytest.mark.parametrize("applied", [False, True], ids=["before", "after"])
async def test_giving_up_that_is_cut_anywhere_goes_on(applied: bool) -> None:
    at, cut = 0, True
    while cut:
        at, scene = at + 1, RestoreScene(reclaim="Retain")
        await expose(scene)
        kept = await scene.exposer().read_volume(scene.request)
        cut = await cut_short(drop_volume(scene, kept, Cut(scene.world.kube, at, applied=applied)))

        await drop_volume(scene, kept)
        await clean_up(scene)

        assert_clean(scene)
    assert at > 5


async def test_a_rebind_may_be_repeated_after_its_end() -> None:
    scene = RestoreScene()
    load = Load(scene)
    await load.carry()

    await load.carry()

    assert load.kept is not None
    assert_handed_over(scene, load.kept)


async def remove_target(scene: RestoreScene) -> None:
    await scene.world.client.delete(PERSISTENT_VOLUME_CLAIMS, "app3", "data")
    await scene.world.settle()


async def bind_target_elsewhere(scene: RestoreScene) -> None:
    patch = {"spec": {"volumeName": "pvc-other"}}
    await scene.world.client.patch(PERSISTENT_VOLUME_CLAIMS, "app3", "data", patch)


async def test_a_target_that_is_gone_ends_the_rebind_and_the_volume_is_dropped() -> None:
    scene = RestoreScene()
    await expose(scene)
    kept = await scene.exposer().read_volume(scene.request)
    await scene.exposer().rebind(scene.request, kept)
    await remove_target(scene)

    with pytest.raises(ExposeError, match="target claim app3/data is gone"):
        await scene.exposer().rebind(scene.request, kept)
    await drop_volume(scene, kept)
    await clean_up(scene)

    assert scene.world.names() == BYSTANDERS
    assert scene.world.disks == set()


async def test_a_target_that_got_another_volume_ends_the_rebind_and_the_volume_is_dropped() -> None:
    scene = RestoreScene()
    await expose(scene)
    kept = await scene.exposer().read_volume(scene.request)
    await bind_target_elsewhere(scene)

    with pytest.raises(ExposeError, match="was bound to PersistentVolume pvc-other meanwhile"):
        await scene.exposer().rebind(scene.request, kept)
    await drop_volume(scene, kept)
    await clean_up(scene)

    assert_clean(scene)


async def test_a_volume_that_is_gone_ends_the_rebind() -> None:
    scene = RestoreScene()
    await expose(scene)

    with pytest.raises(ExposeError, match="PersistentVolume pvc-none with the restored data is gone"):
        await scene.exposer().rebind(scene.request, KeptVolume("pvc-none", "Delete"))
    assert await scene.exposer().drop_volume(scene.request, KeptVolume("pvc-none", "Delete")) is None


async def test_a_volume_that_belongs_to_another_claim_is_neither_taken_nor_dropped() -> None:
    scene = RestoreScene()
    reference = {"namespace": "app3", "name": "bystander", "uid": "uid-bystander"}
    spec = {"claimRef": reference, "persistentVolumeReclaimPolicy": "Retain"}
    scene.world.put(PERSISTENT_VOLUMES, "pv", spec=spec)
    kept = KeptVolume("pv", "Delete")

    with pytest.raises(ExposeError, match="belongs to another claim"):
        await scene.exposer().rebind(scene.request, kept)
    assert await scene.exposer().drop_volume(scene.request, kept) is None
    assert volume(scene, "pv")["spec"] == spec


async def test_a_volume_that_was_lost_cannot_be_kept() -> None:
    scene = RestoreScene()

    with pytest.raises(ExposeError, match="claim velero/r2-9nft8 with the restored data is gone"):
        await scene.exposer().read_volume(scene.request)


@pytest.mark.parametrize(
    ("binding", "node", "ignore", "reason"),
    [
        ("Immediate", "", False, None),
        ("WaitForFirstConsumer", "", False, "TargetClaimUnconsumed"),
        ("WaitForFirstConsumer", "", True, None),
        ("WaitForFirstConsumer", "node-a", False, None),
    ],
)
async def test_an_unconsumed_target_is_waited_for(binding: str, node: str, ignore: bool, reason: str | None) -> None:
    scene = RestoreScene(binding=binding, node=node)
    scene.request = replace(scene.request, ignore_delay_binding=ignore)

    found = await scene.exposer().check(scene.request)

    assert (found.reason if found else None) == reason


async def test_an_ignored_selected_node_does_not_pin_the_restore() -> None:
    scene = RestoreScene(binding="WaitForFirstConsumer", node="node-b")
    scene.request = replace(scene.request, ignore_delay_binding=True)

    exposed = await expose(scene)

    assert "volume.kubernetes.io/selected-node" not in claim(scene, "velero", "r2-9nft8")["metadata"].get(
        "annotations", {}
    )
    assert "matchFields" not in str(exposed.pod["spec"]["affinity"])


async def test_an_absent_target_is_waited_for() -> None:
    scene = RestoreScene()
    await remove_target(scene)

    assert await scene.exposer().check(scene.request) == Waiting(
        "TargetClaimAbsent", "target claim app3/data does not exist yet"
    )


async def test_a_missing_storage_class_is_waited_for() -> None:
    scene = RestoreScene()
    await scene.world.client.delete(STORAGE_CLASSES, "", "hostpath")

    found = await scene.exposer().check(scene.request)

    assert found == Waiting("StorageClassMissing", "StorageClass hostpath of target claim app3/data does not exist")


async def test_a_bound_target_is_refused() -> None:
    scene = RestoreScene()
    await bind_target_elsewhere(scene)

    for step in (scene.exposer().check(scene.request), scene.exposer().ensure(scene.request, no_guard)):
        with pytest.raises(ExposeError, match="target claim app3/data is bound to PersistentVolume pvc-other already"):
            await step


@pytest.mark.parametrize("at", [1, 2, 3])
async def test_what_was_made_for_a_load_that_ended_is_removed(at: int) -> None:
    scene = RestoreScene()
    asked = 0

    async def guard() -> None:
        nonlocal asked
        asked += 1
        if asked >= at:
            raise NotOwnerError("it ended", ended=True)

    with pytest.raises(NotOwnerError):
        await scene.world.until_exposed(lambda: scene.exposer().ensure(scene.request, guard))
    await scene.world.settle()

    assert_clean(scene)


class NoPriorityClasses(Cut):
    """Admission in a cluster whose PriorityClasses were deleted, or one that allows no pods."""

    def __init__(self, inner: FakeKube, words: str) -> None:
        super().__init__(inner)
        self._words = words

    async def request(self, request: Request) -> Response:
        if request.method == "POST" and "priorityClassName" in str(request.body):
            status = {"kind": "Status", "reason": "Forbidden", "message": self._words}
            return Response(403, json.dumps(status).encode())
        return await super().request(request)


async def test_a_priority_class_that_is_gone_costs_nothing_but_its_priority(caplog: pytest.LogCaptureFixture) -> None:
    scene = RestoreScene()
    words = 'pods "r2-9nft8" is forbidden: no PriorityClass with name data-mover-low was found'

    exposed = await expose(scene, NoPriorityClasses(scene.world.kube, words))

    assert "priorityClassName" not in exposed.pod["spec"]
    assert "made without one" in caplog.text


async def test_another_refusal_of_the_pod_is_passed_on() -> None:
    scene = RestoreScene()

    with pytest.raises(ForbiddenError, match="exceeded quota"):
        await expose(scene, NoPriorityClasses(scene.world.kube, "exceeded quota"))
