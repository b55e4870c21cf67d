"""`python -m datamover`: install the handler for SIGTERM, then import and run the mode of the command line."""

import sys

from datamover.runtime.signals import StopSignal


def main() -> int:
    """Run the command line and return its exit code."""
    stop = StopSignal()
    stop.install()
    return _run(stop)


def _run(stop: StopSignal) -> int:
    """Import and run the selected mode, with the handler installed; return its exit code."""
    import asyncio  # noqa: PLC0415 - the handler must be installed before the heavy imports
    import os  # noqa: PLC0415 - see above

    from core.errors import AgentError  # noqa: PLC0415 - see above
    from core.logs import set_up_logging  # noqa: PLC0415 - see above
    from core.redact import Redactor  # noqa: PLC0415 - see above
    from datamover.arguments import LocalOptions, parse_arguments  # noqa: PLC0415 - see above

    redactor = Redactor()
    try:
        options = parse_arguments(sys.argv[1:], os.environ)
        set_up_logging(options.log.level, options.log.format, redactor=redactor)
        if isinstance(options, LocalOptions):
            from datamover.local.command import run_local  # noqa: PLC0415 - not needed in a pod

            return asyncio.run(run_local(options, stop, redactor))
        from datamover.pod.transfer import run_in_pod  # noqa: PLC0415 - not needed in local mode

        return asyncio.run(run_in_pod(options, stop, redactor))
    except AgentError as e:
        sys.stderr.write(f"error: {redactor.redact(str(e))}\n")
        return e.exit_code


if __name__ == "__main__":
    sys.exit(main())
