"""`python -m nodeagent` and `nodeagent`: the commands, and errors as one line with an exit code.

Those for users are in `client`, which this module alone imports, and only when one of them runs.
"""

import argparse
import gc
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from core.errors import AgentError, ConfigError
from core.text import hinted, one_line
from core.version import VERSION
from nodeagent.cli import set_up_check_config, set_up_serve
from nodeagent.runtime.settings import USER_COMMANDS, CommandParser

_INTERRUPTED: Final = 130
"""Exit code that shells report for a process that SIGINT ended."""

_ABOUT: Final = """\
Backs up and restores the data of persistent volumes on one node of a Kubernetes cluster. Handles
Velero's DataUpload, DataDownload, PodVolumeBackup and PodVolumeRestore resources, as a drop-in
replacement for Velero's node-agent."""

_EXAMPLES: Final = """\
examples:
  nodeagent serve --help
        all flags, with their defaults
  nodeagent check-config node-agent-config.json
        check a configuration before you apply it
  nodeagent backup create before-upgrade --pvc app/data --wait
        back up a volume
  nodeagent repo get
        backup repositories, and when their next maintenance is due
  nodeagent install --help
        install the agents into a cluster
"""

_RUN_SCHEDULE: Final = "run-schedule"
_POD_COMMANDS: Final = {
    _RUN_SCHEDULE: "run a schedule once, in its pod",
    "run-restore-test": "test a restore, in a pod of the leader",
}
"""The commands of pods that have the agents' image, without the extra `cli`."""

_USER_PACKAGES: Final = frozenset({"click", "jinja2", "rich"})

_COMPLETION: Final = "_NODEAGENT_COMPLETE"
"""Set by a shell that asks for completions. Source: click 8.5, docs/shell-completion."""

_OBJECTS_PER_COLLECTION: Final = 200_000
"""As many as 10,000 transfers have; Python's default, 700, takes a tenth of a command's time."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv` and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if _COMPLETION in os.environ or (words and words[0] in USER_COMMANDS):
            return _run_user_command(words)
        if words and words[0] in _POD_COMMANDS:
            return _run_pod_command(*words)
        _check_command(words[:1])
        arguments = _parser().parse_args(words)
        code: int = arguments.run(arguments)
    except AgentError as e:
        sys.stderr.write(f"error: {one_line(str(e))}\n")
        return e.exit_code
    except KeyboardInterrupt:
        return _INTERRUPTED
    return code


def complete() -> int:
    """Print what the words of `kubectl nodeagent` may become: kubectl runs it as `kubectl_complete-nodeagent`."""
    try:
        from client.cli.user_commands import complete_for_kubectl  # noqa: PLC0415 - see USER_COMMANDS
    except ModuleNotFoundError:
        # A message would be in the line that the user types.
        return 1
    sys.stdout.write(complete_for_kubectl(sys.argv[1:]))
    return 0


def _run_pod_command(name: str, *words: str) -> int:
    """Run a command in its pod: an agent never loads what it needs."""
    if name == _RUN_SCHEDULE:
        from client.cli.run_schedule import run_words  # noqa: PLC0415 - see above
    else:
        from client.cli.run_restore_test import run_words  # noqa: PLC0415 - see above
    return run_words(words)


def _run_user_command(words: list[str]) -> int:
    # A command keeps nearly all that it reads until it ends, so collections would find nothing, again and again.
    gc.set_threshold(_OBJECTS_PER_COLLECTION)
    try:
        from client.cli.user_commands import run_user_command  # noqa: PLC0415 - see USER_COMMANDS
    except ModuleNotFoundError as e:
        package = (e.name or "").partition(".")[0]
        if package not in _USER_PACKAGES:
            raise
        command = words[0] if words else "completion"
        raise ConfigError(
            f"{command} needs the Python package {package}: install node-agent with its extra cli, such as "
            "pipx install '.[cli]' in its sources"
        ) from e
    return run_user_command(words)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="nodeagent",
        description=_ABOUT,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"node-agent {VERSION}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, text in USER_COMMANDS.items():
        commands.add_parser(name, help=text)
    for name, (text, set_up) in _AGENT_COMMANDS.items():
        _add_command(commands, name, text, set_up)
    for name, text in _POD_COMMANDS.items():
        commands.add_parser(name, help=text)
    return parser


def _check_command(words: Sequence[str]) -> None:
    """Raise ConfigError, with the command that may be meant, unless the first word, if any, is a flag or a command."""
    known = (*USER_COMMANDS, *_AGENT_COMMANDS, *_POD_COMMANDS)
    for name in words:
        if not name.startswith("-") and name not in known:
            text = f'no such command "{name}"'
            raise ConfigError(f"{hinted(text, name, known)} (see nodeagent --help)")


def _set_up_velero(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_command(commands, "server", "the same as serve", set_up_serve)


_AGENT_COMMANDS: Final[Mapping[str, tuple[str, Callable[[argparse.ArgumentParser], None]]]] = {
    "serve": ("run the agent of one node", set_up_serve),
    "check-config": ("check a configuration", set_up_check_config),
    "node-agent": ("start the agent as Velero's DaemonSet does (server)", _set_up_velero),
}


def _add_command(
    commands: "argparse._SubParsersAction[Any]", name: str, text: str, set_up: Callable[[argparse.ArgumentParser], None]
) -> None:
    set_up(
        commands.add_parser(name, help=text, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    )


if __name__ == "__main__":
    sys.exit(main())
