"""The matrix before a real API server: runs at the same time, and their results."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

from core.kube.client import KubeClient, Selection
from core.kube.resources import PERSISTENT_VOLUME_CLAIMS, PERSISTENT_VOLUMES, PODS, VOLUME_SNAPSHOT_CONTENTS
from tests.crash.controllers import RealCluster
from tests.crash.listing import list_everything
from tests.crash.worlds import LEASE_SECONDS, World, beside, open_client
from tests.nodeagent.support.harness import Fuse
from tests.support.apiserver import ApiServer
from tests.support.objects import JsonDict

LEDGER = "configmaps node-agent-admissions"
_HISTORY = "configmaps node-agent-history-"
"""Written once a minute at most: only of a slow run before its end is judged."""
_SNAPSHOT = ["volumesnapshotcontents content-of-*", "volumesnapshots velero-data-lwkc4"]
CHANGES = {
    "DataUpload": ([], _SNAPSHOT),
    "DataDownload": (["persistentvolumes pvc-*"], []),
    "PodVolumeBackup": ([], []),
    "PodVolumeRestore": ([], []),
}
"""What a Completed transfer creates in its volume's namespace, and what it deletes."""

_AT_A_TIME = 16
_SETTLE_SECONDS = 20
_LOOK_SECONDS = 0.2


class Matrix:
    """Plays runs on an API server that no other test uses."""

    def __init__(self, apiserver: ApiServer, client: KubeClient, cluster: RealCluster) -> None:
        self._apiserver = apiserver
        self._client = client
        self._cluster = cluster
        self._slots = asyncio.Semaphore(_AT_A_TIME)
        self.lease_seconds = LEASE_SECONDS

    async def play(self, kind: str, fuses: Sequence[Fuse]) -> list[JsonDict]:
        return await self.play_all([(kind, fuse) for fuse in fuses])

    async def play_all(self, runs: Sequence[tuple[str, Fuse]]) -> list[JsonDict]:
        """Play a run of each kind with its fuse, all at a time; return what each is judged by."""
        worlds = [World(self._apiserver, self._client, kind, lease_seconds=self.lease_seconds) for kind, _ in runs]
        async with asyncio.TaskGroup() as group:
            for world in worlds:
                group.create_task(world.prepare(), name="prepare")
        async with asyncio.TaskGroup() as group:
            for world in worlds:
                group.create_task(world.begin(), name="begin")
        before = await list_everything(self._apiserver.api)
        async with asyncio.TaskGroup() as group:
            for world, (_, fuse) in zip(worlds, runs, strict=True):
                group.create_task(self._play(world, fuse), name=world.name)
        await settle(self._client, worlds)
        after = await list_everything(self._apiserver.api)
        found = []
        for world in worlds:
            result = await summarize(world, self._cluster)
            for whose, namespace in (("agent's", world.name), ("volume's", world.space)):
                made, deleted = compare(
                    before.pop(namespace, Counter()), after.pop(namespace, Counter()), hide=world.name
                )
                result[f"made in the {whose} namespace"] = [each for each in made if not each.startswith(_HISTORY)]
                result[f"deleted from the {whose} namespace"] = deleted
            found.append(result)
        if before != after:
            raise AssertionError(f"objects changed outside of all worlds: {before} became {after}")
        return found

    async def _play(self, world: World, fuse: Fuse) -> None:
        async with self._slots:
            try:
                await world.play(fuse)
            except TimeoutError as error:
                at = fuse.counted[fuse.at] if fuse.at < len(fuse.counted) else "no request"
                status = world.transfer.get("status")
                raise AssertionError(f"{fuse.fault.name} at {fuse.at} ({at}): {world.kind} is {status}") from error


def compare(before: Counter[str], after: Counter[str], *, hide: str) -> tuple[list[str], list[str]]:
    """Return the objects of a namespace that are new, and those that were deleted, with `*` for the name `hide`."""
    new, deleted = (after - before).elements(), (before - after).elements()
    return sorted(each.replace(hide, "*") for each in new), sorted(each.replace(hide, "*") for each in deleted)


async def settle(client: KubeClient, worlds: Sequence[World]) -> None:
    """Wait until provisioner and kubelet have deleted what they delete, for a limited time."""
    namespaces = {each for world in worlds for each in (world.namespace, world.space)}
    with suppress(TimeoutError):
        # What was not deleted by then is in the listing.
        async with asyncio.timeout(_SETTLE_SECONDS):
            while await _leaving(client, namespaces):
                await asyncio.sleep(_LOOK_SECONDS)


async def _leaving(client: KubeClient, namespaces: set[str]) -> bool:
    for resource in (PODS, PERSISTENT_VOLUME_CLAIMS, PERSISTENT_VOLUMES, VOLUME_SNAPSHOT_CONTENTS):
        obj: JsonDict
        for obj in await client.list(Selection(resource)):
            spec = obj["spec"]
            reference = spec.get("claimRef") or spec.get("volumeSnapshotRef") or obj["metadata"]
            released = (obj.get("status") or {}).get("phase") == "Released"
            if reference["namespace"] in namespaces and (released or "deletionTimestamp" in obj["metadata"]):
                return True
    return False


async def summarize(world: World, cluster: RealCluster) -> JsonDict:
    """Return what a run is judged by, beside what it made; what differs from run to run is left out."""
    transfer = world.transfer
    status = {key: value for key, value in transfer["status"].items() if not key.endswith("Timestamp")}
    moved = cluster.moved.get(transfer["metadata"]["uid"], "")
    status["path"] = status.get("path", "").replace(transfer["metadata"]["uid"], "*")
    # All runs are created at once, and wait for their turn: on a slow machine for longer than is worth a line.
    status["activities"] = [line for line in status.get("activities", ()) if not line.startswith("waited ")]
    result: JsonDict = {
        "status": status,
        "stamps": sorted(key for key in transfer["status"] if key.endswith("Timestamp")),
        "finalizers": transfer["metadata"].get("finalizers"),
        "data": moved.replace(world.name, "*"),
    }
    if world.kind == "DataDownload":
        claim, volume = await world.target()
        result["target"] = (claim["status"]["phase"], volume.get("spec", {}).get("persistentVolumeReclaimPolicy"))
        result["data"] = volume.get("metadata", {}).get("name") == moved
    elif "pod" in transfer["spec"]:
        result["data"] = moved.replace(transfer["spec"]["pod"]["uid"], "*")
    return result


@asynccontextmanager
async def open_cluster(client: KubeClient, *, interrupted: int = 0) -> AsyncIterator[RealCluster]:
    """Run the controllers of an API server; the first `interrupted` attempts of each transfer are interrupted."""
    cluster = RealCluster(client, interrupted=interrupted)
    async with beside(cluster.run(), "controllers"):
        yield cluster


@asynccontextmanager
async def open_matrix(apiserver: ApiServer, *, interrupted: int = 0) -> AsyncIterator[Matrix]:
    """Run the controllers of an API server, and a matrix on it; `interrupted` as in `open_cluster`."""
    async with open_client(apiserver) as client, open_cluster(client, interrupted=interrupted) as cluster:
        yield Matrix(apiserver, client, cluster)
