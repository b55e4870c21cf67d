"""The benchmark of the bandwidth: it measures everything it is to measure, and its arithmetic. No figure is checked."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.bandwidth.counters import SocketCounters, directory_bytes
from benchmarks.bandwidth.course import Course
from benchmarks.bandwidth.figures import BandwidthFigures, Limited
from benchmarks.processes import Measured
from benchmarks.resume.relay import run_relay

_ROOT = Path(__file__).parents[2]
_SENT = 300_000
_ANSWERED = 100_000


def _course(*totals: int, step: float = 1.0) -> Course:
    course = Course()
    for number, total in enumerate(totals):
        course.add(number * step, total)
    return course


@pytest.mark.cluster
@pytest.mark.processes
@pytest.mark.lane(name="waiting")
@pytest.mark.timeout(600)
def test_the_last_line_has_every_figure(tmp_path: Path) -> None:
    """Needs root, for its namespaces."""
    done = subprocess.run(
        ["nice", "-n", "10", sys.executable, "-m", "benchmarks.bench_bandwidth", "--quick", "--folder", tmp_path],
        cwd=_ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    for name in ("upload_10", "download_5", "directory_10"):
        assert all(figures[f"{name}_{what}"] > 0 for what in ("mean", "most", "worst_second"))
    assert all(figures[f"{name}_least"] > 0 for name in ("upload_10", "download_5"))
    # kopia writes whole blobs into a directory: a short window may have none.
    assert figures["directory_10_least"] >= 0
    assert all(figures[f"unlimited_{what}_ratio"] > 0 for what in ("time", "cpu"))
    assert {"unlimited_mover_mib", "unlimited_all_mib", "edit_seconds"} <= figures.keys()


def test_rates_are_of_whole_windows_at_any_sample() -> None:
    course = _course(0, 10, 40, 40)
    assert course.rates(1.0) == [10, 30, 0]
    assert course.rates(2.0) == [20, 15]
    assert course.rates(4.0) == []
    assert course.since(1.0).rates(1.0) == [30, 0]


def test_bytes_between_two_samples_pass_evenly() -> None:
    assert _course(0, 10, 40, step=2.0).rates(1.0) == [5, 15]
    assert _course(0, 10, 40).rates(1.5) == [(10 + 15) / 1.5]


def test_the_last_rate_is_of_the_last_window() -> None:
    course = _course(0, 10, 40, 50)
    assert (course.last_rate(1.0), course.last_rate(2.0), course.last_rate(9.0)) == (10, 20, 0)
    assert Course().last_rate(1.0) == 0


def test_a_burst_at_the_begin_counts_for_the_most_and_not_for_the_mean() -> None:
    course = _course(0, 600, 700, 800, 900)
    limited = Limited.of("upload", 100, course, 1.0, 2.0)
    assert (limited.mean, limited.least, limited.most, limited.worst_second) == (1.0, 1.0, 3.5, 6.0)


def test_the_figures_compare_each_run_with_the_one_beside_it() -> None:
    proxy, none = Measured(0, 3 * 10**9, 35, 200, 230, 1.5), Measured(0, 2 * 10**9, 33, 200, 229, 1.0)
    limited = Limited("upload", 2_500_000, 1.0, 0.99, 1.01, 1.25)
    figures = BandwidthFigures(60.0, [limited], [(proxy, none)], [0.2, 0.4])
    assert json.loads(figures.last_line()) == {
        "upload_2.5_mean": 1.0,
        "upload_2.5_least": 0.99,
        "upload_2.5_most": 1.01,
        "upload_2.5_worst_second": 1.25,
        "unlimited_time_ratio": 1.5,
        "unlimited_cpu_ratio": 1.5,
        "unlimited_mover_mib": 2.0,
        "unlimited_all_mib": 1.0,
        "edit_seconds": 0.4,
    }
    assert "| upload | 2.5 | 1.000 | 0.990 | 1.010 | 1.25 |" in list(figures.lines())


async def test_the_kernel_counts_what_passes_through_the_sockets_of_a_storage() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(_SENT)
        writer.write(b"x" * _ANSWERED)
        await writer.drain()
        writer.close()

    counters = SocketCounters()
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server, asyncio.timeout(30):
        host, port = server.sockets[0].getsockname()
        async with run_relay(f"http://{host}:{port}", during=counters.counting) as url:
            reader, writer = await asyncio.open_connection(host, int(url.rpartition(":")[2]))
            writer.write(b"x" * _SENT)
            assert len(await reader.readexactly(_ANSWERED)) == _ANSWERED
            while counters.received.total < _SENT or counters.sent.total < _ANSWERED:
                counters.sample()
                await asyncio.sleep(0)
            writer.close()
    counters.sample()
    # An end of the connection counts as a byte.
    assert counters.received.total - _SENT in {0, 1}
    assert counters.sent.total - _ANSWERED in {0, 1}


def test_a_directory_has_the_size_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one").write_bytes(b"x" * 30)
    (tmp_path / "two").write_bytes(b"x" * 4)
    assert directory_bytes(tmp_path) == 34
