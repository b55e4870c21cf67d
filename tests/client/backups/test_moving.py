"""What backups and restores have in common: which transfers are listed, and how often."""

from dataclasses import dataclass, field
from functools import partial

import pytest

from client.backups.create import start_backup
from client.backups.follow import find_backups, wait_for_backup
from client.backups.plan import Choice, ClaimName, plan_backup
from core.kube.errors import NotFoundError
from core.kube.resources import DATA_UPLOADS
from tests.client.support.backup_scene import BackupScene, SteppingClock


@dataclass
class _CountingClock(SteppingClock):
    """Remembers how long each sleep was."""

    sleeps: list[float] = field(default_factory=list)

    async def sleep(self, seconds: float) -> None:
        self.sleeps.append(round(seconds, 2))
        await super().sleep(seconds)


async def _started(*names: str, clock: SteppingClock | None = None) -> BackupScene:
    scene = BackupScene(clock=clock or SteppingClock())
    for name in names:
        choice = Choice(claims=(ClaimName("app", "data"),))
        await start_backup(scene.tools, await plan_backup(scene.tools, scene.request(name), choice))
    return scene


def _lists(scene: BackupScene) -> list[str]:
    """The selectors of the lists of transfers."""
    return [
        one.query.get("labelSelector", "")
        for one in scene.kube.requests
        if one.method == "GET" and one.path.endswith(("/datauploads", "/podvolumebackups"))
    ]


async def test_one_backup_is_found_without_listing_the_others() -> None:
    scene = await _started("night", "noon")
    scene.kube.requests.clear()
    found = await find_backups(scene.client, "velero", ("night",))
    assert found.names == ["night"]
    assert sorted(_lists(scene)) == sorted(2 * ["nodeagent.io/backup=night", "velero.io/backup-name=night"])


async def test_all_are_listed_for_the_name_that_may_be_meant() -> None:
    scene = await _started("night")
    scene.kube.requests.clear()
    with pytest.raises(NotFoundError, match=r"\(did you mean night\?\)"):
        await find_backups(scene.client, "velero", ("nigth",))
    assert _lists(scene)[-2:] == ["", ""]


async def test_a_long_wait_asks_less_often_and_never_for_other_transfers() -> None:
    clock = _CountingClock()
    scene = await _started("night", "noon", clock=clock)
    scene.kube.requests.clear()
    clock.steps = [*[lambda: None] * 40, partial(scene.move, "data", "Completed")]
    await wait_for_backup(scene.tools, "velero", "night", lambda _: None)
    assert (clock.sleeps[0], clock.sleeps[-1], clock.sleeps) == (1.0, 5.0, sorted(clock.sleeps))
    assert set(_lists(scene)) == {"nodeagent.io/backup=night"}


async def test_an_outage_of_the_api_server_is_waited_for() -> None:
    scene = await _started("night")
    scene.kube.fail_next("GET", "/datauploads", "lost", times=10)
    scene.clock.steps = [*[lambda: None] * 10, partial(scene.move, "data", "Completed")]
    assert (await wait_for_backup(scene.tools, "velero", "night", lambda _: None)).counted == "1/1"


async def test_a_backup_whose_transfers_vanish_while_waiting_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = await _started("night")
    (name,) = scene.objects(DATA_UPLOADS)

    async def vanish(_: float) -> None:
        await scene.client.delete(DATA_UPLOADS, "velero", name)

    monkeypatch.setattr(scene.clock, "sleep", vanish)
    with pytest.raises(NotFoundError, match=r"^backup night has no transfer in namespace velero any more"):
        await wait_for_backup(scene.tools, "velero", "night", lambda _: None)
