"""kopia as a child process.

Knows the flags every call gets, which secrets its environment holds, and what it said last.
Does not know repositories, snapshots or volumes: callers bring the arguments.
Source: kopia 0.23.1, `kopia --help-full`.
"""

import asyncio
import json
import logging
import signal
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Protocol

from core.errors import KopiaError
from core.models.base import JsonDict
from datamover.kopia.causes import find_cause
from datamover.runtime.child import ChildCommand, run_child
from datamover.runtime.redact import Redactor
from datamover.runtime.resources import ran_out_of_memory
from datamover.runtime.work_dir import WorkFolder

__all__ = ["Kopia", "KopiaAnswer", "KopiaFiles", "KopiaSilentError", "Listener", "kopia_environment"]

_logger = logging.getLogger(__name__)

_OWN_FLAGS: Final = (
    "--no-auto-maintenance",
    "--no-persist-credentials",
    "--no-use-keyring",
    "--disable-file-logging",
    "--error-notifications=never",
)
_KEPT_LINES: Final = 40
"""More of kopia's last lines than a termination message holds."""

_SHOWN_LINES: Final = 12

_PLEASANTRIES: Final = ("Snapshotting ", "Unable to estimate", "Restoring to ")
"""Beginnings of lines that say nothing about a failure."""

_SHORT_CALL_SECONDS: Final = 120.0
"""What a call that moves no data may take; kopia gives up on a dead storage within that."""


def kopia_environment(base: Mapping[str, str], folder: WorkFolder, secrets: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of every call: `base` without kopia's settings, and our own."""
    own = {
        "KOPIA_CHECK_FOR_UPDATES": "false",
        "KOPIA_CONFIG_PATH": str(folder.config_file),
        # The root file system may be read-only, and nothing of this user's shall be read.
        "HOME": str(folder.path),
        "KOPIA_LOG_DIR": str(folder.path / "logs"),
    }
    kept = {name: value for name, value in base.items() if not name.startswith("KOPIA_")}
    return {**kept, **own, **secrets}


@dataclass(frozen=True)
class KopiaFiles:
    """Open files that stand for kopia's standard input and output."""

    stdin_fd: int | None = None
    stdout_fd: int | None = None


class Listener(Protocol):
    """Hears what kopia says while it moves data."""

    def take(self, line: str) -> str:
        """Take what a line tells of progress; return the rest of it."""
        ...

    def hear(self, words: str) -> None:
        """Take such a rest, without secrets, as soon as it is said."""
        ...


@dataclass(frozen=True)
class KopiaAnswer:
    """What a call of kopia came to.

    `lines` are the last of its standard error, scrubbed; `counters` is what its metrics were
    when it ended, as a Prometheus text: empty if it did not end by itself, or moved no data.
    `out_of_memory` says that the kernel ended it for that.
    """

    attempted: str
    exit_code: int
    output: bytes
    lines: list[str] = field(default_factory=list)
    counters: str = field(default="", repr=False)
    out_of_memory: bool = False

    @property
    def succeeded(self) -> bool:
        """Whether kopia exited with 0; for a snapshot that alone says little."""
        return self.exit_code == 0

    @property
    def end(self) -> str:
        """How kopia ended, for a message."""
        end = f"signal {-self.exit_code}" if self.exit_code < 0 else f"exit code {self.exit_code}"
        why = ": out of memory, it was killed by the node's kernel" if self.out_of_memory else ""
        return f"kopia ended with {end}{why}"

    def said(self, text: str) -> bool:
        """Whether one of the last lines holds `text`, in any case."""
        return any(text.lower() in line.lower() for line in self.lines)

    def error(self, cause: str = "") -> KopiaError:
        """Return the error this answer is: one line of cause, then kopia's last lines."""
        head = f"{self.attempted}: {cause or find_cause(self.lines) or self.end}"
        lines = [line for line in self.lines if not line.startswith(_PLEASANTRIES)]
        return KopiaError("\n".join([head, *lines[-_SHOWN_LINES:]]))

    def check(self) -> "KopiaAnswer":
        """Return this answer if kopia exited with 0.

        Raises:
            KopiaError: it did not.
        """
        if not self.succeeded:
            raise self.error()
        return self

    def json(self) -> Any:  # noqa: ANN401 - whatever kopia printed
        """Return the JSON that kopia printed; lines of comment before it are skipped.

        Raises:
            KopiaError: it printed none.
        """
        lines = self.output.decode(errors="replace").splitlines()
        try:
            return json.loads("\n".join(line for line in lines if not line.startswith("//")))
        except ValueError as e:
            raise self.error("what kopia printed is no JSON") from e

    def document(self) -> JsonDict:
        """Return the JSON object that kopia printed.

        Raises:
            KopiaError: it printed none.
        """
        document = self.json()
        if not isinstance(document, dict):
            raise self.error("what kopia printed is no JSON object")
        return document


class KopiaSilentError(KopiaError):
    """A call came to no end in the time that it had; `lines` are the last that kopia wrote, scrubbed."""

    def __init__(self, attempted: str, seconds: float, lines: list[str]) -> None:
        super().__init__("\n".join([f"{attempted}: no end within {seconds:.0f} s", *lines]))
        self.lines = lines


def _was_out_of_memory(exit_code: int) -> bool:
    """Whether a child of ours was ended for want of memory: this process is spared, as it takes less."""
    return exit_code == -signal.SIGKILL and ran_out_of_memory()


def _read_counters(folder: Path) -> str:
    return "".join(file.read_text() for file in folder.rglob("*.prom"))


class Kopia:
    """Runs kopia; `environment` holds its secrets, `redactor` knows them."""

    def __init__(self, environment: Mapping[str, str], redactor: Redactor, *, program: str = "kopia") -> None:
        self._environment = environment
        self._redactor = redactor
        self._program = program

    async def call(
        self,
        attempted: str,
        *arguments: str,
        seconds: float = _SHORT_CALL_SECONDS,
        more: Mapping[str, str] | None = None,
    ) -> KopiaAnswer:
        """Return the answer of a call that moves no data.

        Args:
            attempted: what the call is for, on which object, as errors shall tell it.
            more: variables for this call alone.

        Raises:
            KopiaSilentError: no end after `seconds`; kopia was killed.
        """
        lines: deque[str] = deque(maxlen=_KEPT_LINES)
        command = ChildCommand(
            [self._program, *_OWN_FLAGS, "--no-progress", *arguments], {**self._environment, **(more or {})}
        )
        try:
            async with asyncio.timeout(seconds):
                end = await run_child(command, self._keep(lines))
        except TimeoutError as e:
            raise KopiaSilentError(attempted, seconds, list(lines)) from e
        return KopiaAnswer(
            attempted, end.exit_code, end.output, list(lines), out_of_memory=_was_out_of_memory(end.exit_code)
        )

    async def transfer(self, attempted: str, *arguments: str, files: KopiaFiles, listener: Listener) -> KopiaAnswer:
        """Return the answer of a call that moves data, however long it takes.

        Cancellation kills kopia, which then saves nothing.
        """
        lines: deque[str] = deque(maxlen=_KEPT_LINES)
        keep = self._keep(lines, listener.hear)

        def on_line(line: str) -> None:
            keep(listener.take(line))

        with TemporaryDirectory(prefix="counters-", dir=self._environment["HOME"]) as kept:
            flags = ["--metrics-store-on-exit", f"--diagnostics-output-directory={kept}"]
            argv = [self._program, *_OWN_FLAGS, *flags, *arguments]
            end = await run_child(ChildCommand(argv, self._environment, files.stdin_fd, files.stdout_fd), on_line)
            counters = _read_counters(Path(kept))
        return KopiaAnswer(
            attempted, end.exit_code, end.output, list(lines), counters, _was_out_of_memory(end.exit_code)
        )

    def _keep(self, lines: deque[str], hear: Callable[[str], None] | None = None) -> Callable[[str], None]:
        def keep(line: str) -> None:
            text = self._redactor.redact(line).strip()
            if text:
                lines.append(text)
                _logger.debug("kopia: %s", text)
                if hear is not None and not text.startswith(_PLEASANTRIES):
                    hear(text)

        return keep
