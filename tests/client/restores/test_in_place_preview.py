"""What precedes a restore into an existing volume: its snapshot, its plan, and that nothing stays of the latter."""

import asyncio
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from functools import partial

import pytest
from msgspec.structs import replace

from client.mover_jobs import JobError
from client.restores.in_place import InPlaceRestore, plan_in_place, start_in_place
from client.restores.in_place_preview import VolumeReport, prepare_in_place
from client.restores.sources import RestoreError, SavedVolume
from client.session import Session
from core.kube.errors import UnreachableError
from core.kube.resources import JOBS, VOLUME_SNAPSHOT_CONTENTS, VOLUME_SNAPSHOTS
from core.kube.transport import Request, Response
from core.models.transfer_settings import InPlace, InPlacePlan, PlannedEntries
from tests.client.support.in_place_scene import InPlaceScene
from tests.client.support.restore_scene import DATA, Send, saved
from tests.support.objects import JsonDict
from tests.support.tasks import interrupt, until

pytestmark = pytest.mark.looptime

SAVED = saved(DATA, "s1")
PLAN = InPlacePlan(to_write=PlannedEntries(files=3, bytes=7, names=["a", "b", "c"]))


@pytest.fixture
def scene() -> InPlaceScene:
    return InPlaceScene().with_controllers(PLAN)


class Command:
    """One run of the command; `agree` is the answer to the question, `shown` what it was asked with.

    `on_question` is called before the answer.
    """

    def __init__(self, scene: InPlaceScene, *, agree: bool = True) -> None:
        self.scene, self.agree = scene, agree
        self.shown: list[VolumeReport] = []
        self.plans: Sequence[InPlaceRestore] = []
        self.on_question: Callable[[], object] = lambda: None

    async def run(self, volume: SavedVolume = SAVED, *, snapshots: bool = True, **how: bool) -> bool:
        scene = self.scene
        request = scene.request(in_place=InPlace(**how))
        self.plans = await plan_in_place(scene.tools, request, [volume], snapshots=snapshots)
        jobs = Session(scene.client, scene.clock, "velero", scene.notes.append)
        if self.plans and not await prepare_in_place(jobs, self.plans, self._decide):
            return False
        return await start_in_place(scene.tools, self.plans)

    def _decide(self, reports: Sequence[VolumeReport]) -> bool:
        self.shown = list(reports)
        self.on_question()
        return self.agree


def left(scene: InPlaceScene) -> list[str]:
    """Everything of a plan that is still there."""
    jobs = [one["metadata"]["name"] for one in scene.kube.objects(JOBS)]
    contents = [n for one in scene.kube.objects(VOLUME_SNAPSHOT_CONTENTS) if "-plan" in (n := one["metadata"]["name"])]
    own = [n for one in scene.snapshots if (n := one["metadata"]["name"]).endswith("-plan")]
    return [*jobs, *contents, *own, *(name for name in scene.claims if name != "app/data")]


def assert_untouched(scene: InPlaceScene) -> None:
    assert scene.claims["app/data"]["metadata"]["uid"] == "uid-old"
    assert scene.volume["spec"]["persistentVolumeReclaimPolicy"] == "Delete"
    assert (left(scene), scene.downloads, scene.snapshots) == ([], [], [])


async def test_a_job_compares_a_volume_from_the_snapshot_and_only_that_stays(scene: InPlaceScene) -> None:
    seen: list[JsonDict] = []
    objects = scene.kube.objects
    scene.on_job = lambda: seen.extend([*objects(VOLUME_SNAPSHOT_CONTENTS), *scene.claims.values(), *objects(JOBS)])
    command = Command(scene)
    assert await command.run(incremental=True, delete_extra_files=True)
    (report,) = command.shown
    (snapshot,) = (plan.snapshot for plan in command.plans)
    assert snapshot is not None
    assert (report.claim, report.volume, report.snapshot) == ("data", "pv-1", snapshot["metadata"]["name"])
    assert (report.plan, report.device) == (PLAN, False)
    contents = (one for one in seen if one["kind"] == "VolumeSnapshotContent")
    original, content = sorted(contents, key=lambda one: str(one["spec"]["deletionPolicy"]))
    assert content["spec"]["source"] == {"snapshotHandle": original["status"]["snapshotHandle"]}
    assert content["spec"]["volumeSnapshotRef"]["namespace"] == "velero"
    (scratch,) = (one for one in seen if one["metadata"].get("namespace") == "velero" and "dataSource" in one["spec"])
    assert scratch["spec"]["dataSource"]["name"] == content["metadata"]["name"]
    assert scratch["spec"]["storageClassName"] == "fast"
    (job,) = (one for one in seen if one["kind"] == "Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert {"plan-restore", "--snapshot=s1", "--incremental", "--delete-extra-files"} <= {*container["args"]}
    (mount,) = [one for one in container["volumeMounts"] if one["mountPath"] == "/scratch/volume"]
    assert mount["readOnly"] is True
    (kept,) = scene.snapshots
    assert (kept["metadata"]["namespace"], kept["metadata"]["name"]) == ("app", report.snapshot)
    assert left(scene) == []
    assert scene.notes == [f"VolumeSnapshot app/{report.snapshot} has the data before the restore"]
    assert len(scene.downloads) == 1


@pytest.mark.parametrize(
    ("plan", "error"),
    [
        (InPlacePlan(refusal="snapshot s1 lacks 2 files"), r": snapshot s1 lacks 2 files \(--delete-extra-files\)"),
        (None, ": the restore could not be planned, nothing was changed: .*no memory.*--no-snap"),
    ],
    ids=["the restore would refuse", "the Job fails"],
)
async def test_without_a_plan_everything_is_as_it_was(plan: InPlacePlan | None, error: str) -> None:
    scene = InPlaceScene().with_controllers(plan)
    with pytest.raises(RestoreError, match=f"PVC app/data{error}") as e:
        await Command(scene).run(delete_extra_files=True)
    assert plan or isinstance(e.value.__cause__, JobError)
    assert_untouched(scene)


async def test_an_interruption_removes_everything(scene: InPlaceScene) -> None:
    scene.ending = False
    await interrupt(Command(scene).run(), until(lambda: bool(scene.kube.objects(JOBS))))
    assert_untouched(scene)


async def test_a_snapshot_that_was_made_without_an_answer_goes_too() -> None:
    scene = InPlaceScene()

    async def lose(what: Request, send: Send) -> Response:
        answer = await send(what)
        if what.method == "POST" and scene.snapshots:
            raise UnreachableError("no answer", status=0)
        return answer

    with scene.answering(lose), pytest.raises(UnreachableError):
        await Command(scene).run()
    assert_untouched(scene)


async def test_a_snapshot_whose_answer_was_lost_is_no_other_one() -> None:
    scene, lost = InPlaceScene().with_controllers(PLAN), list[str]()

    async def repeat(what: Request, send: Send) -> Response:
        answer = await send(what)
        if what.method == "POST" and scene.snapshots and not lost:
            lost.append(what.path)
            return await send(what)
        return answer

    with scene.answering(repeat):
        assert not await Command(scene, agree=False).run()
    assert lost
    assert_untouched(scene)


async def test_a_snapshot_that_another_run_made_in_its_place_stays(scene: InPlaceScene) -> None:
    command = Command(scene, agree=False)

    def replace_snapshot() -> None:
        (own,) = scene.snapshots
        scene.kube.put(own | {"metadata": own["metadata"] | {"annotations": {"nodeagent.io/command": "other"}}})

    command.on_question = replace_snapshot
    assert not await command.run()
    assert len(scene.snapshots) == 1


@pytest.mark.parametrize("own", [True, False], ids=["own", "of another"])
async def test_a_class_that_retains_snapshots_retains_none_without_a_yes(own: bool, scene: InPlaceScene) -> None:
    command = Command(scene, agree=False)

    def retain() -> None:
        (content,) = scene.kube.objects(VOLUME_SNAPSHOT_CONTENTS)
        spec = content["spec"] | {"deletionPolicy": "Retain"}
        if not own:
            spec["volumeSnapshotRef"] = spec["volumeSnapshotRef"] | {"uid": "another"}
        scene.kube.put(content | {"spec": spec})

    command.on_question = retain
    assert not await command.run()
    (content,) = scene.kube.objects(VOLUME_SNAPSHOT_CONTENTS)
    assert (content["spec"]["deletionPolicy"], scene.snapshots) == ("Delete" if own else "Retain", [])


@pytest.mark.parametrize("by_block", [False, True], ids=["of a device", "by block, of a file system"])
async def test_the_plan_of_a_block_volume_is_the_whole_device(by_block: bool, scene: InPlaceScene) -> None:
    if not by_block:
        scene.make_block()
    command, mode = Command(scene), "Filesystem" if by_block else "Block"
    assert await command.run(dataclasses.replace(saved(replace(DATA, volume_mode=mode)), by_block=by_block))
    assert [(one.device, one.plan, one.total_bytes) for one in command.shown] == [(True, None, 7)]
    assert left(scene) == []
    assert len(scene.snapshots) == 1


async def test_a_snapshot_is_ready_before_anything_is_planned_and_one_that_fails_goes() -> None:
    scene = InPlaceScene()
    started = asyncio.create_task(Command(scene).run(), name="command")
    await asyncio.sleep(60)
    (snapshot,) = scene.snapshots
    assert snapshot["spec"] == {"volumeSnapshotClassName": "snap", "source": {"persistentVolumeClaimName": "data"}}
    scene.kube.put(snapshot | {"status": {"readyToUse": False, "error": {"message": "no space"}}})
    with pytest.raises(RestoreError, match="is not ready, nothing was changed: no space"):
        await started
    assert_untouched(scene)


async def test_a_snapshot_of_an_earlier_run_is_not_the_way_back(scene: InPlaceScene) -> None:
    first = Command(scene)
    await first.run()
    scene = InPlaceScene().with_controllers(PLAN)
    (earlier,) = (plan.snapshot for plan in first.plans)
    assert earlier is not None
    scene.kube.put(earlier)
    second = Command(scene)
    await second.run()
    (later,) = (plan.snapshot for plan in second.plans)
    assert later is not None
    assert later["metadata"]["name"] == f"{earlier['metadata']['name']}-2"


async def test_what_is_of_something_else_is_not_deleted(scene: InPlaceScene) -> None:
    probe = Command(scene, agree=False)
    await probe.run()
    name = f"{probe.plans[0].one.name}-plan"
    scene.put_claim(name, "velero")
    with pytest.raises(RestoreError, match="could not be planned, nothing was changed"):
        await Command(scene).run()
    assert left(scene) == [f"velero/{name}"]


@pytest.mark.parametrize("when", ["before", "meanwhile"])
async def test_a_pod_that_ran_since_the_snapshot_ends_the_command(scene: InPlaceScene, when: str) -> None:
    """Such as one of a CronJob: what it wrote would be lost."""
    command, put = Command(scene), partial(scene.put_pod, phase="Succeeded")
    if when == "before":
        put()
        assert await command.run()
        return
    command.on_question = put
    before = (scene.claims, scene.volume)
    with pytest.raises(RestoreError, match="PVC app/data was used by pod app/db-0 of StatefulSet db meanwhile: repeat"):
        await command.run()
    assert (scene.claims, scene.downloads) == (before[0], [])
    assert scene.volume["spec"] == before[1]["spec"]


@pytest.mark.parametrize("applied", [False, True], ids=["before", "after"])
async def test_a_command_that_is_killed_at_any_request_is_continued_and_leaves_no_plan(applied: bool) -> None:
    planned = 0
    for writes in itertools.count(1):
        scene = InPlaceScene().with_controllers(PLAN)
        with scene.cutting(writes, applied=applied) as sent:
            await Command(scene).run()
        planned += bool(left(scene))
        scene.bind()
        again = Command(scene)
        await again.run()
        assert left(scene) == []
        assert len(scene.downloads) == 1
        assert scene.claims["app/data"]["spec"]["volumeName"] == "pv-1"
        # Whatever was released had a snapshot before.
        assert scene.kube.objects(VOLUME_SNAPSHOTS)
        if len(sent) < writes:
            break
    assert planned >= 4
