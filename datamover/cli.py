"""The mover's command line: which command it names, and which exit code comes of it.

Does not know what a command does. Each side is imported only where it is needed: a pod then
holds nothing that serves a terminal, and a terminal nothing that reaches a cluster.
"""

import asyncio
import sys
from collections.abc import Sequence

from core.errors import AgentError
from core.logs import set_up_logging
from datamover.arguments import parse_arguments
from datamover.signals import StopSignal

__all__ = ["run"]


def run(argv: Sequence[str], stop: StopSignal) -> int:
    """Run one command and return its exit code."""
    try:
        arguments = parse_arguments(argv)
        if getattr(arguments, "repository", ""):
            set_up_logging(arguments.log_level or "warning", arguments.log_format)
            from datamover.handcommand import run_by_hand  # noqa: PLC0415 - see above

            return asyncio.run(run_by_hand(arguments, stop))
        set_up_logging(arguments.log_level or "info", arguments.log_format)
        from datamover.podcommand import run_in_pod  # noqa: PLC0415 - see above

        return asyncio.run(run_in_pod(arguments, stop))
    except AgentError as e:
        sys.stderr.write(f"datamover: {e}\n")
        return e.exit_code
