"""Transfers from Accepted to cleanup, in a simulated cluster and virtual time."""

import asyncio
import json

import pytest

from core.kube.resources import DATA_UPLOADS, EVENTS, PODS
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
from tests.nodeagent.support.transfers import NAMESPACE, NODE, data_download, data_upload

pytestmark = pytest.mark.looptime

TRANSFERS = {"DataUpload": data_upload, "DataDownload": data_download}


async def run_to_the_end(transfer: JsonDict, *, mover: Mover | None = None) -> World:
    async with open_world(transfer, mover=mover) as world, world.agent():
        await world.until(lambda: world.done(transfer["kind"]))
        # The provisioner reclaims the volume a little later.
        await asyncio.sleep(1)
        return world


async def test_a_data_upload_completes_and_leaves_no_objects() -> None:
    world = await run_to_the_end(accepted(data_upload()))
    transfer = world.transfer()
    assert transfer["status"] == transfer["status"] | {
        "phase": "Completed",
        "node": NODE,
        "nodeOS": "linux",
        "path": f"/{transfer['metadata']['uid']}",
        "snapshotID": "kopia-1",
        "incrementalBytes": 600,
        "progress": {"totalBytes": 1000, "bytesDone": 1000},
    }
    assert {"acceptedTimestamp", "startTimestamp", "completionTimestamp"} <= transfer["status"].keys()
    assert "message" not in transfer["status"]
    assert world.left() == {"persistentvolumeclaims": ["data"]}


async def test_a_shrunk_backup_is_completed_with_its_sizes_in_annotations_and_an_event() -> None:
    shrunk = {"bytes": 1000, "fullBytes": 1_000_000, "files": 4, "fullFiles": 400}
    message = json.dumps(json.loads(BACKUP_DONE) | {"files": 4, "shrunk": shrunk})
    world = await run_to_the_end(accepted(data_upload()), mover=Mover(message=message))
    annotations = world.transfer()["metadata"]["annotations"]
    assert (world.phase(), annotations["nodeagent.io/files"]) == ("Completed", "4")
    assert json.loads(annotations["nodeagent.io/shrunk"]) == shrunk
    assert world.reasons()[-2:] == ["Completed", "Shrunk"]


async def test_a_data_download_completes_into_its_target_pvc() -> None:
    world = await run_to_the_end(accepted(data_download()))
    status = world.transfer("DataDownload")["status"]
    assert (status["phase"], status["progress"]) == ("Completed", {"totalBytes": 1000, "bytesDone": 1000})
    assert "nodeOS" not in status
    claim, volume = world.target()
    assert (claim["status"]["phase"], claim["spec"]["volumeName"]) == ("Bound", volume["metadata"]["name"])
    assert volume["spec"]["persistentVolumeReclaimPolicy"] == "Delete"
    assert world.left() == {"persistentvolumeclaims": ["data"], "persistentvolumes": [volume["metadata"]["name"]]}


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
        _, volume = world.target()
    assert OWNER_UID_LABEL not in volume["metadata"].get("labels", {})
    assert volume["spec"]["persistentVolumeReclaimPolicy"] == "Delete"


@pytest.mark.parametrize("kind", TRANSFERS)
async def test_a_finished_transfer_has_no_marks_of_the_agent(kind: str) -> None:
    meta = (await run_to_the_end(accepted(TRANSFERS[kind]()))).transfer(kind)["metadata"]
    assert not meta.get("finalizers")
    assert not {NODE_LABEL, EXPOSE_ON_GOING_LABEL} & meta["labels"].keys()
    assert OUTCOME_ANNOTATION not in meta.get("annotations", {})


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


@pytest.mark.parametrize(
    ("mover", "text"),
    [
        pytest.param(Mover(exit_code=12, message="wrong password"), "wrong password", id="with a message"),
        pytest.param(Mover(exit_code=137, message="", reason="OOMKilled"), "OOMKilled", id="killed"),
        pytest.param(Mover(message="nonsense"), "its result is invalid: nonsense", id="invalid result"),
        pytest.param(Mover(exit_code=14, message="SIGTERM: data path is canceled"), "was stopped", id="stopped"),
    ],
)
@pytest.mark.parametrize("kind", TRANSFERS)
async def test_a_transfer_whose_mover_fails_is_failed(kind: str, mover: Mover, text: str) -> None:
    world = await run_to_the_end(accepted(TRANSFERS[kind]()), mover=mover)
    assert world.phase(kind) == "Failed"
    assert text in world.transfer(kind)["status"]["message"]
    assert world.left() == {"persistentvolumeclaims": ["data"]}
    assert world.reasons()[-1] == "Failed"


@pytest.mark.parametrize("phase", ["Accepted", "Prepared", "InProgress"])
@pytest.mark.parametrize("by", ["cancel", "deletion"])
@pytest.mark.parametrize("kind", TRANSFERS)
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


async def test_a_transfer_whose_pod_disappears_is_failed() -> None:
    async with open_world(accepted(data_upload()), mover=Mover(seconds=100)) as world, world.agent():
        await world.until(lambda: world.phase() == "InProgress")
        await world.cluster.client.delete(PODS, "velero", "du-1")
        await world.until(world.done)
        assert world.phase() == "Failed"
        assert "data mover pod velero/du-1 was lost" in world.transfer()["status"]["message"]


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
    running, waiting = accepted(data_upload("du-1")), accepted(data_upload("du-2"))
    async with open_world(running, waiting, mover=Mover(seconds=50)) as world:
        async with world.agent(slots=1):
            await world.until(lambda: "InProgress" in {world.phase(name="du-1"), world.phase(name="du-2")})
            await world.until(
                lambda: {world.phase(name="du-1"), world.phase(name="du-2")} == {"InProgress", "Prepared"}
            )
        async with world.agent(slots=1):
            await asyncio.sleep(10)
            assert {world.phase(name="du-1"), world.phase(name="du-2")} == {"InProgress", "Prepared"}
            await world.until(lambda: world.done(name="du-1") and world.done(name="du-2"))


async def test_a_volume_that_cannot_be_handed_over_is_deleted_and_the_transfer_fails() -> None:
    async with open_world(accepted(data_download())) as world, world.agent():
        await world.until(lambda: world.phase("DataDownload") == "InProgress")
        claim, _ = world.target()
        await world.cluster.client.delete(*world.claim_path(claim))
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
        assert world.transfer()["metadata"]["finalizers"] == [DATA_MOVER_FINALIZER]


async def test_a_slow_transfer_does_not_delay_another_one() -> None:
    pending, quick = accepted(data_upload("pending")), accepted(data_upload("quick"))
    pending["spec"] = pending["spec"] | {"csiSnapshot": pending["spec"]["csiSnapshot"] | {"volumeSnapshot": "unready"}}
    async with open_world(pending, quick) as world, world.agent():
        world.unready_snapshot("unready")
        await world.until(lambda: world.done(name="quick"), seconds=10)
        assert world.phase(name="pending") == "Accepted"
        await world.until(lambda: "unready" in world.transfer(name="pending")["status"].get("message", ""), seconds=10)


async def test_the_status_page_has_transfers_and_slots() -> None:
    async with open_world(accepted(data_upload()), mover=Mover(seconds=20)) as world, world.agent(slots=2) as agent:
        await world.until(lambda: world.transfer()["status"].get("progress", {}).get("bytesDone") == 400)
        await asyncio.sleep(0.5)
        report = agent.report()
    assert report["slots"] == {"used": 1, "total": 2, "pending": 0}
    assert [
        (transfer["name"], transfer["phase"], transfer["progress"]["bytesDone"]) for transfer in report["transfers"]
    ] == [("du-1", "InProgress", 400)]
