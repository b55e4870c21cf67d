"""Every permission that the agent and its data movers use, with the reason.

`deploy/agent/` and `deploy/volume-secrets/` grant exactly these, to one ServiceAccount each (a test compares them).
Where movers have no account of their own, the agent's needs both.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any, Final

from core.kube import resources as kube
from core.models import names as wire


class Scope(StrEnum):
    """Where a permission holds."""

    OWN_NAMESPACE = "own namespace"
    CLUSTER = "cluster"
    """Cluster-scoped objects, or namespaced ones in every namespace."""


@dataclass(frozen=True)
class Permission:
    """Verbs on one resource; `names`, if not empty, limits them to single objects.

    `without` is what the agent cannot do without the permission, if it starts nevertheless; None: it does not start.
    """

    scope: Scope
    resource: kube.Resource
    verbs: tuple[str, ...]
    reason: str
    subresource: str | None = None
    names: tuple[str, ...] = ()
    without: str | None = None

    @property
    def path(self) -> str:
        """The resource as RBAC spells it, such as `pods/log`."""
        return f"{self.resource.plural}/{self.subresource}" if self.subresource else self.resource.plural

    @property
    def only(self) -> str:
        """The single objects that it is limited to, as the end of a text."""
        return f" (only {', '.join(self.names)})" if self.names else ""

    @property
    def where(self) -> str:
        """The scope as text, such as `in every namespace`."""
        if self.scope is Scope.OWN_NAMESPACE:
            return "in its namespace"
        return "in every namespace" if self.resource.namespaced else "in the cluster"


def _permit(scope: Scope, resource: kube.Resource, verbs: str, reason: str, **more: Any) -> Permission:  # noqa: ANN401 - of any field
    return Permission(scope, resource, tuple(verbs.split()), reason, **more)


own: Final = partial(_permit, Scope.OWN_NAMESPACE)
"""Returns a permission in the agents' namespace; its verbs are words."""

everywhere: Final = partial(_permit, Scope.CLUSTER)
"""Returns a permission in the cluster, or in every namespace; its verbs are words."""

_ALL_BLOCKS: Final = "backups by block read whole devices"

_AGENT_PERMISSIONS: Final = (
    *(own(kind, "get list watch patch", "carry out transfers, report their status") for kind in kube.TRANSFERS),
    own(
        kube.BACKUP_REPOSITORIES,
        "get list watch patch",
        "the repository controller makes them ready; the cache limit of a restore",
    ),
    own(
        kube.BACKUP_REPOSITORIES,
        "create",
        "the repository of the first backup of a namespace, while its volume is exposed",
        without="the first backup of a namespace waits for its repository once its data mover runs",
    ),
    own(
        kube.BACKUP_STORAGE_LOCATIONS,
        "get list watch patch",
        "whether a location is available, and has credentials; its status, without a Velero server",
    ),
    own(
        kube.BACKUPS,
        "get",
        "whether the Backup of an interrupted transfer still waits for it",
        without="a PodVolumeBackup is retried although its Backup is gone or final",
    ),
    own(
        kube.PODS,
        "get list watch create patch delete",
        "mover pods; live agents; an agent announces its active configuration on its own pod",
    ),
    own(kube.PODS, "get", "copy a mover's log before its pod is deleted", subresource="log"),
    own(
        kube.PERSISTENT_VOLUME_CLAIMS,
        "list create delete",
        "PVCs that bring volumes to mover pods; garbage collection of leaked ones",
    ),
    own(kube.VOLUME_SNAPSHOTS, "list create", "snapshots from which the movers' volumes are created"),
    own(
        kube.VOLUME_SNAPSHOTS,
        "patch",
        "a finalizer that some provisioners leave on them",
        without="the cleanup of a backup without a volume stays blocked then",
    ),
    own(
        kube.EVENTS,
        "list watch create",
        "the progress that movers report; Events on transfers; why pods and PVCs are pending",
    ),
    own(kube.CONFIG_MAPS, "create", "the admission ledger; the history of backups"),
    own(kube.CONFIG_MAPS, "get patch", "the admission ledger", names=(wire.ADMISSIONS_CONFIGMAP,)),
    own(
        kube.SECRETS,
        "get create",
        "whether the credentials of a location exist; the repository password, created if absent",
    ),
    own(kube.LEASES, "create", "leader election"),
    own(kube.LEASES, "get list watch patch", "leader election", names=(wire.DISPATCHER_LEASE,)),
    own(kube.DAEMON_SETS, "get", "what mover pods inherit", names=(wire.AGENT_DAEMONSET, wire.AGENT_DAEMONSET_WINDOWS)),
    own(kube.DEPLOYMENTS, "list", "whether a Velero server runs here"),
    own(
        kube.JOBS,
        "get list watch create patch delete",
        "maintenance Jobs of backup repositories, without a Velero server",
    ),
    *(
        own(
            kind,
            "list",
            "how often volumes are to be backed up, for the metrics",
            without=f"the metrics do not show which volumes a {kind.kind} should have backed up",
        )
        for kind in (kube.CRON_JOBS, kube.SCHEDULES)
    ),
    own(
        kube.CONFIG_MAPS,
        "get",
        "what retention keeps and why, for the metrics",
        names=(wire.DELETIONS_CONFIGMAP,),
        without="the metrics do not show what retention keeps, and no Event reports a backlog",
    ),
    own(
        kube.CONFIG_MAPS,
        "get patch",
        "the history of backups",
        names=wire.HISTORY_CONFIGMAPS,
        without="no history of backups is kept",
    ),
    everywhere(
        kube.PODS,
        "get list watch",
        "workload pods: whether they exist, what they wait for, their node; "
        "the Running ones of a node, whose directories host-pods has",
    ),
    everywhere(kube.PERSISTENT_VOLUME_CLAIMS, "get patch", "source and target PVCs"),
    everywhere(
        kube.PERSISTENT_VOLUME_CLAIMS,
        "list",
        "which PVCs exist, and how often they are to be backed up, for the metrics",
        without="the metrics do not show which volumes lack a backup, and keep the metrics of deleted PVCs",
    ),
    everywhere(kube.VOLUME_SNAPSHOTS, "get delete", "source snapshots, which are handed over"),
    everywhere(
        kube.VOLUME_SNAPSHOT_CONTENTS,
        "get list create patch delete",
        "handover of a snapshot from the workload's namespace to the agent's",
    ),
    everywhere(
        kube.VOLUME_SNAPSHOT_CONTENTS,
        "patch",
        "snapshots of a group whose driver deletes them only together; those that their driver has not seen",
        subresource="status",
        without="DataUploads of such a group time out; a snapshot that its driver has not seen stays",
    ),
    everywhere(
        kube.SNAPSHOT_METADATA_SERVICES,
        "get",
        "which blocks of a snapshot have changed: where its driver says so",
        without=_ALL_BLOCKS,
    ),
    everywhere(
        kube.PERSISTENT_VOLUMES,
        "get list patch",
        "bind restored volumes to target PVCs; set the policy by which temporary and leaked volumes are deleted",
    ),
    everywhere(
        kube.PERSISTENT_VOLUMES,
        "create delete",
        "a second PersistentVolume of a device that is restored: the mode of one never changes",
        without="restores by block into volumes with a file system fail, or are pending until they time out",
    ),
    everywhere(kube.STORAGE_CLASSES, "get", "the binding mode of a class"),
    everywhere(
        kube.NODES,
        "get list watch",
        "the operating system of a volume's nodes; the labels that perNodeConfig selects by; lost nodes",
    ),
    everywhere(
        kube.VOLUME_ATTACHMENTS,
        "list",
        "where a volume is attached: snapshots of some drivers must not be mounted there; "
        "when a restored one is detached",
    ),
    everywhere(
        kube.PRIORITY_CLASSES,
        "list watch",
        "whether the configured priority class exists",
        without="cannot check whether the configured priority class exists",
    ),
    everywhere(
        kube.CUSTOM_RESOURCE_DEFINITIONS,
        "get",
        "which fields the definitions drop; the hash of new repositories",
        names=tuple(kind.full_name for kind in kube.TRANSFERS),
        without="fields that the definitions drop are not reported, and new repositories have kopia's default hash",
    ),
    everywhere(
        kube.NAMESPACES,
        "list",
        "which namespaces are left out of backups, for the metrics",
        without="the metrics do not show which namespaces are left out",
    ),
    everywhere(
        kube.NAMESPACES,
        "get",
        "the identity of the cluster, for the tags of its snapshots",
        names=(wire.CLUSTER_NAMESPACE,),
        without="snapshots do not say which cluster made them",
    ),
)

MOVER_PERMISSIONS: Final = (
    *(own(kind, "list watch", "the start of a transfer, and cancel requests") for kind in kube.TRANSFERS),
    own(kube.BACKUP_REPOSITORIES, "get list watch create", "the repository of a volume's namespace, created if absent"),
    own(kube.BACKUP_STORAGE_LOCATIONS, "get", "the bucket of a location"),
    own(kube.SECRETS, "get", "credentials and CA of a location; the repository password"),
    own(kube.EVENTS, "create", "progress, waits and results"),
    own(kube.JOBS, "list watch", "the start of a maintenance; which runs were Jobs of this cluster"),
    own(kube.DEPLOYMENTS, "list", "no maintenance beside a Velero server"),
    own(
        kube.VOLUME_SNAPSHOTS,
        "get",
        "which blocks of a snapshot have changed: drivers tell who may read it",
        without=_ALL_BLOCKS,
    ),
    own(
        kube.BACKUPS,
        "list",
        "which snapshots belong to no backup",
        without="the snapshot report cannot tell which snapshots belong to no backup",
    ),
)
"""The permissions of data movers, each with its reason."""

_NO_COPIES: Final = "transfers that copy them for a volume fail, or are not cleaned up"
_COPIES: Final = "find and delete the copies of transfers"
_COPIED: Final = "copy what a driver needs in the namespace of a PVC"

COPY_PERMISSIONS: Final = (
    own(kube.SECRETS, "list delete", _COPIES, without=_NO_COPIES),
    own(kube.CONFIG_MAPS, "list delete", _COPIES, without=_NO_COPIES),
    everywhere(kube.SECRETS, "get", _COPIED, without=_NO_COPIES),
    everywhere(kube.CONFIG_MAPS, "get", _COPIED, without=_NO_COPIES),
)
"""The agent's permissions of `deploy/volume-secrets`, which only `secretNames` and `configMapNames` need."""


def agent_permissions(
    config_map: str | None = None, repository_config_map: str | None = None, maintenance_config_map: str | None = None
) -> tuple[Permission, ...]:
    """Return the permissions of the agent, with those for the ConfigMaps that are named."""
    named = (
        (config_map, "get list watch", "the configuration"),
        (repository_config_map, "get", "the configuration of new backup repositories"),
        (maintenance_config_map, "get", "the configuration of maintenance Jobs"),
    )
    return (
        *_AGENT_PERMISSIONS,
        *(own(kube.CONFIG_MAPS, verbs, reason, names=(name,)) for name, verbs, reason in named if name),
    )


def copy_permissions(secrets: tuple[str, ...], config_maps: tuple[str, ...]) -> tuple[Permission, ...]:
    """Return what copying the objects of these names needs: `get` on them alone, so that a role may name them."""
    named: Mapping[kube.Resource, tuple[str, ...]] = {kube.SECRETS: secrets, kube.CONFIG_MAPS: config_maps}
    return tuple(
        replace(permission, names=() if permission.scope is Scope.OWN_NAMESPACE else named[permission.resource])
        for permission in COPY_PERMISSIONS
        if named[permission.resource]
    )
