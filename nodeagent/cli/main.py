"""The agent's command line.

Knows the commands, and how an error becomes one line and an exit code. Does not know what a
command takes or does (`nodeagent.cli.serve`, `nodeagent.cli.check_config`).
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Final, NoReturn

from core.errors import AgentError, ConfigError
from core.version import VERSION
from nodeagent.cli.check_config import set_up_check_config
from nodeagent.cli.serve import set_up_serve

__all__ = ["main"]

_INTERRUPTED: Final = 130
"""What shells report for a process that ended on SIGINT."""

_ABOUT: Final = """\
Moves the data of persistent volumes into a backup repository and back, for one node of a
Kubernetes cluster. It carries out Velero's DataUpload and DataDownload resources, in the place
of Velero's own node-agent."""

_EXAMPLES: Final = """\
examples:
  nodeagent serve --help
        all flags, with their defaults
  nodeagent check-config node-agent-config.json
        what is wrong with a configuration, before an agent meets it
  kubectl apply -f deploy/crds && kubectl apply -k deploy
        install the agent on every node of a cluster
"""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, instead of a page of usage."""

    def error(self, message: str) -> NoReturn:
        """End the process with exit code 2."""
        self.exit(ConfigError.exit_code, f"error: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` names and return its exit code."""
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
    except AgentError as e:
        sys.stderr.write(f"error: {' '.join(str(e).split())}\n")
        return e.exit_code
    except KeyboardInterrupt:
        return _INTERRUPTED
    return code


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="nodeagent",
        description=_ABOUT,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"node-agent {VERSION}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, words, set_up in (
        ("serve", "run the agent for one node", set_up_serve),
        ("check-config", "say what is wrong with a configuration", set_up_check_config),
    ):
        set_up(
            commands.add_parser(
                name, help=words, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
            )
        )
    return parser
