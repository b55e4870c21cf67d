"""One run of `nodeagent install` against a cluster: checks, then apply, then the wait for the agents."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

from client.install.apply import ApplyTools, apply_installation
from client.install.checks import (
    check_config_maps,
    check_named,
    check_user,
    named_config_maps,
)
from client.install.existing import fit_to_existing, note_former_agents
from client.install.manifests import build_installation
from client.install.options import InstallOptions
from client.install.wait import WaitTools, wait_installation
from core.kube.types import Manifest

__all__ = ["InstallRequest", "run_install"]


@dataclass(frozen=True)
class InstallRequest:
    """What is installed, and how; without `options`, only the definitions.

    `timeout` limits the wait for the agents; None: it is not waited for them.
    """

    namespace: str
    definitions: Sequence[Manifest]
    options: InstallOptions | None
    force_conflicts: bool = True
    timeout: timedelta | None = None


async def run_install(tools: ApplyTools, request: InstallRequest, on_progress: Callable[[str], None]) -> None:
    """Check, apply, and wait.

    Raises:
        ConfigError: a permission or a ConfigMap is missing, or an object of others is in the way; nothing was applied.
        AgentError: the objects could not be applied, or the agents do not come up.
    """
    client, options, timeout = tools.client, request.options, request.timeout
    objects = build_installation(options) if options is not None else []
    named = named_config_maps(options) if options is not None else []
    await check_user(
        client, request.namespace, [*request.definitions, *objects], config_maps=named, wait=timeout is not None
    )
    objects = await fit_to_existing(client, objects, tools.on_note)
    if options is not None:
        await check_config_maps(client, options, tools.on_note)
        await check_named(client, options, tools.on_note)
        await note_former_agents(client, request.namespace, tools.on_note)
    applied = await apply_installation(tools, request.definitions, objects, force=request.force_conflicts)
    if timeout is not None:
        await wait_installation(WaitTools(client, tools.clock, on_progress, tools.on_note), applied, timeout)
