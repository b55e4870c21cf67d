"""The steps of an expose or a restore, each until nothing is pending, and its possible ends."""

from typing import Any

from core.kube.resources import PERSISTENT_VOLUME_CLAIMS, PERSISTENT_VOLUMES
from exposer.manifests import changed_name
from exposer.model import Exposed, Guard, KeptVolume, NotOwnerError, Pending
from tests.exposer.support.cuts import Cut
from tests.exposer.support.scenes import BackupScene, RestoreScene
from tests.exposer.support.world import no_guard
from tests.support.objects import JsonDict

AnyScene = BackupScene | RestoreScene
BYSTANDERS = {"PersistentVolumeClaim app3/bystander"}
TARGET = "PersistentVolumeClaim app3/data"


class GuardAt:
    """A guard that raises at its `at`-th call."""

    def __init__(self, at: int, *, ended: bool) -> None:
        self._at = at
        self._ended = ended
        self.calls: list[str] = []

    async def __call__(self, *, sure: bool) -> None:
        self.calls.append("with a read" if sure else "from the cache")
        if len(self.calls) >= self._at:
            raise NotOwnerError("no longer this agent's", ended=self._ended)


async def expose(scene: Any, transport: Cut | None = None, guard: Guard = no_guard) -> Exposed:
    exposer = scene.exposer(transport)
    exposed: Exposed = await scene.world.until_exposed(lambda: exposer.ensure(scene.request, guard))
    return exposed


async def clean_up(scene: Any, transport: Cut | None = None) -> None:
    exposer = scene.exposer(transport)
    await scene.world.until_none(lambda: exposer.clean_up(scene.request))


async def rebind(scene: RestoreScene, kept: KeptVolume, transport: Cut | None = None) -> None:
    exposer = scene.exposer(transport)
    await scene.world.until_none(lambda: exposer.rebind(scene.request, kept))


async def drop_volume(scene: RestoreScene, kept: KeptVolume, transport: Cut | None = None) -> None:
    exposer = scene.exposer(transport)
    await scene.world.until_none(lambda: exposer.drop_volume(scene.request, kept))


async def collect(scene: Any, transport: Cut | None = None) -> None:
    await scene.world.collect(transport)


async def check(scene: Any) -> Pending | None:
    """Check once, as the leader does before it accepts the transfer."""
    found: Pending | None = await scene.exposer().check(scene.request, scene.world.client)
    return found


async def ensure(scene: Any) -> Any:
    """Take one step of the expose."""
    return await scene.exposer().ensure(scene.request, no_guard)


class Restore:
    """A restore and its steps; `kept` is the volume as recorded in the outcome."""

    def __init__(self, scene: RestoreScene) -> None:
        self.scene, self.world = scene, scene.world
        self.kept: Any = None

    async def begin(self, transport: Cut | None = None) -> None:
        """Go on until the volume is recorded."""
        if self.kept is None:
            await expose(self.scene, transport)
            self.kept = await self.scene.exposer(transport).read_volume(self.scene.request)

    async def rebind(self, transport: Cut | None = None) -> None:
        await rebind(self.scene, self.kept, transport)

    async def drop(self, transport: Cut | None = None) -> None:
        await drop_volume(self.scene, self.kept, transport)

    async def carry(self, transport: Cut | None = None) -> None:
        """Run it to its end from any state."""
        await self.begin(transport)
        await self.rebind(transport)
        await clean_up(self.scene, transport)


async def begun(scene: RestoreScene) -> Restore:
    """Return a restore whose volume is recorded."""
    restore = Restore(scene)
    await restore.begin()
    return restore


def claim(scene: RestoreScene, namespace: str, name: str) -> JsonDict:
    return scene.world.find(PERSISTENT_VOLUME_CLAIMS, name, namespace)


def volume(scene: AnyScene, name: str) -> JsonDict:
    return scene.world.find(PERSISTENT_VOLUMES, name)


def assert_handed_over(scene: RestoreScene, kept: KeptVolume) -> None:
    """Assert that the target has the volume as if provisioned for it, and nothing else is left."""
    target = claim(scene, "app3", "data")
    changed = scene.request.by_block and target["spec"]["volumeMode"] == "Filesystem"
    name = changed_name(kept.pv_name) if changed else kept.pv_name
    given = volume(scene, name)
    assert scene.world.names() == BYSTANDERS | {TARGET, f"PersistentVolume /{name}"}
    assert target["spec"]["volumeName"] == name
    assert given["spec"]["volumeMode"] == target["spec"]["volumeMode"]
    assert target["status"]["phase"] == given["status"]["phase"] == "Bound"
    assert given["spec"]["claimRef"]["uid"] == target["metadata"]["uid"]
    assert given["spec"]["persistentVolumeReclaimPolicy"] == kept.reclaim_policy
    assert given["metadata"]["labels"] == target["spec"]["selector"]["matchLabels"]
    assert scene.world.disks == {kept.pv_name}


def assert_ended(scene: RestoreScene, kept: KeptVolume) -> bool:
    """Assert that the target has the volume, or nothing is left; return whether it has."""
    handed_over = bool(claim(scene, "app3", "data")["spec"].get("volumeName"))
    (assert_handed_over(scene, kept) if handed_over else assert_clean(scene))
    return handed_over


def assert_clean(scene: RestoreScene) -> None:
    assert scene.world.names() == BYSTANDERS | {TARGET}
    assert scene.world.disks == set()


async def remove_target(scene: RestoreScene) -> None:
    await scene.world.client.delete(PERSISTENT_VOLUME_CLAIMS, "app3", "data")
    await scene.world.settle()


async def replace_target(scene: RestoreScene, meta: JsonDict | None = None) -> None:
    """Have a user delete the target, and the restore r3 of a Velero server make it again, an hour later."""
    await remove_target(scene)
    again = {
        "uid": "uid-again",
        "labels": {"velero.io/restore-name": "r3"},
        "creationTimestamp": "2026-11-21T12:15:02Z",
    }
    scene.put_target("data", meta=again | (meta or {}))


async def bind_target_elsewhere(scene: RestoreScene) -> None:
    await scene.world.patch(PERSISTENT_VOLUME_CLAIMS, "app3/data", spec={"volumeName": "pvc-other"})
