"""Rates and remaining times of volumes, from readings."""

from datetime import timedelta

import pytest
from msgspec.structs import replace

from client.backups.progress import ProgressMeter, VolumeProgress
from client.backups.view import Backup, BackupPhase
from core.models.phases import Phase
from tests.client.support.backups import DATA_VOLUME, build_backup


def _backup(done: int, phase: Phase = Phase.IN_PROGRESS, total: int = 1000) -> Backup:
    volume = replace(DATA_VOLUME, phase=phase, bytes_done=done, total_bytes=total, snapshot_id="")
    return build_backup(volume, phase=BackupPhase.IN_PROGRESS, expected=1)


def _read(*readings: tuple[float, int]) -> VolumeProgress:
    meter = ProgressMeter()
    for at, done in readings:
        (progress,) = meter.read(_backup(done), at)
    return progress


@pytest.mark.parametrize(
    ("readings", "rate", "remaining"),
    [
        pytest.param([(0, 0)], None, None, id="one reading"),
        pytest.param([(0, 0), (10, 500)], 50.0, 10.0, id="two readings"),
        pytest.param([(0, 0), (10, 0)], 0.0, None, id="nothing moves"),
        pytest.param([(0, 0), (100, 0), (110, 100), (131, 310)], 10.0, 69.0, id="the last seconds count"),
        pytest.param([(0, 900), (10, 0), (20, 100)], 10.0, 90.0, id="another attempt"),
    ],
)
def test_the_rate_is_that_of_the_last_seconds(
    readings: list[tuple[float, int]], rate: float | None, remaining: float | None
) -> None:
    progress = _read(*readings)
    assert progress.bytes_per_second == rate
    assert progress.remaining == (None if remaining is None else timedelta(seconds=remaining))


def test_a_volume_that_waits_for_another_attempt_begins_anew() -> None:
    meter = ProgressMeter()
    meter.read(_backup(0), 0)
    meter.read(_backup(500), 10)
    (ended,) = meter.read(_backup(500, Phase.COMPLETED), 20)
    (again,) = meter.read(_backup(500), 30)
    assert (ended.bytes_per_second, again.bytes_per_second) == (None, None)


@pytest.mark.parametrize("total", [0, 100], ids=["unknown", "less than done"])
def test_the_remaining_time_is_not_known_without_the_size(total: int) -> None:
    assert VolumeProgress(_backup(500, total=total).volumes[0], 10.0).remaining is None
