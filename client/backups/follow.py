"""What happens to a backup after its creation: waiting for its end, finding it by its name, canceling it."""

from collections.abc import Callable

from client.backups.methods import BackupError
from client.backups.moving import cancel_transfers, sort_newest_first, wait_for_end
from client.backups.plan import BackupTools
from client.backups.progress import VolumeProgress
from client.backups.view import Backup, BackupList, BackupOrigin, BackupVolume, read_backups, read_named
from core.kube.client import KubeClient
from nodeagent.config.keys import missing

__all__ = ["cancel_backup", "find_backup", "find_backups", "find_own_backup", "read_own_backup", "wait_for_backup"]


async def wait_for_backup(
    tools: BackupTools, namespace: str, name: str, show: Callable[[list[VolumeProgress]], None]
) -> Backup:
    """Return the backup of ours once all its transfers are final; `show` gets the progress every few seconds.

    Raises:
        NotFoundError: it has no transfer any more.
        KubeError: the transfers cannot be listed.
    """
    client = tools.client.patiently()
    return await wait_for_end(tools.clock, lambda: read_own_backup(client, namespace, name), show)


async def find_backups(client: KubeClient, namespace: str, names: tuple[str, ...] = ()) -> BackupList:
    """Return the backups of these names, ours and Velero's; all of them if there are no names.

    Raises:
        NotFoundError: there is none of such a name; the message has the one that may be meant.
        KubeError: the transfers cannot be listed.
    """
    if not names:
        return await read_backups(client, namespace)
    backups, notes = list[Backup](), list[str]()
    for name in dict.fromkeys(names):
        found = await read_named(client, namespace, name)
        if not found.backups:
            known = (await read_backups(client, namespace)).names
            raise missing(f"there is no backup {name} in namespace {namespace}", name, known)
        backups += found.backups
        notes += found.notes
    sort_newest_first(backups)
    return BackupList(backups=backups, notes=list(dict.fromkeys(notes)))


async def find_backup(client: KubeClient, namespace: str, name: str) -> tuple[Backup, list[str]]:
    """Return the backup of that name, ours if Velero has one too, and notes about it.

    Raises:
        NotFoundError: there is none; the message has the one that may be meant.
        KubeError: the transfers cannot be listed.
    """
    found = await find_backups(client, namespace, (name,))
    backup, *others = sorted(found.backups, key=lambda one: one.origin)
    return backup, [*found.notes, *(f"{other.origin} has another backup of this name" for other in others)]


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
    return await cancel_transfers(client, namespace, (await find_own_backup(client, namespace, name)).volumes)


async def read_own_backup(client: KubeClient, namespace: str, name: str) -> Backup:
    """Return the same by its label: the other transfers are not listed.

    Raises:
        NotFoundError: it has no transfer.
        KubeError: the transfers cannot be listed.
    """
    found = await read_backups(client, namespace, name)
    if not found.backups:
        raise missing(f"backup {name} has no transfer in namespace {namespace} any more: they were deleted", name, ())
    return found.backups[0]
