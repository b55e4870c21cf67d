"""What the fake API server has beyond the contract: garbage collection, faults, a history to forget."""

import asyncio

import pytest

from core.clock import SystemClock
from core.kube.client import KubeClient, Selection
from core.kube.errors import InvalidError, ServerError, UnreachableError
from core.kube.resources import CONFIG_MAPS, DATA_UPLOADS, PODS
from core.kube.transport import Request, Retry
from core.models.base import JsonDict
from tests.contract.bench import HOLD, build_upload
from tests.support.clock import NOON
from tests.support.fakekube import FakeKube


@pytest.fixture
def kube() -> FakeKube:
    return FakeKube()


@pytest.fixture
def client(kube: FakeKube) -> KubeClient:
    return KubeClient(kube, Retry(SystemClock(), attempts=1))


def owned(name: str, *owners: JsonDict, **metadata: object) -> JsonDict:
    references = [
        {"apiVersion": owner["apiVersion"], "kind": owner["kind"]}
        | {key: owner["metadata"][key] for key in ("name", "uid")}
        for owner in owners
    ]
    meta = {"namespace": "a", "name": name, "ownerReferences": references} | metadata
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta}


def names(kube: FakeKube) -> list[str]:
    return [obj["metadata"]["name"] for obj in kube.objects(CONFIG_MAPS)]


async def test_an_object_is_deleted_with_its_last_owner(kube: FakeKube, client: KubeClient) -> None:
    first, second = kube.put(build_upload("a", "one")), kube.put(build_upload("a", "two"))
    child = kube.put(owned("child", first))
    kube.put(owned("grandchild", child))
    kube.put(owned("shared", first, second))
    kube.put(owned("held", first, finalizers=[HOLD]))
    await client.delete(DATA_UPLOADS, "a", "one")
    assert names(kube) == ["held", "shared"]
    held = await client.get(CONFIG_MAPS, "a", "held")
    assert "deletionTimestamp" in held["metadata"]


async def test_owner_that_a_finalizer_holds_keeps_what_it_owns(kube: FakeKube, client: KubeClient) -> None:
    owner = kube.put(build_upload("a", "one", finalizers=[HOLD]))
    kube.put(owned("child", owner))
    await client.delete(DATA_UPLOADS, "a", "one")
    assert names(kube) == ["child"]
    await client.patch(DATA_UPLOADS, "a", "one", {"metadata": {"finalizers": []}})
    assert names(kube) == []


async def test_faults_hit_so_many_requests_of_a_method_and_path(kube: FakeKube, client: KubeClient) -> None:
    kube.put(owned("m"))
    kube.fail_next("GET", "/configmaps/m", 503, times=2)
    for _ in range(2):
        with pytest.raises(ServerError):
            await client.get(CONFIG_MAPS, "a", "m")
    await client.get(CONFIG_MAPS, "a", "m")


@pytest.mark.parametrize(("what", "left"), [("lost", ["m"]), ("lost-applied", [])])
async def test_a_lost_response_is_applied_and_a_lost_request_is_not(
    kube: FakeKube, client: KubeClient, what: str, left: list[str]
) -> None:
    kube.put(owned("m"))
    kube.fail_next("DELETE", "/configmaps", what)  # type: ignore[arg-type] # one of its literals
    with pytest.raises(UnreachableError):
        await client.delete(CONFIG_MAPS, "a", "m")
    assert names(kube) == left


@pytest.mark.parametrize(("changed", "line"), [("Pod", b'"ADDED"'), ("ConfigMap", b'"Expired"')])
async def test_compaction_ends_only_the_watches_that_missed_a_change(kube: FakeKube, changed: str, line: bytes) -> None:
    version = kube.put(owned("m"))["metadata"]["resourceVersion"]
    query = {"watch": "true", "resourceVersion": version}
    async with kube.stream(Request("GET", CONFIG_MAPS.path("a"), query)) as lines:
        kube.put({"apiVersion": "v1", "kind": changed, "metadata": {"namespace": "a", "name": "other"}})
        kube.compact()
        kube.put(owned("n"))
        assert line in await anext(lines)


async def test_bookmark_has_the_version_for_watches_that_allow_it(kube: FakeKube) -> None:
    version = kube.put(owned("m"))["metadata"]["resourceVersion"]
    query = {"watch": "true", "resourceVersion": version, "timeoutSeconds": "1"}
    allowing = Request("GET", CONFIG_MAPS.path("a"), query | {"allowWatchBookmarks": "true"})
    async with kube.stream(allowing) as allowed, kube.stream(Request("GET", CONFIG_MAPS.path("a"), query)) as others:
        first = asyncio.ensure_future(anext(allowed))
        await asyncio.sleep(0)
        kube.put({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "other"}})
        kube.watches.bookmark()
        assert b'"BOOKMARK"' in await first
        assert [line async for line in others] == []


async def test_what_a_test_holds_is_not_what_is_stored(kube: FakeKube) -> None:
    obj = owned("m")
    kube.put(obj)["metadata"]["labels"] = {"x": "y"}
    obj["metadata"]["labels"] = {"x": "y"}
    kube.objects(CONFIG_MAPS)[0]["metadata"]["labels"] = {"x": "y"}
    assert "labels" not in kube.objects(CONFIG_MAPS)[0]["metadata"]


def test_objects_are_stamped_by_the_clock(kube: FakeKube) -> None:
    assert kube.put(owned("m"))["metadata"]["creationTimestamp"] == NOON.strftime("%Y-%m-%dT%H:%M:%SZ")


async def test_unsupported_selector_is_rejected(client: KubeClient) -> None:
    with pytest.raises(InvalidError):
        await client.list(Selection(PODS, field_selector="spec.hostname=x"))
