"""The root of the commands for users, what they have in common, and their errors.

click is imported here and in the modules of these commands alone, and only when one of them is called.
"""

import logging
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Final

import click
from click.shell_completion import ShellComplete

from client.cli.output import NoteHandler
from client.session import interrupted_by_signals
from core.errors import AgentError, ConfigError
from core.kube.errors import NotServedError, UnauthorizedError, UnreachableError
from core.text import ask, close_name
from nodeagent.runtime.settings import USER_COMMANDS

_HELP_COLUMNS: Final = 100

_ALSO_FILES: Final = ":0"
_NO_FILES: Final = ":4"
"""What a shell may propose beside the words. Source: cobra v1.10, ShellCompDirective."""


_MODULES: Final = {"uninstall": "install"}
"""Each other command is in a module of its own name, with `-` as `_`; only the one that is called is imported."""


class _Root(click.Group):
    """Knows the names of the commands, and imports a command when it is called."""

    def list_commands(self, _: click.Context) -> list[str]:
        return list(USER_COMMANDS)

    def get_command(self, _: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in USER_COMMANDS:
            return None
        name = cmd_name.replace("-", "_")
        command: click.Command = getattr(import_module(f"client.cli.{_MODULES.get(name, name)}"), name)
        return command


@click.group(
    "nodeagent",
    cls=_Root,
    no_args_is_help=False,
    context_settings={"max_content_width": _HELP_COLUMNS, "help_option_names": ["-h", "--help"]},
)
def _root() -> None:
    """Commands for users."""


def _is_unreachable(error: BaseException | None) -> bool:
    """Return whether the error, or one that it was raised from, is that the cluster cannot be reached."""
    # A path that the server does not know is an answer, once it is known that it does not serve the resource.
    while error is not None and not isinstance(error, NotServedError):
        if isinstance(error, (UnreachableError, UnauthorizedError)):
            return True
        error = error.__cause__
    return False


_INSTEAD: Final[Mapping[str, Sequence[str]]] = {
    "--confirm": ("--yes",),
    "--context": ("--kubecontext",),
    "--follow": ("--watch",),
    "--force": ("--yes",),
    "--format": ("--output",),
    "--include-namespaces": ("--namespace",),
    "--keep-annual": ("--keep-yearly",),
    "--keep-within": ("--ttl",),
    "--namespace": ("--agent-namespace",),
    "-n": ("--agent-namespace",),
    "list": ("get",),
    "log": ("describe",),
    "logs": ("describe",),
    "remove": ("delete",),
    "rm": ("delete",),
    "show": ("describe", "get"),
    "stop": ("cancel",),
    "update": ("create",),
}
"""What to type in place of words that velero, kubectl, kopia and restic have, if the command has it."""


def _explain(error: click.UsageError) -> str:
    """Return what is wrong with a command line, in the words of our own errors, and what to type instead."""
    match error:
        case click.NoSuchOption(option_name=name, ctx=click.Context() as context):
            shown = [one for one in context.command.get_params(context) if not getattr(one, "hidden", False)]
            known = [word for one in shown for word in one.opts]
            return _suggest("option", name, known)
        case click.exceptions.NoSuchCommand(
            command_name=name, ctx=click.Context(command=click.Group() as group) as context
        ):
            return _suggest("command", name, group.list_commands(context))
        case click.MissingParameter(param=click.Parameter() as missing):
            return f"missing {missing.param_type_name} {_name(missing)}"
        case click.BadParameter(param=click.Parameter() as bad, message=text):
            return f"{_name(bad)}: {text.removesuffix('.')}"
    message = error.format_message().removesuffix(".")
    return f"{message[:1].lower()}{message[1:]}"


def _suggest(what: str, name: str, known: Sequence[str]) -> str:
    meant = next((word for word in _INSTEAD.get(name, ()) if word in known), "") or close_name(name, known)
    hint = f" ({ask(meant)})" if meant else ""
    return f'no such {what} "{name}"{hint}'


def _name(parameter: click.Parameter) -> str:
    """Return the first long word of an option, an argument as the help has it."""
    return next((word for word in parameter.opts if word.startswith("--")), parameter.human_readable_name)


def run_user_command(words: Sequence[str]) -> int:
    """Run a command for users and return its exit code.

    Raises:
        ConfigError: the command line is invalid, or the cluster cannot be reached.
        AgentError: the command failed.
        KeyboardInterrupt: the user interrupted it.
    """
    root, handler = logging.getLogger(), NoteHandler(logging.WARNING)
    root.addHandler(handler)
    try:
        with interrupted_by_signals():
            code: int | None = _root.main(list(words), prog_name="nodeagent", standalone_mode=False)
    except click.UsageError as e:
        path = e.ctx.command_path if e.ctx is not None else "nodeagent"
        raise ConfigError(f"{_explain(e)} (see {path} --help)") from e
    except click.Abort as e:
        raise KeyboardInterrupt from e
    except OSError as e:
        # Such as a full disk below standard output; click handles a closed pipe.
        raise AgentError(f"input or output failed: {e}") from e
    except AgentError as e:
        if not _is_unreachable(e):
            raise
        raise ConfigError(f"the cluster cannot be reached: {e}") from e
    finally:
        root.removeHandler(handler)
    return code or 0


def complete_for_kubectl(words: Sequence[str]) -> str:
    """Return what the last of the words may become, as kubectl reads it.

    Source: Kubernetes v1.34, kubectl, pkg/cmd/plugin/plugin_completion.go.
    """
    *before, begun = words or [""]
    found = ShellComplete(_root, {}, "nodeagent", "").get_completions(before, begun)
    names = [one for one in found if one.type == "plain"]
    lines = [f"{one.value}\t{one.help}" if one.help else f"{one.value}" for one in names]
    return "\n".join([*lines, _NO_FILES if len(names) == len(found) else _ALSO_FILES, ""])
