"""Plans a backup, and creates its objects: every volume is checked before the first one."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Final, cast

from client.backups.manifests import (
    BackupError,
    BackupRequest,
    ClusterClasses,
    DataMover,
    Method,
    PlannedVolume,
    check_pairs,
    choose_method,
    needs_pods,
    snapshot_label,
)
from client.collections.collection import Backups
from client.collections.models import Backup, find_difference
from client.installation import explain_absent_agents, explain_velero_server
from client.session import Session, StepTimeoutError
from core.errors import AgentError, ConfigError
from core.kube import errors
from core.kube import resources as kube
from core.kube.client import KubeClient, Selection, select_labels
from core.kube.types import Manifest, PersistentVolumeClaim, Pod, UncheckedObject
from core.models.backups import SavedClaim
from core.models.base import parse_time
from core.models.names import BACKUP_LABEL, OBJECT_NAME, OWNER_UID_LABEL
from core.models.phases import Phase
from core.models.storage import BackupStorageLocation
from core.text import hinted

_DEFAULT_LOCATION: Final = "default"


@dataclass(frozen=True, order=True)
class ClaimName:
    """Namespace and name of a PVC."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"

    @classmethod
    def parse(cls, word: str, namespace: str) -> "ClaimName":
        """Return the PVC that a word names, alone or in the namespace of `-n`; ConfigError: it names none."""
        before, slash, after = word.partition("/")
        found = cls(before, after) if slash else cls(namespace, before)
        if not (OBJECT_NAME.fullmatch(found.namespace) and OBJECT_NAME.fullmatch(found.name)):
            raise ConfigError(f'--pvc: "{word}" is not allowed: expected NAMESPACE/NAME, or NAME beside -n NAMESPACE')
        return found


@dataclass(frozen=True)
class Choice:
    """What the user chose: the PVCs by name, or the PVCs in a namespace that a label selector matches.

    With `on_left_out`, a PVC that does not exist any more is left out with a note, and one that may not be read or
    cannot be backed up is missing in the backup: it is called with the reason.
    """

    claims: tuple[ClaimName, ...] = ()
    namespace: str = ""
    selector: str = ""
    method: Method = Method.AUTO
    data_mover: DataMover | None = None
    ignore_velero_server: bool = False
    on_left_out: Callable[[str], None] | None = None

    @classmethod
    def parse(
        cls,
        claims: Sequence[str],
        namespace: str,
        selector: str | None,
        *,
        method: str,
        data_mover: str | None = None,
        ignore_velero_server: bool,
    ) -> "Choice":
        """Return what the flags of this name choose (`claims`: the words of `--pvc`); ConfigError: they name no PVC."""
        if selector is not None and (claims or not namespace):
            raise ConfigError("-l selects PVCs of the namespace that -n names, and excludes --pvc")
        if selector is None and not claims:
            raise ConfigError('no PVC: set --pvc NAMESPACE/NAME, or -n NAMESPACE -l LABELS (-l "": all of them)')
        if data_mover == DataMover.BLOCK and method == Method.FS_BACKUP:
            raise ConfigError("--data-mover block needs a CSI snapshot, which --method fs-backup does not take")
        return cls(
            claims=tuple(dict.fromkeys(ClaimName.parse(word, namespace) for word in claims)),
            namespace=namespace,
            selector=selector or "",
            method=Method(method),
            data_mover=DataMover(data_mover) if data_mover else None,
            ignore_velero_server=ignore_velero_server,
        )

    @property
    def required_method(self) -> Method:
        """The method: a device is only read from a snapshot."""
        return Method.CSI_SNAPSHOT if self.data_mover is DataMover.BLOCK else self.method


async def plan_backup(tools: Session, request: BackupRequest, choice: Choice) -> list[PlannedVolume]:
    """Return the volumes that have no transfer yet, in the order of their names; without a location, the default one.

    A backup of the same name is continued, if it is of the same volumes.

    Raises:
        ConfigError: the request is invalid.
        BackupError: a volume cannot be backed up, or a backup of the name has others; the message names it.
    """
    if not OBJECT_NAME.fullmatch(request.name):
        raise ConfigError(f'"{request.name}" is no name of a backup: up to 253 lowercase letters, digits, "-" and "."')
    check_pairs(request.labels, request.annotations)
    client = tools.client
    if text := await explain_absent_agents(client, request.namespace, tools.on_note):
        raise BackupError(text)
    location = await find_destination(tools, request.location, ignore_velero_server=choice.ignore_velero_server)
    request = replace(request, location=location)
    claims, unread = await _read_claims(tools, choice)
    existing = await Backups(client, request.namespace).find_existing(request.name)
    lenient = choice.on_left_out is not None
    present = _check_existing(existing, request, claims, lenient=lenient) if existing else set[ClaimName]()
    number, begun = len(claims) + unread, None
    if lenient and existing:
        # Its snapshots would otherwise disagree about the number of volumes, as if they were of two backups.
        number, begun = existing.expected or number, existing.created
    classes = await read_classes(client) if choice.method is not Method.FS_BACKUP else ClusterClasses({}, ())
    pods: dict[str, list[Pod]] = {}
    volumes: list[PlannedVolume] = []
    for name, claim in [(name, claim) for name, claim in claims.items() if name not in present]:
        if begun is not None and parse_time(claim["metadata"]["creationTimestamp"]) > begun:
            tools.on_note(f"PVC {name} was created after the backup: it is left out")
            continue
        if choice.on_left_out is not None and len(present) + len(volumes) >= number:
            # It was given its label after the backup began.
            choice.on_left_out(f"PVC {name} is left out: backup {request.name} has {number} volumes already")
            continue
        if needs_pods(claim, choice.required_method, classes) and name.namespace not in pods:
            pods[name.namespace] = await client.list(Selection(kube.PODS, name.namespace))
        try:
            way = choose_method(claim, choice.required_method, classes, pods.get(name.namespace, ()))
        except BackupError as e:
            if choice.on_left_out is None:
                raise
            choice.on_left_out(str(e))
            continue
        volumes.append(PlannedVolume(request, SavedClaim.from_claim(claim), way, number, choice.data_mover))
    return volumes


async def find_destination(tools: Session, location: str, *, ignore_velero_server: bool) -> str:
    """Return the name of the location for backups: the default one if none is given.

    Raises:
        BackupError: it does not exist or is read-only, or a Velero server is there, or may be.
    """
    client, namespace = tools.client, tools.namespace
    if not ignore_velero_server:
        benefit = "and the backup also has manifests and hooks, and expires"
        if text := await explain_velero_server(client, namespace, "backup", benefit):
            raise BackupError(text)
    found = {
        raw["metadata"]["name"]: raw for raw in await client.list(Selection(kube.BACKUP_STORAGE_LOCATIONS, namespace))
    }
    if not location:
        marked = sorted(name for name, raw in found.items() if raw["spec"].get("default"))
        names = marked or [name for name in found if name == _DEFAULT_LOCATION or len(found) == 1]
        if not names:
            known = ", ".join(sorted(found)) or "none"
            raise BackupError(f"no default BackupStorageLocation in namespace {namespace}: --storage-location: {known}")
    name = location or names[0]
    place = f"BackupStorageLocation {namespace}/{name}"
    if name not in found:
        raise BackupError(hinted(f"{place} does not exist", name, found))
    stored = BackupStorageLocation.parse(found[name])
    if stored.read_only:
        raise BackupError(f"{place} is read-only: --storage-location names another")
    if not stored.available:
        status = stored.status
        tools.on_note(f"{place} is {status.phase}: {status.message or 'no reason'}: data movers wait for it")
    return name


async def _read_claims(tools: Session, choice: Choice) -> tuple[dict[ClaimName, PersistentVolumeClaim], int]:
    """Return the PVCs, and how many others may not be read."""
    client = tools.client
    if not choice.claims:
        # In the agents' namespace, others are what transfers read or write for a while.
        selector = ",".join(filter(None, (choice.selector, f"!{OWNER_UID_LABEL}")))
        selection = Selection(kube.PERSISTENT_VOLUME_CLAIMS, choice.namespace, label_selector=selector)
        listed = {ClaimName(choice.namespace, raw["metadata"]["name"]): raw for raw in await client.list(selection)}
        if not listed:
            which = f'with the labels "{choice.selector}"' if choice.selector else "at all"
            raise BackupError(f"there is no PVC in namespace {choice.namespace} {which}")
        return dict(sorted(listed.items())), 0
    found, unread = {}, 0
    for name in sorted(choice.claims):
        try:
            claim = await client.read(kube.PERSISTENT_VOLUME_CLAIMS, name.namespace, name.name)
        except errors.ForbiddenError as e:
            # The role of a schedule is deleted with its namespace.
            if choice.on_left_out is None:
                raise
            choice.on_left_out(f"PVC {name} cannot be backed up: {e}")
            unread += 1
            continue
        if claim is None and choice.on_left_out is not None:
            tools.on_note(f"PVC {name} does not exist any more: it is left out")
            continue
        if claim is None:
            raise BackupError(await _explain_absent(client, name))
        found[name] = claim
    if not found and not unread:
        raise BackupError("none of the PVCs exists any more")
    return found, unread


async def note_absent_claims(tools: Session, choice: Choice) -> None:
    """Note which PVCs do not exist, as far as the user may read them: a schedule leaves them out.

    Raises:
        KubeError: the API server rejected the label selector.
    """
    if not choice.claims:
        try:
            await _read_claims(tools, choice)
        except BackupError as e:
            tools.on_note(f"{e}: runs fail until there is one")
        except errors.ForbiddenError:
            pass
    for name in sorted(choice.claims):
        try:
            claim = await tools.client.read(kube.PERSISTENT_VOLUME_CLAIMS, name.namespace, name.name)
        except errors.ForbiddenError:
            continue
        if claim is None:
            tools.on_note(f"{await _explain_absent(tools.client, name)}: it is left out until it does")


async def _explain_absent(client: KubeClient, name: ClaimName) -> str:
    """Return that there is no such PVC, and which one may be meant, if PVCs of the namespace may be listed."""
    try:
        listed = await client.list(Selection(kube.PERSISTENT_VOLUME_CLAIMS, name.namespace))
    except errors.KubeError:
        listed = []
    return hinted(f"PVC {name} does not exist", name.name, [one["metadata"]["name"] for one in listed])


def _check_existing(
    backup: Backup, request: BackupRequest, claims: Mapping[ClaimName, PersistentVolumeClaim], *, lenient: bool
) -> set[ClaimName]:
    """Return the PVCs that have their transfer already; a `lenient` backup may have others."""
    present = {ClaimName(one.namespace, one.claim) for one in backup.volumes}
    difference = None if lenient else find_difference(backup, set(map(str, claims)))
    if difference is None and backup.locations != [request.location]:
        difference = f"the location {', '.join(backup.locations)}"
    if difference is not None:
        raise BackupError(f"backup {request.name} exists already, and has {difference}: choose another name")
    return present


async def read_classes(client: KubeClient) -> ClusterClasses:
    """Return the classes of the cluster, as far as the user may read them."""
    try:
        snapshot_classes = await client.list(Selection(kube.VOLUME_SNAPSHOT_CLASSES))
        stored = await client.list(Selection(kube.STORAGE_CLASSES))
    except errors.NotServedError:
        return ClusterClasses({}, (), "the cluster has no snapshot API")
    except errors.ForbiddenError as e:
        return ClusterClasses({}, (), str(e))
    return ClusterClasses({raw["metadata"]["name"]: raw.get("provisioner") or "" for raw in stored}, snapshot_classes)


_CREATION_TIMEOUT: Final = timedelta(minutes=15)

_OLDEST_SNAPSHOT: Final = timedelta(hours=1)
"""Of an earlier run that made no transfer of it: the data of an older one is not what the user asks for now."""

_BEFORE_HANDOVER: Final = frozenset({"", Phase.NEW, Phase.ACCEPTED})
"""Phases in which a transfer still needs its VolumeSnapshot."""

_SHOWN_MISSING: Final = 3


async def start_backup(tools: Session, volumes: Sequence[PlannedVolume]) -> list[str]:
    """Create the snapshots and the transfers of these volumes, and return why some are missing in the backup.

    An interruption lets it finish. Of a volume whose transfer is rejected nevertheless, the snapshot is deleted.

    Raises:
        BackupError: the API server does not respond.
    """
    try:
        return await tools.finish("create the backup", _CREATION_TIMEOUT, lambda: _create_all(tools, volumes))
    except StepTimeoutError as e:
        raise BackupError(f"not created within {_CREATION_TIMEOUT.seconds // 60} minutes: repeat the command") from e


def sum_up_missing(missing: Sequence[str]) -> str:
    """Return the first reasons why volumes are missing, and how many more there are."""
    more = len(missing) - _SHOWN_MISSING
    return "; ".join([*missing[:_SHOWN_MISSING], *([f"and {more} more"] if more > 0 else [])])


async def check_backup(tools: Session, volumes: Sequence[PlannedVolume]) -> None:
    """Check by a dry run that every object could be created: permissions, quotas, webhooks, labels.

    Raises:
        BackupError: one could not be; the message names its volume.
    """
    for volume in volumes:
        found: list[str | None] = []
        for resource, manifest in _objects(volume):
            try:
                await tools.client.try_create(resource, manifest)
            except errors.AlreadyExistsError:
                found.append(_own_uid(tools, await _check_same(tools, volume, resource, manifest)))
            except errors.KubeError as e:
                # An earlier run was killed after it had made the snapshot.
                for snapshot in found:
                    await _clean_up(tools, volume, snapshot)
                raise BackupError(f"PVC {_name(volume)} cannot be backed up, nothing was created: {e}") from e


def _objects(volume: PlannedVolume) -> list[tuple[kube.Resource, Manifest]]:
    snapshot = volume.build_snapshot()
    transfer = (volume.resource, volume.build_transfer())
    return [transfer] if snapshot is None else [(kube.VOLUME_SNAPSHOTS, snapshot), transfer]


async def _create_all(tools: Session, volumes: Sequence[PlannedVolume]) -> list[str]:
    missing: list[str] = []
    ready = deque[PlannedVolume]()
    own: dict[str, str | None] = {}
    try:
        for volume in volumes:
            snapshot = volume.build_snapshot()
            # Before the request: its answer may be lost.
            ready.append(volume)
            with _noted(volume, missing):
                if snapshot is not None:
                    own[volume.name] = await _ensure_snapshot(tools, volume, snapshot)
                continue
            ready.pop()
        while ready:
            volume = ready.popleft()
            with _noted(volume, missing):
                await _start_transfer(tools, volume, own.get(volume.name))
    finally:
        for volume in ready:
            if volume.method is Method.CSI_SNAPSHOT:
                place = f"VolumeSnapshot {volume.claim.namespace}/{volume.name}"
                tools.on_note(
                    f"{place} may be left without a transfer: repeat the command, or delete it ({_deletion(volume)})"
                )
    return missing


@contextmanager
def _noted(volume: PlannedVolume, missing: list[str]) -> Iterator[None]:
    """Note that the volume is missing in the backup if an object was rejected in the block."""
    try:
        yield
    except (errors.UnreachableError, errors.UnauthorizedError) as e:
        # It is not asked about other volumes.
        raise BackupError(f"not all volumes were started, repeat the command: PVC {_name(volume)}: {e}") from e
    except AgentError as e:
        missing.append(f"PVC {_name(volume)} is missing in the backup: {e}")


async def _start_transfer(tools: Session, volume: PlannedVolume, snapshot: str | None) -> None:
    """Create the transfer; if nothing takes over the `snapshot` with this UID, it is deleted.

    A request that failed may have created the transfer nevertheless.
    """
    manifest = volume.build_transfer()
    try:
        await tools.client.create(volume.resource, manifest)
    except errors.AlreadyExistsError:
        stored = await _check_same(tools, volume, volume.resource, manifest)
        if snapshot is not None and (stored.get("status") or {}).get("phase", Phase.NEW) not in _BEFORE_HANDOVER:
            # Another run has created it, and that run's snapshot was handed over before this run made one.
            await _delete_snapshot(tools, volume, snapshot)
    except errors.KubeError:
        if await _clean_up(tools, volume, snapshot):
            raise
        await _check_same(tools, volume, volume.resource, manifest)


def _name(volume: PlannedVolume) -> str:
    return f"{volume.claim.namespace}/{volume.claim.name}"


async def _ensure_snapshot(tools: Session, volume: PlannedVolume, manifest: Manifest) -> str | None:
    """Create the VolumeSnapshot and return its UID; None: there is one of another run, which may go on."""
    try:
        return (await tools.client.create(kube.VOLUME_SNAPSHOTS, manifest))["metadata"]["uid"]
    except errors.AlreadyExistsError:
        return _own_uid(tools, await _check_same(tools, volume, kube.VOLUME_SNAPSHOTS, manifest))


def _own_uid(tools: Session, stored: UncheckedObject) -> str | None:
    """Return the UID of an object if it is of an earlier pod of this Job, which failed; None: of another run, maybe."""
    return stored["metadata"]["uid"] if tools.in_pod else None


async def _check_same(
    tools: Session, volume: PlannedVolume, resource: kube.Resource, manifest: Manifest
) -> UncheckedObject:
    """Return the stored object if it is the one that would be created: of the same backup, about the same PVC."""
    meta = manifest["metadata"]
    stored = cast("UncheckedObject", await tools.client.get(resource, meta["namespace"], meta["name"]))
    labels, spec = stored["metadata"].get("labels") or {}, stored.get("spec") or {}
    differs = labels.get(BACKUP_LABEL) != meta["labels"][BACKUP_LABEL] or any(
        spec.get(key) != value for key, value in manifest["spec"].items() if value
    )
    place = f"{resource.kind} {meta['namespace']}/{meta['name']}"
    if differs:
        raise BackupError(f"{place} exists already, and is of another backup: choose another name")
    if stored["metadata"].get("deletionTimestamp"):
        raise BackupError(f"{place} is being deleted: repeat the command later")
    if resource is kube.VOLUME_SNAPSHOTS:
        created, now = parse_time(stored["metadata"]["creationTimestamp"]), tools.date()
        if now is not None and now - created > _OLDEST_SNAPSHOT and not await _has_transfer(tools, volume):
            hours = int((now - created).total_seconds() / 3600)
            raise BackupError(f"{place} is {hours}h old: delete it ({_deletion(volume)})")
    return stored


async def _has_transfer(tools: Session, volume: PlannedVolume) -> bool:
    return await tools.client.read(volume.resource, volume.request.namespace, volume.name) is not None


async def delete_abandoned(tools: Session, schedule: str, namespaces: Iterable[str]) -> None:
    """Delete the VolumeSnapshots of a schedule whose pods were killed before they made the transfers; name each one."""
    if (now := tools.date()) is None:
        return
    selector = select_labels(snapshot_label(tools.namespace, schedule))
    for namespace in namespaces:
        try:
            for one in await tools.client.list(Selection(kube.VOLUME_SNAPSHOTS, namespace, label_selector=selector)):
                meta = one["metadata"]
                if now - parse_time(meta["creationTimestamp"]) <= _OLDEST_SNAPSHOT:
                    continue
                if await tools.client.read(kube.DATA_UPLOADS, tools.namespace, meta["name"]) is None:
                    await tools.client.delete(kube.VOLUME_SNAPSHOTS, namespace, meta["name"], uid=meta["uid"])
                    tools.on_note(f"deleted VolumeSnapshot {namespace}/{meta['name']}, left by a run that was killed")
        except errors.NotServedError:
            return
        except errors.KubeError as e:
            tools.on_note(f"VolumeSnapshots that killed runs of schedule {schedule} left may stay: {e}")


async def _clean_up(tools: Session, volume: PlannedVolume, snapshot: str | None) -> bool:
    """Delete the `snapshot` that this run made; return whether there is no transfer, as far as is known.

    One of another run stays: that may be about to create the transfer.
    """
    try:
        if await _has_transfer(tools, volume):
            return False
    except errors.KubeError as e:
        _note_left(tools, volume, str(e))
        return True
    if snapshot is not None:
        await _delete_snapshot(tools, volume, snapshot)
    else:
        _note_left(tools, volume, "another run of the command made it")
    return True


async def _delete_snapshot(tools: Session, volume: PlannedVolume, uid: str) -> None:
    try:
        await tools.client.delete(kube.VOLUME_SNAPSHOTS, volume.claim.namespace, volume.name, uid=uid)
    except errors.KubeError as e:
        _note_left(tools, volume, str(e))


def _note_left(tools: Session, volume: PlannedVolume, why: str) -> None:
    if volume.method is Method.CSI_SNAPSHOT:
        place = f"VolumeSnapshot {volume.claim.namespace}/{volume.name}"
        tools.on_note(f"{place} was not deleted ({_deletion(volume)}): {why}")


def _deletion(volume: PlannedVolume) -> str:
    return f"kubectl -n {volume.claim.namespace} delete volumesnapshot {volume.name}"
