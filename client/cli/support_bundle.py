"""The command `nodeagent support-bundle`: an archive that helps others to help, without secrets."""

import os
import tempfile
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Final

import click

from client.cli.options import UserCommand, cluster_options, working
from client.cli.output import OutputFormat, Printer
from client.support_bundle import Bundle, BundleReader, pack
from client.text import format_bytes
from core.errors import ConfigError
from nodeagent.runtime.connection import ClusterAccess, connect

_EXAMPLES: Final = """\
examples:
  nodeagent support-bundle --list
        what a bundle would have, and what is missing; nothing is written
  nodeagent support-bundle
        write node-agent-support-<namespace>-<time>.tar.gz into this directory
  nodeagent support-bundle --output bundle.tar.gz --namespace staging
        into that file, which must not exist

Never in it: Secrets, values of environment variables, the annotation last-applied-configuration, fields
that are not listed. What has the form of a secret is replaced by ***. Read it before you pass it on: names
stay.

exit codes:
  0  written or listed, also if some of it could not be read: the output names that
  1  an error of the cluster
  2  invalid command line, the file cannot be written, or the cluster is not reachable
"""


@click.command("support-bundle", cls=UserCommand, epilog=_EXAMPLES)
@click.option(
    "--output", "path", type=click.Path(path_type=Path), metavar="PATH", help="the archive to write; -o PATH does too"
)
@click.option("--list", "only_list", is_flag=True, help="show what the archive would have, and write nothing")
@click.option(
    "-o",
    "form",
    metavar="FORMAT",
    default=OutputFormat.TABLE.value,
    help="format of the answer, not of the archive: table, wide, json or yaml (default: table)",
)
@cluster_options
async def support_bundle(access: ClusterAccess, form: str, path: Path | None, *, only_list: bool) -> None:
    """Collect what helps to find a fault into an archive, without secrets."""
    if form not in set(OutputFormat):
        if path is not None:
            raise ConfigError(f'-o: "{form}" is no format of the answer: {", ".join(OutputFormat)}')
        if "." not in form and "/" not in form:
            raise ConfigError(
                f'-o: "{form}" is neither a format ({", ".join(OutputFormat)}) nor a path such as b.tar.gz'
            )
        form, path = OutputFormat.TABLE, Path(form)
    if path is not None and path.exists():
        raise ConfigError(f"{path} exists already: name another file")
    printer, answer_form = Printer(), OutputFormat(form)
    async with connect(access) as cluster:
        with working(cluster, printer, "reading the cluster") as tools:
            bundle = await BundleReader(tools).read()
        at = tools.now()
    target = path or Path(f"node-agent-support-{cluster.namespace}-{at:%Y%m%d-%H%M%S}.tar.gz")
    if not only_list:
        _write(target, bundle, at)
    if answer_form.for_programs:
        files = [{"name": one.name, "about": one.about, "bytes": len(one.content)} for one in bundle.files]
        written = "" if only_list else str(target)
        printer.document({"file": written, "files": files, "missing": bundle.missing}, answer_form)
        return
    if only_list:
        rows = [[one.name, format_bytes(len(one.content)), one.about] for one in bundle.files]
        printer.table(("FILE", "SIZE", "CONTENT"), rows)
    else:
        printer.line(f"{target}: {len(bundle.files)} files, {format_bytes(target.stat().st_size)}")
    printer.notes(f"not in the bundle: {missing}" for missing in bundle.missing)


def _write(target: Path, bundle: Bundle, at: datetime) -> None:
    """Write the archive as a whole, readable by its owner alone; an interrupted run leaves nothing."""
    content = pack(bundle, target.name.removesuffix(".tar.gz"), at)
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            # Unlike a rename, this never replaces a file that appeared meanwhile.
            Path(target).hardlink_to(temporary)
        finally:
            with suppress(OSError):
                Path(temporary).unlink()
    except OSError as e:
        raise ConfigError(f"{target} cannot be written: {e.strerror}") from e
