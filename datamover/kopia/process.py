"""kopia as a child process, and its errors for single entries of a restore.

With `--ignore-errors` kopia goes on after an entry that it could not write, writes one line for it, and exits with 0.
It also goes on where the repository cannot be read, or nothing more fits: those errors are none of a single entry.
Source: kopia 0.23.1, `kopia --help-full`; snapshot/restore/restore.go (copyEntry), local_fs_output.go; Go 1.26,
io/fs.PathError; errno(3).
"""

import asyncio
import errno
import json
import logging
import os
import re
import signal
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Protocol

from core.errors import KopiaCrashError, KopiaError, StorageOutageError
from core.models.base import JsonDict
from core.redact import Redactor
from datamover.kopia.causes import find_cause, find_outage
from datamover.kopia.private_run import VolumeAccess, open_private_run
from datamover.runtime.child import ChildCommand, ChildExit, ChildFiles, run_child
from datamover.runtime.confinement import find_means
from datamover.runtime.resources import ran_out_of_memory
from datamover.runtime.work_dir import WorkDir, escape_controls

_logger = logging.getLogger(__name__)

_OWN_FLAGS: Final = (
    "--no-auto-maintenance",
    "--no-use-keyring",
    "--disable-file-logging",
    "--error-notifications=never",
)
_KEEP_NO_PASSWORD: Final = "--no-persist-credentials"  # noqa: S105 - a flag
_KEPT_LINES: Final = 100
"""More than fit into a termination message, or are in 1024 characters of a proxy's page, which kopia shows."""

_SHOWN_LINES: Final = 12
_COUNTERS: Final = "counters"

_STATUS_LINES: Final = ("Snapshotting ", "Unable to estimate", "Restoring to ", "starting prometheus metrics on ")
"""Prefixes of lines that contain no error."""

_JSON_START: Final = re.compile(r"^[\[{n]", re.MULTILINE)
"""Comments, before it, quote the path of a snapshot, which may have line breaks, and what these characters begin."""

_CRASH_SIGNALS: Final = frozenset({signal.SIGABRT, signal.SIGBUS, signal.SIGKILL, signal.SIGSEGV})
"""This process sends KILL only to a kopia whose answer it no longer waits for, and TERM. A broken pipe (PIPE) is no
crash: the device that gets kopia's output failed."""

_PANIC_EXIT_CODE: Final = 2
_STACK: Final = re.compile(r"goroutine \d+ .*\[")
_PANIC: Final = re.compile(r"(panic|fatal error|SIG[A-Z]+): ")
"""Go ends a program with this code and the stacks of its goroutines after a panic, and after a signal such as SEGV. A
line before them says why. Source: Go 1.26, runtime (panic.go, signal_unix.go)."""

_SHORT_CALL_SECONDS: Final = 120.0
"""The timeout of a call that moves no data; kopia stops retrying an unreachable storage earlier."""


def kopia_environment(base: Mapping[str, str], work_dir: WorkDir, secrets: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of every call: `base` without kopia's settings, plus the mover's."""
    own = {
        "KOPIA_CHECK_FOR_UPDATES": "false",
        "KOPIA_CONFIG_PATH": str(work_dir.config_file),
        # The root file system may be read-only, and this user's own configuration must not be used.
        "HOME": str(work_dir.path),
        "TMPDIR": str(work_dir.path),
        "KOPIA_LOG_DIR": str(work_dir.path / "logs"),
    }
    kept = {name: value for name, value in base.items() if not name.startswith("KOPIA_")}
    return {**kept, **own, **secrets}


@dataclass(frozen=True)
class KopiaFiles(ChildFiles):
    """kopia's open files, and the volume that it reads or writes; TERM ends a backup with an incomplete snapshot."""

    volume: VolumeAccess = field(default_factory=VolumeAccess)


class Listener:
    """Receives kopia's output while it moves data; this one has no use for it."""

    def take_progress(self, line: str) -> str:
        """Parse the progress in a line; return the rest of the line."""
        return line

    def keep(self, line: str) -> None:
        """Receive such a rest, redacted, as soon as kopia writes it."""


class CallServer(Protocol):
    """A kopia that runs already, and carries out calls in the place of others."""

    def serves(self, arguments: Sequence[str]) -> bool:
        """Return whether it knows the command."""
        ...

    async def carry_out(self, command: ChildCommand, on_line: Callable[[str], None]) -> tuple[ChildExit, str]:
        """Return how a call with these arguments alone ended, and kopia's metrics of it; raises DataPathError."""
        ...

    async def end(self) -> None:
        """End it; the next call starts another one."""
        ...


class _KopiaOutageError(StorageOutageError, KopiaError):
    """kopia gave up because the storage does not answer."""


@dataclass(frozen=True)
class KopiaAnswer:
    """The outcome of one call of kopia.

    `lines` are the last lines of its standard error, redacted. `counters` are its metrics at its exit, in Prometheus
    text format: empty if it was killed, or moved no data. `out_of_memory`: the kernel killed it for lack of memory.
    `volume` is the path that it walked, if it walked one.
    """

    attempted: str
    exit_code: int
    output: bytes
    lines: list[str] = field(default_factory=list)
    counters: str = field(default="", repr=False)
    out_of_memory: bool = False
    volume: str | None = None

    @property
    def succeeded(self) -> bool:
        """Whether kopia exited with 0, which does not suffice for a complete snapshot."""
        return self.exit_code == 0

    @property
    def crashed(self) -> bool:
        """Whether kopia was ended by a signal that this process did not send, or by a panic."""
        if self.exit_code == _PANIC_EXIT_CODE:
            return any(_STACK.match(line) for line in self.lines[-1:])
        return -self.exit_code in _CRASH_SIGNALS

    @property
    def exit_status(self) -> str:
        """How kopia exited, for a message."""
        if self.out_of_memory:
            return "kopia was killed by the node's kernel: out of memory"
        if self.exit_code < 0:
            return f"kopia was killed by signal {-self.exit_code}"
        if self.crashed and (panics := [line for line in self.lines if _PANIC.match(line)]):
            return f"kopia crashed: {panics[-1]}"
        return f"kopia exited with code {self.exit_code}"

    @property
    def cause(self) -> str:
        """Why kopia failed, for a message: what its last lines name, or how it exited."""
        return (None if self.crashed else find_cause(self.lines, self.volume)) or self.exit_status

    @property
    def shown_lines(self) -> list[str]:
        """The last lines that may contain an error, for a message."""
        return [line for line in self.lines if not line.startswith(_STATUS_LINES)][-_SHOWN_LINES:]

    def mentions(self, text: str) -> bool:
        """Return whether one of the last lines contains `text`, in any case."""
        return any(text.lower() in line.lower() for line in self.lines)

    def error(self, cause: str | None = None) -> KopiaError:
        """Return the error for this call: one line with the cause, then kopia's last lines.

        Another attempt may succeed after a KopiaCrashError, or a StorageOutageError, which is a KopiaError here.
        """
        kind = KopiaError
        if self.crashed:
            kind = KopiaCrashError
        elif not self.succeeded and find_outage(self.lines, self.volume):
            kind = _KopiaOutageError
        return kind("\n".join([f"{self.attempted}: {cause or self.cause}", *self.shown_lines]))

    def check(self) -> "KopiaAnswer":
        """Return this answer if kopia exited with 0. Raises KopiaError if it exited otherwise."""
        if not self.succeeded:
            raise self.error()
        return self

    def json(self) -> Any:  # noqa: ANN401 - any JSON
        """Return the JSON in kopia's output, after comments, which may have line breaks; raises KopiaError."""
        text = self.output.decode(errors="replace")
        for start in _JSON_START.finditer(text):
            with suppress(ValueError):
                return json.loads(text[start.start() :])
        raise self.error("kopia's output is not JSON")

    def document(self) -> JsonDict:
        """Return the JSON object in kopia's output. Raises KopiaError if the output is not a JSON object."""
        document = self.json()
        if not isinstance(document, dict):
            raise self.error("kopia's output is not a JSON object")
        return document


class KopiaTimeoutError(KopiaError):
    """A call timed out; `lines` are the last lines of kopia's output, redacted."""

    def __init__(self, attempted: str, seconds: float, lines: list[str]) -> None:
        super().__init__("\n".join([f"{attempted}: timed out after {seconds:.0f} s", *lines]))
        self.lines = lines


def counter_flags(directory: Path) -> list[str]:
    """Return kopia's flags to write its metrics below a directory when it exits."""
    return ["--metrics-store-on-exit", f"--diagnostics-output-directory={directory}"]


def read_counters(directory: Path) -> str:
    """Return the contents of the files that kopia wrote; links are left out, since it may restore some."""
    files = (file for file in directory.rglob("*.prom") if file.is_file() and not file.is_symlink())
    return "".join(file.read_text() for file in files)


class Kopia:
    """Runs kopia; `environment` contains its secrets, which `redactor` removes from the output.

    `server` carries out the calls that it serves; None: each call has a process of its own.
    """

    def __init__(self, environment: Mapping[str, str], redactor: Redactor, *, program: str = "kopia") -> None:
        self._environment = environment
        self._redactor = redactor
        self._program = program
        self.server: CallServer | None = None

    async def call(
        self,
        attempted: str,
        *arguments: str,
        seconds: float | None = _SHORT_CALL_SECONDS,
        more: Mapping[str, str] | None = None,
        output_fd: int | None = None,
        hurry: tuple[str, float] | None = None,
    ) -> KopiaAnswer:
        """Return the answer of a call that moves no data.

        Args:
            attempted: the operation and its object, for errors.
            seconds: the timeout; None for a call that the caller ends.
            more: additional variables for this call.
            output_fd: an open file for kopia's output, which replaces its content; None: the answer has it.
            hurry: the beginning of a line, and how many seconds are left once kopia writes it.

        Raises:
            KopiaTimeoutError: it took longer than that; kopia was killed.
        """
        lines: deque[str] = deque(maxlen=_KEPT_LINES)
        if output_fd is not None:
            os.lseek(output_fd, 0, os.SEEK_SET)
            os.ftruncate(output_fd, 0)
        command = ChildCommand(
            [self._program, *_OWN_FLAGS, _KEEP_NO_PASSWORD, "--no-progress", *arguments],
            {**self._environment, **(more or {})},
            ChildFiles(stdout_fd=output_fd),
        )
        keep, server = self._keep(lines), None if more else self._find_server(arguments)

        def on_line(line: str) -> None:
            nonlocal seconds
            if hurry is not None and line.startswith(hurry[0]):
                seconds = hurry[1]
                limit.reschedule(asyncio.get_running_loop().time() + seconds)
            keep(line)

        try:
            async with asyncio.timeout(seconds) as limit:
                if server is None:
                    child, counters = await run_child(command, on_line), ""
                else:
                    child, counters = await server.carry_out(replace(command, argv=arguments), on_line)
        except TimeoutError as e:
            raise KopiaTimeoutError(attempted, seconds or 0.0, list(lines)) from e
        return _build_answer(attempted, child, lines, counters)

    def _find_server(self, arguments: Sequence[str]) -> CallServer | None:
        return self.server if self.server is not None and self.server.serves(arguments) else None

    async def move_data(self, attempted: str, *arguments: str, files: KopiaFiles, listener: Listener) -> KopiaAnswer:
        """Return the answer of a call that moves data; there is no timeout.

        kopia is confined to the volume, and no secret can be opened meanwhile. Cancellation kills it: it saves nothing
        then.

        Raises:
            DataPathError: it cannot be started or confined.
        """
        lines: deque[str] = deque(maxlen=_KEPT_LINES)
        keep = self._keep(lines, listener.keep)

        def on_line(line: str) -> None:
            keep(listener.take_progress(line))

        command = ChildCommand(arguments, self._environment, files)
        if (server := self._find_server(arguments)) is not None:
            child, counters = await server.carry_out(command, on_line)
        else:
            volume, redactor = files.volume, self._redactor
            opening = open_private_run(self._program, self._environment, volume, find_means(), redactor=redactor)
            async with opening as run:
                argv = [self._program, *_OWN_FLAGS, *counter_flags(run.home / _COUNTERS), *arguments]
                confined = replace(command, argv=argv, environment=run.environment, confinement=run.confinement)
                child, counters = await run_child(confined, on_line), read_counters(run.home / _COUNTERS)
        return _build_answer(attempted, child, lines, counters, str(files.volume.path or ""))

    def redact(self, text: str) -> str:
        """Return what kopia wrote for a message: without secrets and control characters."""
        return escape_controls(self._redactor.redact(text).strip())

    def _keep(self, lines: deque[str], forward: Callable[[str], None] | None = None) -> Callable[[str], None]:
        def keep(line: str) -> None:
            text = self.redact(line)
            # The stacks after a panic would replace its cause.
            if text and not (lines and _STACK.match(lines[-1])):
                lines.append(text)
                _logger.debug("kopia: %s", text)
                if forward is not None and not text.startswith(_STATUS_LINES):
                    forward(text)

        return keep


def _build_answer(
    attempted: str, child: ChildExit, lines: Iterable[str], counters: str, volume: str | None = None
) -> KopiaAnswer:
    # The kernel killed kopia alone, since this process uses less memory.
    out_of_memory = child.exit_code == -signal.SIGKILL and ran_out_of_memory()
    return KopiaAnswer(attempted, child.exit_code, child.output, list(lines), counters, out_of_memory, volume)


_IGNORED: Final = re.compile(r"ignored error (.*)")
_FAILED: Final = re.compile(r"error restoring: restore error: (.*)")

_CONTENT: Final = re.compile(
    r"copy file: error creating file: (cannot write data to file|unable to open snapshot file|close )"
    r"|error reading (directory|link target)|invalid FS entry type"
)
"""The content of an entry: the repository could not be read, or the file is not what was written."""

FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
TARGET_FAILURES: Final = FULL | {errno.EROFS, errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.EUCLEAN}
"""Errors of the target as a whole: every other file would fail too."""


def match_texts(errors: Iterable[int]) -> str:
    """Return the pattern of kopia's texts for these errors of the system.

    Source: Go 1.26, syscall/zerrors_linux_amd64.go (the texts of the C library, in lower case).
    """
    return "|".join(re.escape(os.strerror(one).lower()) for one in sorted(errors))


_WHOLE: Final = re.compile(f": ({match_texts(TARGET_FAILURES)})( on |$)")

_RESTORED: Final = re.compile(r"(copy directory contents: )?[a-z]+ [a-z]+: (error setting attributes: |unlinkat )")
"""The entry itself is restored. Then kopia removes its placeholder, whose name a target may take for too long.

Source: kopia 0.23.1, snapshot/restore/local_fs_output.go (WriteFile, FinishDirectory)."""


def is_refusal(answer: KopiaAnswer) -> bool:
    """Return whether kopia ended because the target refused an entry, so that it can restore the others."""
    if answer.succeeded or answer.crashed:
        return False
    errors = [found[1] for line in answer.lines if (found := _FAILED.search(line))]
    return bool(errors) and not any(_is_fatal(line) for line in answer.lines)


def _is_fatal(error: str) -> bool:
    return bool(_CONTENT.search(error) or _WHOLE.search(error))


class IgnoredErrors:
    """Counts the errors that kopia ignores, as it writes them; `first` is the first one about what is not restored."""

    def __init__(self) -> None:
        self.count = 0
        self.first: str | None = None
        self._fatal: str | None = None

    def take(self, line: str) -> None:
        """Take one line of kopia's output."""
        if not (found := _IGNORED.search(line)):
            return
        self.count += 1
        if not _RESTORED.match(found[1]):
            self.first = self.first or found[1]
        if _is_fatal(found[1]):
            self._fatal = self._fatal or found[1]

    def check(self, answer: KopiaAnswer) -> None:
        """Check that all are refusals of single entries; raises KopiaError."""
        if self._fatal is not None:
            replace(answer, exit_code=1, lines=[self._fatal]).check()
