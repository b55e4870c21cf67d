"""Restore into existing volumes: what is recorded and released, what is refused, and how a repetition continues."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from client.restores.in_place import InPlaceRestore, plan_in_place, start_in_place
from client.restores.manifests import RequestedRestore
from client.restores.sources import RestoreError
from core.kube.resources import DATA_DOWNLOADS, PERSISTENT_VOLUME_CLAIMS
from core.kube.transport import Request, Response
from core.models.backups import SavedClaim
from core.models.transfer_settings import InPlace
from tests.client.support.in_place_scene import NODE, OWNER, SPEC, InPlaceScene
from tests.client.support.restore_scene import DATA, RestoreScene, Send, saved

pytestmark = pytest.mark.looptime


@pytest.fixture
def scene() -> InPlaceScene:
    return InPlaceScene()


def request(scene: RestoreScene, **how: bool) -> RequestedRestore:
    return scene.request(in_place=InPlace(**how))


async def plan(scene: InPlaceScene, *, snapshots: bool = False, **how: bool) -> list[InPlaceRestore]:
    return await plan_in_place(scene.tools, request(scene, **how), [saved(DATA, "s1")], snapshots=snapshots)


async def restore(scene: InPlaceScene, **how: bool) -> bool:
    return await start_in_place(scene.tools, await plan(scene, **how))


def assert_started(scene: InPlaceScene) -> None:
    """Assert that the PVC is as it was, without its volume, and the transfer names that."""
    claim = scene.claims["app/data"]
    assert claim["metadata"]["uid"] != "uid-old"
    assert claim["metadata"]["labels"] == {"tier": "db"}
    assert claim["metadata"]["annotations"] == {NODE: "node-a", "team": "x"}
    assert claim["metadata"]["ownerReferences"] == [OWNER]
    assert claim["spec"] == SPEC
    assert scene.volume["spec"]["persistentVolumeReclaimPolicy"] == "Retain"
    assert scene.volume["metadata"]["annotations"]["nodeagent.io/reclaim-policy"] == "Delete"
    (transfer,) = scene.downloads
    assert transfer["spec"]["targetVolume"] == {"namespace": "app", "pvc": "data", "pv": "pv-1"}


async def test_a_volume_is_released_once_and_its_transfer_names_it(scene: InPlaceScene) -> None:
    assert await restore(scene, incremental=True, delete_extra_files=True)
    assert_started(scene)
    (transfer,) = scene.downloads
    assert transfer["spec"]["restoreType"] == "incremental"
    assert transfer["spec"]["dataMoverConfig"] == {"DeleteExtraFiles": "true"}
    assert scene.snapshots == []
    before = (scene.claims, scene.volume, scene.downloads)
    assert not await restore(scene, incremental=True, delete_extra_files=True)
    assert (scene.claims, scene.volume, scene.downloads) == before


async def test_a_backup_of_velero_has_the_name_of_the_pvc_alone(scene: InPlaceScene) -> None:
    volumes = [saved(SavedClaim(namespace="app", name="data"))]
    await start_in_place(scene.tools, await plan_in_place(scene.tools, request(scene), volumes, snapshots=False))
    assert_started(scene)


async def test_nothing_is_changed_if_the_transfer_would_be_rejected(scene: InPlaceScene) -> None:
    scene.kube.fail_next("POST", "datadownloads", 403, message="no")
    with pytest.raises(RestoreError, match="PVC app/data cannot be restored, nothing was changed"):
        await restore(scene)
    assert scene.claims["app/data"]["metadata"]["uid"] == "uid-old"


@pytest.mark.parametrize("applied", [False, True], ids=["before", "after"])
async def test_a_repetition_continues_at_any_change(applied: bool) -> None:
    at, cut = 0, True
    while cut:
        at, scene = at + 1, InPlaceScene()
        with scene.cutting(at, applied=applied, dead=False) as sent:
            await restore(scene)
        cut = len(sent) >= at
        scene.bind()
        await restore(scene)
        assert_started(scene)
    assert at > 4


async def test_a_volume_whose_transfer_is_rejected_is_given_back(scene: InPlaceScene) -> None:
    plans = await plan(scene)
    scene.kube.fail_next("POST", "datadownloads", 403, message="no")
    error = "PersistentVolume pv-1 was not changed, and is reserved for PVC app/data; none was started"
    with pytest.raises(RestoreError, match=error):
        await start_in_place(scene.tools, plans)
    assert scene.volume["spec"]["persistentVolumeReclaimPolicy"] == "Delete"
    assert "uid" not in scene.volume["spec"]["claimRef"]
    assert not scene.volume["metadata"].get("annotations")
    assert scene.claims["app/data"]["spec"]["volumeName"] == "pv-1"


async def test_a_pvc_that_was_made_meanwhile_is_not_overwritten(scene: InPlaceScene) -> None:
    plans = await plan(scene)
    made = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "data", "namespace": "app"}}

    async def make(what: Request, send: Send) -> Response:
        if what.method == "POST" and "persistentvolumeclaims" in what.path:
            scene.kube.put(made | {"spec": SPEC | {"volumeName": "pv-operator"}})
        return await send(what)

    error = "PVC app/data was made by another client meanwhile; PersistentVolume pv-1"
    with scene.answering(make), pytest.raises(RestoreError, match=error):
        await start_in_place(scene.tools, plans)
    assert scene.claims["app/data"]["spec"]["volumeName"] == "pv-operator"
    assert scene.volume["spec"]["persistentVolumeReclaimPolicy"] == "Delete"
    assert "uid" not in scene.volume["spec"]["claimRef"]
    assert scene.downloads == []


async def test_what_is_recreated_is_recorded_before_it_is_deleted(scene: InPlaceScene) -> None:
    plans = await plan(scene)
    scene.kube.fail_next("POST", "persistentvolumeclaims", 403, message="quota")
    with pytest.raises(RestoreError, match="is retained for PVC app/data, which is missing: repeat the command"):
        await start_in_place(scene.tools, plans)
    record = json.loads(scene.volume["metadata"]["annotations"]["nodeagent.io/released-claim"])
    assert record["claim"]["metadata"]["ownerReferences"] == [OWNER]
    assert "app/data" not in scene.claims


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.put_pod(), "PVC app/data is used by pod app/db-0 of StatefulSet db: stop it first"),
        (lambda s: s.put_pod(phase="Pending"), "PVC app/data is used by pod app/db-0 of StatefulSet db"),
        (
            lambda s: (s.put_volume("pv-2", claimRef={"namespace": "x", "name": "twin"}), s.put_pod("twin", "x")),
            "PersistentVolume pv-1 is in use: pod x/db-0 of StatefulSet db has PersistentVolume pv-2",
        ),
        (lambda s: s.put_agent(""), "no node agent in namespace velero can restore in place"),
        (lambda s: s.put_volume("pv-1", volumeMode="Block", claimRef={"uid": "uid-old"}), "has volumeMode Block"),
        (lambda s: s.put_volume("pv-1", capacity={"storage": "6"}, claimRef={"uid": "uid-old"}), "has 6, and the"),
        (lambda s: s.put_volume("pv-1", claimRef={"uid": "else"}), "is not bound to PersistentVolume pv-1"),
    ],
    ids=["used", "about to be used", "used elsewhere", "old agents", "mode", "size", "unbound"],
)
async def test_a_volume_that_cannot_be_restored_into_is_refused(change: Any, message: str, scene: InPlaceScene) -> None:
    change(scene)
    before = (scene.claims, scene.volume)
    with pytest.raises(RestoreError, match=message):
        await restore(scene)
    assert (scene.claims, scene.volume) == before
    assert scene.downloads == []


async def test_a_device_is_restored_into_a_volume_with_a_file_system_of_a_csi_driver_only(scene: InPlaceScene) -> None:
    by_block = replace(saved(DATA, "s1"), by_block=True)
    (planned,) = await plan_in_place(scene.tools, request(scene), [by_block], snapshots=False)
    assert planned.one.existing == "pv-1"
    reference = scene.volume["spec"]["claimRef"]
    scene.put_volume("pv-1", claimRef=reference, csi=None, nfs={"server": "n", "path": "/p"})
    with pytest.raises(RestoreError, match="PVC app/data is of no CSI driver: restore its backup by block into a new"):
        await plan_in_place(scene.tools, request(scene), [by_block], snapshots=False)
    assert scene.downloads == []


async def test_a_pod_that_has_ended_does_not_matter(scene: InPlaceScene) -> None:
    scene.put_pod(phase="Succeeded")
    await restore(scene)
    assert_started(scene)


async def test_a_pod_that_starts_after_the_plan_keeps_its_volume(scene: InPlaceScene) -> None:
    plans = await plan(scene)
    scene.put_pod()
    with pytest.raises(RestoreError, match="is used by pod app/db-0"):
        await start_in_place(scene.tools, plans)
    assert scene.claims["app/data"]["metadata"]["uid"] == "uid-old"
    assert scene.volume["spec"]["persistentVolumeReclaimPolicy"] == "Delete"
    assert not scene.volume["metadata"].get("annotations")


async def test_a_volume_that_the_pvc_got_after_the_plan_is_not_released(scene: InPlaceScene) -> None:
    plans = await plan(scene)
    scene.put_volume("pv-new", claimRef={"namespace": "app", "name": "data", "uid": "uid-new"})
    claim = scene.claims["app/data"]
    meta = claim["metadata"] | {"uid": "uid-new"}
    scene.kube.put(claim | {"metadata": meta, "spec": SPEC | {"volumeName": "pv-new"}})
    before = (scene.claims, scene.volume)
    with pytest.raises(RestoreError, match="replaced meanwhile: repeat the command; none was started"):
        await start_in_place(scene.tools, plans)
    assert (scene.claims, scene.volume, scene.downloads) == (*before, [])


async def test_a_volume_that_was_bound_again_after_the_plan_needs_a_snapshot_first(scene: InPlaceScene) -> None:
    await restore(scene)
    # As a command leaves it that is killed before the transfer.
    await scene.client.delete(DATA_DOWNLOADS, "velero", scene.downloads[0]["metadata"]["name"])
    plans = await plan(scene, snapshots=True)
    assert [one.claim for one in plans] == [None]
    uid = scene.claims["app/data"]["metadata"]["uid"]
    scene.put_volume("pv-1", claimRef={"namespace": "app", "name": "data", "uid": uid}, capacity={"storage": "2Gi"})
    with pytest.raises(RestoreError, match="replaced meanwhile: repeat the command; none was started"):
        await start_in_place(scene.tools, plans)
    assert scene.downloads == []


async def test_a_pvc_without_a_snapshot_class_needs_no_snapshot(scene: InPlaceScene) -> None:
    scene.kube.put({**scene.claims["app/data"], "spec": SPEC | {"storageClassName": "late-none"}})
    with pytest.raises(RestoreError, match="--no-snapshot restores without a way back"):
        await plan(scene, snapshots=True)


@pytest.mark.parametrize("lost", ["persistentvolumeclaims", "datadownloads"])
async def test_the_restore_that_a_killed_command_began_is_named(lost: str, scene: InPlaceScene) -> None:
    plans = await plan(scene)

    async def kill(what: Request, send: Send) -> Response:
        if what.method == "POST" and lost in what.path:
            raise asyncio.CancelledError
        return await send(what)

    with scene.answering(kill), pytest.raises(asyncio.CancelledError):
        await start_in_place(scene.tools, plans)
    other = replace(request(scene), name="later")
    began = r"pv-1 of PVC app/data was released for restore \S+: to continue that: nodeagent"
    with pytest.raises(RestoreError, match=began):
        await plan_in_place(scene.tools, other, [saved(DATA, "s1")], snapshots=False)
    assert await restore(scene)
    assert_started(scene)


async def test_a_volume_that_cannot_be_started_in_time_is_told_with_its_state(scene: InPlaceScene) -> None:
    plans = await plan(scene)

    async def hang(what: Request, send: Send) -> Response:
        if what.method == "POST" and "persistentvolumeclaims" in what.path:
            await asyncio.sleep(3600)
        return await send(what)

    error = (
        "PVC app/data is not restored: not started within 15 minutes; the PVC does not exist, "
        "and PersistentVolume pv-1 is retained and records it; none was started"
    )
    with scene.answering(hang), pytest.raises(RestoreError, match=error):
        await start_in_place(scene.tools, plans)


async def test_a_missing_pvc_is_not_restored_in_place(scene: InPlaceScene) -> None:
    await scene.client.delete(PERSISTENT_VOLUME_CLAIMS, "app", "data")
    with pytest.raises(RestoreError, match="PVC app/data does not exist: leave out --in-place"):
        await plan(scene)


async def test_definitions_that_drop_the_type_are_noted(scene: InPlaceScene) -> None:
    plans = await plan(scene, incremental=True)
    await start_in_place(scene.tools, plans)
    assert scene.notes == []
    (transfer,) = scene.downloads
    spec = {key: value for key, value in transfer["spec"].items() if key != "restoreType"}
    scene.kube.put(transfer | {"spec": spec})
    await start_in_place(scene.tools, plans)
    assert [note.partition(":")[0] for note in scene.notes] == ["PVC app/data is restored in full"]
