"""A command of the product as a process: in a pseudo-terminal, as a person runs it, or with pipes."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_SEQUENCES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_PIECES = re.compile(r"\x1b\[(?P<count>[0-9;?]*)(?P<command>[A-Za-z])|(?P<control>[\r\n])|(?P<text>[^\x1b\r\n]+)")
_READ_BYTES = 65_536
_POLL_SECONDS = 0.1
_LONGEST_SECONDS = 300.0


def plain(text: str) -> str:
    """Return what a terminal got without colors and movements of the cursor."""
    return _SEQUENCES.sub("", text).replace("\r\n", "\n").replace("\r", "")


def screen_of(raw: str) -> str:
    """Return what is on the screen in the end, as a terminal of any height has it.

    What is drawn in the place of something else replaces it, as progress does. Only what rich writes is understood.
    """
    lines, row, column = [""], 0, 0
    for piece in _PIECES.finditer(raw):
        if text := piece["text"]:
            lines[row] = lines[row][:column].ljust(column) + text + lines[row][column + len(text) :]
            column += len(text)
        elif piece["control"] == "\r":
            column = 0
        elif piece["control"] == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif piece["command"] == "A":
            row = max(0, row - int(piece["count"] or 1))
        elif piece["command"] == "K":
            lines[row] = "" if piece["count"] == "2" else lines[row][:column]
    return "\n".join(line.rstrip() for line in lines)


@dataclass
class Terminal:
    """A process and the other end of its terminal; `raw` is all that it has written so far."""

    process: subprocess.Popen[bytes]
    master: int
    raw: str = ""

    @property
    def text(self) -> str:
        """All that it has written, without control sequences; what is redrawn follows what was there before."""
        return plain(self.raw)

    def read_until(self, pattern: str, *, seconds: float = 600.0) -> str:
        """Return all text once it matches; fail if it does not in time, or the process ends before."""
        until = time.monotonic() + seconds
        while not re.search(pattern, self.text):
            assert self._read(), f"the process ended before {pattern!r}: {self.text}"
            assert time.monotonic() < until, f"no {pattern!r} in {seconds} s: {self.text}"
        return self.text

    def finish(self, *, seconds: float = 600.0) -> tuple[int, str]:
        """Return the exit code and all text, once the process has ended."""
        until = time.monotonic() + seconds
        while self._read():
            assert time.monotonic() < until, f"not ended in {seconds} s: {self.text}"
        return self.process.wait(seconds), self.text

    def answer(self, text: str) -> None:
        """Type a line."""
        os.write(self.master, f"{text}\n".encode())

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        self.process.send_signal(signal.SIGINT)

    def _read(self) -> bool:
        """Read what is there; return whether there may be more."""
        if not select.select([self.master], [], [], _POLL_SECONDS)[0]:
            return True
        try:
            piece = os.read(self.master, _READ_BYTES)
        except OSError:
            # Linux reports the end of a terminal's last process so.
            return False
        self.raw += piece.decode(errors="replace")
        return bool(piece)


@contextmanager
def open_terminal(
    words: Sequence[str], *, columns: int = 160, lines: int = 60, environment: Mapping[str, str] | None = None
) -> Iterator[Terminal]:
    """Run `python -m nodeagent WORD…` in a terminal of that size; it is killed if it still runs after the block."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    inherited = {key: value for key, value in os.environ.items() if key not in {"NO_COLOR", "COLUMNS", "LINES"}}
    argv, env = [sys.executable, "-m", "nodeagent", *words], {"TERM": "xterm-256color", "LANG": "C.UTF-8"}
    with _interrupts():
        process = subprocess.Popen(
            argv, cwd=_ROOT, stdin=slave, stdout=slave, stderr=slave, env=inherited | env | dict(environment or {})
        )
    os.close(slave)
    with process:
        try:
            yield Terminal(process, master)
        finally:
            process.kill()
            os.close(master)


def run_interrupted(words: Sequence[str], when: Callable[[], bool]) -> tuple[str, str]:
    """Run `python -m nodeagent WORD…` with pipes, and press Ctrl-C `when` it is time; return its output and errors.

    It must end by that, and without a traceback.
    """
    argv, until = [sys.executable, "-m", "nodeagent", *words], time.monotonic() + _LONGEST_SECONDS
    with _interrupts():
        process = subprocess.Popen(argv, cwd=_ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with process:
        try:
            while not when():
                assert process.poll() is None, "it has ended"
                assert time.monotonic() < until, "it does not come to that"
                time.sleep(_POLL_SECONDS)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=_LONGEST_SECONDS)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "Traceback" not in err
    return out, err


@contextmanager
def _interrupts() -> Iterator[None]:
    """Let a process that is started meanwhile end by SIGINT.

    A shell starts what runs in the background with SIGINT ignored, and children of such tests would ignore it too.
    """
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
