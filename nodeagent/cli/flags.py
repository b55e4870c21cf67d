"""Flags that several commands have, with the same words.

Knows how the way to a cluster is given. Does not know the commands.
"""

import argparse

__all__ = ["add_kubeconfig", "add_namespace"]


def add_kubeconfig(group: argparse._ArgumentGroup) -> None:
    """Give a command `--kubeconfig`, empty where it is not named."""
    group.add_argument(
        "--kubeconfig",
        metavar="FILE",
        default="",
        help="how to reach the cluster (default: a pod's own account; elsewhere $KUBECONFIG, then ~/.kube/config)",
    )


def add_namespace(group: argparse._ArgumentGroup, words: str) -> None:
    """Give a command `--namespace`, empty where it is not named; `words` say whose it is."""
    group.add_argument(
        "--namespace",
        metavar="NAME",
        default="",
        help=f"{words} (default: $VELERO_NAMESPACE, then the kubeconfig's, then velero)",
    )
