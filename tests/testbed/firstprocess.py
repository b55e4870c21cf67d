"""What the first process of a PID namespace must do: collect orphans until its worker ends.

containerd's shims become its children. When it ends, the kernel ends everything else in the
namespace.
"""

import os
import signal
from collections.abc import Callable
from types import FrameType


def run_as_first_process(work: Callable[[], int]) -> int:
    """Fork, let the child do `work`, pass SIGTERM on to it, return its exit code."""
    worker = os.fork()
    if worker == 0:
        os._exit(work())

    def pass_on(number: int, _: FrameType | None) -> None:
        os.kill(worker, number)

    signal.signal(signal.SIGTERM, pass_on)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the worker gets it from the terminal itself
    while True:
        pid, status = os.wait()
        if pid == worker:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
