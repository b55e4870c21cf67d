"""What a check of a volume leaves behind: found by its label, deleted in an order in which agents can follow."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, cast

from client.volume_check_objects import PREFLIGHT_LABELS, CheckPlan
from core.clock import Clock, Deadline
from core.errors import AgentError
from core.kube import resources as kube
from core.kube.client import KubeClient, Selection, select_labels
from core.kube.errors import ForbiddenError
from core.kube.resources import Resource
from core.kube.types import Metadata, UncheckedObject

__all__ = ["CheckCleanup", "LeftoverError"]

_POLL_SECONDS: Final = 0.5

_TRANSFERS: Final = (kube.DATA_DOWNLOADS, kube.DATA_UPLOADS)
"""Deleted first: an agent cancels one that has not ended, and deletes what it had created for it."""

_VOLUMES: Final = (kube.PODS, kube.VOLUME_SNAPSHOTS, kube.PERSISTENT_VOLUME_CLAIMS)

_BOUND: Final = {
    "pv": (kube.PERSISTENT_VOLUMES, "persistentVolumeReclaimPolicy"),
    "volumesnapshotcontent": (kube.VOLUME_SNAPSHOT_CONTENTS, "deletionPolicy"),
}
"""What claims and snapshots are bound to, by the name that kubectl takes, and the policy that may keep it."""


class LeftoverError(AgentError):
    """Objects of a check are not deleted in time."""


@dataclass(frozen=True)
class CheckCleanup:
    """Deletes what checks with the namespaces of `plan` have created.

    `bound` gets what deleted claims and snapshots were bound to, as kubectl names it: a policy may keep it.
    """

    client: KubeClient
    clock: Clock
    plan: CheckPlan
    on_note: Callable[[str], None]
    bound: set[str] = field(default_factory=set)

    async def find_retained(self) -> list[str]:
        """Return what stays of `bound` by the policy Retain, or may, if that may not be read.

        Raises:
            KubeError: the API server rejected a request.
        """
        found = []
        for kind, name in sorted(one.split("/") for one in self.bound):
            resource, policy = _BOUND[kind]
            try:
                stored = await self.client.read(resource, "", name)
                retained = stored is not None and cast("UncheckedObject", stored)["spec"].get(policy) == "Retain"
            except ForbiddenError:
                retained = True
            if retained:
                found.append(f"{kind}/{name}")
        return found

    async def clean(self, deadline: Deadline) -> bool:
        """Delete everything, and return whether there was anything, once it is gone.

        Raises:
            LeftoverError: something still exists at the deadline; the message names it.
            KubeError: the API server rejected a request.
        """
        found = await self._delete_all(_TRANSFERS, self.plan.namespace, deadline)
        space = await self.client.read(kube.NAMESPACES, "", self.plan.space)
        if space is None:
            return found
        found = await self._delete_all(_VOLUMES, self.plan.space, deadline) or found
        if PREFLIGHT_LABELS.items() <= (space["metadata"].get("labels") or {}).items():
            await self.client.delete(kube.NAMESPACES, "", self.plan.space, uid=space["metadata"]["uid"])
            await self._wait_namespace(deadline)
            found = True
        return found

    async def _delete_all(self, resources: tuple[Resource, ...], namespace: str, deadline: Deadline) -> bool:
        """Delete the objects of these kinds; return whether there were any, once they are gone."""
        deleted = False
        while left := [pair for resource in resources for pair in await self._list(resource, namespace)]:
            for resource, meta in left:
                if not meta.get("deletionTimestamp"):
                    await self.client.delete(resource, namespace, meta["name"], uid=meta["uid"])
            deleted = True
            if deadline.expired:
                names = ", ".join(f"{resource.kind} {namespace}/{meta['name']}" for resource, meta in left)
                raise LeftoverError(f"not deleted yet: {names}; the next preflight deletes them")
            await self.clock.sleep(_POLL_SECONDS)
        return deleted

    async def _list(self, resource: Resource, namespace: str) -> list[tuple[Resource, Metadata]]:
        found = await self.client.list(Selection(resource, namespace, select_labels(PREFLIGHT_LABELS)))
        for one in cast("list[UncheckedObject]", found):
            if volume := (one.get("spec") or {}).get("volumeName"):
                self.bound.add(f"pv/{volume}")
            if content := (one.get("status") or {}).get("boundVolumeSnapshotContentName"):
                self.bound.add(f"volumesnapshotcontent/{content}")
        return [(resource, one["metadata"]) for one in found]

    async def _wait_namespace(self, deadline: Deadline) -> None:
        while await self.client.read(kube.NAMESPACES, "", self.plan.space) is not None:
            if deadline.expired:
                raise LeftoverError(f"not deleted yet: Namespace {self.plan.space}; the next preflight deletes it")
            await self.clock.sleep(_POLL_SECONDS)
