"""A command of the product in a pseudo-terminal, as a person sees it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["Terminal", "run_in_terminal"]

_ROOT = Path(__file__).parents[2]
_COLUMNS, _LINES = 160, 40
_CONTROLS = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
_READ_BYTES = 1 << 16
_POLL_SECONDS = 0.2


class Terminal:
    """What a command has written to its terminal so far."""

    def __init__(self, master: int, process: subprocess.Popen[bytes]) -> None:
        """Read from `master`, the side of the terminal that the command does not have."""
        self._master = master
        self._raw = b""
        self.process = process

    @property
    def raw(self) -> str:
        """Everything, with its control sequences."""
        return self._raw.decode(errors="replace")

    @property
    def text(self) -> str:
        """Everything, without control sequences; each frame of what is shown in place follows the one before."""
        return _CONTROLS.sub("", self.raw).replace("\r", "")

    def read_until(self, pattern: str, *, seconds: float = 120) -> None:
        """Return once the text matches; fail with it if that does not happen in time, or the command ends."""
        until = time.monotonic() + seconds
        while not re.search(pattern, self.text):
            assert time.monotonic() < until, f"no {pattern!r} in:\n{self.text}"
            if not self._read() and self.process.poll() is not None:
                assert re.search(pattern, self.text), f"ended without {pattern!r}:\n{self.text}"

    def wait(self, *, seconds: float = 120) -> int:
        """Return the exit code of the command, once all that it wrote was read."""
        until = time.monotonic() + seconds
        while self._read() or self.process.poll() is None:
            assert time.monotonic() < until, f"it does not end:\n{self.text}"
        return self.process.wait()

    def _read(self) -> bool:
        """Read what is there, after a moment; return whether there was something."""
        if not select.select([self._master], [], [], _POLL_SECONDS)[0]:
            return False
        try:
            found = os.read(self._master, _READ_BYTES)
        except OSError:
            # Linux reports the end of the other side as an error.
            return False
        self._raw += found
        return bool(found)


@contextmanager
def run_in_terminal(words: Sequence[str], env: Mapping[str, str] = os.environ) -> Iterator[Terminal]:
    """Run `python -m nodeagent WORD…` in a terminal of 160 columns; it is killed if it still runs after the block."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", _LINES, _COLUMNS, 0, 0))
    kept = {key: value for key, value in env.items() if key not in {"NO_COLOR", "COLUMNS", "LINES"}}
    process = subprocess.Popen(
        [sys.executable, "-m", "nodeagent", *words],
        cwd=_ROOT,
        env=kept | {"TERM": "xterm-256color"},
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
    )
    os.close(slave)
    try:
        with process:
            try:
                yield Terminal(master, process)
            finally:
                process.kill()
    finally:
        os.close(master)
