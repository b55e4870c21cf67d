"""The dialogue with `kopia mover-backup`, which a coroutine plays."""

import asyncio
import json
import os
import signal
from typing import Any
from unittest.mock import MagicMock

from core.clock import SystemClock
from datamover.kopia.backup_process import MoverBackup, Offer
from datamover.kopia.process import KopiaAnswer, KopiaFiles
from datamover.kopia.progress import Direction, Meter

_OFFER = {"unique_id": "ab", "snapshots": None, "policy": {"a": 1}, "defined": None}
_PROGRESS = {
    "hashed_files": 1,
    "hashed_bytes": 20,
    "cached_files": 2,
    "cached_bytes": 30,
    "estimated_bytes": 60,
    "counters": {"kopia_content_hashed_bytes_total": 20.0, "kopia_blob_upload_bytes_total": 7.0},
}


class _Program:
    """Writes an offer if it is to, and waits for a decision, unless it is to fail; `decided` is what it read."""

    def __init__(self, exit_code: int = 0, *, offers: bool = True, fails: bool = False, last_line: str = "") -> None:
        self.exit_code = exit_code
        self.offers = offers
        self.fails = fails
        self.last_line = last_line
        self.decided: Any = None
        self.ended = False

    async def move_data(self, attempted: str, *_: str, files: KopiaFiles, listener: Any) -> KopiaAnswer:
        try:
            listener.keep("a line")
            if self.offers and files.on_output:
                files.on_output(json.dumps({"offer": _OFFER}))
            if not self.fails and files.stdin_fd is not None and files.on_output:
                self.decided = json.loads(await asyncio.to_thread(os.read, files.stdin_fd, 1 << 16))
                files.on_output(json.dumps({"progress": _PROGRESS}))
                files.on_output(json.dumps({"result": {"snapshot": {"id": "s"}, "copied": True}}))
            if self.last_line and files.on_output:
                files.on_output(self.last_line)
            return KopiaAnswer(attempted, self.exit_code, b"", ["a line"])
        finally:
            self.ended = True


def _backup(program: _Program, meter: Meter | None = None) -> MoverBackup:
    meter = meter or Meter(SystemClock(), Direction.BACKUP)
    return MoverBackup(program, "u@h:/p", "back up", files=KopiaFiles(), listener=MagicMock(), meter=meter)  # type: ignore[arg-type]


async def test_the_decision_is_sent_after_the_offer_and_the_answer_has_the_snapshot() -> None:
    program, meter = _Program(), Meter(SystemClock(), Direction.BACKUP)
    backup = _backup(program, meter)

    opened = await backup.open()
    assert (opened.exit_code, opened.lines, backup.offer) == (0, ["a line"], Offer("ab", (), {"a": 1}, None))
    assert program.decided is None

    answer = await backup.carry_out({"parents": []})
    assert program.decided == {"parents": []}
    assert (answer.document(), backup.result["copied"]) == ({"id": "s"}, True)
    assert (meter.hashed_bytes, meter.cached_bytes, meter.total_bytes) == (20, 30, 60)
    assert (await meter.read()).done_bytes == 50
    await backup.end()


async def test_a_kopia_that_cannot_open_the_repository_has_only_its_answer() -> None:
    backup = _backup(_Program(1, offers=False, fails=True))
    opened = await backup.open()
    assert (opened.exit_code, opened.lines) == (1, ["a line"])
    await backup.end()


async def test_a_kopia_that_ends_before_it_has_read_the_decision_is_no_snapshot() -> None:
    backup = _backup(_Program(1, fails=True))
    await backup.open()
    answer = await backup.carry_out({"delete": ["0" * 32] * 5000})
    assert (answer.exit_code, answer.output, backup.result) == (1, b"", {})
    await backup.end()


async def test_a_line_that_a_killed_kopia_has_not_ended_is_no_error() -> None:
    backup = _backup(_Program(-signal.SIGKILL, fails=True, last_line='{"progress": {"hashed'))
    await backup.open()
    answer = await backup.carry_out({})
    assert (answer.crashed, answer.output) == (True, b"")
    await backup.end()


async def test_what_still_runs_is_ended() -> None:
    program = _Program()
    backup = _backup(program)
    await backup.open()
    # The thread that reads ends.
    os.write(backup._decision_fd, b"{}")
    await backup.end()
    assert program.ended
