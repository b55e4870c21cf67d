"""How much may pass when: the rate of a lane, whatever asks for it."""

import pytest

from core.models.transfer_settings import BandwidthLimits
from datamover.bandwidth.proxy import Lane, Lanes
from tests.client.support.backup_scene import SteppingClock


class _Clock(SteppingClock):
    """Sleeps at once, and counts."""

    slept = 0.0

    async def sleep(self, seconds: float) -> None:
        self.slept += seconds
        self.seconds += seconds


async def _take(lane: Lane, size_bytes: int) -> None:
    """Take so many bytes, a piece after the other."""
    while size_bytes:
        piece = min(size_bytes, lane.piece_bytes)
        await lane.take(piece)
        size_bytes -= piece


@pytest.mark.parametrize("rate", [100_000, 1_000_000, 100_000_000])
async def test_a_minute_has_the_rate(rate: int) -> None:
    clock = _Clock()
    lane = Lane(clock, rate)
    await _take(lane, 60 * rate)
    assert clock.seconds == pytest.approx(60, rel=0.02)


async def test_what_was_not_used_for_long_may_not_pass_at_once() -> None:
    clock = _Clock()
    lane = Lane(clock, 1_000_000)
    clock.seconds += 3600
    begin = clock.seconds
    await _take(lane, 2_000_000)
    assert clock.seconds - begin == pytest.approx(1.75, abs=0.05)


async def test_a_limit_holds_from_its_change_on() -> None:
    clock = _Clock()
    lanes = Lanes(clock)
    await _take(lanes.upload, 10**9)
    assert clock.slept == 0
    lanes.limit(BandwidthLimits(upload_bytes_per_second=1_000_000))
    await _take(lanes.upload, 10_000_000)
    assert clock.slept == pytest.approx(10, abs=0.5)
    lanes.limit(BandwidthLimits())
    await _take(lanes.upload, 10**9)
    assert clock.slept == pytest.approx(10, abs=0.5)
    assert lanes.download.rate == 0
