"""Retention by count and calendar: restic's own answers, and what restic does not know."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import pytest

from client.backups.copies import Copy, KeepPolicy, KeepRule, decide_kept, explain_scheduled, format_keep
from core.models.phases import Phase
from tests.client.support.copies import make_copy
from tests.nodeagent.support.hand_clock import NOON

_RECORDING: Final = Path(__file__).parents[2] / "recordings/restic-0.18.0/retention.json"
_HISTORIES: Final = json.loads(_RECORDING.read_text())["histories"]

_DAILY: Final = KeepPolicy({KeepRule.DAILY: 2})


def _spell(reasons: list[str]) -> str:
    return ",".join(f"{'oldest ' if one.endswith(', the oldest') else ''}{one.split()[0]}" for one in reasons)


def test_the_recording_has_200_histories_with_all_rules() -> None:
    assert len(_HISTORIES) == 200
    assert {rule for one in _HISTORIES for rule in one["policy"]} == set(KeepRule)
    assert any("oldest" in kept for one in _HISTORIES for kept in one["kept"])


@pytest.mark.parametrize("zone", sorted({one["zone"] for one in _HISTORIES}))
def test_what_restic_keeps_is_kept_for_the_same_reasons(zone: str) -> None:
    for history in (one for one in _HISTORIES if one["zone"] == zone):
        # Of copies of the same second, restic takes the first one for the newest.
        copies = {
            f"{999 - number:03}": make_copy("a", uid=f"{999 - number:03}", created=datetime.fromtimestamp(at, UTC))
            for number, at in enumerate(history["times"])
        }
        policy = KeepPolicy({KeepRule(rule): count for rule, count in history["policy"].items()}, zone)
        kept = decide_kept(copies.values(), policy)
        assert [_spell(kept.get(uid, [])) for uid in copies] == history["kept"], history


def _days(*days_old: float, **more: Any) -> list[Copy]:
    return [make_copy(f"n{day}", day, uid=f"n{day}", **more) for day in days_old]


@pytest.mark.parametrize(
    "change",
    [
        {"phase": Phase.FAILED, "snapshot_id": ""},
        {"phase": Phase.CANCELED, "snapshot_id": ""},
        {"damaged": True},
        {"recorded": True},
    ],
    ids=["failed", "canceled", "damaged", "recorded"],
)
def test_what_is_no_sound_copy_takes_no_place_and_stays_as_long_as_if_it_did(change: dict[str, Any]) -> None:
    kept = decide_kept([*_days(1, 2, 3, 4), *_days(0.9, 3.9, **change)], _DAILY)
    assert kept.keys() == {"n1", "n2", "n0.9"}


@pytest.mark.parametrize("change", [{"deleting": True}, {"foreign": "x"}], ids=str)
def test_what_goes_or_is_foreign_takes_no_place(change: dict[str, Any]) -> None:
    assert decide_kept([*_days(1, 2, 3), *_days(0.9, **change)], _DAILY).keys() == {"n1", "n2"}


def _explain(
    *copies: Copy, keep: str = format_keep(_DAILY, None), now: datetime = NOON, **policies: KeepPolicy | None
) -> dict[str, str | None]:
    made = [Copy(**vars(one) | {"schedule": one.schedule or "night", "keep": one.keep or keep}) for one in copies]
    return explain_scheduled(made, policies, now)


def test_each_volume_and_location_is_judged_by_itself() -> None:
    other = {"volume": ("app", "files")}
    found = _explain(*_days(1, 2, 3), *_days(5.1, **other), *_days(3.1, location="lab"))
    assert found == {
        "n1": "schedule night keeps it: daily 1 of 2, the newest of 2026-11-20",
        "n2": "schedule night keeps it: daily 2 of 2, the newest of 2026-11-19",
        "n3": None,
        "n5.1": "schedule night keeps it: daily 1 of 2, the newest of 2026-11-16",
        "n3.1": "schedule night keeps it: daily 1 of 2, the newest of 2026-11-18",
    }


@pytest.mark.parametrize(
    ("zone", "kept"), [("UTC", {"n0", "n1"}), ("Pacific/Kiritimati", {"n0", "n0.5"})], ids=["UTC", "14 hours ahead"]
)
def test_periods_are_those_of_the_time_zone(zone: str, kept: set[str]) -> None:
    found = _explain(*_days(0, 0.5, 1), night=KeepPolicy({KeepRule.DAILY: 2}, zone))
    # The day changes at 10:00 UTC there: the newest of its day before is then that of midnight.
    assert {uid for uid, why in found.items() if why} == kept


def test_copies_from_the_future_stay_and_take_no_place() -> None:
    """A clock was wrong by a year for three runs: each new copy would have gone at once."""
    found = _explain(*_days(-365, -366, -367, 0, 1, 2))
    assert found["n-365"] == "it is from the future: it was made at 2027-11-21T12:00:00Z"
    assert [uid for uid, why in found.items() if not why] == ["n2"]


def test_the_policy_of_the_newest_backup_of_a_schedule_counts() -> None:
    before = _days(1, 2, 3, keep="last=1,zone=UTC")
    assert [uid for uid, why in _explain(*before, *_days(0.5)).items() if not why] == ["n2", "n3"]
    assert _explain(*before, keep="", other=_DAILY).keys() == {"n1", "n2", "n3"}


def test_a_copy_from_the_future_does_not_name_the_policy() -> None:
    found = _explain(*_days(-365, keep="last=1,zone=UTC"), *_days(1, 2, 3, keep="last=3,zone=UTC"))
    assert all(found.values())


@pytest.mark.parametrize(
    ("ttl", "held"), [(None, ["n1", "n2"]), (timedelta(days=9), [])], ids=["nor a time to live", "but a time to live"]
)
def test_copies_with_a_count_stay_once_their_schedule_has_none(ttl: timedelta | None, held: list[str]) -> None:
    before = _days(1, 2, schedule="night", keep="monthly=12,zone=UTC,ttl=1h0m0s", ttl=timedelta(hours=1))
    found = explain_scheduled([*before, *_days(0.5, schedule="night", ttl=ttl)], {}, NOON)
    assert sorted(found) == held
    assert all(why and why.startswith("schedule night had a count when it was made") for why in found.values())


def test_without_a_schedule_or_a_policy_there_is_no_answer() -> None:
    assert explain_scheduled([make_copy("a", keep="daily=1"), make_copy("b", schedule="night")], {}, NOON) == {}


@pytest.mark.parametrize("keep", ["quarterly=4", "daily=many", "daily=1,zone=Mars/Base"])
def test_a_policy_that_cannot_be_read_keeps_everything_of_its_schedule(keep: str) -> None:
    found = _explain(*_days(1, 2, 3), *_days(0.5, keep=keep))
    assert all(
        why and why.startswith("what schedule night keeps cannot be read in its newest backup")
        for why in found.values()
    )
    assert len(found) == 4


def test_the_text_of_a_copy_has_all_its_rules() -> None:
    policy = KeepPolicy(dict.fromkeys(KeepRule, 3), "Europe/Berlin")
    found = _explain(*_days(0, 0.01), night=policy)
    assert found["n0"] == (
        "schedule night keeps it: last 1 of 3; hourly 1 of 3, the newest of 2026-11-21 13h; "
        "daily 1 of 3, the newest of 2026-11-21; weekly 1 of 3, the newest of 2026-W47; "
        "monthly 1 of 3, the newest of 2026-11; yearly 1 of 3, the newest of 2026"
    )
    assert found["n0.01"] == (
        "schedule night keeps it: last 2 of 3; hourly 2 of 3, the newest of 2026-11-21 12h; "
        "daily 2 of 3, the oldest; weekly 2 of 3, the oldest; monthly 2 of 3, the oldest; yearly 2 of 3, the oldest"
    )
