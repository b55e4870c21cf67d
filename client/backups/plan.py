"""Plans a backup: which PVCs, where to, and how each of them is backed up. Checks every volume, and creates nothing."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final

from client.backups.manifests import BackupRequest, PlannedVolume, check_pairs
from client.backups.methods import BackupError, ClusterClasses, Method, choose_method, needs_pods
from client.collections.collection import Backups
from client.collections.models import Backup
from client.installation import explain_no_agents, explain_velero_server
from core.clock import Clock
from core.errors import ConfigError
from core.kube import resources as kube
from core.kube.client import KubeClient, Selection
from core.kube.errors import ForbiddenError, KubeError, NotServedError
from core.kube.types import PersistentVolumeClaim, Pod, VolumeSnapshotClass
from core.models.names import AGENT_DAEMONSET, OBJECT_NAME
from core.models.saved_claim import SavedClaim
from core.models.storage import BackupStorageLocation
from core.spelling import hinted

__all__ = [
    "BackupTools",
    "Choice",
    "ClaimName",
    "find_destination",
    "note_absent_claims",
    "plan_backup",
    "read_classes",
]

_DEFAULT_LOCATION: Final = "default"


@dataclass(frozen=True, order=True)
class ClaimName:
    """Namespace and name of a PVC."""

    namespace: str
    name: str

    def __str__(self) -> str:
        """Return them as the command line has them."""
        return f"{self.namespace}/{self.name}"

    @classmethod
    def parse(cls, word: str, namespace: str) -> "ClaimName":
        """Return the PVC that a word names, alone or in the namespace of `-n`.

        Raises:
            ConfigError: it names none.
        """
        before, slash, after = word.partition("/")
        found = cls(before, after) if slash else cls(namespace, before)
        if not (OBJECT_NAME.fullmatch(found.namespace) and OBJECT_NAME.fullmatch(found.name)):
            raise ConfigError(f'--pvc: "{word}" is not allowed: expected NAMESPACE/NAME, or NAME beside -n NAMESPACE')
        return found


@dataclass(frozen=True)
class Choice:
    """What the user chose: the PVCs by name, or the PVCs in a namespace that a label selector matches.

    With `on_left_out`, a PVC that does not exist any more is left out with a note, and one that cannot be backed up is
    missing in the backup: it is called with the reason.
    """

    claims: tuple[ClaimName, ...] = ()
    namespace: str = ""
    selector: str = ""
    method: Method = Method.AUTO
    ignore_velero_server: bool = False
    on_left_out: Callable[[str], None] | None = None

    @classmethod
    def parse(
        cls, claims: Sequence[str], namespace: str, selector: str | None, *, method: str, ignore_velero_server: bool
    ) -> "Choice":
        """Return what the flags of this name choose; `claims` are the words of `--pvc`.

        Raises:
            ConfigError: they do not say which PVCs.
        """
        if selector is not None and (claims or not namespace):
            raise ConfigError("-l selects PVCs of the namespace that -n names, and excludes --pvc")
        if selector is None and not claims:
            raise ConfigError('no PVC: set --pvc NAMESPACE/NAME, or -n NAMESPACE -l LABELS (-l "": all of them)')
        return cls(
            claims=tuple(ClaimName.parse(word, namespace) for word in claims),
            namespace=namespace,
            selector=selector or "",
            method=Method(method),
            ignore_velero_server=ignore_velero_server,
        )


@dataclass(frozen=True)
class BackupTools:
    """What a command works with; `on_note` gets what the user should know beside the answer.

    `date` returns the Date of the API server's last answer; None: it is not known.
    """

    client: KubeClient
    clock: Clock
    on_note: Callable[[str], None]
    date: Callable[[], datetime | None]


async def plan_backup(tools: BackupTools, request: BackupRequest, choice: Choice) -> list[PlannedVolume]:
    """Return the volumes that have no transfer yet, in the order of their names; without a location, the default one.

    A backup of the same name is continued, if it is of the same volumes.

    Raises:
        ConfigError: the request is invalid.
        BackupError: a volume cannot be backed up, or a backup of the name has others; the message names it.
        KubeError: the API server rejected a request.
    """
    _check_request(request)
    client = tools.client
    await _check_agents(client, request.namespace)
    location = await find_destination(
        tools, request.namespace, request.location, ignore_velero_server=choice.ignore_velero_server
    )
    request = replace(request, location=location)
    claims = await _read_claims(tools, choice)
    existing = await Backups(client, request.namespace).list_named(request.name, only_own=True)
    present = _check_existing(existing.groups, request, claims, lenient=choice.on_left_out is not None)
    classes = await read_classes(client) if choice.method is not Method.FS_BACKUP else ClusterClasses({}, ())
    pods: dict[str, list[Pod]] = {}
    volumes = []
    for name, claim in claims.items():
        if name in present:
            continue
        if needs_pods(claim, choice.method, classes) and name.namespace not in pods:
            pods[name.namespace] = await client.list(Selection(kube.PODS, name.namespace))
        try:
            way = choose_method(claim, choice.method, classes, pods.get(name.namespace, ()))
        except BackupError as e:
            if choice.on_left_out is None:
                raise
            choice.on_left_out(str(e))
            continue
        volumes.append(PlannedVolume(request, SavedClaim.from_claim(claim), way, len(claims)))
    return volumes


def _check_request(request: BackupRequest) -> None:
    if not OBJECT_NAME.fullmatch(request.name):
        raise ConfigError(
            f'"{request.name}" is no name of a backup: lowercase letters, digits, "-" and "." are allowed'
        )
    check_pairs(request.labels, request.annotations)


async def _check_agents(client: KubeClient, namespace: str) -> None:
    if await client.read(kube.DAEMON_SETS, namespace, AGENT_DAEMONSET) is None:
        raise BackupError(explain_no_agents(namespace))


async def find_destination(tools: BackupTools, namespace: str, location: str, *, ignore_velero_server: bool) -> str:
    """Return the name of the location for backups of the agents in `namespace`: the default one if none is given.

    Raises:
        BackupError: it does not exist or is read-only, or a Velero server is there, or may be.
        KubeError: the API server rejected a request.
    """
    client = tools.client
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


async def _read_claims(tools: BackupTools, choice: Choice) -> dict[ClaimName, PersistentVolumeClaim]:
    """Return the PVCs in the order of their names.

    Raises:
        BackupError: one does not exist, or none is selected.
    """
    client = tools.client
    if not choice.claims:
        selection = Selection(kube.PERSISTENT_VOLUME_CLAIMS, choice.namespace, label_selector=choice.selector)
        listed = {ClaimName(choice.namespace, raw["metadata"]["name"]): raw for raw in await client.list(selection)}
        if not listed:
            which = f'with the labels "{choice.selector}"' if choice.selector else "at all"
            raise BackupError(f"there is no PVC in namespace {choice.namespace} {which}")
        return dict(sorted(listed.items()))
    found = {}
    for name in sorted(set(choice.claims)):
        claim = await client.read(kube.PERSISTENT_VOLUME_CLAIMS, name.namespace, name.name)
        if claim is None and choice.on_left_out is not None:
            tools.on_note(f"PVC {name} does not exist any more: it is left out")
            continue
        if claim is None:
            raise BackupError(await _explain_absent(client, name))
        found[name] = claim
    if not found:
        raise BackupError("none of the PVCs exists any more")
    return found


async def note_absent_claims(tools: BackupTools, claims: Iterable[ClaimName]) -> None:
    """Note which of these PVCs do not exist, as far as the user may read them: a schedule leaves them out.

    Raises:
        KubeError: the API server rejected a request.
    """
    for name in sorted(set(claims)):
        try:
            claim = await tools.client.read(kube.PERSISTENT_VOLUME_CLAIMS, name.namespace, name.name)
        except ForbiddenError:
            continue
        if claim is None:
            tools.on_note(f"{await _explain_absent(tools.client, name)}: it is left out until it does")


async def _explain_absent(client: KubeClient, name: ClaimName) -> str:
    """Return that there is no such PVC, and which one may be meant, if PVCs of the namespace may be listed."""
    try:
        listed = await client.list(Selection(kube.PERSISTENT_VOLUME_CLAIMS, name.namespace))
    except KubeError:
        listed = []
    return hinted(f"PVC {name} does not exist", name.name, [one["metadata"]["name"] for one in listed])


def _check_existing(
    existing: Sequence[Backup],
    request: BackupRequest,
    claims: Mapping[ClaimName, PersistentVolumeClaim],
    *,
    lenient: bool,
) -> set[ClaimName]:
    """Return the PVCs that have their transfer already; a `lenient` backup may have others.

    Raises:
        BackupError: the backup of that name is another one.
    """
    present: set[ClaimName] = set()
    for backup in existing:
        present |= {ClaimName(one.namespace, one.claim) for one in backup.volumes}
        differences = [f"the volume {name}" for name in sorted(present - claims.keys())]
        if backup.expected is not None and backup.expected != len(claims):
            differences.append(f"{backup.expected} volumes instead of {len(claims)}")
        if lenient:
            differences = []
        if backup.locations != [request.location]:
            differences.append(f"the location {', '.join(backup.locations)}")
        if differences:
            raise BackupError(f"backup {request.name} exists already, and has {differences[0]}: choose another name")
    return present


async def read_classes(client: KubeClient) -> ClusterClasses:
    """Return the classes of the cluster, as far as the user may read them."""
    provisioners, snapshot_classes, unread = dict[str, str](), list[VolumeSnapshotClass](), ""
    try:
        snapshot_classes = await client.list(Selection(kube.VOLUME_SNAPSHOT_CLASSES))
        for raw in await client.list(Selection(kube.STORAGE_CLASSES)):
            provisioners[raw["metadata"]["name"]] = raw.get("provisioner") or ""
    except NotServedError:
        unread = "the cluster has no snapshot API"
    except ForbiddenError as e:
        unread = str(e)
    return ClusterClasses(provisioners, snapshot_classes, unread)
