"""`python -m tests.testbed.slow_day PERCENT COMMAND…`: a command on a slow day, such as `58 make test`.

All its processes together, those of the test bed's pods too, get that share of the processors. At the end it says how
many they used on average, and at most within a few seconds.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

from tests.testbed import cgroups

_SAMPLE_SECONDS = 10
_POLL_SECONDS = 1


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    if len(arguments) < 2 or not arguments[0].isdigit() or os.geteuid() != 0:
        print(f"error: run as root: {__doc__.splitlines()[0] if __doc__ else ''}", file=sys.stderr)
        return 2
    processors = int(arguments[0]) / 100 * len(os.sched_getaffinity(0))
    name = f"{cgroups.SLOW_DAY}-{os.getpid()}"
    cgroups.limit_group(name, processors)
    stops: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _: stops.append(received))
    began = time.monotonic()
    child = subprocess.Popen(arguments[1:], preexec_fn=lambda: cgroups.attach(name))  # noqa: PLW1509 - one thread
    code, most = _follow(name, child, stops)
    seconds = time.monotonic() - began
    mean = cgroups.read_used_seconds(name) / seconds
    print(
        f"{seconds:.0f} s with {processors:.2f} processors: {mean:.2f} used on average, "
        f"at most {most:.2f} within {_SAMPLE_SECONDS} s"
    )
    cgroups.remove_groups(name)
    return code


def _follow(name: str, child: subprocess.Popen[bytes], stops: list[int]) -> tuple[int, float]:
    """Wait for the end of the child, which gets the signals of `stops`.

    Returns how it ended, and the most processors that the group used.
    """
    most, at, used = 0.0, time.monotonic(), 0.0
    while True:
        while stops:
            child.send_signal(stops.pop())
        with suppress(subprocess.TimeoutExpired):
            return child.wait(_POLL_SECONDS), most
        now = time.monotonic()
        if now - at >= _SAMPLE_SECONDS:
            total = cgroups.read_used_seconds(name)
            most, at, used = max(most, (total - used) / (now - at)), now, total


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
