"""Child processes that run beside the one who starts them, each with a log file.

A child gets SIGKILL from the kernel when the thread that started it ends, so nothing
survives its starter, however that dies. Knows nothing of what runs.
"""

import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

_T = TypeVar("_T")
LIMIT_SECONDS: Final = 900
"""How long to wait before it is a fault: longer than anything takes when the machine stands still for minutes."""

_POLL_SECONDS = 0.1
_LOG_LINES_SHOWN = 15

_GOGC = "300"
"""Components collect garbage more rarely than by themselves: they share few processors with the tests."""


class BedError(Exception):
    """The test bed could not do what was asked, or it waited in vain; the message is for the user.

    All that acts on the test bed or waits for it may raise this.
    """


def wait_for(
    what: str | Callable[[], str],
    ready: Callable[[], _T | None],
    *,
    seconds: float = LIMIT_SECONDS,
    pause_seconds: float = _POLL_SECONDS,
) -> _T:
    """Return what `ready` returns, once that is true.

    Raises:
        BedError: It is not in time; `what` names it, and what there is instead.
    """
    deadline = time.monotonic() + seconds
    while not (found := ready()):
        if time.monotonic() > deadline:
            raise BedError(f"waited {seconds:.0f} s for {what if isinstance(what, str) else what()}")
        time.sleep(pause_seconds)
    return found


@dataclass(frozen=True)
class Component:
    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def last_lines(self) -> str:
        """The end of the log, for an error message."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(f"    {line[:400]}" for line in lines[-_LOG_LINES_SHOWN:])


@dataclass
class Supervisor:
    """Starts components and notices when one ends that should run on."""

    logs: Path
    components: list[Component] = field(default_factory=list)

    def start(self, name: str, argv: Sequence[str | Path], *, env: Mapping[str, str] | None = None) -> Component:
        """Start a component; its output goes to `<name>.log`.

        Args:
            env: Added to this process's own environment.
        """
        self.logs.mkdir(parents=True, exist_ok=True)
        log = self.logs / f"{name}.log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *map(str, argv)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={"GOGC": _GOGC, **os.environ, **(env or {})},
            )
        component = Component(name, process, log)
        self.components.append(component)
        return component

    def check(self) -> None:
        """Raise when a component has ended.

        Raises:
            BedError: With the last lines of that component's log.
        """
        for component in self.components:
            code = component.process.poll()
            if code is not None:
                message = f"{component.name} ended with {code}; the end of {component.log}:"
                raise BedError(f"{message}\n{component.last_lines()}")

    def wait(self, what: str, ready: Callable[[], bool], *, seconds: float = LIMIT_SECONDS) -> None:
        """Return once `ready` returns true.

        Args:
            what: Completes the sentence "waited for …".
            ready: Called repeatedly; it must not raise.

        Raises:
            BedError: Time ran out, or a component ended meanwhile.
        """
        deadline = time.monotonic() + seconds
        while not ready():
            self.check()
            if time.monotonic() > deadline:
                raise BedError(f"waited {seconds:.0f} s for {what}\n{self._all_last_lines()}")
            time.sleep(_POLL_SECONDS)

    def stop(self) -> None:
        """End all components at once; none is left when this returns.

        They are killed: an API server takes 5 s to shut down, and all that
        they could save is deleted anyway.
        """
        for component in reversed(self.components):
            component.process.kill()
        for component in self.components:
            component.process.wait()
        self.components.clear()

    def _all_last_lines(self) -> str:
        return "\n".join(f"{c.log}:\n{c.last_lines()}" for c in self.components)
