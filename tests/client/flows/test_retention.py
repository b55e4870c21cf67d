"""Retention by whole runs: what took the last copy away once, and what everyday life may not stop."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta

import pytest

from client.backups.delete import DeletionWish, check_plan, plan_deletion
from client.backups.deletion_report import build_deletion, build_report
from client.backups.retention import DeletionError
from core.kube.resources import DATA_UPLOADS
from core.kube.transport import Request
from core.models.base import parse_time
from tests.client.support.deletion_scene import DeletionScene
from tests.nodeagent.support.hand_clock import NOON, FreeClock

_DAY = timedelta(days=1)


@pytest.fixture
def scene() -> DeletionScene:
    """29 nightly copies in `default`, all but the newest expired, and a newer one by hand in `lab`."""
    scene = DeletionScene()
    scene.put_location("lab")
    for day in range(29, 0, -1):
        scene.put_backup(f"night-{day:02}", day + 0.5, ttl="24h")
    scene.put_backup("by-hand", 0.2, ttl="", location="lab")
    return scene


async def _lose(scene: DeletionScene) -> None:
    path = "/apis/velero.io/v1/namespaces/velero/backupstoragelocations/lab"
    assert (await scene.kube.request(Request("DELETE", path))).status == 200


@pytest.mark.parametrize("phase", ["Available", "Unavailable", None], ids=str)
async def test_a_newer_copy_elsewhere_keeps_the_newest_of_a_location(scene: DeletionScene, phase: str | None) -> None:
    """The copy in `lab` counted as the newest of all, and all 29 in `default` went."""
    if phase is None:
        await _lose(scene)
    else:
        scene.put_location("lab", phase)
    await scene.run()
    left = sorted(key for key, place in scene.kube.places.items() if place == "default" and key in scene.kube.bucket)
    # None was completed within a day in `default`: two go.
    assert left == [f"s-night-{day:02}-data" for day in range(1, 28)]
    assert "s-by-hand-data" in scene.kube.bucket


def _delete_newest(scene: DeletionScene) -> None:
    del scene.kube.bucket["s-night-01-data"]


def _damage_root(scene: DeletionScene) -> None:
    scene.kube.rootless.add("s-night-01-data")


def _point_elsewhere(scene: DeletionScene) -> None:
    for key in scene.kube.places:
        scene.kube.places[key] = "another bucket"


@pytest.mark.parametrize("change", [_delete_newest, _damage_root, _point_elsewhere])
async def test_a_newest_copy_that_is_lost_justifies_no_deletion(
    scene: DeletionScene, change: Callable[[DeletionScene], object]
) -> None:
    change(scene)
    before = scene.kube.bucket.keys(), scene.names()
    await scene.run()
    assert (scene.kube.bucket.keys(), scene.names()) == before
    plan = await scene.check()
    assert plan.now is not None
    held = build_report(plan, plan.now).held[-1]
    assert (held.backup, held.rule) == ("night-01", "newest-copy")
    assert {one.rule for one in build_report(plan, plan.now).held[:-1]} == {"unconfirmed"}


async def test_after_a_move_the_last_copies_in_the_old_location_stay(scene: DeletionScene) -> None:
    """The schedule writes to `lab` from now on, `lab` is lost, and backups fail: `default` keeps what it has."""
    for day in range(5):
        scene.put_backup(f"moved-{day}", -day, location="lab", phase="Completed" if day < 3 else "Failed")
    await _lose(scene)
    scene.clock.seconds = 6 * _DAY.total_seconds()
    for _ in range(40):
        scene.clock.seconds += _DAY.total_seconds()
        await scene.run()
    # The newest transfer failed: three stay.
    left = {key for key in scene.kube.bucket if scene.kube.places[key] == "default"}
    assert left == {"s-night-01-data", "s-night-02-data", "s-night-03-data"}


@pytest.mark.parametrize(("dates", "pod"), [(31, 0), (0, 31), (-31, -31)], ids=["Date", "pod", "both behind"])
async def test_one_wrong_clock_deletes_nothing(scene: DeletionScene, dates: int, pod: int) -> None:
    """One Date header, 31 days ahead, expired all but the newest."""
    for name, days_old in (("ancient", 401), ("old", 400)):
        scene.put_backup(name, days_old)
    scene.kube.dates_ahead, scene.kube.pod_ahead = dates * _DAY, pod * _DAY
    before = dict(scene.kube.bucket)
    with pytest.raises(DeletionError, match="apart"):
        await scene.run()
    assert scene.kube.bucket == before
    # A person who names a backup needs no clock.
    scene.kube.dates_ahead = scene.kube.pod_ahead = timedelta()
    scene.kube.dated = False
    await scene.execute(await scene.check("night-05"))
    assert "s-night-05-data" not in scene.kube.bucket


async def test_what_is_held_at_the_old_end_does_not_stop_the_others(scene: DeletionScene) -> None:
    """Three that were held took the places of the limit, for ever."""
    for day in (29, 28, 27):
        del scene.kube.bucket[f"s-night-{day}-data"]
    await scene.run()
    assert {f"night-{day}-data" for day in (29, 28, 27)} < scene.names()
    assert not {f"night-{day}-data" for day in (26, 25)} & scene.names()
    plan = await scene.check()
    assert plan.now is not None
    held = build_report(plan, plan.now).held
    assert [(one.backup, one.rule) for one in held[:3]] == [(f"night-{day}", "not-found") for day in (29, 28, 27)]


async def test_a_person_is_warned_of_what_may_be_the_last_copy(scene: DeletionScene) -> None:
    _delete_newest(scene)
    plan, found = await check_plan(scene.tools, await plan_deletion(scene.tools, DeletionWish("night-02")))
    (backup,) = build_deletion(plan, found, done=False).backups
    (loss,) = backup.losses
    newest = "DataUpload night-01-data, the newest copy of app/data in default"
    assert loss.startswith(f"it may have the last copy: {newest}")


async def test_a_named_deletion_by_a_wrong_clock_does_not_stop_what_goes_by_age(scene: DeletionScene) -> None:
    await scene.run()
    scene.kube.dates_ahead = 2 * _DAY
    await scene.execute(await scene.check("night-27"))
    scene.kube.dates_ahead = timedelta()
    # Three went today: no more may.
    await scene.run()
    assert len(scene.names()) == 30 - 3
    for _ in range(2):
        scene.clock.seconds += 1.1 * _DAY.total_seconds()
        await scene.run()
    # The one that went "in two days" counts until the next run has put it right.
    assert len(scene.names()) == 30 - 3 - 1 - 2


async def test_a_date_that_is_behind_fails_the_run_of_a_pod(scene: DeletionScene) -> None:
    """Nothing would be expired, and nothing would say why."""
    scene.kube.dates_ahead = -31 * _DAY
    with pytest.raises(DeletionError, match="clocks are more than 5m0s apart"):
        await plan_deletion(replace(scene.tools, in_pod=True))


async def test_a_backup_that_is_completed_during_the_check_stops_nothing(scene: DeletionScene) -> None:
    plan = await scene.check()
    scene.put_backup("by-another", 0.01)
    await scene.execute(plan)
    assert {one.backup for one in plan.deleted} == {"night-29", "night-28"}
    assert not {"night-29-data", "night-28-data"} & scene.names()


@dataclass(frozen=True)
class _Schedule:
    """Backs `claims` up every `hours`; each run deletes what is expired. It pauses, and has the `ttl`, by the day.

    With `keep`, it keeps by count and calendar, and has no time to live.
    """

    name: str
    hours: int
    ttl: Callable[[float], int]
    claims: Callable[[float], tuple[str, ...]] = lambda _: ("data",)
    runs: Callable[[float], bool] = lambda _: True
    keep: str = ""


@dataclass
class _Life:
    """Runs schedules for days, and notes how many copies waited after each run."""

    schedules: tuple[_Schedule, ...]
    scene: DeletionScene = field(default_factory=lambda: DeletionScene(FreeClock()))
    waited: list[int] = field(default_factory=list)
    held: set[tuple[str, str]] = field(default_factory=set)

    async def live(self, days: int) -> None:
        for hour in range(days * 24):
            for schedule in self.schedules:
                if hour % schedule.hours == 0 and schedule.runs(hour / 24):
                    self.scene.clock.seconds = max(self.scene.clock.seconds, hour * 3600)
                    await self._run(schedule, hour)

    async def _run(self, schedule: _Schedule, hour: int) -> None:
        day = hour / 24
        ttl = f"{schedule.ttl(day)}h"
        if claims := schedule.claims(day):
            name = f"{schedule.name}-{hour:04}"
            self.scene.put_backup(name, -day, *claims, ttl=ttl, schedule=schedule.name, keep=schedule.keep)
        plan, _ = await check_plan(self.scene.tools, await plan_deletion(self.scene.tools))
        assert plan.now is not None
        report = build_report(plan, plan.now)
        self.waited.append(report.waiting)
        self.held |= {(one.claim, one.rule) for one in report.held}
        await self.scene.execute(plan)

    def oldest_hours(self) -> dict[str, int]:
        """Return the age of the oldest copy of each PVC, and check that each copy has its snapshot."""
        oldest: dict[str, int] = {}
        for raw in self.scene.kube.objects(DATA_UPLOADS):
            assert raw["status"]["snapshotID"] in self.scene.kube.bucket
            created = parse_time(raw["metadata"]["creationTimestamp"])
            age = (NOON + timedelta(seconds=self.scene.clock.seconds) - created) // timedelta(hours=1)
            claim = raw["spec"]["sourcePVC"]
            oldest[claim] = max(oldest.get(claim, 0), age)
        return oldest


_DAILY = _Schedule("daily", 24, lambda _: 7 * 24)
_BOTH = ("gone", "data")
_MANY = tuple(f"v{number}" for number in range(50))


@pytest.mark.sample(
    "hourly with 2 h", "two schedules on one volume", "10 days suspended", "a volume gone", "50 volumes"
)
@pytest.mark.parametrize(
    ("schedules", "days", "most_waiting", "oldest"),
    [
        ([_DAILY], 20, 0, {"data": 7 * 24}),
        ([_Schedule("w", 168, lambda _: 28 * 24)], 70, 0, {"data": 28 * 24}),
        ([_Schedule("h", 1, lambda _: 24)], 3, 0, {"data": 24}),
        ([_Schedule("h", 1, lambda _: 2)], 2, 0, {"data": 2}),
        ([_DAILY, _Schedule("h", 6, lambda _: 24)], 15, 0, {"data": 7 * 24 - 6}),
        ([replace(_DAILY, runs=lambda day: not 10 <= day < 20)], 40, 5, {"data": 7 * 24}),
        ([_Schedule("d", 24, lambda day: (30 if day < 40 else 7) * 24)], 75, 0, {"data": 7 * 24}),
        # The whole backup that has the last copy stays, and is named.
        ([replace(_DAILY, claims=lambda day: _BOTH[day >= 10 :])], 30, 0, {"data": 20 * 24, "gone": 20 * 24}),
        ([replace(_DAILY, claims=lambda day: ("gone",) if day < 10 else ())], 30, 0, {"gone": 20 * 24}),
        ([replace(_DAILY, claims=lambda _: _MANY)], 12, 0, dict.fromkeys(_MANY, 7 * 24)),
    ],
    ids=[
        "daily with 7 d",
        "weekly with 28 d",
        "hourly with 24 h",
        "hourly with 2 h",
        "two schedules on one volume",
        "10 days suspended",
        "ttl from 30 d to 7 d",
        "a volume gone",
        "the last volume gone",
        "50 volumes",
    ],
)
async def test_everyday_life_needs_no_person(
    schedules: list[_Schedule], days: int, most_waiting: int, oldest: dict[str, int]
) -> None:
    life = _Life(tuple(schedules))
    await life.live(days)
    assert (max(life.waited), life.waited[-1]) == (most_waiting, 0)
    assert life.oldest_hours() == oldest
    assert life.held <= {("gone", "newest-copy")}


async def test_a_schedule_that_keeps_by_calendar_settles() -> None:
    """Nothing waits, and what is left are the days that its rules name; it began at noon of 2026-11-21."""
    life = _Life((replace(_DAILY, keep="daily=3,weekly=3,monthly=3,zone=UTC"),))
    await life.live(50)
    assert (max(life.waited), life.held) == (0, set())
    left = sorted(raw["metadata"]["creationTimestamp"][:10] for raw in life.scene.kube.objects(DATA_UPLOADS))
    assert left == ["2026-11-30", "2026-12-27", "2026-12-31", "2027-01-03", "2027-01-07", "2027-01-08", "2027-01-09"]
