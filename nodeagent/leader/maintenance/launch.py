"""The start of one maintenance or verification: a Job whose pod the API server accepts.

The pod is tried by a dry run first: a Job whose pod is rejected never ends.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from core.errors import RepositoryError
from core.kube.client import KubeClient
from core.kube.errors import ForbiddenError, InvalidError
from core.kube.resources import JOBS, PODS
from core.kube.types import Manifest
from core.logs import fields
from core.models.names import VERIFIED_REPOSITORY_LABEL
from core.models.storage import (
    CACHE_LIMIT_KEY,
    DEFAULT_CACHE_LIMIT_MIB,
    BackupRepository,
    BackupStorageLocation,
)
from core.models.units import parse_count
from core.mover_specs import MaintainRepository, VerifySnapshots
from exposer.model import Owner
from exposer.ownership import NO_PRIORITY_CLASS
from exposer.pods import MaintenanceRun, build_command_job, build_maintenance_job
from exposer.settings import ExposeSettings
from exposer.storage_access import access_of
from nodeagent.config.maintenance import MaintenanceSettings
from nodeagent.maintenance.facts import full_interval_of
from nodeagent.maintenance.jobs import MaintenanceJob
from nodeagent.maintenance.rules import Memory

__all__ = ["JobRequest", "PodRejectedError", "create_job", "create_verification"]

_log = logging.getLogger(__name__)


class PodRejectedError(RepositoryError):
    """The API server rejects the pod of the Job: a quota, or an admission webhook."""


@dataclass(frozen=True)
class JobRequest:
    """One Job to create: its `name`, what it maintains or verifies, and what applies to it.

    `memory` is what it gets unless `settings` say otherwise. `ignore_foreign`: maintenance by another cluster does not
    hold it. `report_snapshots`: it also reports the snapshots that nothing refers to.
    """

    name: str
    repository: BackupRepository
    location: BackupStorageLocation
    settings: MaintenanceSettings
    memory: Memory
    ignore_foreign: bool = False
    report_snapshots: bool = False


async def create_job(
    client: KubeClient, request: JobRequest, expose: ExposeSettings, check_leading: Callable[[], None]
) -> MaintenanceJob:
    """Create the Job and return it.

    Raises:
        AlreadyExistsError: a Job of that name exists: another leader created it in the same slot.
        PodRejectedError: the API server rejects its pod.
        KubeError: the API server rejected a request for another reason.
    """
    return await _create(client, _build(request, expose), check_leading)


async def create_verification(
    client: KubeClient,
    request: JobRequest,
    spec: VerifySnapshots,
    expose: ExposeSettings,
    check_leading: Callable[[], None],
) -> MaintenanceJob:
    """Create a Job that verifies the repository by `spec`, and return it; it gets no label of Velero's.

    Raises:
        KubeError: as of `create_job`.
        PodRejectedError: the API server rejects its pod.
    """
    manifest = build_command_job(_plan_run(request), expose, spec)
    manifest["metadata"]["labels"][VERIFIED_REPOSITORY_LABEL] = request.repository.uid
    return await _create(client, manifest, check_leading)


async def _create(client: KubeClient, manifest: Manifest, check_leading: Callable[[], None]) -> MaintenanceJob:
    manifest = await _try_pod(client, manifest)
    check_leading()
    return MaintenanceJob.parse(await client.create(JOBS, manifest))


def _plan_run(request: JobRequest) -> MaintenanceRun:
    repository, settings = request.repository, request.settings
    job = settings.job
    if job.resources is None:
        job = replace(job, resources=request.memory.resources)
    return MaintenanceRun(
        owner=Owner.of(repository),
        name=request.name,
        settings=job,
        storage=access_of(request.location),
        cache_limit_mib=parse_count(repository.spec.repository_config.get(CACHE_LIMIT_KEY, ""))
        or DEFAULT_CACHE_LIMIT_MIB,
    )


def _build(request: JobRequest, expose: ExposeSettings) -> Manifest:
    repository, settings = request.repository, request.settings
    interval = full_interval_of(repository)
    spec = MaintainRepository(
        job=request.name,
        ignore_foreign=request.ignore_foreign,
        verify_blobs=settings.verify_blob_limit,
        full_interval_seconds=int(interval.total_seconds()) if interval is not None else None,
        report_snapshots=request.report_snapshots,
    )
    return build_maintenance_job(_plan_run(request), expose, spec)


async def _try_pod(client: KubeClient, manifest: Manifest) -> Manifest:
    """Return the Job's manifest if the API server accepts its pod, without a priority class that does not exist.

    Raises:
        PodRejectedError: it does not accept it.
    """
    meta, template = manifest["metadata"], manifest["spec"]["template"]
    pod: Manifest = {
        "apiVersion": PODS.api_version,
        "kind": PODS.kind,
        "metadata": template["metadata"] | {"name": meta["name"], "namespace": meta["namespace"]},
        "spec": template["spec"],
    }
    extra = fields(kind=JOBS.kind, namespace=meta["namespace"], name=meta["name"])
    try:
        await client.try_create(PODS, pod)
    except (ForbiddenError, InvalidError) as e:
        priority_class = template["spec"].get("priorityClassName", "")
        if not priority_class or NO_PRIORITY_CLASS not in str(e):
            raise PodRejectedError(f"the pod of Job {meta['namespace']}/{meta['name']} is rejected: {e}") from e
        _log.warning("PriorityClass %s does not exist, creating the Job without it: %s", priority_class, e, extra=extra)
        spec = {key: value for key, value in template["spec"].items() if key != "priorityClassName"}
        manifest = manifest | {"spec": manifest["spec"] | {"template": template | {"spec": spec}}}
        return await _try_pod(client, manifest)
    return manifest
