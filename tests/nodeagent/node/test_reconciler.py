"""Transfers from Accepted to cleanup, in a simulated cluster and virtual time."""

import asyncio
import json

import pytest

from core.kube.resources import DATA_UPLOADS, EVENTS, PERSISTENT_VOLUME_CLAIMS, PODS
from core.models.base import JsonDict
from core.models.names import (
    DATA_MOVER_FINALIZER,
    EXPOSE_ON_GOING_LABEL,
    NODE_LABEL,
    OUTCOME_ANNOTATION,
    OWNER_UID_LABEL,
    PENDING_REASON_ANNOTATION,
)
from nodeagent.metrics import Metrics
from tests.nodeagent.support.harness import World, accepted, open_world
from tests.nodeagent.support.simulation import BACKUP_DONE, Mover
from tests.nodeagent.support.transfers import NAMESPACE, NODE, TRANSFERS, data_download, data_upload

pytestmark = pytest.mark.looptime


async def run_to_the_end(transfer: JsonDict, *, mover: Mover | None = None) -> World:
    async with open_world(transfer, mover=mover) as world, world.agent():
        await world.until(lambda: world.done(transfer["kind"]))
        # The provisioner reclaims the volume a little later.
        await asyncio.sleep(1)
        return world


_ALL = {"totalBytes": 1000, "bytesDone": 1000}
_BACKED_UP = {"snapshotID": "kopia-1", "incrementalBytes": 600, "sourceSize": 1000, "progress": _ALL}


@pytest.mark.parametrize(
    ("kind", "status", "left"),
    [
        ("DataUpload", _BACKED_UP | {"path": "/uid-of-du-1", "node": NODE, "nodeOS": "linux"}, "data"),
        ("DataDownload", {"progress": _ALL, "node": NODE}, "data"),
        ("PodVolumeBackup", _BACKED_UP | {"path": "/uid-of-pvb-1"}, "writer"),
        ("PodVolumeRestore", {"progress": _ALL, "node": NODE}, "writer"),
    ],
)
async def test_a_transfer_completes_with_the_fields_of_its_definition_and_leaves_no_mark(
    kind: str, status: JsonDict, left: str
) -> None:
    world = await run_to_the_end(accepted(TRANSFERS[kind]()))
    found = world.transfer(kind)
    accepted_by = {} if kind.startswith("PodVolume") else {"acceptedByNode": NODE}
    stamps = {key for key in found["status"] if key.endswith("Timestamp")}
    assert stamps == {"acceptedTimestamp", "startTimestamp", "completionTimestamp"}
    assert {key: value for key, value in found["status"].items() if key not in stamps} == (
        {"phase": "Completed"} | status | accepted_by
    )
    meta = found["metadata"]
    assert not meta.get("finalizers")
    assert not {NODE_LABEL, EXPOSE_ON_GOING_LABEL} & meta["labels"].keys()
    assert OUTCOME_ANNOTATION not in meta.get("annotations", {})
    # The volume of a DataDownload stays.
    objects = {plural: names for plural, names in world.left().items() if plural != "persistentvolumes"}
    assert list(objects.values()) == [[left]]


async def test_a_shrunk_backup_is_completed_with_its_sizes_in_annotations_and_an_event() -> None:
    shrunk = {"bytes": 1000, "fullBytes": 1_000_000, "files": 4, "fullFiles": 400}
    message = json.dumps(json.loads(BACKUP_DONE) | {"files": 4, "shrunk": shrunk})
    world = await run_to_the_end(accepted(data_upload()), mover=Mover(message=message))
    annotations = world.transfer()["metadata"]["annotations"]
    assert (world.phase(), annotations["nodeagent.io/files"]) == ("Completed", "4")
    assert json.loads(annotations["nodeagent.io/shrunk"]) == shrunk
    assert world.reasons()[-2:] == ["Completed", "Shrunk"]


async def test_a_volume_has_the_owner_label_only_during_its_handover() -> None:
    """If its transfer is deleted then, garbage collection finds the volume by that label."""
    transfer = accepted(data_download())
    async with open_world(transfer) as world, world.agent():
        world.cluster.binds = False
        await world.until(lambda: world.target()[1] != {})
        await asyncio.sleep(5)
        _, volume = world.target()
        assert volume["metadata"]["labels"][OWNER_UID_LABEL] == transfer["metadata"]["uid"]
        assert volume["spec"]["persistentVolumeReclaimPolicy"] == "Retain"
        world.cluster.binds = True
        await world.until(lambda: world.done("DataDownload"))
        claim, volume = world.target()
    assert claim["status"]["phase"] == "Bound"
    assert OWNER_UID_LABEL not in volume["metadata"].get("labels", {})
    assert volume["spec"]["persistentVolumeReclaimPolicy"] == "Delete"


async def test_progress_is_written_into_the_status() -> None:
    metrics = Metrics(NODE)
    async with open_world(accepted(data_upload())) as world, world.agent(metrics=metrics):
        await world.until(lambda: world.transfer()["status"].get("progress", {}).get("bytesDone") == 400)
        assert world.phase() == "InProgress"
        assert b"nodeagent_rate_bytes_per_second{" in metrics.render()
        assert b"nodeagent_last_progress_seconds{" in metrics.render()
        await world.until(world.done)
    text = metrics.render().decode()
    assert f'nodeagent_moved_bytes_total{{kind="DataUpload",node="{NODE}"}} 1000.0' in text
    assert f'nodeagent_sent_bytes_total{{kind="DataUpload",node="{NODE}"}} 50.0' in text
    assert f'nodeagent_hashed_bytes_total{{kind="DataUpload",node="{NODE}"}} 300.0' in text
    assert f'nodeagent_deduplicated_bytes_total{{kind="DataUpload",node="{NODE}"}} 200.0' in text
    assert f'nodeagent_stored_bytes_total{{kind="DataUpload",node="{NODE}"}} 40.0' in text
    assert f'nodeagent_expose_seconds_count{{kind="DataUpload",node="{NODE}"}} 1.0' in text
    assert f'podVolume_data_upload_success_total{{node="{NODE}"}} 1.0' in text
    assert "nodeagent_rate_bytes_per_second{" not in text
    assert "nodeagent_last_progress_seconds{" not in text


async def test_a_restore_whose_target_refused_files_is_failed_and_counted() -> None:
    metrics = Metrics(NODE)
    mover = Mover(exit_code=18, message="the target refused entries")
    async with open_world(accepted(data_download()), mover=mover) as world, world.agent(metrics=metrics):
        await world.until(lambda: world.done("DataDownload"))
    counted = f'nodeagent_refused_restores_total{{kind="DataDownload",node="{NODE}",result="missing"}} 1.0'
    assert (world.phase("DataDownload"), counted in metrics.render().decode()) == ("Failed", True)


@pytest.mark.parametrize("phase", ["Accepted", "Prepared", "InProgress"])
@pytest.mark.parametrize("by", ["cancel", "deletion"])
@pytest.mark.parametrize("kind", ["DataUpload", "DataDownload"])
async def test_a_cancel_request_is_honored_in_every_phase(kind: str, by: str, phase: str) -> None:
    transfer = accepted(TRANSFERS[kind]())
    mover = Mover(starts=phase != "Accepted", seconds=100)
    async with open_world(transfer, mover=mover) as world, world.agent(slots=0 if phase == "Prepared" else 1):
        await world.until(lambda: world.phase(kind) == phase and world.kube.objects(PODS) != [])
        await world.stop(transfer, by)
        await world.until(lambda: world.done(kind) and world.kube.objects(PODS) == [])
        if by == "cancel":
            status = world.transfer(kind)["status"]
            assert status["phase"] == "Canceled"
            assert {"startTimestamp", "completionTimestamp"} <= status.keys()
        else:
            assert world.transfer(kind) == {}
        await asyncio.sleep(1)
        assert world.left() == {"persistentvolumeclaims": ["data"]}


@pytest.mark.cause("waiting-for-slot")
async def test_transfers_use_a_slot_one_after_the_other_and_report_that_they_are_pending() -> None:
    transfers = []
    for number in range(4):
        transfer = accepted(data_upload(f"du-{number}"))
        transfer["status"]["acceptedTimestamp"] = f"2026-11-21T12:00:0{9 - number}Z"
        transfer["spec"] = transfer["spec"] | {
            "csiSnapshot": transfer["spec"]["csiSnapshot"] | {"volumeSnapshot": f"vs-{number}"}
        }
        transfers.append(transfer)
    most = 0
    order: list[str] = []
    async with open_world(*transfers, mover=Mover(seconds=10)) as world, world.agent(slots=1):
        phases = ["InProgress", "Prepared", "Prepared", "Prepared"]
        await world.until(lambda: sorted(world.phase(name=f"du-{n}") for n in range(4)) == phases, seconds=9)

        def observe() -> bool:
            nonlocal most
            running = [
                o["metadata"]["name"] for o in world.kube.objects(DATA_UPLOADS) if o["status"]["phase"] == "InProgress"
            ]
            most = max(most, len(running))
            order.extend(name for name in running if name not in order)
            return all(world.done(name=f"du-{n}") for n in range(4))

        await world.until(observe)
        assert most == 1
        assert order[1:] == [name for name in ("du-3", "du-2", "du-1", "du-0") if name != order[0]]
        pending = [e for e in world.kube.objects(EVENTS) if "waiting for a free slot" in e["message"]]
        assert len({e["involvedObject"]["name"] for e in pending}) == len(pending) == 3


async def test_a_reason_that_the_leader_has_replaced_and_removed_is_reported_again() -> None:
    async with open_world(accepted(data_upload())) as world, world.agent(slots=0):

        async def report(message: str | None, reason: str | None) -> None:
            marks = {"annotations": {PENDING_REASON_ANNOTATION: reason}}
            patch = {"metadata": marks, "status": {"message": message}}
            await world.cluster.client.patch(DATA_UPLOADS, NAMESPACE, "du-1", patch)

        def message() -> str:
            return str(world.transfer()["status"].get("message"))

        await world.until(lambda: message().startswith("waiting for a free slot"))
        await report("no node agent is ready", "AgentUnavailable")
        await asyncio.sleep(60)
        assert message() == "no node agent is ready"
        await report(None, None)
        await world.until(lambda: message().startswith("waiting for a free slot"), seconds=10)


async def test_a_restarted_agent_counts_running_transfers_before_it_starts_one() -> None:
    names = ("du-1", "du-2")
    async with open_world(*(accepted(data_upload(name)) for name in names), mover=Mover(seconds=50)) as world:

        def phases() -> set[str]:
            return {world.phase(name=name) for name in names}

        async with world.agent(slots=1):
            await world.until(lambda: phases() == {"InProgress", "Prepared"})
        async with world.agent(slots=1):
            await asyncio.sleep(10)
            assert phases() == {"InProgress", "Prepared"}
            await world.until(lambda: all(world.done(name=name) for name in names))


async def test_a_volume_that_cannot_be_handed_over_is_deleted_and_the_transfer_fails() -> None:
    async with open_world(accepted(data_download())) as world, world.agent():
        await world.until(lambda: world.phase("DataDownload") == "InProgress")
        claim, _ = world.target()
        await world.cluster.client.delete(PERSISTENT_VOLUME_CLAIMS, "app3", claim["metadata"]["name"])
        await world.until(lambda: world.done("DataDownload"))
        assert world.phase("DataDownload") == "Failed"
        assert "target PVC app3/data was deleted" in world.transfer("DataDownload")["status"]["message"]
        assert world.left() == {}


@pytest.mark.cause("unreadable")
async def test_an_invalid_transfer_is_reported_once_and_not_changed() -> None:
    transfer = accepted(data_upload())
    async with open_world(transfer) as world:
        broken = transfer | {"spec": {"snapshotType": "CSI"}}
        world.kube.put(broken)
        async with world.agent():
            await asyncio.sleep(5)
            world.kube.put(broken | {"status": {"phase": "Accepted", "message": "touched"}})
            await asyncio.sleep(5)
            assert world.reasons() == ["Unreadable"]
            world.kube.put(broken | {"spec": {"snapshotType": 5}})
            await asyncio.sleep(5)
        assert world.reasons() == ["Unreadable"] * 2
        assert world.transfer()["metadata"]["finalizers"] == [DATA_MOVER_FINALIZER]


async def test_the_status_page_has_transfers_and_slots() -> None:
    async with open_world(accepted(data_upload()), mover=Mover(seconds=20)) as world, world.agent(slots=2) as agent:
        await world.until(lambda: world.transfer()["status"].get("progress", {}).get("bytesDone") == 400)
        await asyncio.sleep(0.5)
        report = agent.report()
    assert report["slots"] == {"used": 1, "total": 2, "pending": 0}
    assert [
        (transfer["name"], transfer["phase"], transfer["progress"]["bytesDone"]) for transfer in report["transfers"]
    ] == [("du-1", "InProgress", 400)]
