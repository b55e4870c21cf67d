"""The agent's command line: its commands, and errors as one line with an exit code."""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

from core.errors import AgentError, ConfigError
from core.redact import redact
from core.version import VERSION
from nodeagent.cli.check_config import set_up_check_config
from nodeagent.cli.serve import set_up_serve

__all__ = ["main"]

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
  kubectl apply -f deploy/crds && kubectl apply -k deploy
        install the agent on every node of a cluster
"""


class _ExitingParser(argparse.ArgumentParser):
    """Exits with one line about an error where argparse would print the usage."""

    def error(self, message: str) -> NoReturn:
        """Exit with code 2."""
        self.exit(ConfigError.exit_code, f"error: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv` and return its exit code."""
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
    except AgentError as e:
        sys.stderr.write(f"error: {redact(' '.join(str(e).split()))}\n")
        return e.exit_code
    except KeyboardInterrupt:
        return _INTERRUPTED
    return code


def _parser() -> argparse.ArgumentParser:
    parser = _ExitingParser(
        prog="nodeagent",
        description=_ABOUT,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"node-agent {VERSION}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_command(commands, "serve", "run the agent of one node", set_up_serve)
    _add_command(commands, "check-config", "check a configuration", set_up_check_config)
    _add_command(commands, "node-agent", "start the agent as Velero's DaemonSet does (server)", _set_up_velero)
    return parser


def _set_up_velero(parser: argparse.ArgumentParser) -> None:
    """Add the command `server`, with which Velero's DaemonSet starts its agent."""
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_command(commands, "server", "the same as serve", set_up_serve)


def _add_command(
    commands: "argparse._SubParsersAction[Any]",
    name: str,
    text: str,
    set_up: Callable[[argparse.ArgumentParser], None],
) -> None:
    set_up(
        commands.add_parser(name, help=text, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    )
