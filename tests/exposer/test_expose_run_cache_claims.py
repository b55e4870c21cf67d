"""Cache volumes of restores; without one, the restore uses the node's disk and never fails."""

from dataclasses import replace

import pytest

from core.kube.resources import PERSISTENT_VOLUME_CLAIMS, PODS
from core.models.base import JsonDict
from core.models.reasons import PendingReason
from exposer.manifests import build_cache_claim
from exposer.model import Exposed, Pending
from exposer.settings import CacheVolume
from tests.exposer.support.cuts import CUTS, interruptions
from tests.exposer.support.scenes import RestoreScene
from tests.exposer.support.steps import clean_up, ensure, expose
from tests.exposer.support.world import World
from tests.exposer.test_pod_volume import Scene

CACHE = CacheVolume("fast", 5000)


def cache_claims(world: World) -> list[JsonDict]:
    claims = world.kube.objects(PERSISTENT_VOLUME_CLAIMS)
    return [claim for claim in claims if claim["metadata"]["name"].endswith("-cache")]


def is_cached(exposed: Exposed) -> bool:
    container = exposed.pod["spec"]["containers"][0]
    mounted = any(mount["name"].endswith("-cache") for mount in container["volumeMounts"])
    configured = any(argument.startswith("--cache-volume-path=") for argument in container["args"])
    assert mounted is configured
    return mounted


async def test_a_pod_volume_restore_has_its_cache_on_the_pods_node() -> None:
    scene = Scene("podvolumerestore", cache=CACHE)
    before = scene.world.names()
    exposed = await expose(scene)
    (claim,) = cache_claims(scene.world)
    await clean_up(scene)
    assert is_cached(exposed)
    assert claim["metadata"]["annotations"]["volume.kubernetes.io/selected-node"] == "node-a"
    assert claim["spec"]["storageClassName"] == "fast"
    assert scene.world.names() == before
    assert scene.world.disks == set()


@pytest.mark.parametrize(
    ("edited_mib", "limit_mib"), [(100, 100), (5000, 5000), (20_000, 5120)], ids=["smaller", "same", "larger"]
)
async def test_a_pod_that_is_created_again_keeps_to_the_room_of_its_cache_volume(
    edited_mib: int, limit_mib: int
) -> None:
    """The PVC is older than the edit: a larger cache would fill its volume, and the restore would fail."""
    scene = Scene("podvolumerestore", cache=CACHE)
    await expose(scene)
    await scene.world.delete(PODS, f"velero/{scene.request.owner.name}")
    scene.request = replace(scene.request, cache=CacheVolume("fast", edited_mib))
    exposed = await expose(scene)
    assert f"--cache-limit-mib={limit_mib}" in exposed.pod["spec"]["containers"][0]["args"]


@pytest.mark.parametrize(
    ("storage_class", "reason"),
    [
        ("", "cachePVC has no storageClass"),
        ("absent", "StorageClass absent does not exist"),
        ("kept", "StorageClass kept has reclaimPolicy Retain: cache volumes would not be deleted"),
    ],
    ids=["none", "absent", "retaining"],
)
async def test_an_unsuitable_class_is_logged_as_a_warning(
    storage_class: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache = CacheVolume(storage_class, 5000)
    restore, pod_volume = RestoreScene(), Scene("podvolumerestore", cache=cache)
    restore.request = replace(restore.request, cache=cache)
    exposed = [await expose(restore), await expose(pod_volume)]
    assert [is_cached(one) for one in exposed] == [False, False]
    assert cache_claims(restore.world) == cache_claims(pod_volume.world) == []
    warnings = [str(vars(record)) for record in caplog.records if record.levelname == "WARNING"]
    assert [reason in warning for warning in warnings] == [True, True]


@pytest.mark.parametrize("status", [403, 422], ids=["quota", "invalid"])
async def test_a_rejected_cache_volume_is_gone_without(status: int) -> None:
    scene = Scene("podvolumerestore", cache=CACHE)
    scene.world.kube.fail_next("POST", "/persistentvolumeclaims", status)
    assert not is_cached(await expose(scene))


@pytest.mark.parametrize(
    ("kind", "blocked", "text"),
    [
        ("DataDownload", False, "of an earlier DataDownload must be deleted first"),
        ("PodVolumeRestore", True, "belongs to PodVolumeRestore r2-9nft8, which has the same name and is not finished"),
    ],
)
async def test_a_cache_of_another_transfer_of_the_name_is_pending(kind: str, text: str, *, blocked: bool) -> None:
    scene = RestoreScene()
    scene.request = replace(scene.request, cache=CACHE)
    other = replace(scene.request.owner, kind=kind, uid="uid-of-other")
    scene.world.kube.put(build_cache_claim(other, CACHE, node=None))
    text = f"PersistentVolumeClaim velero/r2-9nft8-cache {text}"
    assert await ensure(scene) == Pending(PendingReason.NAME_TAKEN, text, blocked=blocked)


async def test_a_cache_that_is_no_longer_configured_is_cleaned_up() -> None:
    """The configuration may have changed since the PVC was created."""
    scene = RestoreScene()
    scene.request = replace(scene.request, cache=CACHE)
    assert is_cached(await expose(scene))
    (claim,) = cache_claims(scene.world)
    assert claim["spec"]["resources"]["requests"]["storage"] == "6Gi"
    scene.request = replace(scene.request, cache=None)
    await clean_up(scene)
    assert cache_claims(scene.world) == []
    assert scene.world.disks == set()


@CUTS
async def test_a_pod_volume_restore_interrupted_at_any_request_continues_and_leaves_nothing(applied: bool) -> None:
    def build() -> Scene:
        return Scene("podvolumerestore", cache=CACHE)

    async for scene in interruptions(build, expose, applied=applied, least=5):
        exposed = await expose(scene)
        await clean_up(scene)
        assert is_cached(exposed)
        assert scene.world.names() == build().world.names()
        assert scene.world.disks == set()
