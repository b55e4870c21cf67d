"""One read of a cluster: a constant number of requests, and what stops it."""

import pytest

from client.status.records import UnreadPart
from core.kube.errors import UnauthorizedError, UnreachableError
from tests.client.support.status_scene import StatusScene, transfer


@pytest.fixture
def scene() -> StatusScene:
    return StatusScene()


async def _count(scene: StatusScene) -> int:
    before = len(scene.kube.requests)
    await scene.reader.read()
    return len(scene.kube.requests) - before


async def test_the_number_of_requests_does_not_depend_on_the_number_of_transfers_or_agents(scene: StatusScene) -> None:
    before = await _count(scene)
    scene.put_transfers()
    for number in range(50):
        scene.kube.put(transfer("DataUpload", f"more-{number}"))
        scene.put_agent(f"node-{number}")
    assert await _count(scene) == before == 16


async def test_lists_are_paged(scene: StatusScene) -> None:
    for number in range(2001):
        scene.kube.put(transfer("PodVolumeBackup", f"b-{number:04}"))
    assert len((await scene.reader.read()).transfers) == 2001
    limits = [one.query["limit"] for one in scene.kube.requests if one.path.endswith("/podvolumebackups")]
    assert limits == ["2000", "2000"]


async def test_without_agents_nothing_is_asked_and_the_rest_is_read(scene: StatusScene) -> None:
    scene.kube.fail_next("GET", "/daemonsets", 404)
    snapshot = await scene.reader.read()
    assert {one.part for one in snapshot.unread} == {UnreadPart.FLAGS, UnreadPart.CONFIG, UnreadPart.PAGE}
    assert len(snapshot.agents) == 2


async def test_a_leader_that_does_not_answer_is_no_error(scene: StatusScene) -> None:
    scene.kube.fail_next("GET", "/proxy/", "lost")
    (unread,) = (await scene.reader.read()).unread
    assert (unread.part, unread.why) == (UnreadPart.PAGE, "it did not answer in time")


@pytest.mark.parametrize(("fault", "error"), [("lost", UnreachableError), (401, UnauthorizedError)])
async def test_a_cluster_without_an_answer_is_an_error(scene: StatusScene, fault: int, error: type[Exception]) -> None:
    scene.kube.fail_next("GET", "/", fault, times=99)
    with pytest.raises(error):
        await scene.reader.read()


@pytest.mark.parametrize("spec", [{"volumeNamespace": 5}, {"volumeNamespace": "app"}], ids=["malformed", "incomplete"])
async def test_an_invalid_repository_is_named_beside_the_others(scene: StatusScene, spec: dict[str, object]) -> None:
    scene.put("BackupRepository", "odd", spec=spec)
    snapshot = await scene.reader.read()
    assert [one.name for one in snapshot.repositories] == ["app-default-kopia"]
    assert UnreadPart.REPOSITORIES in {one.part for one in snapshot.unread}
