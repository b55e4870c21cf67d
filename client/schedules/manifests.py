"""The objects of a schedule: a CronJob, its account, and roles with exactly what its pods need. Pure builders."""

from dataclasses import replace
from datetime import datetime
from typing import Final

from client.backups.deletion_jobs import build_lease, build_record
from client.backups.manifests import Method
from client.install.manifests import build_role, in_scope
from client.install.options import build_object
from client.permissions import BACKUP_PERMISSIONS, READ_BACK_PERMISSIONS
from client.schedules.request import ScheduleRequest, ScheduleTimes
from core.kube import resources as kube
from core.kube.types import Manifest, Object
from core.models import names as wire
from core.models.units import format_duration
from exposer.pods import WITHOUT_SIDECAR, AgentImage, build_client_pod
from nodeagent.runtime.permissions import Permission, Scope, everywhere, own

_RULES: Final = "the rules: newest copies, running restores"
_DELETED: Final = "the Job that deletes snapshots"
_RECORD: Final = "the record of what is being deleted"
_ONE: Final = "one deletion at a time"

EXPIRY_PERMISSIONS: Final = (
    own(kube.DATA_UPLOADS, "get list delete", "the transfers of the backup; the rules"),
    own(kube.POD_VOLUME_BACKUPS, "get list delete", "the transfers of the backup; the rules"),
    own(kube.DATA_DOWNLOADS, "list", _RULES),
    own(kube.POD_VOLUME_RESTORES, "list", _RULES),
    own(kube.DEPLOYMENTS, "list", "whether a Velero server runs here"),
    own(kube.CONFIG_MAPS, "patch", _RECORD, names=(wire.DELETIONS_CONFIGMAP,)),
    own(kube.LEASES, "get patch", _ONE, names=(wire.DELETIONS_LEASE,)),
    own(kube.JOBS, "list", f"{_ONE}: the Job of a command that was killed is ended"),
    own(kube.BACKUP_STORAGE_LOCATIONS, "get list", _DELETED),
    own(kube.DAEMON_SETS, "get", _DELETED, names=(wire.AGENT_DAEMONSET, wire.AGENT_DAEMONSET_WINDOWS)),
    own(kube.CONFIG_MAPS, "get", f"{_DELETED}; {_RECORD}"),
    own(kube.JOBS, "get create delete", _DELETED),
    own(kube.PODS, "list", _DELETED),
    own(kube.EVENTS, "list", _DELETED),
    own(kube.PODS, "get", _DELETED, subresource="log"),
    everywhere(kube.NAMESPACES, "get", "which snapshots are of this cluster", names=(wire.CLUSTER_NAMESPACE,)),
)
"""What the account of a schedule has besides if it deletes, by `--ttl` or `--keep-...`."""

DELETION_PERMISSIONS: Final = (
    *EXPIRY_PERMISSIONS,
    own(kube.CONFIG_MAPS, "create", _RECORD),
    own(kube.LEASES, "create", _ONE),
)
"""What `nodeagent backup delete` needs."""

SCHEDULED_PERMISSIONS: Final = (
    *(one for one in BACKUP_PERMISSIONS if one.verbs != ("patch",)),
    everywhere(kube.VOLUME_SNAPSHOTS, "list", "snapshots that a run that was killed has left"),
    own(kube.JOBS, "get", "the time of the run, which names the backup"),
)
"""What the account of a schedule has: on PVCs, snapshots and pods, in the namespaces of the PVCs alone."""

_SCHEDULE: Final = "schedule create: "
_RENEWED: Final = "schedule create, renew: "

SCHEDULE_PERMISSIONS: Final = (
    own(kube.CRON_JOBS, "get list create patch delete", "the schedules"),
    own(kube.DAEMON_SETS, "get", f"{_RENEWED}the image of the agents", names=(wire.AGENT_DAEMONSET,)),
    own(
        kube.DEPLOYMENTS,
        "list",
        f"{_SCHEDULE}whether a Velero server runs here",
        without="--ignore-velero-server is needed",
    ),
    own(kube.BACKUP_STORAGE_LOCATIONS, "list", f"{_SCHEDULE}the location"),
    everywhere(
        kube.PERSISTENT_VOLUME_CLAIMS,
        "get list",
        f"{_SCHEDULE}whether the PVCs exist, and which are meant",
        without="a PVC that does not exist is not noticed",
    ),
    own(kube.SERVICE_ACCOUNTS, "get create patch delete", "the account of a schedule"),
    own(kube.CONFIG_MAPS, "create patch", f"{_RENEWED}{_RECORD}"),
    own(kube.LEASES, "create", f"{_RENEWED}{_ONE}"),
    *(
        everywhere(resource, "get list create patch delete", "the roles of its account")
        for resource in (kube.ROLES, kube.ROLE_BINDINGS, kube.CLUSTER_ROLES, kube.CLUSTER_ROLE_BINDINGS)
    ),
    *(
        everywhere(
            resource,
            "escalate bind",
            f"{_RENEWED}grant permissions that the user does not have",
            without="the user has all permissions of the account",
        )
        for resource in (kube.ROLES, kube.CLUSTER_ROLES)
    ),
)
"""What `nodeagent schedule` needs."""

_RETRIES: Final = 2
"""A pod that is lost with its node is replaced, and continues the backup; what failed once more fails again."""

_LATEST_START_SECONDS: Final = 3600
"""A CronJob that could not start for longer, such as in an outage, waits for its next time."""

_DEADLINE_SECONDS: Final = 3 * 24 * 3600
"""Of a run with its retries: longer than the first backup of large volumes, so that one that hangs does not end all."""

_OF_CLAIMS: Final = frozenset({kube.PERSISTENT_VOLUME_CLAIMS, kube.VOLUME_SNAPSHOTS, kube.PODS})
"""What the account may do in the namespaces of the PVCs alone."""

_FOR_SNAPSHOTS: Final = frozenset({kube.VOLUME_SNAPSHOTS, kube.VOLUME_SNAPSHOT_CLASSES, kube.STORAGE_CLASSES})


def account_name(schedule: str) -> str:
    """Return the name of the ServiceAccount of a schedule, and of its role in the agents' namespace."""
    return f"node-agent-schedule-{schedule}"


def _shared_role_name(request: ScheduleRequest) -> str:
    """Return the name of a schedule's roles, in a namespace that other agents' schedules may use too.

    A namespace has no dot, and an account's name a dash in place of the first one: no two schedules share a name.
    Source: Kubernetes v1.34, "Object Names and IDs": a namespace is an RFC 1123 label.
    """
    return f"node-agent-schedule.{request.namespace}.{request.name}"


def is_role_of(request: ScheduleRequest, role: Object) -> bool:
    """Return whether a role or binding with the schedule's label has a name of its roles."""
    meta = role["metadata"]
    in_own = meta.get("namespace") == request.namespace and meta["name"] == account_name(request.name)
    return bool(in_own or meta["name"] == _shared_role_name(request))


def schedule_permissions(request: ScheduleRequest) -> tuple[Permission, ...]:
    """Return what the account of the schedule needs: less for a method or a choice that needs less."""
    left_out = _FOR_SNAPSHOTS if request.choice.method is Method.FS_BACKUP else ()
    found = [
        replace(one, verbs=("get",) if request.choice.claims else ("list",))
        if one.resource is kube.PERSISTENT_VOLUME_CLAIMS
        else one
        for one in SCHEDULED_PERMISSIONS
        if one.resource not in left_out
        and not (one.resource is kube.PODS and request.choice.required_method is Method.CSI_SNAPSHOT)
    ]
    return (
        *found,
        *(READ_BACK_PERMISSIONS if request.verify else ()),
        *(EXPIRY_PERMISSIONS if request.deletes else ()),
    )


def build_accounts(request: ScheduleRequest) -> list[Manifest]:
    """Return the account of a schedule, with its roles in the agents' and the PVCs' namespaces, and in the cluster."""
    account, shared, labels = account_name(request.name), _shared_role_name(request), request.own_labels
    permissions = schedule_permissions(request)
    in_cluster = in_scope(permissions, Scope.CLUSTER)
    of_claims = [one for one in in_cluster if one.resource in _OF_CLAIMS]
    places = [
        (account, request.namespace, in_scope(permissions, Scope.OWN_NAMESPACE)),
        *((shared, name, of_claims) for name in request.claim_namespaces),
        (shared, "", [one for one in in_cluster if one.resource not in _OF_CLAIMS]),
    ]
    objects = [build_object("v1", "ServiceAccount", account, request.namespace, labels)]
    for name, namespace, needed in places:
        if needed or namespace:
            objects += build_role(name, namespace, needed, (request.namespace, account), labels)
    return objects


def build_schedule(request: ScheduleRequest, times: ScheduleTimes, agent: AgentImage, now: datetime) -> list[Manifest]:
    """Return the objects of a schedule, the CronJob last: when it runs, the others are there.

    `now` is from when on the longest pause between two runs counts, which is how often verifications are due.
    """
    shared = [build_record(request.namespace), build_lease(request.namespace)] if request.deletes else []
    return [*build_accounts(request), *shared, _build_cron_job(request, times, agent, now)]


def _build_cron_job(request: ScheduleRequest, times: ScheduleTimes, agent: AgentImage, now: datetime) -> Manifest:
    kind, labels = kube.CRON_JOBS, request.own_labels
    cron_job = build_object(kind.api_version, kind.kind, request.name, request.namespace, labels)
    annotations = {}
    if request.verify:
        annotations[wire.VERIFICATION_INTERVAL_ANNOTATION] = format_duration(times.longest_pause(now))
    if request.deletes:
        annotations[wire.RETENTION_IMAGE_ANNOTATION] = agent.image
    if annotations:
        cron_job["metadata"]["annotations"] = annotations
    pod = build_client_pod(account_name(request.name), request.argv, agent, container="schedule")
    template = {"metadata": {"labels": labels, "annotations": WITHOUT_SIDECAR}, "spec": pod}
    return cron_job | {
        "spec": {
            "schedule": times.schedule,
            **({"timeZone": times.time_zone} if times.time_zone else {}),
            "concurrencyPolicy": "Forbid",
            "startingDeadlineSeconds": _LATEST_START_SECONDS,
            "suspend": times.suspend,
            "jobTemplate": {
                "metadata": {"labels": labels},
                "spec": {"backoffLimit": _RETRIES, "activeDeadlineSeconds": _DEADLINE_SECONDS, "template": template},
            },
        }
    }
