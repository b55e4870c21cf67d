"""What is checked before an installation is applied: permissions, ConfigMaps, and objects that it only names."""

import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from client.install.options import InstallOptions
from client.permissions import WAIT_PERMISSIONS, grant_permissions, install_permissions
from core.errors import ConfigError
from core.kube.client import KubeClient
from core.kube.errors import ForbiddenError
from core.kube.resources import CONFIG_MAPS, NAMESPACES, PRIORITY_CLASSES, SECRETS, SERVICE_ACCOUNTS, Resource
from core.kube.types import ConfigObject, Manifest
from nodeagent.config.maintenance import parse_maintenance
from nodeagent.config.repository import parse_settings_of
from nodeagent.config.schema import ConfigFinding
from nodeagent.config.source import parse_config_map
from nodeagent.runtime.permissions import (
    COPY_PERMISSIONS,
    MOVER_PERMISSIONS,
    Permission,
    Scope,
    agent_permissions,
)
from nodeagent.runtime.preflight import missing_permissions

__all__ = ["check_config_maps", "check_named", "check_user", "named_config_maps"]

_SHOWN = 6
"""Missing permissions that fit into a line."""


async def check_user(
    client: KubeClient, namespace: str, manifests: Sequence[Manifest], *, config_maps: Iterable[str], wait: bool
) -> None:
    """Check that the user may apply these objects, read these ConfigMaps, and wait for the agents.

    Raises:
        ConfigError: a permission is missing; the message names all that is missing.
        KubeError: the API server does not answer.
    """
    needed = [*install_permissions(manifests), *(WAIT_PERMISSIONS if wait else ())]
    names = tuple(config_maps)
    if names:
        needed.append(Permission(Scope.OWN_NAMESPACE, CONFIG_MAPS, ("get",), "whether they are valid", names=names))
    missing = list((await missing_permissions(client, namespace, needed)).values())
    granting = list((await missing_permissions(client, namespace, grant_permissions(manifests))).values())
    if granting and await _lacks_what_it_grants(client, namespace):
        missing += granting
    if missing:
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise ConfigError(
            f"nothing was applied: permissions missing in namespace {namespace}: {'; '.join(missing[:_SHOWN])}{more}: "
            "docs/install.md has a role for the person who installs"
        )


async def _lacks_what_it_grants(client: KubeClient, namespace: str) -> bool:
    """Return whether the user does not have all permissions of agents: who has them may grant them."""
    granted = (*agent_permissions(), *MOVER_PERMISSIONS, *COPY_PERMISSIONS)
    return bool(await missing_permissions(client, namespace, granted))


def named_config_maps(options: InstallOptions) -> list[str]:
    """Return the ConfigMaps that must exist."""
    return [flag.name for flag in _config_map_flags(options)]


@dataclass(frozen=True)
class _ConfigMapFlag:
    """A flag that names a ConfigMap; `parse` returns its errors and notes, or raises ConfigError."""

    flag: str
    name: str
    parse: Callable[[ConfigObject], tuple[Iterable[ConfigFinding], Iterable[ConfigFinding]]]
    example: str


async def check_config_maps(client: KubeClient, options: InstallOptions, on_note: Callable[[str], None]) -> None:
    """Check that the ConfigMaps that flags name exist and are valid; their other findings are notes.

    Raises:
        ConfigError: one does not exist, or is invalid; the message has the command that creates it.
        KubeError: one cannot be read.
    """
    for flag in _config_map_flags(options):
        place = f"{flag.flag}: ConfigMap {options.namespace}/{flag.name}"
        found = await client.read(CONFIG_MAPS, options.namespace, flag.name)
        if found is None:
            example = await _create_command(client, options.namespace, f"{flag.name} --from-literal={flag.example}")
            raise ConfigError(f"nothing was applied: {place} does not exist; to create it: {example}")
        try:
            errors, notes = flag.parse(found)
        except ConfigError as e:
            raise ConfigError(f"nothing was applied: {place} is invalid: {e}") from e
        if text := "; ".join(map(str, errors)):
            raise ConfigError(f"nothing was applied: {place} is invalid: {text} (see nodeagent check-config)")
        for note in notes:
            on_note(f"{place}: {note}")


async def _create_command(client: KubeClient, namespace: str, words: str) -> str:
    """Return the command that creates a ConfigMap; the installation creates the namespace only later."""
    command = f"kubectl -n {namespace} create configmap {words}"
    is_missing = await client.read(NAMESPACES, "", namespace) is None
    return f"kubectl create namespace {namespace} && {command}" if is_missing else command


def _config_map_flags(options: InstallOptions) -> Sequence[_ConfigMapFlag]:
    """Return the flags that name a ConfigMap which the installation does not create itself."""
    agent = options.agent
    flags = [
        _ConfigMapFlag(
            "--node-agent-configmap",
            "" if options.configuration is not None else agent.config_map,
            _parse_agent,
            "config.json=" + shlex.quote('{"loadConcurrency": {"globalConfig": 1}}'),
        ),
        _ConfigMapFlag(
            "--backup-repository-configmap",
            agent.repository_config_map,
            _parse_repository,
            "kopia=" + shlex.quote('{"cacheLimitMB": 2048}'),
        ),
        _ConfigMapFlag(
            "--repo-maintenance-job-configmap",
            agent.maintenance_config_map,
            _parse_maintenance,
            "global=" + shlex.quote('{"podResources": {"memoryLimit": "2Gi"}}'),
        ),
    ]
    return [flag for flag in flags if flag.name]


def _parse_agent(config_map: ConfigObject) -> tuple[Iterable[ConfigFinding], Iterable[ConfigFinding]]:
    parsed = parse_config_map(config_map)
    return parsed.errors, parsed.notes


def _parse_repository(config_map: ConfigObject) -> tuple[Iterable[ConfigFinding], Iterable[ConfigFinding]]:
    parsed = parse_settings_of(config_map)
    return parsed.errors, parsed.notes


def _parse_maintenance(config_map: ConfigObject) -> tuple[Iterable[ConfigFinding], Iterable[ConfigFinding]]:
    parsed = parse_maintenance(config_map)
    return parsed.invalid, parsed.notes


async def check_named(client: KubeClient, options: InstallOptions, on_note: Callable[[str], None]) -> None:
    """Note each object that the installation names and that does not exist: its pods are not created until it does.

    Raises:
        KubeError: the API server does not answer.
    """
    namespace, agent = options.namespace, options.agent
    named: list[tuple[str, Resource, str, str]] = [
        ("--node-agent-priority-class-name", PRIORITY_CLASSES, agent.priority_class, "--value=50"),
        ("--service-account-name", SERVICE_ACCOUNTS, options.service_account, ""),
        ("--mover-service-account-name", SERVICE_ACCOUNTS, options.mover_service_account, ""),
        *(("--image-pull-secret", SECRETS, name, "...") for name in options.pull_secrets),
    ]
    for flag, resource, name, more in named:
        if not name:
            continue
        where = f"-n {namespace} " if resource.namespaced else ""
        what = f"docker-registry {name}" if resource is SECRETS else name
        command = f"kubectl {where}create {resource.kind.lower()} {what} {more}".strip()
        try:
            missing = await client.read(resource, namespace if resource.namespaced else "", name) is None
        except ForbiddenError:
            on_note(f"{flag}: no permission to check whether {resource.kind} {name} exists")
            continue
        if missing:
            on_note(f"{flag}: {resource.kind} {name} does not exist, and pods need it: {command}")
