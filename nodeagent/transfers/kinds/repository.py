"""Admission check of the backup storage location, and the cache limit of the backup repository.

Knows what of a location is checked before admission, and where a BackupRepository has its cache
limit. Does not access the bucket, which the mover does, nor size cache volumes (`exposer.settings`).
"""

from dataclasses import replace
from datetime import timedelta
from typing import Final, TypeVar

from core.errors import ContractError
from core.kube.client import KubeClient, Selection, select_labels
from core.kube.resources import BACKUP_REPOSITORIES, BACKUP_STORAGE_LOCATIONS, SECRETS
from core.models.base import JsonDict
from core.models.reasons import PendingReason
from core.models.storage import (
    CACHE_LIMIT_KEY,
    DEFAULT_CACHE_LIMIT_MIB,
    BackupStorageLocation,
    RepositoryKey,
    repository_labels,
)
from core.models.transfers import Transfer
from core.models.units import parse_count
from exposer.model import PodVolumeRequest, Reader, RestoreRequest
from nodeagent.transfers.kinds.base import READY, Admission, AdmissionState

__all__ = ["check_location", "fit_cache"]

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


_Request = TypeVar("_Request", RestoreRequest, PodVolumeRequest)


async def fit_cache(client: KubeClient, cr: Transfer, request: _Request) -> _Request:
    """Return `request` with a cache volume, if it has one, for the cache limit of its backup repository.

    A repository keeps the limit that it was created with; the configured one is for new
    repositories. A volume for a smaller limit would be full before kopia evicts anything, and the
    restore would fail.
    """
    if request.cache is None:
        return request
    wanted = RepositoryKey(cr.repository_namespace, cr.spec.backup_storage_location)
    selector = select_labels(repository_labels(wanted.volume_namespace, wanted.location))
    found = await client.list(Selection(BACKUP_REPOSITORIES, cr.metadata.namespace, label_selector=selector))
    limits = [_limit_of(raw) for raw in found if RepositoryKey.of(raw) == wanted]
    return replace(request, cache=replace(request.cache, limit_mib=max(limits))) if limits else request


def _limit_of(repository: JsonDict) -> int:
    """Return the cache limit of a BackupRepository (a JSON dict); an invalid one counts as the default."""
    text = str((repository.get("spec", {}).get("repositoryConfig") or {}).get(CACHE_LIMIT_KEY, ""))
    return parse_count(text) or DEFAULT_CACHE_LIMIT_MIB
