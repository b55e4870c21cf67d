"""Flags of Velero's binary without effect: accepted, so that its DaemonSets start this agent unchanged.

Source: Velero v1.18, pkg/cmd/velero/velero.go and pkg/install/daemonset.go; its Helm chart 12.1,
templates/node-agent-daemonset.yaml; klog v2.130, klog.go.
"""

import argparse
from collections.abc import Sequence
from typing import Any, Final

__all__ = ["IGNORED_FLAGS", "add_velero_flags"]

IGNORED_FLAGS: Final = "ignored_flags"
"""The attribute of a parsed command line with the flags that were given, and are ignored: a list of strings."""

_WITH_VALUE: Final = {
    ("--features",): ("NAMES", "features of Velero's server"),
    ("--colorized",): ("BOOL", "colors of Velero's command line"),
    ("--log_backtrace_at",): ("PLACE", "klog: stack trace at a line of code"),
    ("--log_dir",): ("PATH", "klog: directory of log files"),
    ("--log_file",): ("PATH", "klog: log file"),
    ("--log_file_max_size",): ("NUMBER", "klog: size of a log file"),
    ("--stderrthreshold",): ("LEVEL", "klog: level from which lines go to standard error"),
    ("--v", "-v"): ("NUMBER", "klog: verbosity; use --log-level"),
    ("--vmodule",): ("PATTERNS", "klog: verbosity by file"),
}

_SWITCHES: Final = {
    "--add_dir_header": "klog: directories in the headers of lines",
    "--alsologtostderr": "klog: files and standard error",
    "--logtostderr": "klog: standard error instead of files",
    "--one_output": "klog: one file for each line",
    "--skip_headers": "klog: lines without headers",
    "--skip_log_headers": "klog: files without headers",
}


class _Ignore(argparse.Action):
    """Remembers that the flag was given, and drops its value."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002 - the signature is argparse's
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,  # noqa: ARG002 - as above
        option_string: str | None = None,
    ) -> None:
        given: list[str] = getattr(namespace, IGNORED_FLAGS, [])
        setattr(namespace, IGNORED_FLAGS, [*given, option_string or self.option_strings[0]])


def add_velero_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags without effect to `parser`."""
    group = parser.add_argument_group("accepted for DaemonSets of Velero, without effect")
    for names, (metavar, text) in _WITH_VALUE.items():
        group.add_argument(*names, action=_Ignore, dest=argparse.SUPPRESS, metavar=metavar, help=text)
    for name, text in _SWITCHES.items():
        group.add_argument(name, action=_Ignore, dest=argparse.SUPPRESS, nargs="?", metavar="BOOL", help=text)
