"""What happens to a backup after its creation: waiting for its end, finding it by its name, canceling it."""

from collections.abc import Callable
from typing import Final

from core.kube.client import KubeClient
from core.kube.errors import NotFoundError
from core.kube.resources import DATA_UPLOADS, POD_VOLUME_BACKUPS
from core.models.phases import Phase
from nodeagent.config.keys import guess
from nodeagent.operations.backups.methods import BackupError
from nodeagent.operations.backups.plan import BackupTools
from nodeagent.operations.backups.progress import ProgressMeter, VolumeProgress
from nodeagent.operations.backups.view import Backup, BackupList, BackupOrigin, BackupVolume, read_backups

__all__ = ["cancel_backup", "explain_failure", "find_backups", "find_own_backup", "wait_for_backup"]

_POLL_SECONDS: Final = 1.0

_RESOURCES: Final = {resource.kind: resource for resource in (DATA_UPLOADS, POD_VOLUME_BACKUPS)}


async def wait_for_backup(
    tools: BackupTools, namespace: str, name: str, show: Callable[[list[VolumeProgress]], None]
) -> Backup:
    """Return the backup of ours once all its transfers are final; `show` gets the progress every second.

    Raises:
        NotFoundError: it has no transfer any more.
        KubeError: the transfers cannot be listed.
    """
    meter = ProgressMeter()
    while True:
        backup = await _read_own(tools.client, namespace, name)
        show(meter.read(backup, tools.clock.monotonic()))
        if all(one.phase.final for one in backup.volumes):
            return backup
        await tools.clock.sleep(_POLL_SECONDS)


def explain_failure(backup: Backup) -> str:
    """Return which volume is not in the backup, which has ended, and why; empty: it has all."""
    lost = [one for one in backup.volumes if one.phase is not Phase.COMPLETED]
    more = f", and {len(lost) - 1} more" if len(lost) > 1 else ""
    if lost:
        first = lost[0]
        return f"PVC {first.namespace}/{first.claim} is {first.phase}: {first.message or 'no message'}{more}"
    return f"{backup.missing} of {backup.expected} volumes have no transfer: it was deleted" if backup.missing else ""


async def find_backups(client: KubeClient, namespace: str, names: tuple[str, ...] = ()) -> BackupList:
    """Return the backups of these names, ours and Velero's; all of them if there are no names.

    Raises:
        NotFoundError: there is none of such a name; the message has the one that may be meant.
        KubeError: the transfers cannot be listed.
    """
    found = await read_backups(client, namespace)
    for name in names:
        if name not in found.names:
            raise _missing(namespace, name, found)
    if not names:
        return found
    return BackupList(backups=[one for one in found.backups if one.name in names], notes=found.notes)


async def find_own_backup(client: KubeClient, namespace: str, name: str) -> Backup:
    """Return the backup of that name that `nodeagent backup create` made.

    Raises:
        NotFoundError: there is none of that name.
        BackupError: it is Velero's.
        KubeError: the transfers cannot be listed.
    """
    found = await find_backups(client, namespace, (name,))
    own = [one for one in found.backups if one.origin is BackupOrigin.NODEAGENT]
    if not own:
        raise BackupError(f"backup {name} is Velero's: use the command velero backup for it")
    return own[0]


async def cancel_backup(client: KubeClient, namespace: str, name: str) -> list[BackupVolume]:
    """Request the cancellation of all transfers of the backup that have not ended, and return these.

    Raises:
        NotFoundError: there is no backup of that name.
        BackupError: it is Velero's.
        KubeError: the API server rejected a request.
    """
    backup = await find_own_backup(client, namespace, name)
    canceled = []
    for volume in backup.volumes:
        if volume.phase.final:
            continue
        try:
            await client.patch(_RESOURCES[volume.kind], namespace, volume.transfer, {"spec": {"cancel": True}})
        except NotFoundError:
            continue
        canceled.append(volume)
    return canceled


async def _read_own(client: KubeClient, namespace: str, name: str) -> Backup:
    found = await read_backups(client, namespace, name)
    if not found.backups:
        raise _missing(namespace, name, found)
    return found.backups[0]


def _missing(namespace: str, name: str, known: BackupList) -> NotFoundError:
    hint = guess(name, known.names)
    text = f"there is no backup {name} in namespace {namespace}" + (f" ({hint})" if hint else "")
    return NotFoundError(text, status=404, reason="NotFound")
