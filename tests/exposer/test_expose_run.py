"""Objects of other owners with the name of an expose object: reported, never adopted, never deleted."""

import re
from contextlib import nullcontext
from copy import deepcopy

import pytest

from core.errors import ExposeError
from core.kube.client import KubeClient
from core.kube.resources import PERSISTENT_VOLUME_CLAIMS, PODS, VOLUME_SNAPSHOT_CONTENTS, VOLUME_SNAPSHOTS, Resource
from core.kube.transport import Retry
from core.models.names import ATTEMPT_LABEL, OWNER_UID_LABEL
from exposer.expose_run import ExposeRun
from exposer.model import NotOwnerError, Owner, Pending, PendingError, or_pending
from exposer.ownership import delete_claim, delete_object, delete_owned
from tests.exposer.support.steps import GuardAt
from tests.exposer.support.world import no_guard
from tests.support.clock import LoopClock
from tests.support.fakekube import FakeKube
from tests.support.objects import JsonDict

pytestmark = pytest.mark.looptime

OWNER = Owner("velero.io/v2alpha1", "DataUpload", "velero", "du-1", "uid-of-upload")
OTHER = Owner("velero.io/v1", "PodVolumeBackup", "velero", "du-1", "uid-of-backup")
EARLIER = Owner("velero.io/v2alpha1", "DataUpload", "velero", "du-1", "uid-of-earlier-upload")
RESOURCES = (PODS, PERSISTENT_VOLUME_CLAIMS, VOLUME_SNAPSHOTS, VOLUME_SNAPSHOT_CONTENTS)
by_resource = pytest.mark.parametrize("resource", RESOURCES, ids=[each.kind for each in RESOURCES])


def build(resource: Resource, owner: Owner | None, *, labeled: bool = True, referenced: bool = True) -> JsonDict:
    """Return an object with the name of those of `OWNER`."""
    meta: JsonDict = {"name": OWNER.name} | ({"namespace": "velero"} if resource.namespaced else {})
    if owner is not None and labeled:
        meta["labels"] = {OWNER_UID_LABEL: owner.uid}
    if owner is not None and referenced:
        meta["ownerReferences"] = [owner.reference]
    return {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": meta, "spec": {}}


@or_pending
async def meet(obj: JsonDict, resource: Resource) -> JsonDict:
    """Return the result of an expose of `OWNER` with `obj` in place, and assert that `obj` is unchanged."""
    kube = FakeKube()
    kube.put(deepcopy(obj))
    before = kube.objects(resource)
    client = KubeClient(kube, Retry(LoopClock()))
    try:
        return await ExposeRun(client, OWNER, no_guard).ensure(resource, build(resource, OWNER))
    finally:
        await delete_owned(client, OWNER, resource)
        await delete_claim(client, OWNER, OWNER.name)
        assert kube.objects(resource) == before


@by_resource
@pytest.mark.cause("name-shared")
async def test_an_object_of_another_transfer_is_pending(resource: Resource) -> None:
    found = await meet(build(resource, OTHER), resource)
    place = "velero/du-1" if resource.namespaced else "du-1"
    text = "belongs to PodVolumeBackup du-1, which has the same name and is not finished"
    assert found == Pending("NameTaken", f"{resource.kind} {place} {text}", blocked=True)
    for referenced in (True, False):
        found = await meet(build(resource, EARLIER, referenced=referenced), resource)
        text = "of an earlier DataUpload must be deleted first"
        assert found == Pending("NameTaken", f"{resource.kind} {place} {text}")


@by_resource
async def test_a_slow_deletion_names_the_node_and_is_not_forced(resource: Resource) -> None:
    kube = FakeKube()
    obj = build(resource, OWNER)
    obj["metadata"]["finalizers"] = ["test/held"]
    kube.put(obj | {"spec": {"nodeName": "node-a"}, "status": {"error": {"message": "is in use"}}})
    client = KubeClient(kube, Retry(LoopClock()))
    results = [await delete_owned(client, OWNER, resource) for _ in range(2)]
    text = "du-1 is being deleted" + (" on node node-a" if resource == PODS else "")
    assert [each.message.endswith(text) for each in results if each] == [True, False]
    assert str(results[1]).count(f"{text} (finalizers: test/held)") == 1
    assert ("(finalizers: test/held): is in use" in str(results[1])) is (resource == VOLUME_SNAPSHOT_CONTENTS)
    deletions = [request for request in kube.requests if request.method == "DELETE"]
    assert len(deletions) == 1
    # The wait for another object of the name begins again.
    (left,) = kube.objects(resource)
    assert {each.operation for each in results if each} == {f"deletion of {left['metadata']['uid']}"}
    assert b"gracePeriodSeconds" not in (deletions[0].body or b"")


@by_resource
async def test_an_object_that_was_created_anew_is_neither_deleted_nor_waited_for(resource: Resource) -> None:
    kube = FakeKube()
    client = KubeClient(kube, Retry(LoopClock()))
    seen = kube.put(build(resource, OWNER))
    await client.delete(resource, "velero", OWNER.name)
    kube.put(build(resource, OWNER))
    left = kube.objects(resource)
    assert await delete_object(client, resource, seen) is None
    assert kube.objects(resource) == left
    assert left[0]["metadata"]["uid"] != seen["metadata"]["uid"]


@by_resource
@pytest.mark.cause("name-taken")
async def test_another_owners_object_fails_the_transfer_and_is_named(resource: Resource) -> None:
    text = "du-1 already exists and does not belong to DataUpload du-1"
    with pytest.raises(ExposeError, match=f"{text}: delete it if it is not needed"):
        await meet(build(resource, None), resource)
    deployed = Owner("apps/v1", "ReplicaSet", "velero", "web", "uid-of-web")
    with pytest.raises(ExposeError, match=f"{re.escape(text)} but to ReplicaSet web: delete it"):
        await meet(build(resource, deployed, labeled=False), resource)


@pytest.mark.parametrize("outdated", [False, True])
async def test_the_pod_of_another_attempt_is_deleted_unless_the_view_of_its_agent_is_outdated(outdated: bool) -> None:
    kube = FakeKube()
    pod = build(PODS, OWNER)
    pod["metadata"]["labels"][ATTEMPT_LABEL] = "2"
    kube.put(pod)
    run = ExposeRun(KubeClient(kube, Retry(LoopClock())), OWNER, GuardAt(1 if outdated else 9, ended=False))
    with pytest.raises(NotOwnerError) if outdated else nullcontext():
        await run.read(PODS, OWNER.name)
    assert bool(kube.objects(PODS)) is outdated


async def test_a_run_that_ends_pending_is_undone_if_its_owner_has_ended() -> None:
    kube = FakeKube()

    async def guard(*, sure: bool) -> None:
        if sure:
            raise NotOwnerError("final", ended=True)

    async def expose() -> None:
        async with ExposeRun(KubeClient(kube, Retry(LoopClock())), OWNER, guard) as run:
            await run.ensure(VOLUME_SNAPSHOTS, build(VOLUME_SNAPSHOTS, OWNER))
            raise PendingError(Pending("SnapshotNotReady", "not ready"))

    with pytest.raises(NotOwnerError):
        await expose()
    assert kube.objects(VOLUME_SNAPSHOTS) == []
