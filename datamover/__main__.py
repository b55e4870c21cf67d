"""`python -m datamover`: the handler for SIGTERM first, then everything else."""

import sys

from datamover.signals import StopSignal

__all__ = ["main"]


def main() -> int:
    """Run the command line and return its exit code."""
    stop = StopSignal()
    stop.install()
    from datamover.cli import run  # noqa: PLC0415 - the handler must stand before the heavy imports

    return run(sys.argv[1:], stop)


if __name__ == "__main__":
    sys.exit(main())
