"""Volumes of a class that retains them: none outlives its transfer, however that ends."""

from functools import partial

import pytest

from core.kube.resources import PERSISTENT_VOLUME_CLAIMS
from core.kube.transport import Request, Response
from exposer.leaked_objects import delete_leaked_objects, list_leaked_objects
from exposer.model import NotOwnerError, Pending
from tests.exposer.support.restore_steps import clean_up
from tests.exposer.support.scenes import BackupScene, RestoreScene
from tests.exposer.support.world import Cut, World, cut_short, no_guard
from tests.exposer.test_csi_snapshot_guard import Guard

Scene = BackupScene | RestoreScene
by_scene = pytest.mark.parametrize("build", [BackupScene, RestoreScene], ids=["backup", "restore"])


class Meanwhile(Cut):
    """A transport that deletes a PVC only after the controllers have run."""

    def __init__(self, world: World) -> None:
        super().__init__(world.kube)
        self._world = world

    async def request(self, request: Request) -> Response:
        if request.method == "DELETE" and PERSISTENT_VOLUME_CLAIMS.plural in request.path:
            await self._world.settle()
        return await super().request(request)


async def run_expose(scene: Scene, transport: Cut | None = None) -> None:
    exposer = scene.exposer(transport)
    await scene.world.until_exposed(lambda: exposer.ensure(scene.request, no_guard))  # type: ignore[arg-type] # its own


async def run_clean_up(scene: Scene) -> None:
    await scene.world.until_none(lambda: scene.exposer().clean_up(scene.request))  # type: ignore[arg-type] # its own


async def collect(world: World) -> None:
    """Collect the objects of a force-deleted transfer; Kubernetes deletes what has an owner reference."""
    for claim in world.kube.objects(PERSISTENT_VOLUME_CLAIMS):
        if claim["metadata"].get("ownerReferences"):
            await world.client.delete(PERSISTENT_VOLUME_CLAIMS, "velero", claim["metadata"]["name"])
    await world.settle()
    for _ in range(20):
        for leaked in (await list_leaked_objects(world.client, "velero")).values():
            await delete_leaked_objects(world.client, leaked)
        await world.settle()


async def writes_of(build: type[Scene]) -> list[int]:
    scene = build(reclaim="Retain")
    cut = Cut(scene.world.kube)
    await run_expose(scene, cut)
    return [number for number, call in enumerate(cut.calls, start=1) if not call.startswith("GET")]


@by_scene
@pytest.mark.parametrize("provisioned", [True, False], ids=["provisioned", "being provisioned"])
@pytest.mark.parametrize("collected", [False, True], ids=["cleaned up", "collected"])
async def test_no_volume_is_left_when_a_transfer_ends_after_any_write(
    build: type[Scene], provisioned: bool, collected: bool
) -> None:
    for at in await writes_of(build):
        scene = build(reclaim="Retain")
        scene.world.provisions = provisioned
        cut = await cut_short(run_expose(scene, Cut(scene.world.kube, at, applied=True)))
        assert cut
        await scene.world.settle()
        if not provisioned:
            await scene.exposer().clean_up(scene.request)  # type: ignore[arg-type] # its own
            await scene.world.settle()
            scene.world.provisions = True

        await (collect(scene.world) if collected else run_clean_up(scene))

        assert scene.world.disks == set()
        assert scene.world.violations == []
        assert not any("PersistentVolume /" in name for name in scene.world.names())


@pytest.mark.parametrize(
    ("build", "at"), [*((BackupScene, at) for at in range(1, 7)), *((RestoreScene, at) for at in range(1, 4))]
)
async def test_no_volume_is_left_by_an_expose_that_outlives_its_transfer(build: type[Scene], at: int) -> None:
    scene = build(reclaim="Retain")
    step = partial(scene.exposer().ensure, scene.request, Guard(at, ended=True))  # type: ignore[arg-type] # its own

    with pytest.raises(NotOwnerError):
        await scene.world.until_exposed(step)
    await collect(scene.world)

    assert scene.world.disks == set()


@pytest.mark.parametrize("provisioned", [True, False], ids=["provisioned", "being provisioned"])
@pytest.mark.parametrize(("build", "creates_pod"), [(BackupScene, 5), (RestoreScene, 2)], ids=["backup", "restore"])
async def test_no_volume_is_left_by_a_later_expose_that_outlives_its_transfer(
    build: type[Scene], creates_pod: int, provisioned: bool
) -> None:
    """An earlier one has created the PVC, and no pod."""
    scene = build(reclaim="Retain")
    scene.world.provisions = provisioned
    for guard in (Guard(creates_pod, ended=False), Guard(1, ended=True)):
        step = partial(scene.exposer().ensure, scene.request, guard)  # type: ignore[arg-type] # its own
        with pytest.raises(NotOwnerError):
            await scene.world.until_exposed(step)
        await scene.world.settle()
    scene.world.provisions = True
    await collect(scene.world)

    assert scene.world.disks == set()
    assert scene.world.violations == []


async def test_a_claim_whose_provisioning_begins_before_it_is_deleted_is_kept() -> None:
    scene = RestoreScene(reclaim="Retain")
    scene.world.provisions = False
    await cut_short(scene.exposer().ensure(scene.request, no_guard))
    for _ in range(3):
        await scene.exposer(Meanwhile(scene.world)).clean_up(scene.request)
    scene.world.provisions = True
    await scene.world.settle()
    await clean_up(scene)

    assert scene.world.disks == set()


async def test_a_claim_that_is_being_provisioned_is_reported() -> None:
    scene = RestoreScene(reclaim="Retain")
    scene.world.provisions = False
    await cut_short(scene.exposer().ensure(scene.request, no_guard))
    await scene.world.settle()
    found: Pending | None = None
    for _ in range(3):
        found = await scene.exposer().clean_up(scene.request)
        await scene.world.settle()

    text = "PersistentVolumeClaim velero/r2-9nft8 is being provisioned, will be deleted with its volume"
    assert found == Pending("CleaningUp", text)
    scene.world.provisions = True
    await scene.world.settle()
    await clean_up(scene)
    assert scene.world.disks == set()


@pytest.mark.parametrize("reclaim", ["Delete", "Retain"])
async def test_a_claim_that_nobody_provisions_is_deleted_at_once(reclaim: str) -> None:
    """Not before a provisioner was asked, nor where the volume is reclaimed by its own policy."""
    scene = RestoreScene(reclaim=reclaim)
    scene.world.provisions = False
    await cut_short(scene.exposer().ensure(scene.request, no_guard))
    if reclaim == "Delete":
        await scene.world.settle()

    await clean_up(scene)
    scene.world.provisions = True
    await scene.world.settle()

    assert scene.world.disks == set()
    assert "PersistentVolumeClaim velero/r2-9nft8" not in scene.world.names()
