"""Checks before the agent starts: the API server answers, permissions, resource definitions, the pods directory."""

import logging
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Final

from core.clock import Clock, Deadline
from core.errors import ConfigError
from core.kube.client import KubeClient, Selection
from core.kube.errors import KubeError, MalformedObjectError, NotFoundError, NotServedError
from core.kube.resources import (
    BACKUP_REPOSITORIES,
    BACKUP_STORAGE_LOCATIONS,
    DATA_DOWNLOADS,
    DATA_UPLOADS,
    POD_VOLUME_BACKUPS,
    POD_VOLUME_RESTORES,
    PODS,
    VOLUME_SNAPSHOT_CONTENTS,
    VOLUME_SNAPSHOTS,
    Resource,
)
from exposer.workload import list_pods
from nodeagent.runtime.access_review import missing_permissions
from nodeagent.runtime.permissions import Permission

__all__ = ["PREFLIGHT_NAME", "check_cluster", "check_host_pods", "check_permissions"]

_log = logging.getLogger(__name__)

_KINDS: Final = (
    DATA_UPLOADS,
    DATA_DOWNLOADS,
    POD_VOLUME_BACKUPS,
    POD_VOLUME_RESTORES,
    BACKUP_REPOSITORIES,
    BACKUP_STORAGE_LOCATIONS,
)
_SNAPSHOT_KINDS: Final = (VOLUME_SNAPSHOTS, VOLUME_SNAPSHOT_CONTENTS)

PREFLIGHT_NAME: Final = "preflight"
"""The name that is read to check a definition: a get needs no permission beyond what every kind needs."""

_SHOWN: Final = 6
"""Missing permissions that fit into a line; if more are missing, the whole role is."""

_SETTLE: Final = timedelta(seconds=10)
"""How long a Running pod may have no directory: it ends, or its node has just booted."""

_POLL_SECONDS: Final = 2.0

_MIRROR: Final = "kubernetes.io/config.mirror"
"""The annotation of a mirror pod: the UID of its static pod on the node. Source: Kubernetes v1.34."""


async def check_cluster(client: KubeClient, namespace: str, permissions: Iterable[Permission]) -> None:
    """Check that the agent has `permissions` and can work in `namespace`; warn if only an optional part cannot.

    Raises:
        ConfigError: the API server does not answer, or a permission or a resource definition is
            missing; the message names all that is missing.
    """
    try:
        await check_permissions(client, namespace, permissions)
        missing = await _missing_kinds(client, namespace, _KINDS)
        without = await _missing_kinds(client, namespace, _SNAPSHOT_KINDS)
    except KubeError as e:
        raise ConfigError(f"cannot check the cluster: {e}") from e
    if missing:
        raise ConfigError(
            f"custom resource definitions missing: {', '.join(missing)}: run nodeagent install --crds-only"
        )
    if without:
        _log.warning("no snapshot API in this cluster (%s): every DataUpload will fail", ", ".join(without))


async def _missing_kinds(client: KubeClient, namespace: str, kinds: Sequence[Resource]) -> list[str]:
    """Return the definitions of `kinds` that the API server does not serve."""
    missing = []
    for kind in kinds:
        try:
            await client.get(kind, namespace, PREFLIGHT_NAME)
        except NotServedError:
            missing.append(f"{kind.full_name}/{kind.version}")
        except (NotFoundError, MalformedObjectError):
            # It is served.
            continue
    return missing


async def check_permissions(client: KubeClient, namespace: str, permissions: Iterable[Permission]) -> None:
    """Check that the agent's account has `permissions`; warn if only optional ones are missing.

    Raises:
        ConfigError: a required permission is missing, or the API server does not answer; the
            message names all that is missing.
    """
    try:
        missing = await missing_permissions(client, namespace, permissions, by_rules=True)
    except KubeError as e:
        raise ConfigError(f"cannot check the cluster: {e}") from e
    required = [text for permission, text in missing.items() if not permission.without]
    if required:
        more = f" and {len(required) - _SHOWN} more" if len(required) > _SHOWN else ""
        raise ConfigError(
            f"permissions missing: {'; '.join(required[:_SHOWN])}{more}: "
            "compare the roles of the ServiceAccount with those in deploy/agent"
        )
    for permission, text in missing.items():
        if permission.without:
            _log.warning("no permission to %s: %s", text, permission.without)


async def check_host_pods(client: KubeClient, clock: Clock, node: str, directory: str) -> None:
    """Check that `directory` is the kubelet's pods directory; warn where the agent has none, or cannot read it.

    Args:
        client: lists pods.
        clock: measures the pauses between reads, while pods start and end.
        node: the agent's node.
        directory: where the agent has the volume `host-pods` mounted; empty: nowhere.

    Raises:
        ConfigError: it lacks the directories of Running pods; the message is one line.

    Source: Velero v1.18, pkg/cmd/cli/nodeagent/server.go (validatePodVolumesHostPath).
    """
    if not directory:
        what = "PodVolumeBackups and PodVolumeRestores will fail"
        _log.warning("the DaemonSet does not mount the volume host-pods: %s", what)
        return
    deadline = Deadline.after(clock, _SETTLE)
    while True:
        running = await _list_running(client, node)
        try:
            present = list_pods(directory)
        except (FileNotFoundError, PermissionError) as e:
            result = "pod volumes are not checked; deploy/agent/daemonset.yaml has the mount and the group for it"
            _log.warning("directory %s cannot be read: %s: %s", directory, e.strerror, result)
            return
        except OSError as e:
            raise ConfigError(f"directory {directory} cannot be read: {e.strerror}") from e
        missing = sorted(pod for entry, pod in running.items() if entry not in present)
        if not missing:
            _log.info("directory %s has an entry for each of the %d Running pods of the node", directory, len(running))
            return
        if deadline.expired:
            what = f"{directory} has no entry for {len(missing)} of {len(running)} Running pods of node {node}"
            raise ConfigError(
                f"the volume host-pods is not the kubelet's pods directory: {what}, such as {missing[0]}: "
                "its hostPath in the DaemonSet must be the directory pods in the kubelet's root directory"
            )
        await clock.sleep(_POLL_SECONDS)


async def _list_running(client: KubeClient, node: str) -> dict[str, str]:
    """Return the Running pods of the node, by the names of their directories."""
    selection = Selection(PODS, field_selector=f"spec.nodeName={node},status.phase=Running")
    try:
        pods = await client.list(selection)
    except KubeError as e:
        raise ConfigError(f"cannot list the pods of node {node}: {e}") from e
    # The directory of a pod that is being deleted may no longer exist.
    metas = [pod["metadata"] for pod in pods if not pod["metadata"].get("deletionTimestamp")]
    return {
        (meta.get("annotations") or {}).get(_MIRROR) or meta["uid"]: f"{meta['namespace']}/{meta['name']}"
        for meta in metas
    }
