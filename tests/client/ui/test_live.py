"""What the pages are made from: coalesced changes, and a state that is never shown as newer or better than it is."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta

import pytest
from msgspec.structs import replace

from client.status.health import Health
from client.status.read import StatusReader
from client.status.records import TRANSFER_KINDS, RepositoryRecord, Target, TransferRecord
from client.ui.live import Details, Live, Observed, State
from core.kube.errors import ForbiddenError, NotFoundError, UnreachableError
from core.kube.resources import DATA_UPLOADS
from core.models.phases import Phase
from tests.client.support.status_scene import StatusScene, transfer
from tests.nodeagent.support.hand_clock import NOON, HandClock
from tests.support.clock import LoopClock

pytestmark = pytest.mark.looptime


@asynccontextmanager
async def _following(scene: StatusScene) -> AsyncIterator[Live]:
    clock = LoopClock()
    reader = StatusReader(scene.client, "velero", now=clock.now)
    live = Live(scene.client, "velero", reader, clock)
    task = asyncio.get_running_loop().create_task(live.run())
    try:
        while live.state is None:
            await live.wait(live.number, 1.0)
        yield live
    finally:
        task.cancel()
        await asyncio.wait({task})


def _state(live: Live) -> State:
    assert live.state is not None
    return live.state


def _now() -> float:
    return asyncio.get_running_loop().time()


@pytest.fixture
def scene() -> StatusScene:
    """A healthy cluster, also some minutes after noon."""
    scene = StatusScene()
    scene.put_lease("2026-11-21T12:30:00.000000Z")
    return scene


async def test_changes_lead_to_two_states_a_second_at_most(scene: StatusScene) -> None:
    async with _following(scene) as live:
        before, began = live.number, _now()
        for number in range(200):
            scene.kube.put(transfer("DataUpload", "busy", "InProgress", progress={"bytesDone": number}))
            await asyncio.sleep(0.05)
        assert 10 <= live.number - before <= 2 * (_now() - began) + 1
        while _state(live).snapshot.transfers[0].bytes_done != 199:
            await live.wait(live.number, 1.0)


async def test_a_state_that_nothing_changes_grows_older_by_seconds(scene: StatusScene) -> None:
    async with _following(scene) as live:
        before = live.number
        await asyncio.sleep(60.0)
        assert 8 <= live.number - before <= 12
        assert _state(live).view.health is Health.HEALTHY
        assert (_state(live).lost, _state(live).since) == (None, _state(live).snapshot.at)


async def test_while_the_cluster_does_not_answer_its_health_is_not_known(scene: StatusScene) -> None:
    async with _following(scene) as live:
        await asyncio.sleep(30.0)
        left = NOON + timedelta(seconds=_now())
        scene.go_away()
        while not _state(live).lost:
            await live.wait(live.number, 1.0)
        assert NOON + timedelta(seconds=_now()) - left <= timedelta(seconds=12)
        while not _state(live).error:
            assert _state(live).lost
            assert abs(_state(live).since - left) <= timedelta(seconds=2)
            await live.wait(live.number, 1.0)
        assert abs(_state(live).since - left) <= timedelta(seconds=2)
        view = _state(live).view
        assert view.health is Health.UNKNOWN
        assert "the cluster does not answer" in view.findings[-1].message
        await asyncio.sleep(300.0)
        assert abs(_state(live).since - left) <= timedelta(seconds=2)
        # It goes on by itself.
        scene.kube.fulfill()
        scene.kube.put(transfer("DataUpload", "later"))
        async with asyncio.timeout(60.0):
            while _state(live).lost:
                await live.wait(live.number, 1.0)
        assert [one.name for one in _state(live).snapshot.transfers] == ["later"]
        assert _state(live).view.health is Health.HEALTHY


async def test_what_may_not_be_watched_is_no_outage(scene: StatusScene) -> None:
    for method in ("GET", "WATCH"):
        scene.kube.fail_next(method, "/backuprepositories", 403, message="you may not", times=999)
    async with _following(scene) as live:
        await asyncio.sleep(300.0)
        assert _state(live).lost is None
        assert _state(live).view.unread == ["repositories"]
        assert _state(live).view.health is Health.UNKNOWN


_TARGET = Target(TRANSFER_KINDS[0], "moving")
_RECORD = TransferRecord(kind="DataUpload", namespace="velero", name="moving", phase=Phase.IN_PROGRESS)
_REPOSITORY = RepositoryRecord(
    name="app-default-kopia", volume_namespace="app", location="default", phase="Ready", maintained=NOON
)


class _Reads:
    """Details of the scene, and how often the transfer was read."""

    def __init__(self) -> None:
        self.scene, self.clock = StatusScene(), HandClock()
        self.scene.put_transfers()
        self.details = Details(self.scene.client, "velero", now=lambda: NOON, clock=self.clock)

    def count(self, text: str) -> int:
        return sum(text in str(request.path) for request in self.scene.kube.requests)

    async def read(self, record: TransferRecord) -> int:
        """Return how many requests for the transfer a look at it costs."""
        before = self.count("/datauploads/moving")
        assert (await self.details.transfer(_TARGET, Observed(record))).name == "moving"
        return self.count("/datauploads/moving") - before


@pytest.fixture
def reads() -> _Reads:
    return _Reads()


async def test_a_transfer_is_read_again_once_it_has_changed_or_after_a_while(reads: _Reads) -> None:
    assert await reads.read(_RECORD) == 1
    assert await reads.read(_RECORD) == 0
    changed = replace(_RECORD, bytes_done=7)
    assert await reads.read(changed) == 0, "twice within two seconds"
    reads.clock.seconds += 3
    assert await reads.read(changed) == 1
    reads.clock.seconds += 10
    assert await reads.read(changed) == 0
    reads.clock.seconds += 10
    assert await reads.read(changed) == 1, "its Events may have changed"
    ended = replace(_RECORD, phase=Phase.COMPLETED)
    reads.clock.seconds += 20
    assert await reads.read(ended) == 1
    reads.clock.seconds += 20
    assert await reads.read(ended) == 0, "it has ended"


async def test_a_repository_is_read_and_kept(reads: _Reads) -> None:
    for _ in range(3):
        found = await reads.details.repository("app-default-kopia", Observed(_REPOSITORY))
        assert found.volume_namespace == "app"
    assert reads.count("/backuprepositories/app-default-kopia") == 1
    with pytest.raises(NotFoundError, match="does not exist"):
        await reads.details.repository("app-defaut-kopia", Observed(None))


async def test_while_the_cluster_does_not_answer_an_object_is_shown_as_it_was_read_last(reads: _Reads) -> None:
    known = await reads.details.transfer(_TARGET, Observed(_RECORD))
    before = len(reads.scene.kube.requests)
    reads.clock.seconds += 60
    assert await reads.details.transfer(_TARGET, Observed(_RECORD, "no answer")) == known
    assert len(reads.scene.kube.requests) == before
    reads.scene.go_away()
    assert await reads.details.transfer(_TARGET, Observed(_RECORD)) == known


async def test_one_that_was_not_read_is_shown_as_it_is_watched_until_the_cluster_answers(reads: _Reads) -> None:
    shown = await reads.details.transfer(_TARGET, Observed(_RECORD, "no answer"))
    assert (shown.name, shown.phase, shown.history) == ("moving", Phase.IN_PROGRESS, [])
    assert shown.notes == ["its history, Events, pods and log could not be read: no answer"]
    repository = await reads.details.repository("app-default-kopia", Observed(_REPOSITORY, "no answer"))
    assert (repository.volume_namespace, repository.last_maintenance, repository.next.due) == ("app", NOON, None)
    assert repository.notes == ["its maintenance, contents and Events could not be read: no answer"]
    assert reads.scene.kube.requests == []
    assert (await reads.details.transfer(_TARGET, Observed(_RECORD))).history != []
    assert (await reads.details.repository("app-default-kopia", Observed(_REPOSITORY))).created is not None
    with pytest.raises(UnreachableError, match="no answer"):
        await reads.details.repository("other", Observed(None, "no answer"))


async def test_one_that_may_not_be_read_is_shown_as_it_is_watched(reads: _Reads) -> None:
    assert (await reads.details.transfer(_TARGET, Observed(_RECORD))).history != []
    for what in ("/datauploads/moving", "/backuprepositories/"):
        reads.scene.kube.fail_next("GET", what, 403, message="you may not", times=99)
    reads.clock.seconds += 60
    for _ in range(2):
        shown = await reads.details.transfer(_TARGET, Observed(_RECORD))
        assert shown.history == []
        assert "you may not" in shown.notes[0]
    assert reads.count("/datauploads/moving") == 2
    repository = await reads.details.repository("app-default-kopia", Observed(_REPOSITORY))
    assert "you may not" in repository.notes[0]
    with pytest.raises(ForbiddenError):
        await reads.details.repository("other", Observed(None))


async def test_one_that_was_deleted_is_not_shown_as_it_was(reads: _Reads) -> None:
    await reads.details.transfer(_TARGET, Observed(_RECORD))
    await reads.scene.client.delete(DATA_UPLOADS, "velero", "moving")
    reads.clock.seconds += 60
    before = len(reads.scene.kube.requests)
    for _ in range(3):
        with pytest.raises(NotFoundError):
            await reads.details.transfer(_TARGET, Observed(None))
    assert len(reads.scene.kube.requests) == before + 2, "the object, and once all for a name that may be meant"
    reads.clock.seconds += 60
    with pytest.raises(UnreachableError):
        await reads.details.transfer(_TARGET, Observed(None, "no answer"))


async def test_one_that_was_created_meanwhile_is_shown(reads: _Reads) -> None:
    target = Target(TRANSFER_KINDS[0], "later")
    record = replace(_RECORD, name="later")
    with pytest.raises(NotFoundError):
        await reads.details.transfer(target, Observed(None))
    reads.scene.kube.put(transfer("DataUpload", "later"))
    reads.clock.seconds += 3
    reads.scene.kube.fail_next("GET", "/datauploads/later", 500, times=99)
    assert (await reads.details.transfer(target, Observed(record))).notes
    reads.scene.kube.fulfill()
    assert not (await reads.details.transfer(target, Observed(record))).notes
