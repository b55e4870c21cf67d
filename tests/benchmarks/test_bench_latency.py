"""The benchmark with a storage that is far away: its line, and that it measures all that it is to measure."""

import asyncio
import hashlib
import random
import time
from pathlib import Path

import pytest

from benchmarks.latency.figures import FarFigures, Swept
from benchmarks.latency.line import run_line
from benchmarks.processes import Measured
from tests.benchmarks.test_bench_mover import run_quickly

pytestmark = pytest.mark.processes

_SECONDS = 0.2
_BYTES = 5_000_000
_CONNECTIONS = 8


async def _hash(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer each request of a size and so many bytes with their hash."""
    while size := await reader.read(4):
        writer.write(hashlib.sha256(await reader.readexactly(int.from_bytes(size))).digest())
    writer.close()


async def _ask(port: int, seed: int) -> list[float]:
    """Send two requests by a connection of their own; return when each was answered, since it was opened."""
    began = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answered = []
    for number in range(2):
        content = random.Random(seed + number).randbytes(_BYTES)
        writer.write(_BYTES.to_bytes(4) + content)
        assert await reader.readexactly(32) == hashlib.sha256(content).digest()
        answered.append(time.monotonic() - began)
    writer.write_eof()
    assert await reader.read() == b""
    writer.close()
    return answered


async def test_a_line_delays_each_round_trip_and_passes_everything_in_order(tmp_path: Path) -> None:
    server = await asyncio.start_server(_hash, "127.0.0.1", 0)
    address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        with run_line(address, tmp_path / "line", _SECONDS) as url:
            port = int(url.rpartition(":")[2])
            answered = await asyncio.gather(*(_ask(port, 10 * one) for one in range(_CONNECTIONS)))
    for first, second in answered:
        # One to connect, and one for each answer; none arrives early, but for the rounding of a pause.
        assert first > 2 * _SECONDS - 0.01
        assert second - first > _SECONDS - 0.01


def _run(seconds: float) -> Measured:
    return Measured(0, int(seconds * 1e9), 40, 100, 130, 0.5)


def test_the_mover_is_compared_with_the_best_setting() -> None:
    swept = Swept({32: _run(20), 64: _run(10), 128: _run(11)}, {"mover": [_run(9), _run(10)], "bare": [_run(10)]})
    near = {"restore": {"mover": [_run(2)], "bare": [_run(4)]}}
    figures = FarFigures(0.02, swept, swept, {0.0: near, 0.02: near})
    assert figures.summary() == {
        "far_upload_ratio": 0.95,
        "far_upload_best_parallel": 64,
        "far_restore_ratio": 0.95,
        "far_restore_best_parallel": 64,
        "near_repository_restore_s": 2.0,
        "near_repository_restore_ratio": 0.5,
        "far_repository_restore_s": 2.0,
        "far_repository_restore_ratio": 0.5,
    }
    lines = list(figures.lines())
    assert any(line.startswith("| restore, bare kopia, 64 in parallel, beside the mover | 10.00 |") for line in lines)
    assert any(line.startswith("| many snapshots, 20 ms: restore, mover | 2.00 |") for line in lines)


@pytest.mark.cluster
@pytest.mark.lane(name="waiting")
@pytest.mark.timeout(600)
def test_the_last_line_has_every_figure_of_a_far_storage(tmp_path: Path) -> None:
    """Needs root, for its namespaces."""
    output, figures = run_quickly(tmp_path, "--latency")
    done = ("second_backup", "restore")
    names = [f"{where}_repository_{what}" for where in ("near", "far") for what in done]
    repository = {f"{name}_{unit}" for name in names for unit in ("s", "ratio")}
    swept = {f"far_{what}_{figure}" for what in ("upload", "restore") for figure in ("ratio", "best_parallel")}
    assert figures.keys() == repository | swept
    assert all(figures[name] > 0 for name in figures)
    assert "| restore, bare kopia, 32 in parallel | " in output
    assert not list(tmp_path.iterdir())
