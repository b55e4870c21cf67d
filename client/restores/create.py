"""Creates the objects of a restore: namespaces, PVCs, then transfers. Checks all volumes before the first one.

A repetition creates none twice. Acts with the user's permissions.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

from client.backups.plan import ClaimName
from client.collections.collection import Restores, delete_waiting_pods
from client.collections.models import find_difference
from client.restores.manifests import PlannedRestore, RequestedRestore
from client.restores.sources import RestoreError, SavedVolume
from client.session import Session, StepTimeoutError
from core.errors import AgentError, Translated
from core.kube.client import KubeClient, Selection
from core.kube.errors import AlreadyExistsError, ForbiddenError, KubeError
from core.kube.resources import NAMESPACES, PERSISTENT_VOLUME_CLAIMS, PODS, STORAGE_CLASSES, Resource
from core.kube.types import Manifest, PersistentVolumeClaim, Pod, UncheckedObject
from core.models.names import RESTORE_ANNOTATION
from core.models.phases import FINAL_PHASES
from core.models.transfers import RESTORE_TYPE
from core.text import guess

_CREATION_TIMEOUT: Final = timedelta(minutes=15)
_LATE: Final = "WaitForFirstConsumer"


async def plan_restore(
    tools: Session, request: RequestedRestore, volumes: Sequence[SavedVolume]
) -> list[PlannedRestore]:
    """Return the restores of these volumes; nothing is created.

    Raises:
        RestoreError: one is not possible: its PVC exists, its class does not, or its size is not known.
    """
    planned = [PlannedRestore(request, volume, len(volumes)) for volume in volumes]
    _check_mappings(planned)
    seen: dict[ClaimName, ClaimName] = {}
    for one in planned:
        if other := seen.get(one.target):
            raise RestoreError(f"PVCs {other} and {one.volume.name} would both become {one.target}")
        seen[one.target] = one.volume.name
        one.build_claim()
        await _check_target(tools.client, one)
    await _check_classes(tools, planned)
    return planned


async def check_name(tools: Session, request: RequestedRestore, volumes: Sequence[SavedVolume]) -> None:
    """Check that a restore of this name, which would be continued, is of these volumes; RestoreError: it is not."""
    existing = await Restores(tools.client, request.namespace).find_existing(request.name)
    wanted = {str(PlannedRestore(request, one, len(volumes)).target) for one in volumes}
    if existing is not None and (difference := find_difference(existing, wanted)):
        raise RestoreError(f"restore {request.name} exists already, and has {difference}: choose another name")


def _check_mappings(planned: Sequence[PlannedRestore]) -> None:
    """Check that each mapping is about a volume: a misspelled one would restore to where the original is."""
    request = planned[0].request
    for flag, mapping, used in (
        ("--namespace-mappings", request.namespaces, {one.volume.claim.namespace for one in planned}),
        ("--storage-class-mappings", request.classes, {one.saved_class or "" for one in planned}),
    ):
        for old in mapping:
            if old not in used:
                hint = guess(old, used) or f"there are: {', '.join(sorted(used - {''})) or 'none'}"
                raise RestoreError(f"{flag}: no volume of the restore has {old} ({hint})")


async def _check_target(client: KubeClient, one: PlannedRestore) -> None:
    """Check that nothing is written to but what an earlier run has made.

    A PVC that has a volume, and whose transfer is gone, may be in use: it was restored already, or bound by another.
    """
    transfer = await read_transfer(client, one)
    existing = await client.read(PERSISTENT_VOLUME_CLAIMS, one.target.namespace, one.target.name)
    if existing is None:
        if transfer is not None and (transfer.get("status") or {}).get("phase") in FINAL_PHASES:
            command = f"kubectl -n {one.request.namespace} delete {one.resource.plural} {one.name}"
            text = f"its {one.resource.kind} {one.name} is final, and there is no PVC {one.target}"
            raise RestoreError(f"restore {one.request.name} has ended: choose another name ({text}; or {command})")
        return
    if existing["metadata"].get("deletionTimestamp"):
        raise RestoreError(f"PVC {one.target} is being deleted: repeat the command once it is gone")
    wanted = one.build_claim()
    if not _is_of_restore(existing, wanted) or existing["spec"].get("selector") != wanted["spec"].get("selector"):
        raise RestoreError(
            f"PVC {one.target} exists already, and restores go to new PVCs only: delete it, or restore into another "
            "namespace by --namespace-mappings"
        )
    if transfer is None and existing["spec"].get("volumeName"):
        raise RestoreError(
            f"PVC {one.target} of restore {one.request.name} has a volume, and no {one.resource.kind} any more: it is "
            "not written to again; delete it, or restore into another namespace by --namespace-mappings"
        )


def _is_of_restore(existing: PersistentVolumeClaim | Pod, wanted: Manifest) -> bool:
    annotations = existing["metadata"].get("annotations") or {}
    return bool(annotations.get(RESTORE_ANNOTATION) == wanted["metadata"]["annotations"][RESTORE_ANNOTATION])


async def read_transfer(client: KubeClient, one: PlannedRestore) -> UncheckedObject | None:
    """Return the transfer of the volume, if there is one; RestoreError: one of that name restores something else."""
    stored = await client.read(one.resource, one.request.namespace, one.name)
    wanted = one.build_transfer()["spec"]
    if stored is not None and RESTORE_TYPE not in (stored.get("spec") or {}):
        # Definitions before Velero 1.19 drop it.
        del wanted[RESTORE_TYPE]
    if stored is not None and not _has(stored.get("spec") or {}, wanted):
        place = f"{one.resource.kind} {one.request.namespace}/{one.name}"
        raise RestoreError(f"{place} exists already, and restores another snapshot: choose another name")
    return stored


def _has(stored: Mapping[str, Any], wanted: Manifest) -> bool:
    """Return whether the stored object has the wanted values; empty ones, as the UID of a pod, are not wanted."""
    return all(
        _has(stored.get(key) or {}, value) if isinstance(value, dict) else stored.get(key) == value
        for key, value in wanted.items()
        if value
    )


async def _check_classes(tools: Session, planned: Sequence[PlannedRestore]) -> None:
    """Check that the storage classes exist, and say which ones wait for a pod."""
    try:
        listed = await tools.client.list(Selection(STORAGE_CLASSES))
    except ForbiddenError as e:
        tools.on_note(f"it is not known whether the storage classes exist: {e}")
        return
    known = {raw["metadata"]["name"]: raw for raw in listed}
    for one in planned:
        if one.storage_class and one.storage_class not in known:
            hint = guess(one.storage_class, known) or f"there are: {', '.join(sorted(known)) or 'none'}"
            text = f"--storage-class-mappings {one.saved_class}:NAME chooses another"
            raise RestoreError(f"PVC {one.target}: StorageClass {one.storage_class} does not exist ({hint}): {text}")
    late = sorted(
        {one.storage_class for one in planned if one.storage_class and not one.by_pod}
        & {name for name, raw in known.items() if raw.get("volumeBindingMode") == _LATE}
    )
    if late:
        text = "are restored once a pod uses their PVC, or at once by --method restore-wait"
        tools.on_note(f"volumes of the storage class {', '.join(late)} {text}")


async def check_restore(tools: Session, planned: Sequence[PlannedRestore]) -> None:
    """Check by a dry run that every object could be created: permissions, quotas, webhooks.

    Raises:
        RestoreError: one could not be; the message names its volume.
    """
    missing: set[str] = set()
    for one in planned:
        namespace = one.target.namespace
        if namespace not in missing and await _is_missing(tools.client, namespace):
            missing.add(namespace)
            await check_creation(tools, one, NAMESPACES, NAMESPACES.build({"name": namespace}))
        if namespace not in missing:
            await check_creation(tools, one, PERSISTENT_VOLUME_CLAIMS, one.build_claim())
            if pod := one.build_pod():
                await check_creation(tools, one, PODS, pod)
        await check_creation(tools, one, one.resource, one.build_transfer())


async def check_creation(tools: Session, one: PlannedRestore, resource: Resource, manifest: Manifest) -> None:
    """Check by a dry run that the object could be created; RestoreError: it could not be."""
    with (
        Translated(KubeError, RestoreError, f"PVC {one.target} cannot be restored, nothing was changed"),
        suppress(AlreadyExistsError),
    ):
        await tools.client.try_create(resource, manifest)


async def _is_missing(client: KubeClient, namespace: str) -> bool:
    """Return whether there is no such namespace; False if that is not known.

    A user who may not read it may still create PVCs in it, and learns then whether it exists.
    """
    try:
        return await client.read(NAMESPACES, "", namespace) is None
    except ForbiddenError:
        return False


async def start_restore(tools: Session, planned: Sequence[PlannedRestore]) -> bool:
    """Create the namespaces that are missing, PVCs, pods that wait, and transfers. An interruption lets it finish.

    Returns whether a transfer was created: without one, all of them existed.

    Raises:
        RestoreError: an object cannot be created; the message names its volume, and what there is of the restore.
    """
    try:
        return await tools.finish("create the restore", _CREATION_TIMEOUT, lambda: _create_all(tools, planned))
    except StepTimeoutError as e:
        raise RestoreError(f"not created within {_CREATION_TIMEOUT.seconds // 60} minutes") from e


async def _create_all(tools: Session, planned: Sequence[PlannedRestore]) -> bool:
    created = False
    for started, one in enumerate(planned):
        left = ""
        try:
            await _ensure_namespace(tools, one.target.namespace)
            await _ensure_claim(tools.client, one)
            left = ", but its PVC exists"
            if one.by_pod:
                command = f"kubectl -n {one.target.namespace} delete pvc {one.target.name}"
                left += f": if it is bound, delete it first ({command})"
            created |= await ensure_transfer(tools.client, one)
        except AgentError as e:
            if one.by_pod:
                await delete_waiting_pods(tools, [one.pod])
            state = f"{started} of {len(planned)} volumes were started" if started else "none was started"
            raise RestoreError(f"PVC {one.target} is not restored: {e}; {state}{left}") from e
    return created


async def _ensure_namespace(tools: Session, name: str) -> None:
    if not await _is_missing(tools.client, name):
        return
    with suppress(AlreadyExistsError):
        await tools.client.create(NAMESPACES, NAMESPACES.build({"name": name}))
        tools.on_note(f"namespace {name} was created")


async def _ensure_claim(client: KubeClient, one: PlannedRestore) -> None:
    try:
        await client.create(PERSISTENT_VOLUME_CLAIMS, one.build_claim())
    except AlreadyExistsError:
        await _check_target(client, one)


async def _ensure_pod(client: KubeClient, one: PlannedRestore) -> str | None:
    """Return the UID of the pod that waits for the data; None: there is none."""
    manifest = one.build_pod()
    if manifest is None:
        return None
    try:
        pod = await client.create(PODS, manifest)
    except AlreadyExistsError:
        pod = await client.get(PODS, one.target.namespace, one.name)
        if not _same_pod(pod, manifest):
            command = f"kubectl -n {one.target.namespace} delete pod {one.name}"
            raise RestoreError(
                f"Pod {one.target.namespace}/{one.name} exists already, and does not wait for this restore: choose "
                f"another name, or delete it ({command})"
            ) from None
    return str(pod["metadata"]["uid"])


def _same_pod(existing: Pod, wanted: Manifest) -> bool:
    """Return whether it is a pod of this restore that waits for this snapshot in this PVC, and can still do so."""
    # Webhooks may have added containers and volumes.
    commands = [one.get("command") for one in existing["spec"].get("initContainers") or []]
    volumes = existing["spec"].get("volumes") or []
    return (
        not existing["metadata"].get("deletionTimestamp")
        and _is_of_restore(existing, wanted)
        and all(one["command"] in commands for one in wanted["spec"]["initContainers"])
        and all(one in volumes for one in wanted["spec"]["volumes"])
    )


async def ensure_transfer(client: KubeClient, one: PlannedRestore) -> bool:
    """Return whether the transfer was created, and before it the pod: of one that exists, the pod may have ended."""
    if await read_transfer(client, one) is not None:
        return False
    try:
        await client.create(one.resource, one.build_transfer(await _ensure_pod(client, one)))
    except AlreadyExistsError:
        await read_transfer(client, one)
        return False
    return True
