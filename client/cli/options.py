"""Options and the help that all commands for users have in common."""

import asyncio
import functools
import os
import shlex
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final

import click

from client.cli.output import OutputFormat
from core.errors import AgentError, ConfigError
from core.kube.client import Selection
from core.kube.resources import Resource
from nodeagent.runtime.connection import ClusterAccess, Connection, connect
from nodeagent.runtime.serve_flags import KUBECONFIG_HELP, KUBECONTEXT_HELP
from nodeagent.runtime.settings import DEFAULT_NAMESPACE

__all__ = [
    "UserCommand",
    "UserGroup",
    "access_of",
    "cluster_options",
    "command_for",
    "complete_names",
    "confirm",
    "dry_run_option",
    "ignore_server_option",
    "list_names",
    "output_option",
    "workload_options",
    "yes_option",
]

_AGENTS: Final = "--agent-namespace"

dry_run_option: Final = click.option("--dry-run", is_flag=True, help="only show what would be done")
ignore_server_option: Final = click.option(
    "--ignore-velero-server", is_flag=True, help="create it although a Velero server is in the namespace"
)


class _Help:
    """A help text whose examples keep their lines."""

    epilog: str | None

    def format_epilog(self, _: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples as they are."""
        if self.epilog:
            formatter.write(f"\n{self.epilog}")


class UserCommand(_Help, click.Command):
    """One command."""


class UserGroup(_Help, click.Group):
    """A command with commands."""

    command_class = UserCommand


def confirm(question: str, undone: str) -> bool:
    """Ask, and return whether the answer is yes; `undone` says what did not happen.

    Raises:
        ConfigError: there is no answer.
    """
    try:
        return click.confirm(question, err=True)
    except click.Abort as e:
        raise ConfigError(f"{undone}: there is no answer to the question (use --yes)") from e


def yes_option(function: Callable[..., int | None]) -> Callable[..., int | None]:
    """Add `--yes`, which each command has that asks, and the word that Velero's commands have for it."""
    for option in (
        click.option("--confirm", "yes", is_flag=True, hidden=True, help="the same, as Velero's commands have it"),
        click.option("--yes", "-y", is_flag=True, help="do not ask"),
    ):
        function = option(function)
    return function


def cluster_options(function: Callable[..., int | None]) -> Callable[..., int | None]:
    """Add the options that say which cluster and namespace; the command gets them as `access`, a ClusterAccess.

    The namespace is never the kubeconfig's, which is the one that the user works in, and not the agents'.
    Source: Velero v1.18, pkg/client/config.go.
    """
    return _add_access(function, "namespace of the agents and of the custom resources", ("--namespace", "-n"))


def workload_options(function: Callable[..., int | None]) -> Callable[..., int | None]:
    """Add the same options for a command about PVCs, whose own `-n` is the namespace of the PVCs."""
    return _add_access(function, "namespace of the agents and of the custom resources", (_AGENTS,))


def _add_access(function: Callable[..., int | None], text: str, flags: tuple[str, ...]) -> Callable[..., int | None]:
    text = f"{text} (default: $VELERO_NAMESPACE, then {DEFAULT_NAMESPACE})"

    @functools.wraps(function)
    def run(*args: Any, of_agents: str, kubeconfig: str, kubecontext: str, **more: Any) -> int | None:  # noqa: ANN401 - click's
        return function(
            *args, access=ClusterAccess(kubeconfig or None, kubecontext, of_agents or DEFAULT_NAMESPACE), **more
        )

    for option in (
        click.option("--kubecontext", metavar="NAME", default="", help=KUBECONTEXT_HELP),
        click.option("--kubeconfig", metavar="PATH", type=click.Path(), default="", help=KUBECONFIG_HELP),
        click.option(*flags, "of_agents", metavar="NAME", default="", envvar="VELERO_NAMESPACE", help=text),
        # So that one word means the same in all commands.
        *([] if _AGENTS in flags else [click.option(_AGENTS, "of_agents", metavar="NAME", hidden=True, help=text)]),
    ):
        run = option(run)
    return run


def access_of(context: click.Context) -> ClusterAccess:
    """Return which cluster and namespace the words before the one that is being completed name."""
    given = {key: context.params.get(key) or "" for key in ("of_agents", "kubeconfig", "kubecontext")}
    return ClusterAccess(given["kubeconfig"] or None, given["kubecontext"], given["of_agents"] or DEFAULT_NAMESPACE)


def complete_names(
    context: click.Context, begun: str, read: Callable[[Connection], Awaitable[Iterable[str]]]
) -> list[str]:
    """Return the names that `read` finds and that begin so, for the shell; none, if the cluster does not answer."""

    async def find() -> list[str]:
        async with connect(access_of(context)) as cluster:
            return list(await read(cluster))

    try:
        return [name for name in dict.fromkeys(asyncio.run(find())) if name.startswith(begun)]
    except AgentError:
        return []


async def list_names(cluster: Connection, resource: Resource) -> list[str]:
    """Return the names of the objects of this kind in the namespace of the agents."""
    found = await cluster.client.list(Selection(resource, cluster.namespace))
    return [raw["metadata"]["name"] for raw in found]


def command_for(access: ClusterAccess, command: str) -> str:
    """Return a command with `workload_options` as a shell takes it, with the flags that lead to the same cluster.

    The default namespace is named too if `$VELERO_NAMESPACE` would lead elsewhere.
    """
    words = []
    if access.namespace != DEFAULT_NAMESPACE or os.environ.get("VELERO_NAMESPACE", "") not in {"", DEFAULT_NAMESPACE}:
        words += ["--agent-namespace", access.namespace]
    if access.kubecontext:
        words += ["--kubecontext", access.kubecontext]
    if access.kubeconfig:
        words += ["--kubeconfig", access.kubeconfig]
    return " ".join([command, *map(shlex.quote, words)])


def output_option(function: Callable[..., int | None]) -> Callable[..., int | None]:
    """Add `--output`; the command gets it as `form`, an OutputFormat."""
    return click.option(
        "--output",
        "-o",
        "form",
        type=click.Choice([form.value for form in OutputFormat]),
        default=OutputFormat.TABLE.value,
        callback=lambda _context, _option, value: OutputFormat(value),
        help="format of the answer (default: table)",
    )(function)
