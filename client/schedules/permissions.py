"""The permissions to delete backups and to make schedules, and of a schedule's account, with the reason."""

from typing import Final

from client.permissions import BACKUP_PERMISSIONS
from core.kube import resources as kube
from core.models.names import (
    AGENT_DAEMONSET,
    AGENT_DAEMONSET_WINDOWS,
    CLUSTER_NAMESPACE,
    DELETIONS_CONFIGMAP,
    DELETIONS_LEASE,
)
from nodeagent.runtime.permissions import Permission, Scope

__all__ = ["DELETION_PERMISSIONS", "EXPIRY_PERMISSIONS", "SCHEDULED_PERMISSIONS", "SCHEDULE_PERMISSIONS"]

_OWN: Final = Scope.OWN_NAMESPACE
_RULES: Final = "the rules: newest copies, running restores"
_DELETED: Final = "the Job that deletes snapshots"
_RECORD: Final = "the record of what is being deleted"
_ONE: Final = "one deletion at a time"

_RUN_DELETION: Final = (
    Permission(_OWN, kube.DATA_UPLOADS, ("list", "delete"), "the transfers of the backup; the rules"),
    Permission(_OWN, kube.POD_VOLUME_BACKUPS, ("list", "delete"), "the transfers of the backup; the rules"),
    Permission(_OWN, kube.DATA_DOWNLOADS, ("list",), _RULES),
    Permission(_OWN, kube.POD_VOLUME_RESTORES, ("list",), _RULES),
    Permission(_OWN, kube.DEPLOYMENTS, ("list",), "whether a Velero server runs here"),
    Permission(_OWN, kube.CONFIG_MAPS, ("patch",), _RECORD, names=(DELETIONS_CONFIGMAP,)),
    Permission(_OWN, kube.LEASES, ("get", "patch"), _ONE, names=(DELETIONS_LEASE,)),
    Permission(_OWN, kube.JOBS, ("list",), f"{_ONE}: the Job of a command that was killed is ended"),
    Permission(_OWN, kube.BACKUP_STORAGE_LOCATIONS, ("get", "list"), _DELETED),
    Permission(_OWN, kube.DAEMON_SETS, ("get",), _DELETED, names=(AGENT_DAEMONSET, AGENT_DAEMONSET_WINDOWS)),
    Permission(_OWN, kube.CONFIG_MAPS, ("get",), f"{_DELETED}; {_RECORD}"),
    Permission(_OWN, kube.JOBS, ("get", "create", "delete"), _DELETED),
    Permission(_OWN, kube.PODS, ("list",), _DELETED),
    Permission(_OWN, kube.EVENTS, ("list",), _DELETED),
    Permission(_OWN, kube.PODS, ("get",), _DELETED, subresource="log"),
    Permission(
        Scope.CLUSTER, kube.NAMESPACES, ("get",), "which snapshots are of this cluster", names=(CLUSTER_NAMESPACE,)
    ),
)

DELETION_PERMISSIONS: Final = (
    *_RUN_DELETION,
    Permission(_OWN, kube.CONFIG_MAPS, ("create",), _RECORD),
    Permission(_OWN, kube.LEASES, ("create",), _ONE),
)
"""What `nodeagent backup delete` needs."""

SCHEDULED_PERMISSIONS: Final = (
    *(one for one in BACKUP_PERMISSIONS if one.verbs != ("patch",)),
    Permission(_OWN, kube.JOBS, ("get",), "the time of the run, which names the backup"),
)
"""What the account of a schedule has: on PVCs, snapshots and pods, in the namespaces of the PVCs alone."""

EXPIRY_PERMISSIONS: Final = _RUN_DELETION
"""What it has besides if it deletes, by `--ttl` or `--keep-...`."""

_SCHEDULE: Final = "schedule create: "
_RENEWED: Final = "schedule create, renew: "

SCHEDULE_PERMISSIONS: Final = (
    Permission(_OWN, kube.CRON_JOBS, ("get", "list", "create", "patch", "delete"), "the schedules"),
    Permission(_OWN, kube.DAEMON_SETS, ("get",), f"{_RENEWED}the image of the agents", names=(AGENT_DAEMONSET,)),
    Permission(
        _OWN,
        kube.DEPLOYMENTS,
        ("list",),
        f"{_SCHEDULE}whether a Velero server runs here",
        without="--ignore-velero-server is needed",
    ),
    Permission(_OWN, kube.BACKUP_STORAGE_LOCATIONS, ("list",), f"{_SCHEDULE}the location"),
    Permission(
        Scope.CLUSTER,
        kube.PERSISTENT_VOLUME_CLAIMS,
        ("get", "list"),
        f"{_SCHEDULE}whether the PVCs exist, and which are meant",
        without="a PVC that does not exist is not noticed",
    ),
    Permission(_OWN, kube.SERVICE_ACCOUNTS, ("get", "create", "patch", "delete"), "the account of a schedule"),
    Permission(_OWN, kube.CONFIG_MAPS, ("create", "patch"), f"{_RENEWED}{_RECORD}"),
    Permission(_OWN, kube.LEASES, ("create",), f"{_RENEWED}{_ONE}"),
    *(
        Permission(Scope.CLUSTER, resource, ("get", "list", "create", "patch", "delete"), "the roles of its account")
        for resource in (kube.ROLES, kube.ROLE_BINDINGS, kube.CLUSTER_ROLES, kube.CLUSTER_ROLE_BINDINGS)
    ),
    *(
        Permission(
            Scope.CLUSTER,
            resource,
            ("escalate", "bind"),
            f"{_RENEWED}grant permissions that the user does not have",
            without="the user has all permissions of the account",
        )
        for resource in (kube.ROLES, kube.CLUSTER_ROLES)
    ),
)
"""What `nodeagent schedule` needs."""
