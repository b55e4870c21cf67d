"""The benchmark of interrupted transfers: what it counts, and what it does to the data and to a mover."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from benchmarks.processes import Command
from benchmarks.programs import MoverRun
from benchmarks.resume.figures import ResumeFigures
from benchmarks.resume.movers import _started
from benchmarks.resume.relay import run_relay
from benchmarks.resume.restore import RestoreFigures
from benchmarks.resume.upload import UploadFigures

_CLEAN = UploadFigures(
    seconds=100.0,
    killed_seconds=50.0,
    resumed_seconds=60.0,
    sent_bytes=1000,
    kept_bytes=480,
    lost_bytes=40,
    second_bytes=520,
    kills=40,
    lost=0,
)


_RESTORED = RestoreFigures(
    seconds=100.0,
    killed_seconds=50.0,
    resumed_seconds=70.0,
    total_bytes=1000,
    finished_bytes=450,
    flight_bytes=50,
    again_bytes=30,
    kills=40,
    lost=1,
)


def test_what_no_index_named_does_not_count_as_sent_again() -> None:
    assert json.loads(ResumeFigures(_CLEAN, None).last_line()) == {
        "upload_resent_share": 0.0,
        "total_time_ratio": 1.1,
        "kills": 40,
        "lost_transfers": 0,
    }


def test_the_worse_direction_counts_and_lost_transfers_of_both() -> None:
    figures = ResumeFigures(_CLEAN, _RESTORED)
    assert json.loads(figures.last_line()) == {
        "upload_resent_share": 0.0,
        "restore_rewritten_share": 0.03,
        "total_time_ratio": 1.2,
        "kills": 80,
        "lost_transfers": 1,
    }
    assert "| its next attempt | 70.0 | 0.0 of finished files written again |" in list(figures.lines())


@pytest.mark.parametrize(("kept", "second", "share"), [(480, 600, 0.08), (500, 1000, 0.5), (480, 400, 0.0)])
def test_what_was_sent_although_an_index_named_it_is_a_share_of_all(kept: int, second: int, share: float) -> None:
    figures = UploadFigures(100.0, 50.0, 50.0, 1000, kept, 40, second, 0, 0)
    assert figures.resent_share == pytest.approx(share)


async def test_the_relay_passes_everything_on_in_both_directions() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write((await reader.read())[::-1])
        writer.close()

    sent = os.urandom(300_000)
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server, run_relay(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", 1e9) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(sent)
        writer.write_eof()
        assert await reader.read() == sent[::-1]
        writer.close()


@pytest.mark.processes
async def test_a_mover_is_killed_with_all_of_its_processes(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    script = f"sh -c 'echo $$ > {fifo}; exec sleep 1000' & wait"
    run = MoverRun(Command(["sh", "-c", script], {"PATH": os.environ["PATH"]}, tmp_path / "log"), tmp_path / "message")
    async with _started(run) as process:
        child = int(await asyncio.to_thread(fifo.read_text))
    assert process.returncode == -9
    status = Path(f"/proc/{child}/stat")
    assert not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"
