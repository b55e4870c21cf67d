"""The permissions of users who run commands, with the reason; no ServiceAccount of `deploy/` has them."""

from typing import Final

from core.kube import resources as kube
from core.models.names import AGENT_DAEMONSET, AGENT_DAEMONSET_WINDOWS, DISPATCHER_LEASE
from nodeagent.runtime.permissions import Permission, Scope

__all__ = ["REPO_PERMISSIONS"]

_OWN: Final = Scope.OWN_NAMESPACE
_PARTLY: Final = "get and describe show less, with a note"
_NO_REPORT: Final = "there is no report"

REPO_PERMISSIONS: Final = (
    Permission(_OWN, kube.BACKUP_REPOSITORIES, ("get", "list"), "the repositories; names for completion"),
    Permission(
        _OWN, kube.BACKUP_STORAGE_LOCATIONS, ("get", "list"), "the state of locations, the report", without=_PARTLY
    ),
    Permission(_OWN, kube.PODS, ("list",), "the leader's pod, those of Jobs", without=_PARTLY),
    Permission(_OWN, kube.PODS, ("get",), "the leader's status page", subresource="proxy", without=_PARTLY),
    Permission(_OWN, kube.PODS, ("get",), "the list of the report", subresource="log", without=_NO_REPORT),
    Permission(_OWN, kube.LEASES, ("get",), "which agent is the leader", names=(DISPATCHER_LEASE,), without=_PARTLY),
    Permission(
        _OWN,
        kube.DAEMON_SETS,
        ("get",),
        "the flags of the agents; the image of the report",
        names=(AGENT_DAEMONSET, AGENT_DAEMONSET_WINDOWS),
        without=_PARTLY,
    ),
    Permission(_OWN, kube.DEPLOYMENTS, ("list",), "whether a Velero server runs here", without=_PARTLY),
    Permission(_OWN, kube.CONFIG_MAPS, ("get",), "windows of maintenance; settings of the report", without=_PARTLY),
    Permission(_OWN, kube.EVENTS, ("list",), "Events of a repository; why a pod is pending", without=_PARTLY),
    Permission(_OWN, kube.JOBS, ("get", "list"), "Jobs that run", without=_PARTLY),
    Permission(_OWN, kube.JOBS, ("create", "delete"), "the Job of the report", without=_NO_REPORT),
    Permission(_OWN, kube.PERSISTENT_VOLUME_CLAIMS, ("get",), "why the report's pod is pending", without=_NO_REPORT),
)
"""What `nodeagent repo` needs in the agent's namespace."""
