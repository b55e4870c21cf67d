"""The benchmark of interrupted transfers: what it counts, and what it does to the data and to a mover."""

import asyncio
import json
import os
from asyncio.subprocess import Process
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.processes import BenchmarkError, Command
from benchmarks.programs import MoverRun
from benchmarks.resume.figures import ResumeFigures
from benchmarks.resume.lost import LostFigures, LostNode, _Node
from benchmarks.resume.movers import Attempt, _started, is_alive
from benchmarks.resume.relay import run_relay
from benchmarks.resume.restore import RestoreFigures
from benchmarks.resume.upload import UploadFigures
from benchmarks.resume.writers import Writers

_CLEAN = UploadFigures(
    seconds=100.0,
    killed_seconds=50.0,
    resumed_seconds=60.0,
    sent_bytes=1000,
    kept_bytes=480,
    lost_bytes=40,
    second_bytes=520,
    kills=20,
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
    kills=20,
    lost=1,
)


def test_what_no_index_named_does_not_count_as_sent_again() -> None:
    assert json.loads(ResumeFigures(_CLEAN, None, None).last_line()) == {
        "upload_resent_share": 0.0,
        "total_time_ratio": 1.1,
        "kills": 20,
        "lost_transfers": 0,
    }


def test_the_worse_direction_counts_and_lost_transfers_of_both() -> None:
    figures = ResumeFigures(_CLEAN, _RESTORED, None)
    assert json.loads(figures.last_line()) == {
        "upload_resent_share": 0.0,
        "restore_rewritten_share": 0.03,
        "total_time_ratio": 1.2,
        "kills": 40,
        "lost_transfers": 1,
    }
    assert "| its next attempt | 70.0 | 0.0 of finished files written again |" in list(figures.lines())


def test_lost_nodes_are_reported_apart_with_their_wait() -> None:
    nodes = (
        LostNode("cut off", 50.0, 20.0, 60.0, late_seconds=0.0, late_writes=0, late_bytes=0),
        LostNode("hangs", 50.0, 20.0, 70.0, late_seconds=0.25, late_writes=3, late_bytes=400_000),
    )
    figures = ResumeFigures(None, None, LostFigures(100.0, nodes))
    assert json.loads(figures.last_line()) == {"lost_node_time_ratio": 1.4, "double_writers": 1}
    late = "ran for 0.25 s, changed the target 3 times, wrote 0.4 MB at most"
    assert f"| hangs at half of the data | 50.0 | 20 | 70.0 | {late} |" in list(figures.lines())


def test_the_tables_of_all_parts_are_apart() -> None:
    lines = list(ResumeFigures(_CLEAN, _RESTORED, LostFigures(100.0, ())).lines())
    heads = [line.split(" | ")[0] for before, line in pairwise(["", *lines]) if not before]
    assert heads == ["| backup", "| restore", "| restore of a lost node"]


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


async def test_nothing_passes_the_relay_while_it_is_cut_off() -> None:
    received: asyncio.Queue[bytes] = asyncio.Queue()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(100):
            received.put_nowait(piece)
        writer.close()

    passes = asyncio.Event()
    server = await asyncio.start_server(take, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, run_relay(url, passes=passes) as relayed, run_relay(url) as other:
        writers = []
        for one, sent in ((relayed, b"late"), (other, b"first")):
            _, writer = await asyncio.open_connection("127.0.0.1", int(one.rpartition(":")[2]))
            writer.write(sent)
            writers.append(writer)
        assert await received.get() == b"first"
        passes.set()
        assert await received.get() == b"late"
        for writer in writers:
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
    assert not is_alive(child)


class _Seen(Writers):
    """Reports changes as they were listed, and says when there are no more."""

    def __init__(self, *changes: Mapping[int, int]) -> None:
        self._changes = list(changes)
        self.over = asyncio.Event()

    def take(self) -> Counter[int]:
        if self._changes:
            return Counter(self._changes.pop(0))
        self.over.set()
        return Counter()


async def _observe(changes: Sequence[Mapping[int, int]], process: Process) -> tuple[_Node, int]:
    """Return the node of an old attempt, and how many changes it has made beside the next one."""
    seen = _Seen(*changes)

    async def resume() -> tuple[float, str]:
        await seen.over.wait()
        return 1.0, ""

    node = _Node(Attempt(0.0, 0.0, process), set(), asyncio.Event(), stops=True)
    node.lose()
    _, writes, _ = await node.observe(seen, asyncio.create_task(resume(), name="next attempt"))
    return node, writes


@pytest.fixture
async def old() -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec("sleep", "1000")
    yield process
    process.kill()
    await process.wait()


@pytest.mark.processes
async def test_changes_of_the_old_attempt_count_and_its_node_is_back_once_the_next_one_writes(old: Process) -> None:
    node, writes = await _observe([{}, {old.pid: 2}, {1: 5}, {1: 1, old.pid: 3}], old)
    assert writes == 5
    assert node.reached.is_set()


@pytest.mark.processes
async def test_nothing_is_said_of_writers_when_none_was_seen(old: Process) -> None:
    with pytest.raises(BenchmarkError, match="the next attempt was not seen to write"):
        await _observe([{}, {old.pid: 1}], old)
