"""How many copies may go at once, and by which time: the limit of deletions, and the witnesses of the time."""

import re
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

import pytest

from client.backups.copies import Copy
from client.backups.retention import (
    DeletionError,
    GoneCopy,
    RetentionDecision,
    RetentionRule,
    Situation,
    decide_now,
    explain_backlog,
    judge_backups,
    limit_deletions,
)
from core.models.phases import Phase
from tests.client.support.copies import DATA, DAY, make_copy
from tests.nodeagent.support.hand_clock import NOON


def _limit(
    *copies: Copy, gone: list[GoneCopy] | None = None, most: int | None = None
) -> dict[str, list[RetentionDecision]]:
    judged = limit_deletions(judge_backups(copies, Situation(now=NOON)), gone or [], NOON, most=most)
    return {
        "deleted": [one for one in judged if not one.holds],
        "waiting": [one for one in judged if one.held_by((RetentionRule.LIMIT,))],
    }


def _names(judgments: list[RetentionDecision]) -> list[str]:
    return [one.backup for one in judgments]


_OLD: Final = [make_copy(f"n{day}", day) for day in range(9, 3, -1)]
"""Six expired copies; the younger ones keep them from being the newest."""


@pytest.mark.parametrize(
    ("younger", "gone", "deleted"),
    [
        pytest.param([make_copy("new", 1.5)], [], 2, id="none completed within a day"),
        pytest.param([make_copy("x", 0.9), make_copy("y", 0.5)], [], 4, id="two completed"),
        pytest.param([make_copy("x", 1.9, ended=NOON - DAY / 2)], [], 3, id="completed within it, and begun before"),
        pytest.param([make_copy("x", 5.5, ended=NOON + 30 * DAY)], [], 2, id="completed by a clock that is ahead"),
        pytest.param([make_copy("x", 0.9)], [(0.5, 9.0)], 2, id="one went"),
        pytest.param([make_copy("x", 0.9)], [(1.5, 9.0)], 3, id="one went before"),
        pytest.param([make_copy("x", 0.9)], [(0.1, 0.5)], 3, id="one came and went"),
        pytest.param([make_copy("x", 0.9)], [(-3.0, 9.0)], 2, id="one went by a clock that was ahead"),
        pytest.param([make_copy("new", 1.5)], [(0.5, 9.0)] * 5, 0, id="too many went"),
    ],
)
def test_as_many_copies_go_as_were_completed_and_two(
    younger: list[Copy], gone: list[tuple[float, float]], deleted: int
) -> None:
    went = [GoneCopy(DATA, "default", NOON - at * DAY, NOON - made * DAY) for at, made in gone]
    limited = _limit(*_OLD, *younger, gone=went)
    assert _names(limited["deleted"]) == _names(judge_backups(_OLD, Situation()))[:deleted]
    assert len(limited["waiting"]) == len(_OLD) - deleted


def test_whole_backups_are_counted_before_the_first_goes_and_none_goes_before_an_older_one() -> None:
    files = ("app", "files")
    # Two copies of app/data go in the first ones: the third waits, and with it what is younger and has its volumes.
    first = [
        make_copy("a", 9),
        make_copy("b", 8),
        make_copy("c", 7),
        make_copy("c", 7, volume=files),
        make_copy("d", 6, volume=files),
    ]
    limited = _limit(*first, make_copy("new", 1.5), make_copy("new", 1.5, volume=files))
    assert (_names(limited["deleted"]), _names(limited["waiting"])) == (["a", "b"], ["c", "d"])
    assert limited["waiting"][0].holds[0].text == "app/data may lose 2 copies in default now: it waits for a later run"
    other = _limit(
        *first, make_copy("z", 6, location="lab"), make_copy("new", 1.5), make_copy("new", 1.2, location="lab")
    )
    assert "z" in _names(other["deleted"])


def test_a_person_may_let_more_go_and_what_has_no_data_has_no_limit() -> None:
    failed = [make_copy(f"f{n}", 9, phase=Phase.FAILED, snapshot_id=None) for n in range(5)]
    assert len(_limit(*_OLD, *failed, make_copy("new", 1.5))["deleted"]) == 7
    assert _names(_limit(*_OLD, make_copy("new", 1.5), most=4)["deleted"]) == ["n9", "n8", "n7", "n6"]


def _explain(*copies: Copy) -> tuple[int, str | None, float] | None:
    judged = limit_deletions(judge_backups(copies, Situation(now=NOON)), [], NOON)
    _, waiting, why, through = explain_backlog(judged, NOON)
    return (waiting, why, (through - NOON) / DAY) if through is not None else None


def test_a_backlog_says_why_and_when_it_is_through() -> None:
    assert _explain(*_OLD[:2], make_copy("new", 1.5)) is None
    assert _explain(*_OLD, make_copy("new", 1.5)) == (4, "fewer backups are completed than expire", 2)
    paused = [make_copy(f"n{day}", day + 20) for day in range(9, 3, -1)]
    between = "2026-10-28T12:00:00Z and 2026-11-20T00:00:00Z"
    why = f"there was no backup between {between}: runs were missed, or a clock was wrong"
    assert _explain(*paused, make_copy("new", 1.5)) == (4, why, 2)
    shorter = [replace(one, ttl=3 * DAY) for one in _OLD]
    assert _explain(*shorter, make_copy("new", 1.5)) == (4, "the time to live was shortened from 72h0m0s to 24h0m0s", 2)


@pytest.mark.parametrize(
    ("ahead", "begun", "error"),
    [
        ((0.0, 0.0, 0.0), None, None),
        ((4.9, 0.0, 2.0), None, None),
        ((0.0, -4.9, 0.0), 0.0, None),
        ((31 * 1440.0, 0.0, 0.0), None, "clocks are more than 5m0s apart (a 2026-12-22T12:00:00Z, b 2026-11-21T12"),
        ((0.0, 0.0, -6.0), None, "clocks are more than 5m0s apart"),
        ((0.0, None, 0.0), None, "how old backups are is not known without b"),
        ((0.0, 0.0, 0.0), 6.0, "this run has not begun yet (2026-11-21T12:06:00Z)"),
    ],
    ids=["alike", "a little apart", "the earliest counts", "one ahead", "one behind", "silent", "before the run"],
)
def test_the_earliest_of_three_clocks_counts_if_they_agree(
    ahead: tuple[float | None, ...], begun: float | None, error: str | None
) -> None:
    def at(minutes: float | None) -> datetime | None:
        return NOON + timedelta(minutes=minutes) if minutes is not None else None

    said = dict(zip("abc", map(at, ahead), strict=True))
    if error is None:
        assert decide_now(said, at(begun)) == min(time for time in said.values() if time is not None)
        return
    with pytest.raises(DeletionError, match=f"^nothing is deleted: .*{re.escape(error)}"):
        decide_now(said, at(begun))
