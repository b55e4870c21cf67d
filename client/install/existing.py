"""Objects of an installation that exist already: whose they are, and what is applied over other tools' objects."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from client.install.objects import place_of, resource_of
from core.errors import ConfigError
from core.kube import resources as kube
from core.kube.client import KubeClient
from core.kube.errors import ForbiddenError
from core.kube.types import Manifest
from core.models.names import AGENT_DAEMONSET_WINDOWS, PART_OF_LABELS, helm_release, is_ours

__all__ = ["fit_to_existing", "note_former_agents"]

_NEVER_MERGED: Final = frozenset(
    {
        kube.DAEMON_SETS,
        kube.ROLES,
        kube.ROLE_BINDINGS,
        kube.CLUSTER_ROLES,
        kube.CLUSTER_ROLE_BINDINGS,
        kube.SECURITY_CONTEXT_CONSTRAINTS,
    }
)
"""Merged with ours, a DaemonSet would be neither, and the accounts of a role would have other permissions."""


async def fit_to_existing(
    client: KubeClient, objects: Iterable[Manifest], on_note: Callable[[str], None]
) -> list[Manifest]:
    """Return the objects as they are applied to this cluster; one note names those that stay their creators'.

    What others have created does not get our label, by which `nodeagent uninstall` recognizes what it removes.

    Raises:
        ConfigError: an object of another installer, or of a release of Helm, cannot be merged with ours.
        KubeError: an object cannot be read.
    """
    fitted, others = [], []
    for manifest in objects:
        resource, meta = resource_of(manifest), manifest["metadata"]
        # The namespace is never removed.
        found = None
        if resource is not kube.NAMESPACES:
            found = await client.read(resource, meta.get("namespace", ""), meta["name"])
        if found is None:
            fitted.append(manifest)
            continue
        own = is_ours(found) and not helm_release(found)
        if not own and resource in _NEVER_MERGED:
            raise ConfigError(f"nothing was applied: {place_of(manifest)} {_refuse(manifest, helm_release(found))}")
        if not own:
            others.append(place_of(manifest))
        fitted.append(_fit(manifest, found, own=own))
    if others:
        on_note(f"what others have created stays theirs, and nodeagent uninstall keeps it: {', '.join(others)}")
    return fitted


async def note_former_agents(client: KubeClient, namespace: str, on_note: Callable[[str], None]) -> None:
    """Note the DaemonSet for Windows nodes that an earlier version has installed; its agents never worked.

    Raises:
        KubeError: the API server does not answer.
    """
    try:
        found = await client.read(kube.DAEMON_SETS, namespace, AGENT_DAEMONSET_WINDOWS)
    except ForbiddenError:
        # Roles for the person who installs need not have it.
        return
    if found is not None and is_ours(found):
        command = f"kubectl -n {namespace} delete daemonset {AGENT_DAEMONSET_WINDOWS}"
        on_note(f"DaemonSet {namespace}/{AGENT_DAEMONSET_WINDOWS} of an earlier version moves no data: {command}")


def _refuse(manifest: Manifest, release: str) -> str:
    """Return why an object of others cannot be merged with ours, and what to do."""
    name, namespace = manifest["metadata"]["name"], manifest["metadata"].get("namespace", "")
    where = f"-n {namespace} " if namespace else ""
    if release:
        return f"belongs to a release of Helm: use helm {where}upgrade {release}"
    kind = manifest["kind"].lower()
    if resource_of(manifest) is kube.DAEMON_SETS:
        end = f"once its transfers have ended, delete it: kubectl {where}delete {kind} {name}"
        return f"is not ours, such as Velero's: {end}"
    label = ",".join(f"{key}={value}" for key, value in PART_OF_LABELS.items())
    return f"is not ours: delete it, or hand it over: kubectl {where}label {kind} {name} {label}"


def _fit(manifest: Manifest, found: Mapping[str, Any], *, own: bool) -> Manifest:
    """Return the object as it is applied over the one that exists; `own`: that one is ours.

    Raises:
        ConfigError: it is a ConfigMap with several keys.
    """
    if resource_of(manifest) is kube.CONFIG_MAPS:
        manifest = {**manifest, "data": _fit_data(manifest, found)}
    if own:
        return manifest
    meta = manifest["metadata"]
    labels = {key: value for key, value in meta["labels"].items() if key not in PART_OF_LABELS}
    rest = {key: value for key, value in meta.items() if key != "labels"}
    return {**manifest, "metadata": rest | ({"labels": labels} if labels else {})}


def _fit_data(manifest: Manifest, found: Mapping[str, Any]) -> Manifest:
    """Return our document under the key that the ConfigMap has: agents accept only one."""
    keys = sorted(found.get("data") or {})
    if len(keys) > 1:
        raise ConfigError(
            f"nothing was applied: {place_of(manifest)} has the keys {', '.join(keys)}, and agents accept only one: "
            "delete the others"
        )
    data: Manifest = manifest["data"]
    return dict(zip(keys, data.values(), strict=True)) if keys else data
