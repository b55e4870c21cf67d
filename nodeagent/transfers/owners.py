"""Whether the owner of a transfer still waits for it: without one, another attempt is of no use."""

import logging
from typing import Final

from core.kube.client import KubeClient
from core.kube.errors import ForbiddenError
from core.kube.resources import BACKUPS
from core.logs import fields
from core.models.transfers import PodVolumeBackup, Transfer

__all__ = ["read_owner_refusal"]

_log = logging.getLogger(__name__)

_FINAL: Final = frozenset({"Completed", "Deleting", "Failed", "FailedValidation", "PartiallyFailed"})
"""The phases of a Backup that no transfer can change any more.

Source: Velero v1.18, pkg/apis/velero/v1/backup_types.go.
"""


async def read_owner_refusal(client: KubeClient, cr: Transfer) -> str:
    """Return why `cr` gets no other attempt because of its owner; empty: there may be one.

    That is a PodVolumeBackup whose owning Backup is gone or final: Velero's server no longer waits for it, and does not
    use its result. The data of any other transfer is of use also then, or the server sets `spec.cancel`.

    Raises:
        KubeError: the Backup could not be read, for another reason than a missing permission.
    """
    if not isinstance(cr, PodVolumeBackup):
        return ""
    namespace, group = cr.metadata.namespace, f"{BACKUPS.group}/"
    for owner in cr.metadata.owner_references:
        if owner.kind != BACKUPS.kind or not owner.api_version.startswith(group):
            continue
        try:
            raw = await client.read(BACKUPS, namespace, owner.name)
        except ForbiddenError as e:
            _log.warning("transfer is retried whatever has become of its Backup: %s", e, extra=fields(uid=cr.uid))
            return ""
        if raw is None or raw["metadata"]["uid"] != owner.uid:
            return f"Backup {namespace}/{owner.name} no longer exists"
        if (phase := _phase(raw.get("status"))) in _FINAL:
            return f"Backup {namespace}/{owner.name} is {phase}"
    return ""


def _phase(status: object) -> str:
    """Return the phase in a Backup's `status`; empty where there is none."""
    return str(status.get("phase") or "") if isinstance(status, dict) else ""
