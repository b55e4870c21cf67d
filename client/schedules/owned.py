"""The objects of a schedule in the cluster: only its own are changed and deleted."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from client.install.apply import ApplyResult
from client.schedules.manifests import is_role_of
from client.schedules.request import ScheduleRequest
from core.errors import ConfigError
from core.kube import resources as kube
from core.kube.answers import Deletion
from core.kube.client import KubeClient, Selection
from core.kube.errors import AlreadyExistsError, ForbiddenError
from core.kube.types import Manifest, Object
from core.models.names import DELETIONS_CONFIGMAP, DELETIONS_LEASE, RETENTION_IMAGE_ANNOTATION, SCHEDULE_LABEL

__all__ = ["OwnedObjects", "Place", "place_of"]

_ROLES: Final = (kube.ROLE_BINDINGS, kube.ROLES, kube.CLUSTER_ROLE_BINDINGS, kube.CLUSTER_ROLES)
_SHARED: Final = frozenset({(kube.CONFIG_MAPS.kind, DELETIONS_CONFIGMAP), (kube.LEASES.kind, DELETIONS_LEASE)})
"""Kinds and names of what all schedules have in common: it stays."""

_KINDS: Final = {
    one.kind: one for one in (*_ROLES, kube.SERVICE_ACCOUNTS, kube.CONFIG_MAPS, kube.LEASES, kube.CRON_JOBS)
}

Place = tuple[str, str, str]
"""Kind, namespace and name of an object; without a namespace, of the cluster."""


def place_of(manifest: Mapping[str, Any]) -> Place:
    """Return where the object is."""
    meta = manifest["metadata"]
    return manifest["kind"], meta.get("namespace", ""), meta["name"]


@dataclass(frozen=True)
class OwnedObjects:
    """The objects of one schedule. `on_deleted` gets each one that was deleted, `on_note` what may be left."""

    client: KubeClient
    request: ScheduleRequest
    on_deleted: Callable[[str], None]
    on_note: Callable[[str], None]

    async def check(self, manifests: Iterable[Manifest]) -> None:
        """Check that what has these names is of the schedule.

        Raises:
            ConfigError: an object is not; the message names it.
        """
        for manifest in manifests:
            await self._read(manifest)

    async def put(self, manifest: Manifest) -> ApplyResult:
        """Create the object, or change it to what it is to be.

        Raises:
            ConfigError: an object of the name is not of the schedule.
        """
        kind, namespace, name = place_of(manifest)
        try:
            await self.client.create(_KINDS[kind], manifest)
        except AlreadyExistsError:
            stored = await self._read(manifest)
            if stored is None:
                return ApplyResult.UNCHANGED
            patch = _patch_of(manifest)
            patch["metadata"] = patch["metadata"] | {"uid": stored["metadata"]["uid"]}
            patched = await self.client.patch(_KINDS[kind], namespace, name, patch)
            same = patched["metadata"]["resourceVersion"] == stored["metadata"]["resourceVersion"]
            return ApplyResult.UNCHANGED if same else ApplyResult.CHANGED
        return ApplyResult.CREATED

    async def _read(self, manifest: Manifest | Object) -> Object | None:
        """Return the object of the schedule that exists; None for one of all schedules."""
        kind, namespace, name = place = place_of(manifest)
        if (kind, name) in _SHARED:
            return None
        stored = await self.client.read(_KINDS[kind], namespace, name)
        if stored is not None and not _is_own(stored, manifest):
            raise ConfigError(f"{_show(place)} exists, and is not of schedule {self.request.name}: it is left alone")
        return stored

    async def remove_roles(self, known: Sequence[Manifest], keep: Iterable[Manifest] = ()) -> None:
        """Delete the schedule's roles and bindings, those that are `known` and those with its label, but not `keep`.

        Raises:
            ConfigError: an object of such a name is not of the schedule; it and the account are left.
            KubeError: the API server rejected a request.
        """
        kept = {place_of(one) for one in keep}
        found: dict[Place, Manifest | Object] = {place_of(one): one for one in known if _KINDS[one["kind"]] in _ROLES}
        for resource in _ROLES:
            found |= {place_of(one): one for one in await self._list(resource)}
        # Bindings first: they grant.
        order = sorted(found.keys() - kept, key=lambda one: (_ROLES.index(_KINDS[one[0]]), one))
        await self.remove([found[one] for one in order])

    async def _list(self, resource: kube.Resource) -> list[Object]:
        label = f"{SCHEDULE_LABEL}={self.request.label}"
        try:
            listed = await self.client.list(Selection(resource, label_selector=label))
        except ForbiddenError as e:
            self.on_note(f"{resource.kind}s that schedule {self.request.name} had before may be left: {e}")
            return []
        # Items of a list have no kind.
        return [one | {"kind": resource.kind} for one in listed if is_role_of(self.request, one)]

    async def remove(self, manifests: Iterable[Manifest | Object]) -> None:
        """Delete these objects where they are of the schedule.

        Raises:
            ConfigError: some are not, and are left alone; the message names them.
            KubeError: the API server rejected a request.
        """
        foreign = []
        for manifest in manifests:
            kind, namespace, name = place = place_of(manifest)
            try:
                stored = await self._read(manifest)
            except ConfigError as e:
                foreign.append(str(e))
                continue
            if stored is None:
                continue
            answer = await self.client.delete(_KINDS[kind], namespace, name, uid=stored["metadata"]["uid"])
            if answer in {Deletion.DONE, Deletion.STARTED}:
                self.on_deleted(_show(place))
        if foreign:
            raise ConfigError("; ".join(foreign))


def _show(place: Place) -> str:
    kind, namespace, name = place
    return f"{kind} {'/'.join(filter(None, (namespace, name)))}"


def _is_own(stored: Mapping[str, Any], manifest: Mapping[str, Any]) -> bool:
    labels, wanted = stored["metadata"].get("labels") or {}, manifest["metadata"]["labels"]
    same_role = "roleRef" not in manifest or stored.get("roleRef") == manifest["roleRef"]
    return labels.get(SCHEDULE_LABEL) == wanted[SCHEDULE_LABEL] and same_role


def _patch_of(manifest: Manifest) -> Manifest:
    """Return the merge patch; what may be absent is removed by it."""
    patch = {key: value for key, value in manifest.items() if key not in {"apiVersion", "kind", "roleRef"}}
    if manifest["kind"] == kube.CRON_JOBS.kind:
        patch["spec"] = {"timeZone": None} | manifest["spec"]
        annotations = {RETENTION_IMAGE_ANNOTATION: None} | (manifest["metadata"].get("annotations") or {})
        patch["metadata"] = manifest["metadata"] | {"annotations": annotations}
    return patch
