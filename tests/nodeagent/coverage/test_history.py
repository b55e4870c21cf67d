"""The history of backups: what is counted once, what a day says, and what goes first where it is too large."""

import random
import zlib
from datetime import UTC, date, datetime, timedelta

import pytest

from core.models.base import parse_time
from nodeagent.coverage.history import (
    HISTORY_DAYS,
    EndedBackup,
    HistoryDay,
    VolumeHistory,
    block_of,
    merge_history,
    name_of_block,
)

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
TODAY = NOON.toordinal()
BLOCK = block_of(TODAY)
FIRST = datetime.fromordinal(BLOCK * 30).replace(tzinfo=UTC)
DATA = ("app", "data")


def backup(uid: str, at: datetime = NOON, size: int = 100, new: int | None = 10, **more: object) -> EndedBackup:
    fields = {"namespace": "app", "claim": "data", "seconds": 5.0} | more
    return EndedBackup(uid, completed=at, total_bytes=size, new_bytes=new, **fields)  # type: ignore[arg-type] # test values


def merged(*backups: EndedBackup, stored: bytes | None = None, today: int = TODAY) -> bytes:
    found = merge_history(stored, BLOCK, backups, today)
    assert found is not None
    return found


def day_of(data: bytes, day: int = TODAY, key: tuple[str, str] | None = DATA) -> tuple[float | None, ...]:
    """What was new, the size and the seconds of a day; without a key, of all volumes."""
    history = VolumeHistory([data], TODAY)
    days = history.of(key) if key is not None else history.every
    (found,) = (one for one in days if one.day == date.fromordinal(day))
    return (found.new_bytes, found.total_bytes, found.seconds)


def test_a_day_sums_up_what_is_new_and_has_the_size_of_the_newest_backup() -> None:
    data = merged(backup("a"), backup("b", size=90, new=20), backup("c", claim="logs", size=1000, new=None))
    assert day_of(data) == (30, 90, 10)
    assert day_of(data, key=("app", "logs")) == (None, 1000, 5)
    assert day_of(data, key=None) == (30, 1090, 15)
    assert day_of(data, TODAY - 1) == (None, None, None)


def test_volumes_of_pods_without_a_pvc_are_in_the_sum_of_all() -> None:
    data = merged(backup("a"), backup("b", claim=""), backup("c", claim=""))
    assert day_of(data) == (10, 100, 5)
    assert day_of(data, key=None) == (30, 300, 15)


def test_each_backup_is_counted_once_also_after_its_transfer_is_gone() -> None:
    data = merged(backup("a"))
    assert merge_history(data, BLOCK, [backup("a")], TODAY) is None
    assert merge_history(data, BLOCK, [backup("a")], TODAY + 1) is None
    assert day_of(merged(backup("b"), stored=data)) == (20, 100, 10)


def test_a_day_that_no_leader_has_seen_pass_takes_what_it_has_missed_and_no_other_day_does() -> None:
    missed = backup("b", NOON + timedelta(hours=3))
    late = merged(backup("a"), missed, stored=merged(backup("a")), today=TODAY + 3)
    assert day_of(late) == (20, 100, 10)
    assert merge_history(late, BLOCK, [backup("a"), missed, backup("c")], TODAY + 3) is None
    # A clock that is days ahead.
    for ahead in (NOON + timedelta(days=5), parse_time("9999-12-31T23:59:59-14:00")):
        assert merge_history(late, BLOCK, [backup("d", ahead)], TODAY + 3) is None


@pytest.mark.parametrize("broken", [b"", b"none", zlib.compress(b"{}\n"), zlib.compress(b'{"version":9,"block":1}\n')])
def test_what_cannot_be_read_is_a_gap_and_begins_anew(broken: bytes) -> None:
    assert day_of(broken) == (None, None, None)
    assert day_of(merged(backup("a"), stored=broken)) == (10, 100, 5)


def test_a_block_that_is_no_longer_shown_is_replaced() -> None:
    old = FIRST - timedelta(days=120)
    before = merge_history(None, BLOCK - 4, [backup("a", old)], TODAY)
    assert name_of_block(BLOCK - 4) == name_of_block(BLOCK)
    assert day_of(merged(backup("b"), stored=before), key=None) == (10, 100, 5)


def test_ninety_days_are_shown_from_four_blocks_at_most() -> None:
    blocks: dict[int, list[EndedBackup]] = {}
    for n in range(HISTORY_DAYS + 10):
        blocks.setdefault(block_of(TODAY - n), []).append(backup(f"b{n}", NOON - timedelta(days=n), new=n))
    contents = [merge_history(None, block, members, TODAY) for block, members in blocks.items()]
    history = VolumeHistory([data for data in contents if data is not None], TODAY)
    assert len({name_of_block(block) for block in blocks}) == len(blocks)
    assert history.of(DATA) == history.every
    assert [one.new_bytes for one in history.every] == list(reversed(range(HISTORY_DAYS)))
    assert history.every[-1] == HistoryDay(day=NOON.date(), new_bytes=0, total_bytes=100, seconds=5)


def test_of_too_many_volumes_the_smallest_are_only_in_the_sum() -> None:
    chance = random.Random(7)
    ended = [
        backup(
            f"{n}-{day}",
            FIRST + timedelta(days=day),
            size=(n + 1) * 10**9,
            new=chance.randrange(10**10),
            claim=f"data-{n}",
            seconds=chance.uniform(10, 3600),
        )
        for n in range(60)
        for day in range(20)
    ]
    today = BLOCK * 30 + 19
    data = merge_history(None, BLOCK, ended, today, most_bytes=4000)
    assert data is not None
    assert 3000 < len(data) <= 4000
    history, last = VolumeHistory([data], today), ended[19::20]
    assert history.every[-1].total_bytes == pytest.approx(sum(one.total_bytes for one in last), rel=0.01)
    assert history.every[-1].new_bytes == pytest.approx(sum(one.new_bytes or 0 for one in last), rel=0.01)
    own = [history.of(("app", f"data-{n}"))[-1].total_bytes is not None for n in range(60)]
    assert own == sorted(own)
    assert 20 < own.count(True) < 60


@pytest.mark.parametrize("value", [0, 1, 1023, 123_456_789, 2**50 + 2**45, 2**62])
def test_numbers_are_right_to_half_a_thousandth(value: int) -> None:
    _, size, _ = day_of(merged(backup("a", size=value)))
    assert size == pytest.approx(value, rel=0.0005)
