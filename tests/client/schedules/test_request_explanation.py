"""Why each copy of a schedule stays or goes: what is said is what a run does."""

from datetime import timedelta

import pytest

from client.backups.copies import KeepPolicy, KeepRule, format_keep
from client.schedules.request import ExplainedCopy, explain_retention
from tests.client.support.deletion_scene import DeletionScene
from tests.client.support.schedule_scene import ScheduleScene

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


async def test_each_copy_has_the_rules_that_keep_it(scene: DeletionScene) -> None:
    found = await _explain(scene)
    assert {name: (one.stays, one.rules) for name, one in found.items()} == {
        "night-0-data": (True, ["newest-copy", "kept-by-schedule"]),
        "night-1-data": (True, ["kept-by-schedule"]),
        # One was completed within a day: three may go, of which one is by hand.
        "night-2-data": (True, ["limit"]),
        "night-3-data": (True, ["limit"]),
        "night-4-data": (False, []),
        "night-5-data": (True, ["newest-copy"]),
        "night-6-data": (False, []),
        "night-5-gone": (True, ["newest-copy", "kept-by-schedule"]),
    }
    assert found["night-4-data"].reasons == ["no rule keeps it"]
    assert found["night-5-data"].reasons == ["it goes only with app/gone: it has the only copy of app/gone in default"]
    assert list(found)[:3] == ["night-0-data", "night-1-data", "night-2-data"]


async def test_what_is_said_to_go_is_what_a_run_deletes(scene: DeletionScene) -> None:
    going = {name for name, one in (await _explain(scene)).items() if not one.stays}
    before = scene.names()
    await scene.run()
    assert before - scene.names() - {"by-hand-data"} == going


async def test_what_went_today_counts(scene: DeletionScene) -> None:
    await scene.run()
    assert [one.stays for one in (await _explain(scene)).values()] == [True] * 6
    scene.clock.seconds += timedelta(days=1).total_seconds() + 60
    assert [name for name, one in (await _explain(scene)).items() if not one.stays] == ["night-2-data", "night-3-data"]
