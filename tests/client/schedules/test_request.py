"""A schedule's name, times and PVCs, checked before anything is created; and why each of its copies stays or goes."""

from datetime import UTC, datetime, timedelta

import pytest

from client.backups.copies import KeepPolicy, KeepRule, format_keep
from client.backups.plan import Choice
from client.schedules.request import ExplainedCopy, ScheduleRequest, ScheduleTimes, explain_retention
from core.errors import ConfigError
from tests.client.support.deletion_scene import DeletionScene
from tests.client.support.schedule_scene import ScheduleScene
from tests.nodeagent.support.hand_clock import NOON


@pytest.mark.parametrize("name", ["night", "a.b-1", "n" * 48])
def test_a_name_that_a_cron_job_can_have_is_valid_and_a_reserved_label_is_not(name: str) -> None:
    ScheduleRequest(name, "velero", Choice(), labels={"team": "a"}).check()
    assert len(f"{name}-20261121120000") <= 63
    with pytest.raises(ConfigError, match=r"--annotations: velero\.io/x is reserved"):
        ScheduleRequest(name, "velero", Choice(), annotations={"velero.io/x": "a"}).check()
    with pytest.raises(ConfigError, match='--labels: "team=a b" is not allowed'):
        ScheduleRequest(name, "velero", Choice(), labels={"team": "a b"}).check()


@pytest.mark.parametrize("name", ["", "Night", "a_b", "-a", "a/b", "n" * 49])
def test_any_other_name_is_an_error(name: str) -> None:
    with pytest.raises(ConfigError, match="is no name of a schedule: up to 48 lowercase letters"):
        ScheduleRequest(name, "velero", Choice()).check()


@pytest.mark.parametrize(
    ("times", "error"),
    [
        (ScheduleTimes("0 2 * *"), '--schedule: "0 2 [*] [*]" is no cron expression .*: found 4 instead of 5 fields'),
        (ScheduleTimes("0 25 * * *"), "--schedule: .*: 25 is not from 0 to 23"),
        (ScheduleTimes("0 0 30 2 *"), "--schedule: .*: no such day"),
        (ScheduleTimes("@every 1h"), "--schedule: .*"),
        (ScheduleTimes("CRON_TZ=UTC 0 2 * * *"), "--schedule: .* has a time zone: set --time-zone"),
        (ScheduleTimes("TZ=UTC 0 2 * * *"), "--schedule: .* has a time zone: set --time-zone"),
        (ScheduleTimes("@daily", "Europe/Berln"), "--time-zone: no time zone: Europe/Berln"),
    ],
    ids=str,
)
def test_invalid_times_are_an_error_that_names_the_flag(times: ScheduleTimes, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        times.check()
    assert times.next_after(NOON) is None or times.schedule.startswith(("CRON_TZ", "TZ"))


def test_the_next_run_is_in_the_time_zone() -> None:
    ScheduleTimes("0 2 * * *", "Europe/Berlin").check()
    assert ScheduleTimes("0 2 * * *", "Europe/Berlin").next_after(NOON) == datetime(2026, 11, 22, 1, tzinfo=UTC)
    assert ScheduleTimes("@daily").next_after(NOON) == datetime(2026, 11, 22, tzinfo=UTC)
    assert ScheduleTimes("0 2 * * 1").longest_pause(NOON) == timedelta(days=7)


_KEEP = KeepPolicy({KeepRule.DAILY: 2})
_REQUEST = ScheduleScene.request(keep=_KEEP)


@pytest.fixture
def scene() -> DeletionScene:
    """Seven daily copies of a schedule, one of them with a volume that is gone, and one by hand."""
    scene = DeletionScene()
    for day in range(7):
        claims = ("data", "gone") if day == 5 else ("data",)
        scene.put_backup(f"night-{day}", day + 0.1, *claims, schedule="night", keep=format_keep(_KEEP, None))
    scene.put_backup("by-hand", 3.5)
    return scene


async def _explain(scene: DeletionScene) -> dict[str, ExplainedCopy]:
    found = await explain_retention(scene.tools, _REQUEST)
    return {f"{one.backup}-{one.claim}": one for one in found.copies}


async def test_what_is_said_to_go_is_what_a_run_deletes_and_what_went_today_counts(scene: DeletionScene) -> None:
    going = {name for name, one in (await _explain(scene)).items() if not one.stays}
    before = scene.names()
    await scene.run()
    assert before - scene.names() - {"by-hand-data"} == going
    assert [one.stays for one in (await _explain(scene)).values()] == [True] * 6
    scene.clock.seconds += timedelta(days=1).total_seconds() + 60
    assert [name for name, one in (await _explain(scene)).items() if not one.stays] == ["night-2-data", "night-3-data"]
