"""Reads that many checks have in common: how often the API server is asked, and what is never shared."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager

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
from tests.support.scripted import answer, rejection, stored

pytestmark = pytest.mark.looptime

_PATH = BACKUP_STORAGE_LOCATIONS.path("velero", "default")
_ANSWER_SECONDS = 0.1
_RESOURCES = (BACKUP_STORAGE_LOCATIONS, PERSISTENT_VOLUME_CLAIMS, PODS, SECRETS, VOLUME_SNAPSHOTS)


def number_of(obj: JsonDict | None) -> int:
    """Return the number of the request that `obj` answered."""
    assert obj is not None
    return int(obj["metadata"]["labels"]["number"])


class _Server:
    """Answers after a moment with the number of the request; `rejections` come first."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.rejections: list[int] = []

    async def request(self, request: Request) -> Response:
        self.asked.append(request.path)
        await asyncio.sleep(_ANSWER_SECONDS)
        if self.rejections:
            return rejection(self.rejections.pop(0), "rejected")
        *_, plural, name = request.path.split("/")
        resource = next(one for one in _RESOURCES if one.plural == plural)
        labels = {"number": str(len(self.asked))}
        return answer(stored(resource, spec={}, metadata={"name": name, "labels": labels}))

    def stream(self, request: Request) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        raise NotImplementedError

    async def close(self) -> None:
        pass


@pytest.fixture
def server() -> _Server:
    return _Server()


@pytest.fixture
def reader(server: _Server) -> SharedReader:
    clock = LoopClock()
    return SharedReader(KubeClient(server, Retry(clock)), clock)


async def _read(reader: SharedReader) -> JsonDict | None:
    return await reader.read(BACKUP_STORAGE_LOCATIONS, "velero", "default")


async def test_concurrent_reads_share_one_request(server: _Server, reader: SharedReader) -> None:
    found = await asyncio.gather(*(_read(reader) for _ in range(20)))
    assert list(map(number_of, found)) == [1] * 20
    assert server.asked == [_PATH]


async def test_an_answer_is_shared_for_a_second_only(server: _Server, reader: SharedReader) -> None:
    found = []
    for pause_seconds in (0.0, 0.5, 0.6):
        await asyncio.sleep(pause_seconds)
        found.append(await _read(reader))
    assert list(map(number_of, found)) == [1, 1, 2]
    assert len(server.asked) == 2


@pytest.mark.parametrize("resource", [PODS, VOLUME_SNAPSHOTS], ids=lambda resource: resource.kind)
async def test_pods_and_snapshots_are_not_shared(server: _Server, reader: SharedReader, resource: Resource) -> None:
    found = [await reader.read(resource, "apps", "web") for _ in range(2)]
    assert list(map(number_of, found)) == [1, 2]
    assert len(server.asked) == 2


async def test_objects_of_one_name_are_distinct(server: _Server, reader: SharedReader) -> None:
    keys = [(SECRETS, "a", "x"), (SECRETS, "b", "x"), (PERSISTENT_VOLUME_CLAIMS, "a", "x"), (SECRETS, "a", "y")]
    for resource, namespace, name in keys:
        await reader.read(resource, namespace, name)
    assert server.asked == [resource.path(namespace, name) for resource, namespace, name in keys]


async def test_an_object_that_was_not_found_is_read_again(server: _Server, reader: SharedReader) -> None:
    server.rejections = [404]
    assert await _read(reader) is None
    assert number_of(await _read(reader)) == 2


async def test_a_waiting_caller_reads_when_the_first_read_fails(server: _Server, reader: SharedReader) -> None:
    server.rejections = [403]
    first, second = await asyncio.gather(*(_read(reader) for _ in range(2)), return_exceptions=True)
    assert isinstance(first, ForbiddenError)
    assert not isinstance(second, BaseException)
    assert number_of(second) == 2


async def test_a_waiting_caller_reads_when_the_first_read_is_canceled(reader: SharedReader) -> None:
    async with asyncio.TaskGroup() as group:
        first = group.create_task(_read(reader), name="first")
        second = group.create_task(_read(reader), name="second")
        await asyncio.sleep(_ANSWER_SECONDS / 2)
        first.cancel()
    assert number_of(second.result()) == 2


async def test_lists_of_the_whole_cluster_are_shared_for_seconds_with_what_is_needed_of_them() -> None:
    kube, clock = FakeKube(), LoopClock()
    shared = SharedReader(KubeClient(kube, Retry(clock)), clock)
    claim = {"namespace": "app", "name": "data"}
    volume = {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "pv-1", "labels": {"a": "b"}}}
    kube.put(volume | {"spec": {"nfs": {"server": "s", "path": "/"}, "claimRef": claim, "capacity": {}}})
    everything = Selection(PERSISTENT_VOLUMES)

    first, second = await asyncio.gather(shared.list(everything), shared.list(everything))
    await asyncio.sleep(4)
    kube.put(volume | {"metadata": {"name": "pv-2"}, "spec": {}})

    assert first is second is await shared.list(everything)
    reduced = {"metadata": {"name": "pv-1"}, "spec": {"nfs": {"server": "s", "path": "/"}, "claimRef": claim}}
    assert first == [reduced]
    assert len(await shared.list(Selection(PERSISTENT_VOLUMES, label_selector="a=b"))) == 1
    await asyncio.sleep(1)
    assert len(await shared.list(everything)) == 2
