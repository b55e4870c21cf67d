"""The permissions of users who run commands, with the reason; no ServiceAccount of `deploy/` has them."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from client.bundle_fields import COLLECTED
from client.install.options import resource_of
from core.kube import resources as kube
from core.kube.types import Manifest, Object
from core.models import names as wire
from nodeagent.runtime.permissions import Permission, everywhere, own

_BACKED_UP: Final = (kube.DATA_UPLOADS, kube.POD_VOLUME_BACKUPS)

_NO_SERVER_CHECK: Final = "--ignore-velero-server is needed"
_PARTLY: Final = "get and describe show less, with a note"
_CLASS_UNNOTICED: Final = "a class that does not exist is not noticed"
_DAEMON_SETS: Final = (wire.AGENT_DAEMONSET, wire.AGENT_DAEMONSET_WINDOWS)
_NO_REPORT: Final = "there is no report"


def _where(resource: kube.Resource) -> "partial[Permission]":
    return own if resource.namespaced else everywhere


def _for_job(reason: str) -> list[Permission]:
    """Return what it takes to plan a Job of a data mover, to run it and to find its pod."""
    return [
        own(kube.DAEMON_SETS, "get", reason, names=_DAEMON_SETS),
        own(kube.CONFIG_MAPS, "get", reason),
        own(kube.JOBS, "get create delete", reason),
        own(kube.PODS, "list", reason),
    ]


REPO_PERMISSIONS: Final = (
    own(kube.BACKUP_REPOSITORIES, "get list", "the repositories; names for completion"),
    own(kube.BACKUP_STORAGE_LOCATIONS, "get list", "the state of locations, the report", without=_PARTLY),
    own(kube.PODS, "list", "the leader's pod, and pods of Jobs", without=_PARTLY),
    own(kube.PODS, "get", "the leader's status page", subresource="proxy", without=_PARTLY),
    own(kube.PODS, "get", "the list of the report", subresource="log", without=_NO_REPORT),
    own(kube.LEASES, "get", "which agent is the leader", names=(wire.DISPATCHER_LEASE,), without=_PARTLY),
    own(
        kube.DAEMON_SETS, "get", "the flags of the agents; the image of the report", names=_DAEMON_SETS, without=_PARTLY
    ),
    own(kube.DEPLOYMENTS, "list", "whether a Velero server runs here", without=_PARTLY),
    own(kube.CONFIG_MAPS, "get", "windows of maintenance; settings of the report", without=_PARTLY),
    own(kube.EVENTS, "list", "Events of a repository; why a pod is pending", without=_PARTLY),
    own(kube.JOBS, "get list", "Jobs that run", without=_PARTLY),
    own(kube.JOBS, "create delete", "the Job of the report", without=_NO_REPORT),
    own(kube.PERSISTENT_VOLUME_CLAIMS, "get", "why the report's pod is pending", without=_NO_REPORT),
)
"""What `nodeagent repo` needs in the agent's namespace."""

_SHOWN: Final = "backup get, describe, cancel: backups and their volumes"
_MADE: Final = "backup create: the transfers"

BACKUP_PERMISSIONS: Final = (
    *(own(one, "list", _SHOWN) for one in _BACKED_UP),
    *(own(one, "patch", "backup cancel, acknowledge") for one in _BACKED_UP),
    *(own(one, "get create", _MADE) for one in _BACKED_UP),
    own(kube.DAEMON_SETS, "get", "backup create: whether agents are there", names=(wire.AGENT_DAEMONSET,)),
    own(kube.DEPLOYMENTS, "list", "backup create: whether a Velero server runs here", without=_NO_SERVER_CHECK),
    own(kube.BACKUP_STORAGE_LOCATIONS, "list", "backup create: the location"),
    everywhere(kube.PERSISTENT_VOLUME_CLAIMS, "get list", "backup create: the PVCs"),
    everywhere(kube.VOLUME_SNAPSHOTS, "get create delete", "backup create: their snapshots"),
    everywhere(
        kube.VOLUME_SNAPSHOT_CLASSES, "list", "backup create: the class of a snapshot", without="only fs-backup"
    ),
    everywhere(kube.STORAGE_CLASSES, "list", "backup create: the driver of a PVC", without="only fs-backup"),
    everywhere(kube.PODS, "list", "backup create: pods that mount a PVC", without="only csi-snapshot"),
)
"""What `nodeagent backup` needs; those on PVCs, snapshots and pods in the namespaces of the PVCs suffice."""

_UNKNOWN: Final = "status says what is unknown"
_READ: Final = "list watch"

_UNSEEN: Final = "a note says what is not known"

VOLUMES_PERMISSIONS: Final = (
    *(own(one, "list", "the backups", without=_UNSEEN) for one in _BACKED_UP),
    own(kube.CRON_JOBS, "list", "schedules of nodeagent schedule", without=_UNSEEN),
    own(kube.SCHEDULES, "list", "Schedules of Velero", without=_UNSEEN),
    own(kube.DEPLOYMENTS, "list", "the Velero server and its flags", without=_UNSEEN),
    own(kube.DAEMON_SETS, "get", "the flags of the agents", names=(wire.AGENT_DAEMONSET,), without=_UNSEEN),
    own(kube.CONFIG_MAPS, "get", "volume policies; the configuration", without=_UNSEEN),
    own(kube.BACKUP_STORAGE_LOCATIONS, "list", "locations that still exist", without=_UNSEEN),
    everywhere(kube.PERSISTENT_VOLUME_CLAIMS, "list", "the volumes", without=_UNSEEN),
    everywhere(kube.NAMESPACES, "list", "namespaces that are left out", without=_UNSEEN),
    everywhere(kube.PODS, "list", "what fs-backup covers", without=_UNSEEN),
    everywhere(kube.PERSISTENT_VOLUMES, "list", "what snapshots and volume policies cover", without=_UNSEEN),
)
"""What `nodeagent volumes` needs; with `-n`, those on PVCs and pods in that namespace suffice."""

STATUS_PERMISSIONS: Final = (
    *(own(one, _READ, "the transfers", without=_UNKNOWN) for one in kube.TRANSFERS),
    own(kube.BACKUP_REPOSITORIES, _READ, "the repositories", without=_UNKNOWN),
    own(kube.BACKUP_STORAGE_LOCATIONS, _READ, "the locations", without=_UNKNOWN),
    own(kube.PODS, _READ, "the agents", without=_UNKNOWN),
    own(kube.PODS, "get", "the leader's status page", subresource="proxy", without="positions are computed"),
    own(kube.LEASES, "get", "the leader", names=(wire.DISPATCHER_LEASE,), without=_UNKNOWN),
    own(kube.DAEMON_SETS, "get", "the flags of the agents", names=(wire.AGENT_DAEMONSET,), without=_UNKNOWN),
    own(kube.CONFIG_MAPS, "get", "the configuration; what retention keeps", without=_UNKNOWN),
    own(kube.CRON_JOBS, "list", "schedules, and those that delete by older rules", without=_UNKNOWN),
    everywhere(kube.NODES, "list", "slots, where rules for nodes exist", without=_UNKNOWN),
    *VOLUMES_PERMISSIONS,
)
"""What `nodeagent status` needs."""

_LESS: Final = "it shows less, with a note"

DESCRIBE_PERMISSIONS: Final = (
    *(own(one, "get list", "the transfer; names for completion") for one in kube.TRANSFERS),
    own(kube.EVENTS, "list", "its Events", without=_LESS),
    own(kube.PODS, "list", "its pods", without=_LESS),
    own(kube.PODS, "get", "the end of the log", subresource="log", without=_LESS),
    own(kube.BACKUPS, "get", "the Schedule of its Backup", without=_LESS),
    everywhere(
        kube.VOLUME_SNAPSHOT_CONTENTS, "get", "the snapshot that the storage keeps of a backup by block", without=_LESS
    ),
)
"""What `nodeagent describe` needs."""

_NOT_COLLECTED: Final = "the bundle has it not, and says so"

SUPPORT_BUNDLE_PERMISSIONS: Final = (
    *(
        _where(one)(one, "list", "objects of the bundle", without=_NOT_COLLECTED)
        for one in dict.fromkeys(collected.resource for collected in COLLECTED)
    ),
    own(kube.CONFIG_MAPS, "get", "the configuration", without=_NOT_COLLECTED),
    own(kube.LEASES, "get", "which agent is the leader", names=(wire.DISPATCHER_LEASE,), without=_NOT_COLLECTED),
    own(kube.DAEMON_SETS, "get", "the flags of the agents", names=(wire.AGENT_DAEMONSET,), without=_NOT_COLLECTED),
    own(kube.PODS, "get", "the ends of logs", subresource="log", without=_NOT_COLLECTED),
    own(kube.PODS, "get", "pages of agents", subresource="proxy", without=_NOT_COLLECTED),
)
"""What `nodeagent support-bundle` needs for all that it collects."""

_LISTED: Final = "--from-storage-location: the Job that lists the bucket; --in-place: the one that plans"
_PLANNED: Final = "--in-place: the scratch volume of the plan"
_RESTORED: Final = "restore get, describe, create: restores and their volumes"

RESTORE_PERMISSIONS: Final = (
    own(kube.DATA_DOWNLOADS, "list", _RESTORED),
    own(kube.POD_VOLUME_RESTORES, "list", _RESTORED),
    own(kube.DATA_DOWNLOADS, "patch", "restore cancel"),
    own(kube.POD_VOLUME_RESTORES, "patch", "restore cancel"),
    own(kube.DATA_DOWNLOADS, "get create", "restore create: the transfers"),
    own(kube.POD_VOLUME_RESTORES, "get create", "--method restore-wait, and restore cancel then: the transfers"),
    everywhere(
        kube.PODS, "get create delete", "--method restore-wait, and restore cancel then: the pods that mount the PVCs"
    ),
    own(kube.DAEMON_SETS, "get", "restore create: whether agents are there", names=(wire.AGENT_DAEMONSET,)),
    own(kube.DEPLOYMENTS, "list", "restore create: whether a Velero server runs here", without=_NO_SERVER_CHECK),
    *(own(one, "list", "restore create: the volumes of a backup") for one in _BACKED_UP),
    everywhere(kube.PERSISTENT_VOLUME_CLAIMS, "get create", "restore create: the new PVCs"),
    everywhere(kube.NAMESPACES, "get create", "restore create: the namespaces of the PVCs", without="they must exist"),
    everywhere(
        kube.STORAGE_CLASSES, "list", "restore create: whether the classes of the PVCs exist", without=_CLASS_UNNOTICED
    ),
    everywhere(kube.PERSISTENT_VOLUMES, "get list patch", "--in-place: retain and release the volumes"),
    everywhere(kube.PERSISTENT_VOLUME_CLAIMS, "delete", "--in-place: the PVCs, which are recreated"),
    everywhere(kube.PODS, "list", "--in-place: whether a pod uses a volume"),
    everywhere(kube.VOLUME_ATTACHMENTS, "list", "--in-place: whether a node uses a volume"),
    everywhere(
        kube.VOLUME_SNAPSHOTS,
        "get create delete",
        "--in-place: the snapshots for the way back, which go if nothing is restored",
    ),
    everywhere(kube.VOLUME_SNAPSHOT_CONTENTS, "get create delete", _PLANNED),
    everywhere(kube.VOLUME_SNAPSHOT_CONTENTS, "patch", "--in-place: snapshots go though their class retains them"),
    everywhere(kube.STORAGE_CLASSES, "get", _PLANNED),
    own(kube.JOBS, "list", "--in-place: what a killed command has left of a plan"),
    everywhere(kube.VOLUME_SNAPSHOT_CLASSES, "list", "--in-place: the classes of these snapshots"),
    own(kube.BACKUP_STORAGE_LOCATIONS, "get list", _LISTED),
    *_for_job(_LISTED),
    own(kube.EVENTS, "list", _LISTED),
    own(kube.PODS, "get", _LISTED, subresource="log"),
)
"""What `nodeagent restore` needs, and `nodeagent backup get --from-storage-location` of it."""

_RETAINED: Final = "what stays by the policy Retain"
_VERIFIED: Final = "the Job that reads the bucket"
_COMPARED: Final = "--restore: the scratch volume"
_ABANDONED: Final = "--restore: scratch volumes that a killed command has left"

_READ_FILES: Final = "the Job that reads the repository"

FILES_PERMISSIONS: Final = (
    *(own(one, "list", "the volumes of the backup") for one in _BACKED_UP),
    own(kube.BACKUP_STORAGE_LOCATIONS, "get list", "where they are"),
    *_for_job(_READ_FILES),
    own(kube.EVENTS, "list", "why its pod is pending"),
    own(kube.PODS, "get", "backup ls: the list of files", subresource="log"),
    own(kube.PODS, "create get", "backup cp: the stream of files", subresource="exec"),
)
"""What `nodeagent backup ls` and `backup cp` need. An API server before 1.35 asks `get` alone of `pods/exec`."""

READ_BACK_PERMISSIONS: Final = (
    *(own(one, "list patch", "the volumes of the backup, and their results") for one in _BACKED_UP),
    own(kube.BACKUP_REPOSITORIES, "list", "where they are"),
    own(kube.BACKUP_STORAGE_LOCATIONS, "get list", "where they are"),
    *_for_job(_VERIFIED),
    own(kube.PODS, "get", _VERIFIED, subresource="log"),
    own(kube.EVENTS, "list", "why its pod is pending"),
    own(kube.EVENTS, "create", "the Event about a result", without="a note, and no Event"),
)
"""What `nodeagent backup verify` needs to read a backup back; the account of a schedule with `--verify` has it."""

VERIFY_PERMISSIONS: Final = (
    *READ_BACK_PERMISSIONS,
    own(kube.PERSISTENT_VOLUME_CLAIMS, "get create delete", _COMPARED),
    own(kube.DATA_DOWNLOADS, "get create delete", _COMPARED),
    own(kube.PERSISTENT_VOLUME_CLAIMS, "list", _ABANDONED, without="a note, and it stays"),
    own(kube.JOBS, "list", _ABANDONED, without="a note, and it stays"),
    everywhere(
        kube.PERSISTENT_VOLUME_CLAIMS,
        "get",
        "--restore of a backup of Velero: the size and class of the PVC",
        without="volumes of Velero's backups are not restored",
    ),
    everywhere(kube.NAMESPACES, "get", "--restore: whether the namespace exists", without="it must exist"),
    everywhere(
        kube.STORAGE_CLASSES, "list", "--restore: whether the class of the PVC exists", without=_CLASS_UNNOTICED
    ),
    everywhere(kube.PERSISTENT_VOLUMES, "get", f"--restore: {_RETAINED}", without="it is not named"),
)
"""What `nodeagent backup verify` needs."""

_INSTALLED: Final = {
    kube.CUSTOM_RESOURCE_DEFINITIONS: "the custom resource definitions",
    kube.NAMESPACES: "the namespace",
    kube.PRIORITY_CLASSES: "priority classes (--priority-classes)",
    kube.SERVICE_ACCOUNTS: "the accounts of agents and data movers",
    kube.SECURITY_CONTEXT_CONSTRAINTS: "constraints of OpenShift (--openshift)",
    kube.ROLES: "roles of the accounts",
    kube.ROLE_BINDINGS: "bindings of the roles",
    kube.CLUSTER_ROLES: "roles of the accounts",
    kube.CLUSTER_ROLE_BINDINGS: "bindings of the roles",
    kube.SECRETS: "the credentials of the location (--secret-file)",
    kube.BACKUP_STORAGE_LOCATIONS: "the location (--bucket)",
    kube.CONFIG_MAPS: "the configuration (--node-agent-config)",
    kube.NETWORK_POLICIES: "the policy for metrics (--monitoring-namespace)",
    kube.DAEMON_SETS: "the agents",
}
"""What an installation consists of."""

WAIT_PERMISSIONS: Final = (
    own(kube.PODS, "list", "--wait: which agents are ready"),
    own(kube.EVENTS, "list", "--wait: why they are not"),
)
"""What `nodeagent install --wait` needs besides."""


_KEPT: Final = "uninstall: what stays, and which transfers have not ended"
_REMOVED: Final = "uninstall: what is removed"
_OTHERS: Final = "uninstall: what others lose if the rest is deleted"

UNINSTALL_PERMISSIONS: Final = (
    *(own(one, "list", _KEPT) for one in (*kube.TRANSFERS, kube.BACKUP_REPOSITORIES, kube.BACKUP_STORAGE_LOCATIONS)),
    own(kube.SECRETS, "get", _KEPT, names=(wire.CREDENTIALS_SECRET, wire.REPO_CREDENTIALS_SECRET)),
    own(kube.CRON_JOBS, "list", _KEPT, without="it names no schedules"),
    everywhere(kube.VOLUME_SNAPSHOT_CONTENTS, "list", _KEPT, without="it names no base snapshots"),
    *(
        own(one, "list", _REMOVED)
        for one in (
            kube.DAEMON_SETS,
            kube.NETWORK_POLICIES,
            kube.CONFIG_MAPS,
            kube.ROLE_BINDINGS,
            kube.ROLES,
            kube.SERVICE_ACCOUNTS,
            kube.JOBS,
        )
    ),
    own(kube.CONFIG_MAPS, "get", _REMOVED, names=(wire.ADMISSIONS_CONFIGMAP, *wire.HISTORY_CONFIGMAPS)),
    own(kube.LEASES, "get", _REMOVED, names=(wire.DISPATCHER_LEASE, wire.DELETIONS_LEASE)),
    own(kube.PODS, "list", "uninstall: whether the agents have ended"),
    own(kube.DEPLOYMENTS, "list", "uninstall: whether a Velero server runs here"),
    own(kube.BACKUPS, "list", _OTHERS),
    *(
        everywhere(one, "list", _OTHERS, without="it does not say how to delete definitions")
        for one in (kube.DAEMON_SETS, kube.BACKUP_REPOSITORIES, *kube.TRANSFERS)
    ),
)
"""What `nodeagent uninstall` reads, beside what the person who installs may get."""

VERSION_PERMISSIONS: Final = (
    own(kube.PODS, "list", "the agents"),
    own(kube.PODS, "get", "their status pages", subresource="proxy", without="no versions"),
    own(kube.DAEMON_SETS, "get", "their flags", names=(wire.AGENT_DAEMONSET,), without="no versions"),
)
"""What `nodeagent version` needs."""


_TESTED: Final = "get list create delete"
_UNNAMED: Final = "it also names what does not stay"

VOLUME_CHECK_PERMISSIONS: Final = (
    own(kube.DAEMON_SETS, "get", "the agents and their image", names=(wire.AGENT_DAEMONSET,)),
    own(kube.BACKUP_STORAGE_LOCATIONS, "get", "whether the location is available"),
    own(kube.DATA_UPLOADS, _TESTED, "the backup"),
    own(kube.DATA_DOWNLOADS, _TESTED, "the restore"),
    everywhere(kube.NAMESPACES, "get create delete", "the namespace of the test"),
    everywhere(kube.SERVICE_ACCOUNTS, "get", "whether pods can be created in it"),
    everywhere(kube.PERSISTENT_VOLUME_CLAIMS, _TESTED, "the volumes of the test"),
    everywhere(kube.PODS, _TESTED, "the pods that write and read"),
    everywhere(kube.VOLUME_SNAPSHOTS, _TESTED, "the snapshot of the test"),
    everywhere(kube.EVENTS, "list", "why a pod is pending"),
    everywhere(kube.STORAGE_CLASSES, "get list", "the class of the volume"),
    everywhere(kube.VOLUME_SNAPSHOT_CLASSES, "list", "the class of the snapshot"),
    everywhere(kube.PERSISTENT_VOLUMES, "get", _RETAINED, without=_UNNAMED),
    everywhere(kube.VOLUME_SNAPSHOT_CONTENTS, "get", _RETAINED, without=_UNNAMED),
    everywhere(
        kube.CUSTOM_RESOURCE_DEFINITIONS,
        "get",
        "which fields the definitions drop",
        names=tuple(kind.full_name for kind in kube.TRANSFERS),
        without="a note",
    ),
)
"""What `nodeagent preflight` needs."""


def delete_permissions(stored: Iterable[Object]) -> tuple[Permission, ...]:
    """Return what removing these objects needs."""
    return tuple(
        _where(resource)(resource, "delete", _REMOVED, names=names) for resource, names in _names_of(stored).items()
    )


def installer_permissions(everything: Sequence[Manifest]) -> tuple[Permission, ...]:
    """Return what the person needs who installs, whatever is chosen, and waits; `everything` are the objects."""
    return (*install_permissions(everything), *grant_permissions(everything), *WAIT_PERMISSIONS)


def install_permissions(manifests: Iterable[Manifest]) -> tuple[Permission, ...]:
    """Return what applying these objects needs; a `create` cannot be limited to names."""
    found = []
    for resource, names in _names_of(manifests).items():
        found.append(_where(resource)(resource, "create", _INSTALLED[resource]))
        found.append(_where(resource)(resource, "get patch", _INSTALLED[resource], names=names))
    return tuple(found)


def grant_permissions(manifests: Iterable[Manifest]) -> tuple[Permission, ...]:
    """Return what granting roles needs that have permissions which the user does not have.

    Source: Kubernetes v1.34, "Using RBAC Authorization", "Privilege escalation prevention and bootstrapping".
    """
    reason = "grant permissions that the user does not have"
    return tuple(
        _where(resource)(resource, "escalate bind", reason, names=names)
        for resource, names in _names_of(manifests).items()
        if resource in {kube.ROLES, kube.CLUSTER_ROLES}
    )


def _names_of(manifests: Iterable[Mapping[str, Any]]) -> dict[kube.Resource, tuple[str, ...]]:
    found: dict[kube.Resource, tuple[str, ...]] = {}
    for manifest in manifests:
        resource = resource_of(manifest)
        found[resource] = (*found.get(resource, ()), manifest["metadata"]["name"])
    return found
