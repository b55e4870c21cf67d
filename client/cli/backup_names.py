"""The names of backups, for the completion of shells."""

from collections.abc import Sequence

import click

from client.backups.view import read_backups
from client.cli.options import complete_names
from nodeagent.runtime.connection import Connection

__all__ = ["complete_backups"]


def complete_backups(context: click.Context, _: click.Parameter, incomplete: str) -> Sequence[str]:
    """Return the names of backups for the shell; none, if the cluster does not answer."""

    async def read(cluster: Connection) -> list[str]:
        return (await read_backups(cluster.client, cluster.namespace)).names

    return complete_names(context, incomplete, read)
