"""`python -m datamover`: the handler for SIGTERM first, then the mode that the command line names.

Does not know what a command does. Each mode is imported only where it is needed: a pod then
holds nothing that serves a terminal, and a terminal nothing that reaches a cluster.
"""

import sys
from collections.abc import Sequence

from datamover.runtime.signals import StopSignal

__all__ = ["main"]


def main() -> int:
    """Run the command line and return its exit code."""
    stop = StopSignal()
    stop.install()
    return _run(sys.argv[1:], stop)


def _run(argv: Sequence[str], stop: StopSignal) -> int:
    """Run one command and return its exit code."""
    import asyncio  # noqa: PLC0415 - the handler must stand before the heavy imports

    from core.errors import AgentError  # noqa: PLC0415 - see above
    from core.logs import set_up_logging  # noqa: PLC0415 - see above
    from datamover.arguments import parse_arguments  # noqa: PLC0415 - see above

    try:
        arguments = parse_arguments(argv)
        if getattr(arguments, "repository", ""):
            set_up_logging(arguments.log_level or "warning", arguments.log_format)
            from datamover.local.command import run_local  # noqa: PLC0415 - a pod does without it

            return asyncio.run(run_local(arguments, stop))
        set_up_logging(arguments.log_level or "info", arguments.log_format)
        from datamover.pod.command import run_in_pod  # noqa: PLC0415 - a terminal does without it

        return asyncio.run(run_in_pod(arguments, stop))
    except AgentError as e:
        sys.stderr.write(f"datamover: {e}\n")
        return e.exit_code


if __name__ == "__main__":
    sys.exit(main())
