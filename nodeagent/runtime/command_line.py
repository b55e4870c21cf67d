"""The parser of the agent's commands, and flags that several of them share."""

import argparse
from typing import Final, NoReturn

from core.errors import ConfigError

__all__ = [
    "KUBECONFIG_HELP",
    "KUBECONTEXT_HELP",
    "CommandParser",
    "add_kubeconfig",
    "add_namespace",
]

KUBECONFIG_HELP: Final = (
    "kubeconfig file (default: the pod's ServiceAccount; outside of a pod $KUBECONFIG, then ~/.kube/config)"
)
KUBECONTEXT_HELP: Final = "context of the kubeconfig (default: its current one)"


class CommandParser(argparse.ArgumentParser):
    """Raises an error where argparse would print the usage and exit."""

    def error(self, message: str) -> NoReturn:
        """Report an invalid command line.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(f"{message} (see {self.prog} --help)")


def add_kubeconfig(group: argparse._ArgumentGroup) -> None:
    """Add `--kubeconfig` and `--kubecontext`; the defaults are empty."""
    group.add_argument("--kubeconfig", metavar="PATH", default="", help=KUBECONFIG_HELP)
    group.add_argument("--kubecontext", metavar="NAME", default="", help=KUBECONTEXT_HELP)


def add_namespace(group: argparse._ArgumentGroup, text: str) -> None:
    """Add `--namespace` and `-n`, described by `text`; the default is empty."""
    group.add_argument(
        "--namespace",
        "-n",
        metavar="NAME",
        default="",
        help=f"{text} (default: $VELERO_NAMESPACE, then the kubeconfig's, then velero)",
    )
