"""Every right the agent and its data movers need, with the reason.

Knows resources, verbs and where they are needed. `deploy/agent/rbac.yaml` grants exactly this (a test
compares them), and `nodeagent.runtime.preflight` asks the cluster for it before the agent starts.
Agent and movers share one ServiceAccount, as the peer's do.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from core.kube import resources as kube
from core.models.names import ADMISSIONS_CONFIGMAP, AGENT_DAEMONSET, AGENT_DAEMONSET_WINDOWS, DISPATCHER_LEASE

__all__ = ["PERMISSIONS", "Permission", "Scope"]


class Scope(StrEnum):
    """Where a right holds."""

    OWN_NAMESPACE = "own namespace"
    CLUSTER = "cluster"
    """Cluster-scoped objects, or namespaced ones in every namespace."""


@dataclass(frozen=True)
class Permission:
    """Some verbs on one resource; `names` narrows them to single objects where it is not empty.

    Without one that is not `needed` the agent works, with less than was asked of it.
    """

    scope: Scope
    resource: kube.Resource
    verbs: tuple[str, ...]
    reason: str
    subresource: str = ""
    names: tuple[str, ...] = ()
    needed: bool = True

    @property
    def path(self) -> str:
        """The resource as RBAC spells it, such as `pods/log`."""
        return f"{self.resource.plural}/{self.subresource}" if self.subresource else self.resource.plural

    @property
    def where(self) -> str:
        """Where it is needed, in words."""
        if self.scope is Scope.OWN_NAMESPACE:
            return "in its namespace"
        return "in every namespace" if self.resource.namespaced else "in the cluster"


_OWN = Scope.OWN_NAMESPACE
_ALL = Scope.CLUSTER

PERMISSIONS: Final = (
    Permission(_OWN, kube.DATA_UPLOADS, ("get", "list", "watch", "patch"), "carry them out, report into their status"),
    Permission(
        _OWN, kube.DATA_DOWNLOADS, ("get", "list", "watch", "patch"), "carry them out, report into their status"
    ),
    Permission(
        _OWN, kube.POD_VOLUME_BACKUPS, ("get", "list", "watch", "patch"), "carry them out, report into their status"
    ),
    Permission(
        _OWN, kube.POD_VOLUME_RESTORES, ("get", "list", "watch", "patch"), "carry them out, report into their status"
    ),
    Permission(
        _OWN,
        kube.BACKUP_REPOSITORIES,
        ("get", "list", "watch", "create", "patch"),
        "a mover asks for the repository it needs; the repository controller makes it ready",
    ),
    Permission(_OWN, kube.BACKUP_STORAGE_LOCATIONS, ("get", "list"), "where a bucket is, whether it is available"),
    Permission(
        _OWN,
        kube.PODS,
        ("get", "list", "watch", "create", "patch", "delete"),
        "mover pods; which agents are alive; an agent notes on its own pod which configuration it has",
    ),
    Permission(_OWN, kube.PODS, ("get",), "a mover's log is taken over before its pod goes", subresource="log"),
    Permission(
        _OWN,
        kube.PERSISTENT_VOLUME_CLAIMS,
        ("list", "create", "delete"),
        "claims that bring volumes to mover pods; those whose load is gone are swept",
    ),
    Permission(_OWN, kube.VOLUME_SNAPSHOTS, ("list", "create"), "snapshots that the movers' volumes are made from"),
    Permission(
        _OWN,
        kube.EVENTS,
        ("list", "watch", "create"),
        "movers report progress by Events, loads tell their story; why pods and claims wait",
    ),
    Permission(
        _OWN,
        kube.CONFIG_MAPS,
        ("get", "list", "watch", "create"),
        "the configuration, as soon as it is edited; the ledger of admissions",
    ),
    Permission(_OWN, kube.CONFIG_MAPS, ("patch",), "the ledger of admissions", names=(ADMISSIONS_CONFIGMAP,)),
    Permission(
        _OWN,
        kube.SECRETS,
        ("get", "create"),
        "credentials and CA of storage locations; the repository password, made when absent",
    ),
    Permission(_OWN, kube.LEASES, ("create",), "who is the dispatcher"),
    Permission(
        _OWN, kube.LEASES, ("get", "list", "watch", "patch"), "who is the dispatcher", names=(DISPATCHER_LEASE,)
    ),
    Permission(
        _OWN, kube.DAEMON_SETS, ("get",), "what mover pods inherit", names=(AGENT_DAEMONSET, AGENT_DAEMONSET_WINDOWS)
    ),
    Permission(_OWN, kube.DEPLOYMENTS, ("list",), "whether a Velero server runs here"),
    Permission(
        _ALL,
        kube.PODS,
        ("get", "list", "watch"),
        "the pods whose volumes are moved: are they there, do they wait, on which node",
    ),
    Permission(_ALL, kube.PERSISTENT_VOLUME_CLAIMS, ("get", "patch"), "source and target claims of the workloads"),
    Permission(_ALL, kube.VOLUME_SNAPSHOTS, ("get", "delete"), "the snapshots to back up, which a backup takes over"),
    Permission(
        _ALL,
        kube.VOLUME_SNAPSHOT_CONTENTS,
        ("get", "list", "create", "patch", "delete"),
        "hand a snapshot from the workload's namespace to the agent's",
    ),
    Permission(
        _ALL,
        kube.PERSISTENT_VOLUMES,
        ("get", "list", "patch", "delete"),
        "bind a restored volume to its claim; remove the temporary ones, and those that a load left half handed over",
    ),
    Permission(_ALL, kube.STORAGE_CLASSES, ("get",), "when the volumes of a class are bound"),
    Permission(
        _ALL,
        kube.NODES,
        ("get", "list", "watch"),
        "for which operating system the nodes of a volume are; the labels by which perNodeConfig gives them numbers; "
        "which nodes are lost",
    ),
    Permission(
        _ALL,
        kube.VOLUME_ATTACHMENTS,
        ("list",),
        "where a volume is in use: some drivers' snapshots must stay away from there",
    ),
    Permission(
        _ALL,
        kube.PRIORITY_CLASSES,
        ("list", "watch"),
        "whether the configured priority class exists",
        needed=False,
    ),
)
"""All rights, the reason with each."""
