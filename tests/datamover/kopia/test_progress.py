"""Progress: what kopia's lines and counters say, and of real data paths, as frequent for a restore as for a backup."""

import asyncio
import os
from collections.abc import Awaitable
from pathlib import Path

import pytest

from core.clock import SystemClock
from core.contract import BackupResult, ProgressMessage, RestoreResult, VolumeMode
from datamover.data_path.backup import back_up
from datamover.data_path.restore import RestoreParameters, restore
from datamover.data_path.snapshot_runs import BackupParameters
from datamover.kopia.progress import Direction, Meter, parse_size
from datamover.kopia.repository import Repository
from datamover.pod.reporting import report_times
from tests.datamover.support.data_paths import backup_data_path, restore_data_path
from tests.datamover.support.trees import make_large_file
from tests.nodeagent.support.hand_clock import HandClock


class Counters(asyncio.Protocol):
    """Serves `text` on the port that a meter reads."""

    text = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        assert isinstance(self.transport, asyncio.WriteTransport)
        self.transport.write(f"HTTP/1.0 200 OK\r\n\r\n{Counters.text}".encode())
        self.transport.close()


@pytest.mark.parametrize(
    ("text", "size"),
    [("0 B", 0), ("16.5 KB", 16_500), ("91.1 MB", 91_100_000), ("2.1 GB", 2_100_000_000), ("1.5 KiB", 1536)],
)
def test_sizes_read_as_kopia_writes_them(text: str, size: int) -> None:
    assert parse_size(text) == size


_HASHED = "0 hashing, 25 hashed (85.6 MB), 7 cached (1 MB), uploaded 84.9 MB"


@pytest.mark.parametrize(
    ("line", "hashed", "cached", "total"),
    [
        ("1 hashing, 0 hashed (16.5 KB), 0 cached (0 B), uploaded 0 B, estimating...", 16_500, 0, 0),
        (f"{_HASHED}, estimated 91.1 MB (93.9%) 0s left", 85_600_000, 1_000_000, 91_100_000),
        (f"{_HASHED} (1 fatal errors), estimated 2 MB (1%)", 85_600_000, 1_000_000, 2_000_000),
    ],
    ids=["no estimate yet", "estimate", "with errors"],
)
def test_upload_lines_have_hashed_cached_and_estimated_bytes(line: str, hashed: int, cached: int, total: int) -> None:
    meter = Meter(SystemClock(), Direction.BACKUP)
    assert not meter.take(f" | {line}").strip()
    assert (meter.hashed_bytes, meter.cached_bytes, meter.total_bytes) == (hashed, cached, total)


def test_other_lines_are_not_progress() -> None:
    meter = Meter(SystemClock(), Direction.RESTORE)
    assert not meter.take("Processed 420 (13.5 MB) of 3258 (91.1 MB).")
    assert not meter.take("Processed 420 (13.5 MB) of 3258 (91.1 MB), skipped 12 (1 KB) 3.1 MB/s (20.0%) remaining 3s.")
    glued = "Processed 119 (303.5 MB) of 120 (1.5 GB) 302.8 MB/s (20.0%) remaining 3s.error restoring: disk full"
    assert meter.take(glued) == "error restoring: disk full"
    assert meter.take('! Error when processing "z/mem": unable to open file')


async def test_readings_never_decrease_or_exceed_the_total_and_have_the_rate() -> None:
    clock = HandClock()
    meter = Meter(clock, Direction.BACKUP)
    meter.total_bytes = 1000
    server = await asyncio.get_running_loop().create_server(
        Counters, "127.0.0.1", int(meter.arguments[-1].rsplit(":", 1)[1])
    )
    readings = []
    async with server:
        for hashed in (100, 400, 300, 5000):
            clock.seconds += 2
            uploaded = "".join(f'kopia_blob_upload_bytes_total{{m="{m}"}} 3.5e+00\n' for m in ("a", "b c"))
            Counters.text = f"# HELP a b\nkopia_content_hashed_bytes_total {hashed}\n{uploaded}"
            readings.append(await meter.read())
    assert [one.done_bytes for one in readings] == [100, 400, 400, 1000]
    assert [one.bytes_per_second for one in readings] == [50, 150, 0, 300]
    assert {one.sent_bytes for one in readings} == {7}


async def test_a_backup_has_the_size_of_new_data_before_and_after_compression() -> None:
    meter = Meter(SystemClock(), Direction.BACKUP)
    counters = {"hashed": 1000, "deduplicated": 400, "after_compression": 150}
    meter.take_counters("".join(f"kopia_content_{name}_bytes_total {count}\n" for name, count in counters.items()))
    assert (meter.new_bytes, meter.stored_bytes) == (600, 150)
    assert (await meter.read()).stored_bytes == 150
    times = report_times()
    assert [next(times) for _ in range(7)] == [0.8, 2, 4, 8, 18, 28, 38]


_LINE = " | 1 hashing, 2 hashed (16.5 KB), {cached}, uploaded 0 B, {estimated}"


@pytest.mark.parametrize(
    ("total_bytes", "line", "counted_bytes", "done_bytes"),
    [
        (2_000_000, _LINE.format(cached="9 cached (1.5 MB)", estimated="estimating..."), 0, 1_500_000),
        # kopia prints no line while its storage does not answer.
        (0, _LINE.format(cached="0 cached (0 B)", estimated="estimating..."), 100, 100),
        # The counter has directories too, and 91.1 MB may be as little as 91.05 MB.
        (0, _LINE.format(cached="0 cached (0 B)", estimated="estimated 91.1 MB (1%) 9s left"), 91_100_000, 91_050_000),
        (1000, _LINE.format(cached="0 cached (0 B)", estimated="estimated 91.1 MB (1%) 9s left"), 91_100_000, 1000),
    ],
    ids=["data of the parent", "no estimate", "rounded estimate", "exact size of a device"],
)
async def test_what_is_done_is_read_or_cached(total_bytes: int, line: str, counted_bytes: int, done_bytes: int) -> None:
    """kopia serves no metrics here when they are read: the last ones count."""
    meter = Meter(SystemClock(), Direction.BACKUP)
    meter.total_bytes = total_bytes
    meter.take(line)
    meter.take_counters(f"kopia_content_hashed_bytes_total {counted_bytes}\n")
    assert (await meter.read()).done_bytes == done_bytes


async def test_directories_are_not_among_the_bytes_that_are_reported() -> None:
    meter = Meter(SystemClock(), Direction.BACKUP)
    reported = {"hashed_files": 1, "hashed_bytes": 20, "cached_files": 2, "cached_bytes": 30, "estimated_bytes": 0}
    meter.take_report(reported | {"counters": {"kopia_content_hashed_bytes_total": 25}})
    assert (await meter.read()).done_bytes == 50
    assert meter.new_bytes == 25


async def test_the_start_of_a_snapshot_is_when_kopia_says_so() -> None:
    """kopia that could not open the repository is run again, and the last start counts."""
    clock = HandClock()
    meter = Meter(clock, Direction.BACKUP)
    assert (await meter.read()).snapshot_started is None
    lines = "Snapshotting default@default:some/volume ...", "starting prometheus metrics on 127.0.0.1:1"
    for seconds in (1.0, 2.0):
        clock.seconds = seconds
        assert [meter.take(line) for line in lines] == [lines[0], ""]
        assert (await meter.read()).snapshot_started == clock.now()


_SIZE = 150 << 20


async def _watch(
    moving: Awaitable[BackupResult | RestoreResult], meter: Meter
) -> tuple[list[ProgressMessage], BackupResult | RestoreResult]:
    readings = []
    task = asyncio.ensure_future(moving)
    while not task.done():
        readings.append(await meter.read())
        await asyncio.sleep(0.02)
    return readings, task.result()


def _check(readings: list[ProgressMessage]) -> None:
    done = [one.done_bytes for one in readings]
    assert done == sorted(done)
    assert len({count for count in done if 0 < count < _SIZE}) >= 3
    assert all(one.done_bytes <= one.total_bytes for one in readings if one.total_bytes)
    assert any(one.bytes_per_second for one in readings)


@pytest.mark.processes
@pytest.mark.sample("Filesystem")
@pytest.mark.parametrize("mode", list(VolumeMode), ids=str)
async def test_progress_is_frequent_and_grows(mover_repository: Repository, tmp_path: Path, mode: VolumeMode) -> None:
    file = make_large_file(tmp_path / "volume" / "file", _SIZE >> 20)
    target = tmp_path / "target"
    device = mode is VolumeMode.BLOCK
    if device:
        target.touch()
        os.truncate(target, _SIZE)

    async def unheard(message: str) -> None:
        pytest.fail(message)

    data_path = backup_data_path(unheard)
    request = BackupParameters(file if device else file.parent, mode, "some/volume", parallel=2)
    out, backup = await _watch(back_up(mover_repository, request, data_path), data_path.meter)
    assert isinstance(backup, BackupResult)
    data_path = restore_data_path()
    wanted = RestoreParameters(backup.snapshot_id, target, mode, 2)
    back, _ = await _watch(restore(mover_repository, wanted, data_path), data_path.meter)
    _check(out)
    _check(back)
    # Known before the first byte: the size of a device, and of a snapshot from its manifest.
    for readings in [back, *([out] if device else [])]:
        assert {one.total_bytes for one in readings if one.done_bytes} == {_SIZE}
