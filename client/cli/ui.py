"""The command `nodeagent ui`: a page on this machine that shows what is going on in the cluster."""

import asyncio
import webbrowser
from contextlib import suppress
from typing import Final

import click

from client.cli.options import UserCommand, cluster_options
from client.cli.output import Printer
from client.status.read import StatusReader
from client.ui.live import Details, Live
from client.ui.server import Pages, serve
from core.clock import SystemClock
from core.errors import ConfigError
from nodeagent.runtime.connection import Connection

_EXAMPLES: Final = """\
examples:
  nodeagent ui -n velero
        open the page in a browser; Ctrl-C ends it
  nodeagent ui --no-browser --port 8765
        only print the address, such as for a tunnel: ssh -L 8765:127.0.0.1:8765 HOST

The server listens on 127.0.0.1 alone, and shows what you may see with your kubeconfig. The address works
once: it gives one browser a cookie. The page changes nothing; it shows the commands that do.

exit codes:
  0  ended
  1  an error of the cluster, such as a missing permission
  2  invalid command line, the port is in use, or the cluster is not reachable
"""


@click.command("ui", cls=UserCommand, epilog=_EXAMPLES)
@click.option("--port", type=click.IntRange(0, 65535), metavar="PORT", default=0, help="port (default: a free one)")
@click.option("--no-browser", is_flag=True, help="open no browser")
@cluster_options
async def ui(cluster: Connection, printer: Printer, *, port: int, no_browser: bool) -> None:
    """Show what is going on, in a browser: volumes, transfers, queue, repositories."""
    clock, reader = SystemClock(), StatusReader(cluster.client, cluster.namespace, now=cluster.time.now)
    # A cluster that does not answer is an error now; later, the page says so.
    await reader.read_rules(())
    live = Live(cluster.client, cluster.namespace, reader, clock)
    details = Details(cluster.client, cluster.namespace, now=cluster.time.now, clock=clock)
    try:
        async with serve(Pages(live, details), port) as url:
            printer.line(url)
            printer.note("the address works once, in one browser; Ctrl-C ends the server")
            if not no_browser:
                with suppress(webbrowser.Error):
                    await asyncio.to_thread(webbrowser.open, url)
            await live.run()
    except OSError as e:
        raise ConfigError(f"--port: cannot listen on 127.0.0.1:{port}: {e.strerror}") from e
