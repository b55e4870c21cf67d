"""Creation of a backup: complete, or it names the volume that is missing; and it may be repeated."""

import asyncio
from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from client.backups.manifests import BackupError, PlannedVolume
from client.backups.plan import Choice, ClaimName, check_backup, plan_backup, start_backup, sum_up_missing
from core.kube.resources import DATA_UPLOADS, VOLUME_SNAPSHOTS
from core.kube.transport import Request, Response
from tests.client.support.backup_scene import BackupScene
from tests.nodeagent.support.hand_clock import NOON, HandClock
from tests.support.objects import JsonDict

_CLAIMS = tuple(ClaimName("app", name) for name in ("data", "data-2", "files"))


async def _plan(scene: BackupScene) -> list[PlannedVolume]:
    scene.put_claim("data-2", "fast")
    return await plan_backup(scene.tools, scene.request(), Choice(claims=_CLAIMS))


async def _planned() -> tuple[BackupScene, list[PlannedVolume]]:
    scene = BackupScene()
    return scene, await _plan(scene)


async def test_all_snapshots_are_taken_before_the_first_transfer_and_nothing_by_the_check() -> None:
    scene, volumes = await _planned()
    await check_backup(scene.tools, volumes)
    assert scene.made == []
    scene.kube.requests.clear()
    await start_backup(scene.tools, volumes)
    created = [request.path.split("/")[-1] for request in scene.kube.requests if request.method == "POST"]
    assert created == ["volumesnapshots"] * 2 + ["datauploads"] * 2 + ["podvolumebackups"]
    assert len(scene.made) == 5


async def test_what_the_api_server_would_reject_is_found_by_the_check() -> None:
    scene = BackupScene()
    scene.kube.fail_next("POST", "/podvolumebackups", 403, message="exceeded quota")
    with pytest.raises(BackupError, match=r"^PVC app/files cannot be backed up, nothing was created: .*exceeded quota"):
        await check_backup(scene.tools, await _plan(scene))


@pytest.mark.parametrize(
    ("path", "missing", "made"),
    [
        pytest.param("/volumesnapshots", "app/data", 3, id="first snapshot"),
        pytest.param("/datauploads", "app/data", 3, id="first transfer"),
        pytest.param("/podvolumebackups", "app/files", 4, id="last transfer"),
    ],
)
async def test_a_rejection_names_the_volume_leaves_no_useless_snapshot_and_starts_the_others(
    path: str, missing: str, made: int
) -> None:
    scene, volumes = await _planned()
    scene.kube.fail_next("POST", path, 403, message="exceeded quota")
    (reason,) = await start_backup(scene.tools, volumes)
    assert reason.startswith(f"PVC {missing} is missing in the backup: ")
    assert "exceeded quota" in reason
    assert len(scene.made) == made
    # What is missing is created by the same command.
    assert await start_backup(scene.tools, await _plan(scene)) == []
    assert len(scene.made) == 5


async def test_nothing_is_started_when_all_is_rejected() -> None:
    scene = BackupScene()
    volumes = (await _plan(scene))[:2]
    scene.kube.fail_next("POST", "/volumesnapshots", 403, message="exceeded quota", times=2)
    assert len(await start_backup(scene.tools, volumes)) == 2
    assert scene.made == []


async def test_an_api_server_that_does_not_respond_is_not_asked_for_each_volume() -> None:
    scene, volumes = await _planned()
    scene.kube.fail_next("POST", "/volumesnapshots", "lost")
    with pytest.raises(BackupError, match=r"^not all volumes were started, repeat the command: PVC app/data: "):
        await start_backup(scene.tools, volumes)
    assert len([one for one in scene.kube.requests if one.method == "POST"]) == 1


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("fault", ["lost", "lost-applied"])
async def test_a_snapshot_without_a_transfer_is_named_when_the_api_server_is_lost(fault: str, number: int) -> None:
    scene, volumes = await _planned()
    inner = scene.kube.request

    async def request(what: Request) -> Response:
        if len([one for one in scene.kube.requests if one.method == "POST"]) == number:
            scene.kube.fail_next("POST", "", fault)  # type: ignore[arg-type]
        return await inner(what)

    scene.kube.requests.clear()
    scene.kube.request = request  # type: ignore[assignment, method-assign]
    named = ""
    try:
        await start_backup(scene.tools, volumes)
    except BackupError as e:
        named = f"{e}"
    bare = scene.objects(VOLUME_SNAPSHOTS).keys() - scene.objects(DATA_UPLOADS).keys()
    assert [name for name in bare if name not in "".join([named, *scene.notes])] == []
    assert len(scene.notes) == len(bare) + (fault == "lost" and number < 2)


def test_many_missing_volumes_are_counted() -> None:
    assert sum_up_missing(["a", "b"]) == "a; b"
    assert sum_up_missing(list("abcde")) == "a; b; c; and 2 more"


async def test_a_snapshot_that_cannot_be_deleted_is_noted_with_the_command() -> None:
    scene, volumes = await _planned()
    scene.kube.fail_next("POST", "/datauploads", 403)
    scene.kube.fail_next("DELETE", "/volumesnapshots", 403)
    assert len(await start_backup(scene.tools, volumes)) == 1
    assert f"kubectl -n app delete volumesnapshot {volumes[0].name}" in scene.notes[0]


@pytest.mark.parametrize(
    ("resource", "change", "error"),
    [
        (VOLUME_SNAPSHOTS, {"labels": {}}, "exists already, and is of another backup"),
        (DATA_UPLOADS, {"labels": {}}, "exists already, and is of another backup"),
        (VOLUME_SNAPSHOTS, {"deletionTimestamp": "2026-11-21T10:00:00Z"}, "is being deleted: repeat"),
    ],
    ids=["snapshot", "transfer", "snapshot that is being deleted"],
)
async def test_an_object_of_another_origin_is_not_taken_for_ours(
    resource: object, change: JsonDict, error: str
) -> None:
    scene, volumes = await _planned()
    manifest = volumes[0].build_snapshot() if resource is VOLUME_SNAPSHOTS else volumes[0].build_transfer()
    assert manifest is not None
    manifest["metadata"] |= change
    scene.kube.put(manifest)
    error = f"{manifest['kind']} {manifest['metadata']['namespace']}/{volumes[0].name} {error}"
    with pytest.raises(BackupError, match=error):
        await check_backup(scene.tools, volumes)
    assert error in (await start_backup(scene.tools, volumes))[0]


async def test_an_old_snapshot_without_a_transfer_is_not_taken() -> None:
    scene, volumes = await _planned()
    await start_backup(scene.tools, volumes)
    scene.clock.seconds += 3 * 3600
    await check_backup(scene.tools, volumes)
    await scene.client.delete(DATA_UPLOADS, "velero", volumes[0].name)
    cause = f"app/{volumes[0].name} is 3h old: delete it .kubectl -n app delete volumesnapshot {volumes[0].name}.$"
    with pytest.raises(BackupError, match=cause):
        await check_backup(scene.tools, volumes)
    scene.clock.seconds -= 3 * 3600
    await start_backup(scene.tools, volumes)
    assert len(scene.made) == 5


@pytest.mark.parametrize("date", [NOON, None], ids=["known", "unknown"])
async def test_the_age_of_a_snapshot_is_by_no_clock_of_this_machine(date: datetime | None) -> None:
    scene, volumes = await _planned()
    await start_backup(scene.tools, volumes)
    await scene.client.delete(DATA_UPLOADS, "velero", volumes[0].name)
    tools = replace(scene.tools, clock=HandClock(skew=timedelta(hours=3)), date=lambda: date)
    assert await start_backup(tools, volumes) == []


async def test_the_snapshot_of_a_transfer_that_was_created_without_an_answer_stays() -> None:
    scene, volumes = await _planned()
    scene.kube.put(volumes[0].build_transfer())
    scene.kube.fail_next("POST", "/datauploads", 504)
    assert await start_backup(scene.tools, volumes) == []
    assert len(scene.made) == 5


async def test_a_snapshot_stays_if_its_transfer_cannot_be_read() -> None:
    scene, volumes = await _planned()
    scene.kube.fail_next("POST", "/datauploads", 504)
    scene.kube.fail_next("GET", "/datauploads", 504)
    assert len(await start_backup(scene.tools, volumes)) == 1
    assert f"VolumeSnapshot/{volumes[0].name}" in scene.made
    assert f"was not deleted (kubectl -n app delete volumesnapshot {volumes[0].name})" in scene.notes[0]


async def test_an_interruption_lets_the_creation_finish() -> None:
    scene, volumes = await _planned()
    task = asyncio.create_task(start_backup(scene.tools, volumes))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(scene.made) == 5
