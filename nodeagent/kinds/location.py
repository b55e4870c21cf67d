"""Whether a load's backup storage location can be used now.

Knows what of a location is checked before a load is accepted. Does not open the bucket: the
mover does, and says what is wrong with it.
"""

from core.errors import ContractError
from core.kube.client import KubeClient
from core.kube.resources import BACKUP_STORAGE_LOCATIONS, SECRETS
from core.models.storage import BackupStorageLocation
from core.models.transfers import Load
from nodeagent.kinds.base import READY, Admission, Verdict

__all__ = ["check_location"]


async def check_location(client: KubeClient, cr: Load) -> Admission:
    """Return whether the location that `cr` names exists, is available and has its Secrets."""
    namespace, name = cr.metadata.namespace, cr.spec.backup_storage_location
    raw = await client.read(BACKUP_STORAGE_LOCATIONS, namespace, name)
    if raw is None:
        message = f"BackupStorageLocation {namespace}/{name} does not exist"
        return Admission(Verdict.FAILS, "LocationMissing", message)
    try:
        location = BackupStorageLocation.parse(raw)
    except ContractError as e:
        return Admission(Verdict.WAITS, "LocationUnreadable", str(e), trouble=True)
    for secret in (location.spec.credential, location.spec.object_storage.ca_cert_ref):
        if secret is None:
            continue
        stored = await client.read(SECRETS, namespace, secret.name)
        what = f"Secret {namespace}/{secret.name} of BackupStorageLocation {name}"
        if stored is None:
            return Admission(Verdict.FAILS, "LocationSecretMissing", f"{what} does not exist")
        if secret.key not in (stored.get("data") or {}):
            return Admission(Verdict.FAILS, "LocationSecretMissing", f"{what} has no key {secret.key}")
    if not location.available:
        why = f": {location.status.message}" if location.status.message else ""
        message = f"BackupStorageLocation {namespace}/{name} is {location.status.phase}{why}"
        return Admission(Verdict.WAITS, "LocationUnavailable", message, trouble=True)
    return READY
