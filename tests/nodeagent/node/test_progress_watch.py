"""The Events of running transfers come from files of their movers, else from one watch for all of a node."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from copy import copy
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from core.kube.event_files import EventFiles, write_event
from core.kube.resources import DATA_UPLOADS, EVENTS, PODS
from core.models.names import NODE_LABEL, OWNER_UID_LABEL
from exposer.workload import EVENTS_VOLUME
from nodeagent.metrics import Metrics
from nodeagent.node.lifecycle import Site
from nodeagent.node.progress import Followed, ProgressFollower
from nodeagent.transfers.status import StatusWriter
from tests.nodeagent.node.test_progress import NOT_READY, event, message_of
from tests.nodeagent.support.harness import accepted, build_agent, open_world
from tests.nodeagent.support.simulation import Mover, _events_directory
from tests.nodeagent.support.transfers import NAMESPACE, NODE, TRANSFERS, data_upload
from tests.support.clock import LoopClock
from tests.support.fakekube import FakeKube
from tests.support.objects import JsonDict
from tests.support.tasks import running

pytestmark = pytest.mark.looptime


def watches_of_events(kube: FakeKube) -> list[str]:
    """Return the selectors of all watches of Events, in order."""
    queries = [r.query for r in kube.requests if r.path.endswith("/events") and "watch" in r.query]
    return [query.get("labelSelector", "") + query.get("fieldSelector", "") for query in queries]


@asynccontextmanager
async def _following(
    kube: FakeKube, *transfers: JsonDict, host_pods: Path | None = None, metrics: Metrics | None = None
) -> AsyncIterator[ProgressFollower]:
    """Follow transfers that run, whose movers have files only with `host_pods`."""
    clock = LoopClock()
    client, kind = kube.client, build_agent(kube)._kinds["DataUpload"]
    status = StatusWriter(client, clock.now)
    site = Site(NODE, NAMESPACE, host_pods=str(host_pods or ""))
    follower = ProgressFollower(client, clock, site, status=status, metrics=metrics or Metrics(NODE))
    async with running(follower.run()):
        for transfer in transfers:
            cr = kind.parse(kube.put(transfer))
            follower.follow(cr, Followed(kind, partial(copy, cr)), _mover_pod(cr.uid, host_pods))
        await asyncio.sleep(1)
        yield follower


def _mover_pod(uid: str, host_pods: Path | None) -> JsonDict:
    meta: JsonDict = {"uid": f"pod-of-{uid}", "labels": {OWNER_UID_LABEL: uid}}
    pod: JsonDict = {"metadata": meta, "spec": {"volumes": [{"name": EVENTS_VOLUME}]}}
    Mover(host_pods=host_pods).mount(pod)
    return pod


def _running(name: str) -> JsonDict:
    return data_upload(name, node=NODE, status={"phase": "InProgress"})


async def test_twenty_running_transfers_need_one_watch() -> None:
    kube, transfers = FakeKube(), [_running(f"du-{n}") for n in range(20)]
    async with _following(kube, *transfers):
        for number, transfer in enumerate(transfers):
            kube.put(event(transfer, "Progress", f'{{"totalBytes":1000,"doneBytes":{number + 1}}}'))
        await asyncio.sleep(2)
    shown = {o["metadata"]["name"]: o["status"]["progress"]["bytesDone"] for o in kube.objects(DATA_UPLOADS)}
    assert shown == {f"du-{number}": number + 1 for number in range(20)}
    assert watches_of_events(kube) == [f"{NODE_LABEL}={NODE}"]


async def test_a_watch_that_is_rejected_for_good_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    kube = FakeKube()
    kube.fail_next("GET", "/events", 403, times=1000)
    async with _following(kube, _running("du-1")):
        await asyncio.sleep(100)
    assert caplog.text.count("cannot watch progress, will retry") == 1


async def test_what_an_earlier_process_counted_is_not_counted_again_by_a_list_of_events() -> None:
    kube, metrics = FakeKube(), Metrics(NODE)
    transfer = data_upload("du-1", node=NODE, status={"phase": "InProgress", "progress": {"bytesDone": 30}})

    def report(number: int) -> None:
        message = f'{{"totalBytes":100,"doneBytes":{number * 10},"sentBytes":{number}}}'
        kube.put(event(transfer, "Progress", message, number=number))

    for number in (1, 2, 3):
        report(number)
    async with _following(kube, transfer, metrics=metrics):
        report(4)
        await asyncio.sleep(1)
    text = metrics.render().decode()
    for name, value in (("moved", "10.0"), ("sent", "1.0")):
        assert f'nodeagent_{name}_bytes_total{{kind="DataUpload",node="{NODE}"}} {value}' in text


async def test_a_mover_of_velero_gets_a_watch_of_its_own_while_it_runs() -> None:
    transfer = accepted(data_upload())
    async with open_world(transfer, mover=Mover(stubborn=True)) as world, world.agent():
        await world.until(lambda: world.phase() == "InProgress")
        (pod,) = world.kube.objects(PODS)
        labels = {key: value for key, value in pod["metadata"]["labels"].items() if key != OWNER_UID_LABEL}
        world.kube.put(pod | {"metadata": pod["metadata"] | {"labels": labels}})
        own = f"involvedObject.uid={transfer['metadata']['uid']}"
        await world.until(lambda: own in watches_of_events(world.kube), seconds=10)
        found = event(transfer, "Progress", '{"totalBytes":1000,"doneBytes":700}')
        del found["metadata"]["labels"]
        world.kube.put(found)
        shown = {"totalBytes": 1000, "bytesDone": 700}
        await world.until(lambda: world.transfer()["status"].get("progress") == shown, seconds=5)
        world.cluster.mover.stubborn = False
        await world.until(world.done)
        await asyncio.sleep(1)
        paths = {r.path for r in world.kube.requests if "watch" in r.query and not r.path.endswith("/events")}
        assert len(world.kube.watches) == len(paths)


def write(host_pods: Path, pod: JsonDict, found: JsonDict) -> None:
    Mover(host_pods=host_pods).write(pod, found)


@pytest.mark.parametrize("kind", TRANSFERS)
async def test_an_agent_that_sees_the_files_of_a_mover_watches_no_events(kind: str, tmp_path: Path) -> None:
    transfer = accepted(TRANSFERS[kind]())
    metrics = Metrics(NODE)
    mover = Mover(host_pods=tmp_path)
    async with open_world(transfer, mover=mover) as world, world.agent(host_pods=tmp_path, metrics=metrics):
        shown = {"totalBytes": 1000, "bytesDone": 400}
        await world.until(lambda: world.transfer(kind)["status"].get("progress") == shown)
        await world.until(lambda: world.done(kind))
        assert world.phase(kind) == "Completed"
        assert watches_of_events(world.kube) == []
    moved = [line for line in metrics.render().decode().splitlines() if line.startswith("nodeagent_moved_bytes_total")]
    assert [float(line.rsplit(" ", 1)[1]) for line in moved] == [1000.0]


async def test_the_files_say_what_a_mover_is_pending_for_to_a_restarted_agent(tmp_path: Path) -> None:
    transfer = accepted(data_upload())
    mover = Mover(stubborn=True, host_pods=tmp_path)
    async with open_world(transfer, mover=mover) as world:
        async with world.agent(host_pods=tmp_path):
            await world.until(lambda: world.phase() == "InProgress")
            (pod,) = world.kube.objects(PODS)
            write(tmp_path, pod, event(transfer, "Waiting", NOT_READY))
        async with world.agent(host_pods=tmp_path):
            await world.until(lambda: message_of(world, "DataUpload") == NOT_READY, seconds=5)


async def test_files_of_long_transfers_are_read_less_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []
    read_new = EventFiles.read_new

    def count(files: EventFiles, reasons: Iterable[str]) -> list[JsonDict]:
        looks.append(LoopClock().monotonic())
        return read_new(files, reasons)

    monkeypatch.setattr(EventFiles, "read_new", count)
    mover = Mover(stubborn=True, host_pods=tmp_path)
    async with open_world(accepted(data_upload()), mover=mover) as world, world.agent(host_pods=tmp_path):
        await world.until(lambda: bool(looks))
        await asyncio.sleep(300)
    pauses = [after - before for before, after in pairwise(looks)]
    assert min(pauses) == pytest.approx(0.1)
    assert max(pauses) == pytest.approx(1.0)
    assert all(pause <= max(0.1, 0.02 * (at - looks[0])) + 0.01 for at, pause in zip(looks, pauses, strict=False))
    assert len(looks) < 500


async def test_a_mover_that_writes_no_file_is_heard_by_a_watch_after_a_minute(tmp_path: Path) -> None:
    """Its image is of an earlier version, or its disk is full."""
    transfer = accepted(data_upload())
    mover = Mover(stubborn=True, host_pods=tmp_path)
    async with open_world(transfer, mover=mover) as world, world.agent(host_pods=tmp_path):
        await world.until(lambda: world.phase() == "InProgress")
        (pod,) = world.kube.objects(PODS)
        mover.host_pods = None
        for file in _events_directory(tmp_path, pod).iterdir():
            file.unlink()
        await asyncio.sleep(50)
        assert watches_of_events(world.kube) == []
        world.kube.put(event(transfer, "Progress", '{"totalBytes":1000,"doneBytes":700}'))
        await world.until(lambda: watches_of_events(world.kube) == [f"{NODE_LABEL}={NODE}"], seconds=20)
        shown = {"totalBytes": 1000, "bytesDone": 700}
        await world.until(lambda: world.transfer()["status"].get("progress") == shown, seconds=10)
        world.kube.put(pod | {"metadata": pod["metadata"] | {"annotations": {"changed": "1"}}})
        await asyncio.sleep(10)
        assert len(watches_of_events(world.kube)) == 1


async def test_what_was_written_after_the_last_look_is_counted(tmp_path: Path) -> None:
    """The kubelet may report the end of a long transfer's mover a second before the next look."""
    kube, transfer = FakeKube(), _running("du-1")
    async with _following(kube, transfer, host_pods=tmp_path) as follower:
        uid = transfer["metadata"]["uid"]
        (directory,) = tmp_path.rglob(EVENTS_VOLUME)
        write_event(directory, event(transfer, "Progress", '{"totalBytes":1000,"doneBytes":1}', number=1))
        await asyncio.sleep(120)
        write_event(directory, event(transfer, "Progress", '{"totalBytes":1000,"doneBytes":1000}', number=2))
        await follower.end_writing(uid)
        assert follower._readings[uid].reported.message.done_bytes == 1000


async def test_the_mover_of_a_transfer_that_was_interrupted_before_a_restart_is_heard(tmp_path: Path) -> None:
    """A restore is not written again as long as it says something."""
    transfer = _running("du-1")
    uid = transfer["metadata"]["uid"]
    async with _following(FakeKube(), host_pods=tmp_path) as follower:
        pod = _mover_pod(uid, tmp_path)
        for again in (True, False):
            follower.leave("DataUpload", uid, again=again, pod=pod)
            write(tmp_path, pod, event(transfer, "Progress", "{}", number=again))
            await asyncio.sleep(2)
            assert follower.heard(uid) == again


async def test_files_that_the_kubelet_has_removed_are_not_replaced_by_a_watch(tmp_path: Path) -> None:
    """The mover has ended, and the agent's cache does not show it yet."""
    kube, transfer = FakeKube(), _running("du-1")
    async with _following(kube, transfer, host_pods=tmp_path) as follower:
        kind = build_agent(kube)._kinds["DataUpload"]
        cr = kind.parse(transfer)
        pod = _mover_pod(cr.uid, tmp_path)
        shutil.rmtree(tmp_path / pod["metadata"]["uid"])
        follower.follow(cr, Followed(kind, partial(copy, cr)), pod)
        await asyncio.sleep(2)
    assert watches_of_events(kube) == []


async def test_the_watch_ends_with_the_last_mover_without_files(tmp_path: Path) -> None:
    transfer = accepted(data_upload())
    async with open_world(transfer, mover=Mover(stubborn=True)) as world, world.agent(host_pods=tmp_path):
        await world.until(lambda: watches_of_events(world.kube) == [f"{NODE_LABEL}={NODE}"])
        before = len(world.kube.watches)
        (pod,) = world.kube.objects(PODS)
        Mover(host_pods=tmp_path).mount(pod)
        write(tmp_path, pod, event(transfer, "Progress", '{"totalBytes":1000,"doneBytes":700}'))
        world.kube.put(pod | {"metadata": pod["metadata"] | {"annotations": {"changed": "1"}}})
        shown = {"totalBytes": 1000, "bytesDone": 700}
        await world.until(lambda: world.transfer()["status"].get("progress") == shown, seconds=10)
        assert len(world.kube.watches) == before - 1


@pytest.mark.parametrize("how", ["they expire", "a list lacks them", "the watch ends"])
async def test_the_events_of_a_finished_transfer_are_forgotten(how: str) -> None:
    kube, other = FakeKube(), _running("du-2")
    uid = other["metadata"]["uid"]
    async with _following(kube, _running("du-1")) as follower:
        kube.put(event(other, "Progress", "{}"))
        await asyncio.sleep(1)
        assert uid in follower._readings
        if how == "the watch ends":
            follower.leave("DataUpload", "uid-of-du-1", again=False)
        else:
            kube.watches.silent = how == "a list lacks them"
            for found in kube.objects(EVENTS):
                await kube.client.delete(EVENTS, NAMESPACE, found["metadata"]["name"])
        if kube.watches.silent:
            kube.compact()
            kube.watches.cut()
            kube.watches.silent = False
        await asyncio.sleep(60 if how == "a list lacks them" else 1)
        assert uid not in follower._readings


async def test_what_is_known_of_a_final_transfer_is_dropped() -> None:
    async with open_world(accepted(data_upload())) as world, world.agent() as agent:
        await world.until(world.done)
        await world.until(lambda: agent._tools.progress._readings == {})
        assert len([o for o in world.kube.objects(EVENTS) if o["reason"].startswith("Data-Path")]) == 1
