"""What the fake API server has beyond the contract: garbage collection, and copies of what it stores."""

import pytest

from core.clock import SystemClock
from core.kube.client import KubeClient
from core.kube.resources import CONFIG_MAPS, DATA_UPLOADS
from core.kube.transport import Retry
from core.models.base import JsonDict
from tests.contract.bench import HOLD, build_upload
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


async def test_what_a_test_holds_is_not_what_is_stored(kube: FakeKube) -> None:
    obj = owned("m")
    kube.put(obj)["metadata"]["labels"] = {"x": "y"}
    obj["metadata"]["labels"] = {"x": "y"}
    kube.objects(CONFIG_MAPS)[0]["metadata"]["labels"] = {"x": "y"}
    assert "labels" not in kube.objects(CONFIG_MAPS)[0]["metadata"]
