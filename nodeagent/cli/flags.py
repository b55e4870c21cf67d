"""Flags that several commands share."""

import argparse

__all__ = ["add_kubeconfig", "add_namespace"]


def add_kubeconfig(group: argparse._ArgumentGroup) -> None:
    """Add `--kubeconfig` and `--kubecontext`; the defaults are empty."""
    group.add_argument(
        "--kubeconfig",
        metavar="PATH",
        default="",
        help="kubeconfig file (default: the pod's ServiceAccount; outside of a pod $KUBECONFIG, then ~/.kube/config)",
    )
    group.add_argument(
        "--kubecontext", metavar="NAME", default="", help="context of the kubeconfig (default: its current one)"
    )


def add_namespace(group: argparse._ArgumentGroup, text: str) -> None:
    """Add `--namespace` and `-n`, described by `text`; the default is empty."""
    group.add_argument(
        "--namespace",
        "-n",
        metavar="NAME",
        default="",
        help=f"{text} (default: $VELERO_NAMESPACE, then the kubeconfig's, then velero)",
    )
