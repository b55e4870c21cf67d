"""The admission check of the backup storage location, which all kinds share.

Does not access the bucket, which the mover does.
"""

from datetime import timedelta
from typing import Final

from core.errors import ContractError
from core.kube.resources import BACKUP_STORAGE_LOCATIONS, SECRETS
from core.models.reasons import PendingReason
from core.models.storage import BackupStorageLocation
from core.models.transfers import Transfer
from exposer.model import Reader
from nodeagent.transfers.kinds.base import READY, Admission, AdmissionState

__all__ = ["check_location"]

_MISSING_TIMEOUT: Final = timedelta(minutes=2)
"""How long a location or its Secret may be missing: a rotation or a GitOps tool deletes and creates it again."""


async def check_location(reader: Reader, cr: Transfer) -> Admission:
    """Return whether the backup storage location of `cr` exists and has its Secrets.

    One that is not Available delays nothing, as in Velero: its phase may be outdated, and the data
    mover learns from the bucket itself. The phase is the warning of a ready transfer.
    """
    namespace, name = cr.metadata.namespace, cr.spec.backup_storage_location
    raw = await reader.read(BACKUP_STORAGE_LOCATIONS, namespace, name)
    if raw is None:
        message = f"BackupStorageLocation {namespace}/{name} does not exist"
        return _build_missing(PendingReason.LOCATION_MISSING, message)
    try:
        location = BackupStorageLocation.parse(raw)
    except ContractError as e:
        return Admission(AdmissionState.PENDING, PendingReason.LOCATION_UNREADABLE, str(e), blocked=True)
    for secret in (location.spec.credential, location.spec.object_storage.ca_cert_ref):
        if secret is None:
            continue
        stored = await reader.read(SECRETS, namespace, secret.name)
        what = f"Secret {namespace}/{secret.name} of BackupStorageLocation {name}"
        if stored is None:
            return _build_missing(PendingReason.LOCATION_SECRET_MISSING, f"{what} does not exist")
        if secret.key not in (stored.get("data") or {}):
            return _build_missing(PendingReason.LOCATION_SECRET_MISSING, f"{what} has no key {secret.key}")
    if not location.available:
        why = f": {location.status.message}" if location.status.message else ""
        message = f"BackupStorageLocation {namespace}/{name} is {location.status.phase}{why}"
        return Admission(AdmissionState.READY, warning=message)
    return READY


def _build_missing(reason: PendingReason, message: str) -> Admission:
    return Admission(AdmissionState.PENDING, reason, message, blocked=True, limit=_MISSING_TIMEOUT)
