"""kopia's subcommands of ours, each of which opens the repository once.

`mover-backup` and `block-write` offer what the repository has of a source, wait, and back it up. `block-read` writes a
snapshot to a device. Knows the lines that both sides write. Does not know what is decided
(`datamover.data_path.snapshot_runs`).
Source: tools/kopia/program (backup.go, block_write.go, block_read.go).
"""

import asyncio
import json
import os
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from core.models.base import JsonDict
from datamover.kopia.process import Kopia, KopiaAnswer, KopiaFiles, Listener
from datamover.kopia.progress import Meter
from datamover.runtime.cancellation import run_in_background

__all__ = ["MoverBackup", "Offer", "device_flags", "read_blocks"]

_KEPT_LINES: Final = 40


@dataclass(frozen=True)
class Offer:
    """What a repository has of a source: all snapshots, the effective policy, and the source's own, None without one.

    The oldest snapshot is the first; each is as kopia lists it. `unique_id` is the repository's.
    """

    unique_id: str
    snapshots: tuple[JsonDict, ...]
    policy: JsonDict
    defined: JsonDict | None


class MoverBackup:
    """One run of a subcommand for a source, in kopia's format `user@host:path`.

    `files` are without input and output. `command` is `mover-backup`, or `block-write` with its flags for the device.
    Who opens it must end it.
    """

    def __init__(
        self,
        kopia: Kopia,
        target: str,
        attempted: str,
        *,
        files: KopiaFiles,
        listener: Listener,
        meter: Meter,
        command: Sequence[str] = ("mover-backup",),
    ) -> None:
        self._kopia = kopia
        self._arguments = [*command, f"--source={target}"]
        self._attempted = attempted
        self._files = files
        self._listener = listener
        self._meter = meter
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._child: asyncio.Task[KopiaAnswer] | None = None
        self._decision_fd = -1
        self._offered: asyncio.Future[Offer] | None = None
        self._result: JsonDict = {}

    @property
    def offer(self) -> Offer:
        """What the repository has, once it is open."""
        if self._offered is None:
            raise RuntimeError("kopia was not started")
        return self._offered.result()

    @property
    def result(self) -> JsonDict:
        """What kopia says about the backup besides its snapshot; empty before its end."""
        return self._result

    async def open(self) -> KopiaAnswer:
        """Start kopia, and return its answer so far once it has opened the repository, or its only one.

        Raises:
            DataPathError: it cannot be started or confined.
        """
        await self.end()
        loop = asyncio.get_running_loop()
        offered = self._offered = loop.create_future()
        decided_fd, self._decision_fd = os.pipe()
        files = replace(self._files, stdin_fd=decided_fd, on_output=self._take_output)
        child = loop.create_task(
            self._kopia.move_data(self._attempted, *self._arguments, files=files, listener=self), name="mover-backup"
        )
        # A decision that kopia does not read fails then.
        child.add_done_callback(lambda _: os.close(decided_fd))
        self._child = child
        both: set[asyncio.Future[object]] = {child, offered}  # type: ignore[arg-type] # only their end matters
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        return child.result() if child.done() else KopiaAnswer(self._attempted, 0, b"", list(self._lines))

    async def carry_out(self, decision: JsonDict) -> KopiaAnswer:
        """Have kopia back up as is decided, and return its answer, whose output is the snapshot's manifest.

        Cancellation kills kopia, which then saves nothing.
        """
        if self._child is None:
            raise RuntimeError("kopia was not started")
        document, fd = json.dumps(decision).encode(), self._decision_fd
        async with run_in_background(lambda _: _write_all(fd, document), name="decision"):
            answer = await self._child
        output = json.dumps(self._result["snapshot"]).encode() if self._result else b""
        return replace(answer, output=output)

    async def end(self) -> None:
        """Kill kopia if it still runs."""
        child, self._child = self._child, None
        if child is None:
            return
        child.cancel()
        await asyncio.wait({child})
        if not child.cancelled():
            child.exception()
        os.close(self._decision_fd)

    def take_progress(self, line: str) -> str:
        """Parse when kopia begins the snapshot; return the line."""
        return self._listener.take_progress(line)

    def keep(self, line: str) -> None:
        """Keep a line of its errors, and pass it on."""
        self._lines.append(line)
        self._listener.keep(line)

    def _take_output(self, line: str) -> None:
        key, value = _parse(line)
        match key:
            case "offer":
                if self._offered is not None and not self._offered.done():
                    offer = Offer(
                        value["unique_id"], tuple(value["snapshots"] or ()), value["policy"], value["defined"]
                    )
                    self._offered.set_result(offer)
            case "progress":
                self._meter.take_report(value)
            case "result":
                self._result = value


async def read_blocks(
    kopia: Kopia, attempted: str, *arguments: str, device_fd: int, listener: Listener, meter: Meter
) -> KopiaAnswer:
    """Return the answer of `block-read` with these arguments, whose output is what it did to the device.

    Cancellation kills kopia, which leaves the device as it is then.

    Raises:
        DataPathError: it cannot be started or confined.
    """
    results: list[JsonDict] = []

    def take(line: str) -> None:
        match _parse(line):
            case "progress", value:
                meter.take_report(value)
            case "result", value:
                results.append(value)

    files = KopiaFiles(inherited_fd=device_fd, on_output=take)
    answer = await kopia.move_data(attempted, "block-read", *arguments, files=files, listener=listener)
    return replace(answer, output=json.dumps(results[-1]).encode() if results else b"")


def device_flags(device_fd: int, size_bytes: int) -> list[str]:
    """Return the flags for an open device, which is inherited, of that size."""
    return [f"--device-fd={device_fd}", f"--device-size={size_bytes}"]


def _parse(line: str) -> tuple[str, JsonDict]:
    """Return key and value of a line; a kopia that is killed may leave a part of one, which is ignored."""
    try:
        ((key, value),) = json.loads(line).items()
    except ValueError:
        return "", {}
    return key, value


def _write_all(fd: int, content: bytes) -> None:
    # kopia may have ended: its answer says why.
    with suppress(BrokenPipeError):
        while content:
            content = content[os.write(fd, content) :]
