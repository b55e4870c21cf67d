"""The options of `backup create` and `schedule create` that say which volumes are backed up, and how."""

import functools
from collections.abc import Callable
from typing import Any, Final

import click

from client.backups.manifests import parse_pairs
from client.backups.methods import Method
from client.backups.plan import Choice
from client.cli.options import ignore_server_option

__all__ = ["backup_options"]

_OPTIONS: Final = (
    click.option("--pvc", "claims", metavar="NAMESPACE/NAME", multiple=True, help="PVC to back up; may be repeated"),
    click.option("--namespace", "-n", metavar="NAME", default="", help="namespace of the PVCs, for -l and --pvc NAME"),
    click.option("--selector", "-l", metavar="LABELS", default=None, help="PVCs of the namespace with these labels"),
    click.option(
        "--method",
        type=click.Choice([method.value for method in Method]),
        default=Method.AUTO.value,
        help="csi-snapshot, fs-backup from a running pod, or auto: the first that is possible (default: auto)",
    ),
    click.option(
        "--storage-location",
        metavar="NAME",
        default="",
        help="BackupStorageLocation (default: the one that is default)",
    ),
    click.option("--labels", metavar="KEY=VALUE,...", default="", help="labels of the transfers"),
    click.option("--annotations", metavar="KEY=VALUE,...", default="", help="annotations of the transfers"),
    ignore_server_option,
)


def backup_options(function: Callable[..., int | None]) -> Callable[..., int | None]:
    """Add these options; the command gets `choice`, a Choice, and `location`, `labels` and `annotations`."""

    @functools.wraps(function)
    def run(*args: Any, **given: Any) -> int | None:  # noqa: ANN401 - click's
        chosen = ("claims", "namespace", "selector", "method", "ignore_velero_server")
        choice = Choice.parse(**{key: given.pop(key) for key in chosen})
        for key in ("labels", "annotations"):
            given[key] = parse_pairs(f"--{key}", given[key])
        return function(*args, choice=choice, location=given.pop("storage_location"), **given)

    for option in reversed(_OPTIONS):
        run = option(run)
    return run
