"""Removes what exposes left behind for custom resources that are gone, step by step.

Knows how objects of ours are found by their owner label alone, and in which order they may go.
Does not know which owners are gone (`nodeagent.leader.recovery.garbage_collector`). Whatever lacks the label is left
alone, whoever made it.
"""

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from core.errors import ContractError
from core.kube.client import KubeClient, Selection
from core.kube.errors import ForbiddenError, NotFoundError
from core.kube.resources import (
    PERSISTENT_VOLUME_CLAIMS,
    PERSISTENT_VOLUMES,
    PODS,
    VOLUME_SNAPSHOT_CONTENTS,
    VOLUME_SNAPSHOTS,
    Resource,
)
from core.models.base import JsonDict
from core.models.names import OWNER_UID_LABEL
from exposer.ownership import patch_if_there, remove
from exposer.snapshots import VOLUME_ANNOTATION, SnapshotSource, remembered_source
from exposer.volumes import DELETE, RETAIN, condemn_volume_of, set_reclaim_policy

__all__ = ["LeakedObjects", "delete_leaked_objects", "list_leaked_objects"]

_NAMESPACED: Final = (PODS, PERSISTENT_VOLUME_CLAIMS, VOLUME_SNAPSHOTS)


@dataclass(frozen=True)
class LeakedObjects:
    """The objects of one owner, as JSON dicts by what they are."""

    uid: str
    objects: dict[Resource, list[JsonDict]] = field(default_factory=dict)

    def of(self, resource: Resource) -> list[JsonDict]:
        """Return those of one kind."""
        return self.objects.get(resource, [])


async def list_leaked_objects(client: KubeClient, namespace: str) -> dict[str, LeakedObjects]:
    """Return all objects with an owner label, by the owner's UID.

    A content lives in no namespace; one counts where it stands for a snapshot of `namespace`. A
    volume, which has the label only while it is handed over, counts where it still stands for a
    claim of `namespace` that is gone: one that is somebody's by now is never an owner's.

    Raises:
        KubeError: the API server refused.
    """
    found: dict[str, LeakedObjects] = {}
    selections = [Selection(resource, namespace, label_selector=OWNER_UID_LABEL) for resource in _NAMESPACED]
    for selection in [*selections, Selection(VOLUME_SNAPSHOT_CONTENTS, label_selector=OWNER_UID_LABEL)]:
        for obj in await _list(client, selection):
            reference = obj.get("spec", {}).get("volumeSnapshotRef") or {"namespace": namespace}
            if reference["namespace"] == namespace:
                uid = obj["metadata"]["labels"][OWNER_UID_LABEL]
                leftovers = found.setdefault(uid, LeakedObjects(uid))
                leftovers.objects.setdefault(selection.resource, []).append(obj)
    for volume in await _list(client, Selection(PERSISTENT_VOLUMES, label_selector=OWNER_UID_LABEL)):
        if await _lost_its_claim(client, volume, namespace):
            uid = volume["metadata"]["labels"][OWNER_UID_LABEL]
            found.setdefault(uid, LeakedObjects(uid)).objects.setdefault(PERSISTENT_VOLUMES, []).append(volume)
    return found


async def delete_leaked_objects(client: KubeClient, leftovers: LeakedObjects) -> str:
    """Take the next step; return what is waited for in words, empty where nothing is left.

    Pods go before the claims they use, volumes before the snapshot they were made from.

    Raises:
        KubeError: the API server refused.
    """
    for steps in (_remove_pods, _remove_claims, _remove_volumes, _remove_snapshots, _remove_contents):
        waiting = await steps(client, leftovers)
        if waiting:
            return waiting
    return ""


async def _list(client: KubeClient, selection: Selection) -> list[JsonDict]:
    try:
        return await client.list(selection)
    except NotFoundError:
        # A cluster without CSI snapshots does not have their kinds.
        return []
    except ForbiddenError:
        if selection.resource != PERSISTENT_VOLUMES:
            raise
        # The role of an earlier version: all else can be swept.
        return []


async def _lost_its_claim(client: KubeClient, volume: JsonDict, namespace: str) -> bool:
    """Whether `volume` stands for a claim of `namespace` that does not exist any more.

    One that stands for no claim was let go by somebody who wants it.
    """
    reference = volume["spec"].get("claimRef") or {}
    if not (reference.get("uid") and reference.get("name")) or reference.get("namespace") != namespace:
        return False
    claim = await client.read(PERSISTENT_VOLUME_CLAIMS, namespace, reference["name"])
    return claim is None or claim["metadata"]["uid"] != reference["uid"]


async def _remove_all(client: KubeClient, leftovers: LeakedObjects, resource: Resource) -> str:
    waiting = [await remove(client, resource, obj) for obj in leftovers.of(resource)]
    return "; ".join(one.message for one in waiting if one is not None)


async def _remove_pods(client: KubeClient, leftovers: LeakedObjects) -> str:
    return await _remove_all(client, leftovers, PODS)


async def _remove_claims(client: KubeClient, leftovers: LeakedObjects) -> str:
    for claim in leftovers.of(PERSISTENT_VOLUME_CLAIMS):
        volume = claim["spec"].get("volumeName", "")
        for content in leftovers.of(VOLUME_SNAPSHOT_CONTENTS):
            # Once the claim is gone nothing else tells which volume must go before the snapshot.
            if volume and not _volume_of(content):
                patch: JsonDict = {"metadata": {"annotations": {VOLUME_ANNOTATION: volume}}}
                await patch_if_there(client, VOLUME_SNAPSHOT_CONTENTS, content, patch)
        await condemn_volume_of(client, claim)
    return await _remove_all(client, leftovers, PERSISTENT_VOLUME_CLAIMS)


async def _remove_volumes(client: KubeClient, leftovers: LeakedObjects) -> str:
    """Say which volumes are still there; their claims are gone, so their provisioner removes them."""
    for volume in leftovers.of(PERSISTENT_VOLUMES):
        await _condemn(client, volume)
    if lost := leftovers.of(PERSISTENT_VOLUMES):
        return "; ".join(f"PersistentVolume {volume['metadata']['name']} is being deleted" for volume in lost)
    contents = leftovers.of(VOLUME_SNAPSHOT_CONTENTS)
    if not contents:
        return ""
    claimed = {claim["spec"].get("volumeName", "") for claim in leftovers.of(PERSISTENT_VOLUME_CLAIMS)}
    names = (claimed | {_volume_of(content) for content in contents}) - {""}
    left = [name for name in sorted(names) if await client.read(PERSISTENT_VOLUMES, "", name) is not None]
    return "; ".join(f"PersistentVolume {name} of the snapshot is being deleted" for name in left)


async def _condemn(client: KubeClient, volume: JsonDict) -> None:
    """Have a volume whose claim is gone reclaimed."""
    with suppress(NotFoundError):
        await set_reclaim_policy(client, volume, DELETE)


async def _remove_snapshots(client: KubeClient, leftovers: LeakedObjects) -> str:
    for content in leftovers.of(VOLUME_SNAPSHOT_CONTENTS):
        await _settle_source(client, content)
    return await _remove_all(client, leftovers, VOLUME_SNAPSHOTS)


async def _remove_contents(client: KubeClient, leftovers: LeakedObjects) -> str:
    return await _remove_all(client, leftovers, VOLUME_SNAPSHOT_CONTENTS)


async def _settle_source(client: KubeClient, content: JsonDict) -> None:
    """See to it that the snapshot on the storage goes with `content` only if nobody else needs it.

    A source that was not yet taken over keeps its snapshot; one that was half taken over goes.
    """
    source = _source_of(content)
    if source is None or content["metadata"].get("deletionTimestamp"):
        return
    theirs = await client.read(VOLUME_SNAPSHOT_CONTENTS, "", source.content)
    if theirs is None or theirs["metadata"]["uid"] != source.content_uid:
        return
    reference = theirs["spec"]["volumeSnapshotRef"]
    snapshot = await client.read(VOLUME_SNAPSHOTS, reference["namespace"], reference["name"])
    if snapshot is not None and snapshot["metadata"]["uid"] == source.snapshot_uid:
        await patch_if_there(client, VOLUME_SNAPSHOT_CONTENTS, content, {"spec": {"deletionPolicy": RETAIN}})
    else:
        await remove(client, VOLUME_SNAPSHOT_CONTENTS, theirs)


def _source_of(content: JsonDict) -> SnapshotSource | None:
    try:
        return remembered_source(content)
    except ContractError:
        return None


def _volume_of(content: JsonDict) -> str:
    return str((content["metadata"].get("annotations") or {}).get(VOLUME_ANNOTATION, ""))
