"""The client with errors, lost responses and pages; other cases are in the contract."""

import asyncio
import json
from typing import Any

import pytest

from core.kube.client import Deletion, KubeClient, Selection
from core.kube.errors import (
    AlreadyExistsError,
    ConflictError,
    GoneError,
    MalformedObjectError,
    NotFoundError,
    ServerError,
    UnknownPathError,
    UnreachableError,
)
from core.kube.resources import CONFIG_MAPS, LEASES, NODES, PODS, Resource
from core.kube.transport import Request, Response, Retry
from core.models.base import JsonDict, ObjectMeta
from tests.support.clock import LoopClock
from tests.support.fakekube import FakeKube

pytestmark = pytest.mark.looptime


@pytest.fixture
def kube() -> FakeKube:
    return FakeKube()


@pytest.fixture
def client(kube: FakeKube) -> KubeClient:
    return KubeClient(kube, Retry(LoopClock()))


def config_map(name: str, **metadata: object) -> JsonDict:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"namespace": "a", "name": name} | metadata}


def test_paths_are_those_of_the_api() -> None:
    assert [PODS.path(), PODS.path("a")] == ["/api/v1/pods", "/api/v1/namespaces/a/pods"]
    assert PODS.path("a", "b", subresource="log") == "/api/v1/namespaces/a/pods/b/log"
    assert NODES.path("", "b") == "/api/v1/nodes/b"
    assert LEASES.path("a", "b") == "/apis/coordination.k8s.io/v1/namespaces/a/leases/b"


class SlowKube(FakeKube):
    """One with webhooks that do not answer, and whose failure is ignored: without a client that waits, it stops."""

    async def request(self, request: Request) -> Response:
        seconds = 0.0 if request.method == "GET" else 59.0
        await asyncio.sleep(min(seconds, request.timeout_seconds))
        if request.timeout_seconds < seconds:
            raise UnreachableError(f"{request.method} {request.path}: timed out")
        return await super().request(request)


async def test_a_write_waits_for_webhooks_as_long_as_the_server() -> None:
    client = KubeClient(SlowKube(), Retry(LoopClock()))
    created = await client.create(CONFIG_MAPS, config_map("x"))
    await client.patch_if_unchanged(CONFIG_MAPS, created, {"data": {"a": "b"}})
    assert await client.delete(CONFIG_MAPS, "a", "x") is Deletion.DONE


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../../secrets/s", "a?watch=true", "a%2Fb", "a b", "a\n"])
async def test_an_object_with_an_invalid_name_does_not_exist_and_is_not_requested(
    kube: FakeKube, client: KubeClient, name: str
) -> None:
    """Names come from custom resources: an empty one would address the whole collection."""
    kube.put(config_map("m"))
    for namespace, called in (("a", name), (name, "m")):
        assert await client.read(CONFIG_MAPS, namespace, called) is None
        assert await client.delete(CONFIG_MAPS, namespace, called) is Deletion.NOT_FOUND
        with pytest.raises(NotFoundError, match="404 NotFound: invalid name"):
            await client.patch(CONFIG_MAPS, namespace, called, {"data": {}})
    if name:
        with pytest.raises(NotFoundError, match="invalid namespace"):
            await client.list(Selection(CONFIG_MAPS, name))
    assert await client.read(NODES, "", name) is None
    assert kube.requests == []
    assert await client.read(CONFIG_MAPS, "a", "m") is not None


async def test_all_pages_are_one_list(kube: FakeKube, client: KubeClient) -> None:
    for number in range(1203):
        kube.put(config_map(f"m{number:04d}"))
    found = await client.list(Selection(CONFIG_MAPS, "a"))
    assert [obj["metadata"]["name"] for obj in found] == [f"m{number:04d}" for number in range(1203)]
    assert len(kube.requests) == 3


async def test_list_whose_pages_expire_raises(kube: FakeKube, client: KubeClient) -> None:
    for number in range(501):
        kube.put(config_map(f"m{number}"))
    pages = client.pages(Selection(CONFIG_MAPS, "a"))
    await anext(pages)
    kube.compact()
    with pytest.raises(GoneError):
        await anext(pages)


async def test_a_request_whose_response_was_lost_is_never_applied_twice(kube: FakeKube, client: KubeClient) -> None:
    kube.fail_next("POST", "/configmaps", "lost-applied")
    with pytest.raises(AlreadyExistsError):
        await client.create(CONFIG_MAPS, config_map("m"))
    (created,) = kube.objects(CONFIG_MAPS)
    kube.fail_next("PATCH", "/configmaps/m", "lost-applied")
    version = {"metadata": {"resourceVersion": created["metadata"]["resourceVersion"]}}
    with pytest.raises(ConflictError):
        await client.patch(CONFIG_MAPS, "a", "m", version | {"data": {"x": "y"}})
    kube.fail_next("DELETE", "/configmaps/m", "lost-applied")
    assert await client.delete(CONFIG_MAPS, "a", "m") is Deletion.NOT_FOUND
    assert kube.objects(CONFIG_MAPS) == []
    kube.fail_next("POST", "/configmaps", "lost-applied")
    manifest = config_map("", generateName="m-")
    del manifest["metadata"]["name"]
    with pytest.raises(UnreachableError):
        await client.create(CONFIG_MAPS, manifest)
    assert len(kube.objects(CONFIG_MAPS)) == 1


@pytest.mark.parametrize("as_model", [False, True], ids=["raw", "model"])
async def test_an_object_that_has_changed_since_it_was_read_is_not_patched(
    kube: FakeKube, client: KubeClient, *, as_model: bool
) -> None:
    seen = kube.put(config_map("m"))
    meta = ObjectMeta.from_wire(seen["metadata"]) if as_model else seen
    change: JsonDict = {"metadata": {"labels": {"a": "b"}}, "data": {"x": "y"}}
    stored = await client.patch_if_unchanged(CONFIG_MAPS, meta, change)
    assert (stored["data"]["x"], stored["metadata"]["labels"]) == ("y", {"a": "b"})
    with pytest.raises(ConflictError):
        await client.patch_if_unchanged(CONFIG_MAPS, meta, {"data": {"x": "z"}})


async def test_patch_that_must_not_be_repeated_is_sent_once(kube: FakeKube, client: KubeClient) -> None:
    kube.put(config_map("m"))
    kube.fail_next("PATCH", "/configmaps/m", 500)
    with pytest.raises(ServerError):
        await client.patch(CONFIG_MAPS, "a", "m", {"data": {"x": "y"}}, again=False)
    assert len(kube.requests) == 1


async def test_the_end_of_a_pod_log_is_read_with_lines_of_any_length(kube: FakeKube, client: KubeClient) -> None:
    kube.put({"apiVersion": "v1", "kind": "Pod", "metadata": {"namespace": "a", "name": "p"}})
    lines = [f"{number} {'x' * (number % 7) * 100}\n" for number in range(2000)]
    kube.logs["a", "p"] = "".join(lines)
    text = await client.pod_log("a", "p", container="c", limit_bytes=40_000)
    assert kube.requests[-1].query["container"] == "c"
    assert kube.logs["a", "p"].endswith(text)
    assert 10_000 < len(text) <= 40_000
    assert text.splitlines(keepends=True) == lines[-len(text.splitlines()) :]
    # The last line may exceed the limit.
    kube.logs["a", "p"] = "short\n" + "y" * 1000
    assert await client.pod_log("a", "p", container="", limit_bytes=100) == "y" * 100
    assert "container" not in kube.requests[-1].query


async def test_an_answer_to_a_deletion_needs_no_resource_version(kube: FakeKube, client: KubeClient) -> None:
    """As a real API server answers for a pod that is deleted without a grace period."""
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"namespace": "a", "name": "p", "uid": "u"}}
    kube.put(pod)
    kube.fail_next("DELETE", "/pods/p", json.dumps(pod).encode())
    assert await client.delete(PODS, "a", "p") is Deletion.DONE
    kube.fail_next("DELETE", "/pods/p", b'{"metadata":[]}')
    assert await client.delete(PODS, "a", "p") is Deletion.STARTED


async def test_a_forced_deletion_has_no_grace_period_and_spares_a_successor(kube: FakeKube, client: KubeClient) -> None:
    kube.put({"apiVersion": "v1", "kind": "Pod", "metadata": {"namespace": "a", "name": "p", "uid": "2"}})
    assert await client.force_delete(PODS, "a", "p", uid="1") is Deletion.CONFLICT
    assert await client.force_delete(PODS, "a", "p", uid="2") is Deletion.DONE
    options = json.loads(kube.requests[-1].body or b"")
    assert (options["gracePeriodSeconds"], options["preconditions"]) == (0, {"uid": "2"})


WRITERS = [{"manager": "kubectl", "operation": "Update", "fieldsV1": {"f:data": {}}}]
PAGE = b"<html><body>Service Unavailable</body></html>"


@pytest.mark.parametrize(
    "body", [PAGE, b"", b"[]", b"null", b'{"kind":"ConfigMap"', b"\xff\xfe"], ids=lambda body: repr(body)[:9]
)
async def test_an_answer_that_is_no_object_is_retried(kube: FakeKube, client: KubeClient, body: bytes) -> None:
    kube.put(config_map("m"))
    for method in ("GET", "PATCH", "DELETE", "POST"):
        kube.fail_next(method, "/configmaps", body)
    assert (await client.get(CONFIG_MAPS, "a", "m"))["metadata"]["name"] == "m"
    assert (await client.patch(CONFIG_MAPS, "a", "m", {"data": {"k": "v"}}))["data"] == {"k": "v"}
    assert await client.delete(CONFIG_MAPS, "a", "m") is Deletion.DONE
    assert (await client.create(CONFIG_MAPS, config_map("m")))["metadata"]["name"] == "m"
    kube.fail_next("GET", "/configmaps", body)
    assert len(await client.list(Selection(CONFIG_MAPS, "a"))) == 1


@pytest.mark.parametrize(
    "body", [b"{}", b'{"metadata":[]}', b'{"metadata":{"continue":1}}', b'{"metadata":{},"items":{}}']
)
async def test_an_answer_that_is_no_list_is_retried(kube: FakeKube, client: KubeClient, body: bytes) -> None:
    kube.put(config_map("m"))
    kube.fail_next("GET", "/configmaps", body)
    assert len(await client.list(Selection(CONFIG_MAPS, "a"))) == 1
    for items in (b"[1, null]", b'[{"metadata":{"name":1}}, "x"]'):
        kube.fail_next("GET", "/configmaps", b'{"metadata":{},"items":' + items + b"}")
        assert await client.list(Selection(CONFIG_MAPS, "a")) == []


@pytest.mark.parametrize(("body", "shown"), [(PAGE, "b'<html>"), (b'{"data":{"password":"c2VjcmV0"', "30 bytes")])
async def test_an_answer_that_stays_no_object_is_an_unreachable_server(
    kube: FakeKube, client: KubeClient, body: bytes, shown: str
) -> None:
    """One that is cut may be part of a Secret."""
    kube.fail_next("GET", "/configmaps", body, times=9)
    with pytest.raises(UnreachableError, match=f"get ConfigMap a/m: 200: the answer is not a JSON object: {shown}"):
        await client.get(CONFIG_MAPS, "a", "m")


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"data": {"k": 1}}, r"malformed ConfigMap a/m: data\[...\]: Expected `str`, got `int`"),
        ({"metadata": {"namespace": "a", "name": "m", "labels": []}}, "malformed ConfigMap a/m: metadata.labels"),
    ],
    ids=["data", "labels"],
)
async def test_a_malformed_object_is_named_with_its_field(
    kube: FakeKube, client: KubeClient, fields: JsonDict, fault: str
) -> None:
    kube.put(config_map("m") | fields)
    with pytest.raises(MalformedObjectError, match=fault):
        await client.get(CONFIG_MAPS, "a", "m")


async def test_a_list_is_read_without_its_malformed_objects(kube: FakeKube, caplog: pytest.LogCaptureFixture) -> None:
    skipped: list[str] = []
    client = KubeClient(kube, Retry(LoopClock()), on_skipped=skipped.append)
    for name, data in (("a", {"k": "v"}), ("b", {"k": 1}), ("c", {})):
        kube.put(config_map(name) | {"data": data})
    found = await client.list(Selection(CONFIG_MAPS, "a"))
    assert [obj["metadata"]["name"] for obj in found] == ["a", "c"]
    assert skipped == ["ConfigMap"]
    assert caplog.messages == ["object skipped: malformed ConfigMap a/b: data[...]: Expected `str`, got `int`"]


async def test_managed_fields_are_dropped_from_every_response(kube: FakeKube, client: KubeClient) -> None:
    kube.put(config_map("m", managedFields=WRITERS))
    responses = [
        await client.get(CONFIG_MAPS, "a", "m"),
        *await client.list(Selection(CONFIG_MAPS, "a")),
        await client.patch(CONFIG_MAPS, "a", "m", {"data": {"k": "v"}}),
        await client.create(CONFIG_MAPS, config_map("n", managedFields=WRITERS)),
    ]
    assert [sorted(response["metadata"]) for response in responses] == [
        ["creationTimestamp", "name", "namespace", "resourceVersion", "uid"]
    ] * 4


_PAGE = Response(404, b"404 page not found\n")


@pytest.mark.parametrize("resource", [CONFIG_MAPS, LEASES], ids=["core", "group"])
async def test_an_object_exists_whatever_a_proxy_answers(
    kube: FakeKube, client: KubeClient, resource: Resource
) -> None:
    manifest = {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": {"namespace": "a", "name": "m"}}
    kube.put(manifest)
    for method in ("GET", "PATCH"):
        kube.fail_next(method, "/a/", _PAGE)
    assert await client.read(resource, "a", "m") is not None
    assert await client.patch(resource, "a", "m", {}) is not None
    kube.fail_next("GET", "/a/", _PAGE, times=10)
    with pytest.raises(UnknownPathError, match="404: 404 page not found"):
        await client.read(resource, "a", "m")


@pytest.mark.parametrize("discovery", [_PAGE, Response(200, b"<html>"), Response(200, b"{}"), 403, "lost"])
async def test_a_kind_is_served_unless_the_server_lists_its_kinds_without_it(
    kube: FakeKube, client: KubeClient, discovery: Any
) -> None:
    kube.unserved.add(LEASES)
    assert await client.read(LEASES, "a", "m") is None
    kube.fail_next("GET", "/leases/", _PAGE, times=20)
    kube.fail_next("GET", "/apis", discovery, times=20)
    with pytest.raises(UnknownPathError):
        await client.read(LEASES, "a", "m")
