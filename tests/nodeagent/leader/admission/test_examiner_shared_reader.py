"""Reads that many checks have in common: how often the API server is asked, and what is never shared."""

import asyncio

import pytest

from core.kube.client import KubeClient, Selection
from core.kube.errors import ForbiddenError
from core.kube.resources import (
    BACKUP_STORAGE_LOCATIONS,
    PERSISTENT_VOLUME_CLAIMS,
    PERSISTENT_VOLUMES,
    PODS,
    SECRETS,
    VOLUME_SNAPSHOTS,
    Resource,
)
from core.kube.transport import Request, Response, Retry
from nodeagent.leader.admission.examiner import SharedReader
from tests.support.clock import LoopClock
from tests.support.fakekube import FakeKube
from tests.support.objects import JsonDict
from tests.support.scripted import stored

pytestmark = pytest.mark.looptime

_ANSWER_SECONDS = 0.1


class Slow(FakeKube):
    """Answers after a moment."""

    async def request(self, request: Request) -> Response:
        await asyncio.sleep(_ANSWER_SECONDS)
        return await super().request(request)

    def put_named(self, resource: Resource, namespace: str, name: str) -> None:
        self.put(stored(resource, spec={}, metadata={"namespace": namespace, "name": name}))

    @property
    def asked(self) -> list[str]:
        return [request.path for request in self.requests]


@pytest.fixture
def kube() -> Slow:
    found = Slow()
    found.put_named(BACKUP_STORAGE_LOCATIONS, "velero", "default")
    return found


@pytest.fixture
def reader(kube: Slow) -> SharedReader:
    clock = LoopClock()
    return SharedReader(KubeClient(kube, Retry(clock)), clock)


async def _read(reader: SharedReader) -> JsonDict | None:
    return await reader.read(BACKUP_STORAGE_LOCATIONS, "velero", "default")


async def test_concurrent_reads_share_one_request(kube: Slow, reader: SharedReader) -> None:
    found = await asyncio.gather(*(_read(reader) for _ in range(20)))
    assert found == [found[0]] * 20
    assert found[0] is not None
    assert kube.asked == [BACKUP_STORAGE_LOCATIONS.path("velero", "default")]


async def test_an_answer_is_shared_for_a_second_only(kube: Slow, reader: SharedReader) -> None:
    asked = []
    for pause_seconds in (0.0, 0.5, 0.6):
        await asyncio.sleep(pause_seconds)
        await _read(reader)
        asked.append(len(kube.asked))
    assert asked == [1, 1, 2]


@pytest.mark.parametrize("resource", [PODS, VOLUME_SNAPSHOTS], ids=lambda resource: resource.kind)
async def test_pods_and_snapshots_are_not_shared(kube: Slow, reader: SharedReader, resource: Resource) -> None:
    kube.put_named(resource, "apps", "web")
    assert None not in [await reader.read(resource, "apps", "web") for _ in range(2)]
    assert len(kube.asked) == 2


async def test_objects_of_one_name_are_distinct(kube: Slow, reader: SharedReader) -> None:
    keys = [(SECRETS, "a", "x"), (SECRETS, "b", "x"), (PERSISTENT_VOLUME_CLAIMS, "a", "x"), (SECRETS, "a", "y")]
    for key in keys:
        kube.put_named(*key)
        await reader.read(*key)
    assert kube.asked == [resource.path(namespace, name) for resource, namespace, name in keys]


async def test_an_object_that_was_not_found_is_read_again(kube: Slow, reader: SharedReader) -> None:
    assert await reader.read(SECRETS, "a", "x") is None
    kube.put_named(SECRETS, "a", "x")
    assert await reader.read(SECRETS, "a", "x") is not None


async def test_a_waiting_caller_reads_when_the_first_read_fails(kube: Slow, reader: SharedReader) -> None:
    kube.fail_next("GET", "/backupstoragelocations/", 403)
    first, second = await asyncio.gather(*(_read(reader) for _ in range(2)), return_exceptions=True)
    assert isinstance(first, ForbiddenError)
    assert isinstance(second, dict)


async def test_a_waiting_caller_reads_when_the_first_read_is_canceled(reader: SharedReader) -> None:
    async with asyncio.TaskGroup() as group:
        first = group.create_task(_read(reader), name="first")
        second = group.create_task(_read(reader), name="second")
        await asyncio.sleep(_ANSWER_SECONDS / 2)
        first.cancel()
    assert second.result() is not None


async def test_lists_of_the_whole_cluster_are_shared_for_seconds_with_what_is_needed_of_them(
    kube: Slow, reader: SharedReader
) -> None:
    claim = {"namespace": "app", "name": "data"}
    volume = {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "pv-1", "labels": {"a": "b"}}}
    kube.put(volume | {"spec": {"nfs": {"server": "s", "path": "/"}, "claimRef": claim, "capacity": {}}})
    everything = Selection(PERSISTENT_VOLUMES)

    first, second = await asyncio.gather(reader.list(everything), reader.list(everything))
    await asyncio.sleep(4)
    kube.put(volume | {"metadata": {"name": "pv-2"}, "spec": {}})

    assert first is second is await reader.list(everything)
    reduced = {"metadata": {"name": "pv-1"}, "spec": {"nfs": {"server": "s", "path": "/"}, "claimRef": claim}}
    assert first == [reduced]
    assert len(await reader.list(Selection(PERSISTENT_VOLUMES, label_selector="a=b"))) == 1
    await asyncio.sleep(1)
    assert len(await reader.list(everything)) == 2
