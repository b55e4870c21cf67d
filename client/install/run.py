"""One run of `nodeagent install` against a cluster: checks, also of what exists, then apply, then the wait."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, NamedTuple

from client.install.apply import Applied, ApplyResult, apply_installation
from client.install.manifests import build_installation, read_definitions
from client.install.options import InstallOptions, place_of, resource_of
from client.installation import find_last_warning
from client.permissions import WAIT_PERMISSIONS, grant_permissions, install_permissions
from client.session import Session
from core.clock import Deadline
from core.errors import AgentError, ConfigError, Translated
from core.kube import resources as kube
from core.kube.client import KubeClient, Selection, select_labels
from core.kube.errors import ForbiddenError
from core.kube.types import ConfigObject, DaemonSet, Manifest, Metadata, Object, Pod
from core.models.names import PART_OF_LABELS, helm_release, is_ours
from core.models.storage import BackupStorageLocation
from core.models.units import format_duration, parse_duration
from core.text import some_of
from exposer.causes import CauseFinder
from exposer.pod_status import is_ready, join_text
from nodeagent.config.parse import ParsedConfig, parse_config_map
from nodeagent.config.repositories import ParsedMaintenance, ParsedSettings, parse_maintenance, parse_settings_of
from nodeagent.runtime.permissions import COPY_PERMISSIONS, MOVER_PERMISSIONS, Permission, Scope, agent_permissions
from nodeagent.runtime.preflight import missing_permissions

_POLL_SECONDS: Final = 1.0


class WaitError(AgentError):
    """The agents did not come up, or the location is not reachable."""


async def wait_installation(tools: Session, applied: Sequence[Applied], timeout: timedelta) -> None:
    """Return once all agents of these objects are ready, and the location is reachable.

    Raises:
        WaitError: that was not so before the timeout, or cannot become so; the message has the cause.
        ExposeError: the pod of an agent can never start.
    """
    clock, deadline, client = tools.clock, Deadline.after(tools.clock, timeout), tools.client.patiently()
    causes, shown = CauseFinder(client, clock), ""
    while missing := await _find_missing(client, causes, applied):
        if missing != shown:
            tools.on_progress(missing)
            shown = missing
        if deadline.expired:
            raise WaitError(f"the agents did not come up within {format_duration(timeout)}: {missing}")
        await clock.sleep(min(_POLL_SECONDS, max(deadline.remaining_seconds, 0.1)))


async def _find_missing(client: KubeClient, causes: CauseFinder, applied: Sequence[Applied]) -> str | None:
    for one in applied:
        if one.stored["kind"] == kube.DAEMON_SETS.kind and (
            missing := await _explain_rollout(client, causes, one.stored)
        ):
            return missing
    # The agents validate a location, so that they must be ready.
    renewed = any(one.result is not ApplyResult.UNCHANGED and one.stored["kind"] == "Secret" for one in applied)
    for one in applied:
        if one.stored["kind"] == kube.BACKUP_STORAGE_LOCATIONS.kind:
            changed = renewed or one.result is not ApplyResult.UNCHANGED
            if missing := await _explain_location(client, one.stored, changed=changed):
                return missing
    return None


async def _explain_rollout(client: KubeClient, causes: CauseFinder, stored: Object) -> str | None:
    meta = stored["metadata"]
    current = await client.read(kube.DAEMON_SETS, meta["namespace"], meta["name"])
    if current is None:
        raise WaitError(f"{place_of(stored)} was deleted")
    status, desired = current.get("status") or {}, _desired(current)
    if status.get("observedGeneration", 0) < current["metadata"].get("generation", 1):
        return f"{place_of(stored)} is not observed yet"
    if desired == 0:
        raise WaitError(f"{place_of(stored)}: no node is eligible for its pods (nodeSelector, operating system)")
    ready = status.get("numberAvailable", 0)
    updated = status.get("updatedNumberScheduled", 0)
    if min(ready, updated) >= desired:
        return None
    cause = await _find_cause(client, causes, current)
    text = f"{place_of(stored)}: {min(ready, updated)} of {desired} agents are ready"
    return f"{text}: {cause}" if cause else text


def _desired(daemonset: DaemonSet) -> int:
    """Return how many nodes should have a pod, as far as the controller knows."""
    return (daemonset.get("status") or {}).get("desiredNumberScheduled", 0)


async def _find_cause(client: KubeClient, causes: CauseFinder, daemonset: DaemonSet) -> str | None:
    meta = daemonset["metadata"]
    pods = await client.list(
        Selection(kube.PODS, meta["namespace"], select_labels(daemonset["spec"]["selector"]["matchLabels"]))
    )
    # An earlier one that is being deleted does not say what keeps the new ones.
    for pod in sorted(pods, key=lambda one: "deletionTimestamp" in one["metadata"]):
        if cause := await _explain_pod(client, causes, pod):
            return cause
    if len(pods) < _desired(daemonset):
        return await _last_warning(client, meta)
    return None


async def _explain_pod(client: KubeClient, causes: CauseFinder, pod: Pod) -> str | None:
    """Return why an agent is not ready; None: it is, or is starting."""
    status, meta = pod.get("status") or {}, pod["metadata"]
    if is_ready(pod):
        return None
    place = f"Pod {meta['namespace']}/{meta['name']}"
    if "deletionTimestamp" in meta:
        return f"{place} on node {pod['spec'].get('nodeName')} is being deleted"
    if reason := status.get("reason"):
        # Evicted, or rejected by its kubelet: how its containers ended follows from that.
        return f"{place} failed: {join_text(reason, status.get('message', ''))}"
    for container in status.get("containerStatuses") or []:
        for state in (container.get("state") or {}, container.get("lastState") or {}):
            if ended := state.get("terminated"):
                lines = str(ended.get("message") or "").strip().splitlines()
                last = lines[-1].strip() if lines else ended.get("reason") or "no reason"
                return f"{place} ended with exit code {ended.get('exitCode')}: {last}"
    pending = await causes.explain(pod)
    return pending.message if pending is not None else await _last_warning(client, meta)


async def _last_warning(client: KubeClient, meta: Metadata) -> str | None:
    last = await find_last_warning(client, meta["namespace"], meta["uid"])
    return f"{last.reason or 'Unknown'}: {' '.join(last.message.split())}" if last is not None else None


async def _explain_location(client: KubeClient, stored: Object, *, changed: bool) -> str | None:
    """Return why the location is not reachable; None: it is, or it is not validated.

    After a change, only a validation counts that came after it.
    """
    meta = stored["metadata"]
    raw = await client.read(kube.BACKUP_STORAGE_LOCATIONS, meta["namespace"], meta["name"])
    if raw is None:
        raise WaitError(f"{place_of(stored)} was deleted")
    before, current = BackupStorageLocation.parse(stored), BackupStorageLocation.parse(raw)
    frequency = current.spec.validation_frequency
    if frequency is not None and parse_duration(frequency) <= timedelta():
        return None
    status = current.status
    is_new = status.last_validation_time != before.status.last_validation_time
    if not status.phase or (changed and not is_new):
        return f"{place_of(stored)} is not validated yet"
    if current.available:
        return None
    return f"{place_of(stored)} is {status.phase}: {status.message or 'no reason'}"


_SHOWN = 6
"""Missing permissions that fit into a line."""


async def check_user(
    client: KubeClient, namespace: str, manifests: Sequence[Manifest], *, config_maps: Sequence[str], wait: bool
) -> None:
    """Check that the user may apply these objects, read these ConfigMaps, and wait for the agents.

    Raises:
        ConfigError: a permission is missing; the message names all that is missing.
    """
    needed = [*install_permissions(manifests), *(WAIT_PERMISSIONS if wait else ())]
    if names := tuple(config_maps):
        reason = "whether they are valid"
        needed.append(Permission(Scope.OWN_NAMESPACE, kube.CONFIG_MAPS, ("get",), reason, names=names))
    missing = list((await missing_permissions(client, namespace, needed)).values())
    granting = list((await missing_permissions(client, namespace, grant_permissions(manifests))).values())
    granted = (*agent_permissions(), *MOVER_PERMISSIONS, *COPY_PERMISSIONS)
    # Who has all permissions of agents may grant them.
    if granting and await missing_permissions(client, namespace, granted):
        missing += granting
    if missing:
        raise ConfigError(
            f"nothing was applied: permissions missing in namespace {namespace}: {some_of(missing, _SHOWN, '; ')}: "
            "docs/install.md has a role for the person who installs"
        )


_CONFIGURATION: Final = """config.json='{"loadConcurrency": {"globalConfig": 1}}'"""
_REPOSITORIES: Final = """kopia='{"cacheLimitMB": 2048}'"""
_MAINTENANCE: Final = """global='{"podResources": {"memoryLimit": "2Gi"}}'"""


class _Flag(NamedTuple):
    """A flag that names a ConfigMap, what parses that or raises ConfigError, and an example of its content."""

    flag: str
    name: str
    parse: Callable[[ConfigObject], ParsedConfig | ParsedSettings | ParsedMaintenance]
    example: str


async def check_config_maps(client: KubeClient, options: InstallOptions, on_note: Callable[[str], None]) -> None:
    """Check that the ConfigMaps that flags name exist and are valid; their other findings are notes.

    Raises:
        ConfigError: one does not exist, or is invalid; the message has the command that creates it.
    """
    for flag in _config_map_flags(options):
        place = f"{flag.flag}: ConfigMap {options.namespace}/{flag.name}"
        found = await client.read(kube.CONFIG_MAPS, options.namespace, flag.name)
        if found is None:
            example = await _create_command(client, options.namespace, f"{flag.name} --from-literal={flag.example}")
            raise ConfigError(f"nothing was applied: {place} does not exist; to create it: {example}")
        with Translated(ConfigError, ConfigError, f"nothing was applied: {place} is invalid"):
            parsed = flag.parse(found)
        if text := "; ".join(map(str, parsed.errors)):
            raise ConfigError(f"nothing was applied: {place} is invalid: {text} (see nodeagent check-config)")
        for note in parsed.notes:
            on_note(f"{place}: {note}")


async def _create_command(client: KubeClient, namespace: str, words: str) -> str:
    """Return the command that creates a ConfigMap; the installation creates the namespace only later."""
    command = f"kubectl -n {namespace} create configmap {words}"
    is_missing = await client.read(kube.NAMESPACES, "", namespace) is None
    return f"kubectl create namespace {namespace} && {command}" if is_missing else command


def _config_map_flags(options: InstallOptions) -> Sequence[_Flag]:
    """Return the flags that name a ConfigMap which the installation does not create itself."""
    agent = options.agent
    named = agent.config_map if options.configuration is None else None
    flags = [
        _Flag("--node-agent-configmap", named or "", parse_config_map, _CONFIGURATION),
        _Flag("--backup-repository-configmap", agent.repository_config_map or "", parse_settings_of, _REPOSITORIES),
        _Flag("--repo-maintenance-job-configmap", agent.maintenance_config_map or "", parse_maintenance, _MAINTENANCE),
    ]
    return [flag for flag in flags if flag.name]


async def check_named(client: KubeClient, options: InstallOptions, on_note: Callable[[str], None]) -> None:
    """Note each object that the installation names and that does not exist: its pods are not created until it does."""
    namespace, agent = options.namespace, options.agent
    named: list[tuple[str, kube.Resource, str | None, str]] = [
        ("--node-agent-priority-class-name", kube.PRIORITY_CLASSES, agent.priority_class, "--value=50"),
        ("--service-account-name", kube.SERVICE_ACCOUNTS, options.service_account, ""),
        ("--mover-service-account-name", kube.SERVICE_ACCOUNTS, options.mover_service_account, ""),
        *(("--image-pull-secret", kube.SECRETS, name, "...") for name in options.pull_secrets),
    ]
    for flag, resource, name, more in named:
        if not name:
            continue
        where = f"-n {namespace} " if resource.namespaced else ""
        what = f"docker-registry {name}" if resource is kube.SECRETS else name
        command = f"kubectl {where}create {resource.kind.lower()} {what} {more}".strip()
        try:
            missing = await client.read(resource, namespace if resource.namespaced else "", name) is None
        except ForbiddenError:
            on_note(f"{flag}: no permission to check whether {resource.kind} {name} exists")
            continue
        if missing:
            on_note(f"{flag}: {resource.kind} {name} does not exist, and pods need it: {command}")


_ROLES: Final = (kube.ROLES, kube.ROLE_BINDINGS, kube.CLUSTER_ROLES, kube.CLUSTER_ROLE_BINDINGS)
_NEVER_MERGED: Final = frozenset({kube.DAEMON_SETS, *_ROLES, kube.SECURITY_CONTEXT_CONSTRAINTS})
"""Merged with ours, a DaemonSet would be neither, and the accounts of a role would have other permissions."""


async def fit_to_existing(
    client: KubeClient, objects: Iterable[Manifest], on_note: Callable[[str], None]
) -> list[Manifest]:
    """Return the objects as they are applied to this cluster; one note names those that stay their creators'.

    What others have created does not get our label, by which `nodeagent uninstall` recognizes what it removes.

    Raises:
        ConfigError: an object of another installer, or of a release of Helm, cannot be merged with ours.
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


def _refuse(manifest: Manifest, release: str | None) -> str:
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
    """Return the object as it is applied over the one that exists; `own`: that one is ours."""
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


async def run_install(
    tools: Session,
    options: InstallOptions | None,
    on_result: Callable[[str, ApplyResult], None],
    *,
    force: bool,
    timeout: timedelta | None,
) -> None:
    """Check, apply, and wait; without `options`, only the definitions; without `timeout`, no agent is waited for.

    `on_result` is called with each object as text and what became of it.

    Raises:
        ConfigError: a permission or a ConfigMap is missing, or an object of others is in the way; nothing was applied.
        AgentError: the objects could not be applied, or the agents do not come up.
    """
    client, definitions = tools.client, read_definitions()
    objects = build_installation(options) if options is not None else []
    named = [flag.name for flag in _config_map_flags(options)] if options is not None else []
    await check_user(client, tools.namespace, [*definitions, *objects], config_maps=named, wait=timeout is not None)
    objects = await fit_to_existing(client, objects, tools.on_note)
    if options is not None:
        await check_config_maps(client, options, tools.on_note)
        await check_named(client, options, tools.on_note)
    applied = await apply_installation(tools, definitions, objects, on_result, force=force)
    if timeout is not None:
        await wait_installation(tools, applied, timeout)
