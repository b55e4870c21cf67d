"""A backup: every volume is checked before anything is created; it is complete, or names what is missing; repeated."""

import asyncio
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from client.backups.manifests import BackupError, DataMover, Method, PlannedVolume
from client.backups.plan import Choice, ClaimName, check_backup, plan_backup, start_backup
from core.errors import ConfigError
from core.kube.errors import ForbiddenError
from core.kube.resources import BACKUP_STORAGE_LOCATIONS, DATA_UPLOADS, VOLUME_SNAPSHOT_CLASSES, VOLUME_SNAPSHOTS
from core.kube.transport import Request, Response
from tests.client.support.backup_scene import BackupScene
from tests.nodeagent.support.hand_clock import NOON, HandClock
from tests.support.objects import JsonDict
from tests.support.tasks import interrupt

_DATA, _FILES, _LOOSE = (ClaimName("app", name) for name in ("data", "files", "loose"))


@pytest.fixture
def scene() -> BackupScene:
    return BackupScene()


def _choose(*claims: ClaimName, **more: Any) -> Choice:
    return Choice(claims=claims, **more)


async def _plan(scene: BackupScene, choice: Choice, **request: Any) -> list[tuple[str, Method]]:
    volumes = await plan_backup(scene.tools, scene.request(**request), choice)
    return [(volume.claim.name, volume.method) for volume in volumes]


async def _fail(scene: BackupScene, choice: Choice, **request: Any) -> str:
    with pytest.raises(BackupError) as e:
        await plan_backup(scene.tools, scene.request(**request), choice)
    assert scene.made == []
    return str(e.value)


async def test_by_block_a_volume_needs_a_snapshot(scene: BackupScene) -> None:
    planned = await plan_backup(scene.tools, scene.request(), _choose(_DATA, data_mover=DataMover.BLOCK))
    assert [volume.data_mover for volume in planned] == [DataMover.BLOCK]
    cause = await _fail(BackupScene(), _choose(_FILES, data_mover=DataMover.BLOCK))
    assert cause.startswith("PVC app/files: no CSI snapshot: ")
    assert "no backup of files" not in cause
    with pytest.raises(ConfigError, match="--data-mover block needs a CSI snapshot"):
        Choice.parse(["app/data"], "", None, method="fs-backup", data_mover="block", ignore_velero_server=False)


async def test_a_selector_chooses_the_claims_of_a_namespace(scene: BackupScene) -> None:
    scene.put_claim("another-transfers", "fast", labels={"tier": "web", "nodeagent.io/owner-uid": "x"})
    assert await _plan(scene, Choice(namespace="app", selector="tier=web")) == [("files", Method.FS_BACKUP)]
    missing = await _fail(scene, Choice(namespace="app", selector="tier=db"))
    assert missing == 'there is no PVC in namespace app with the labels "tier=db"'
    assert await _fail(scene, Choice(namespace="empty")) == "there is no PVC in namespace empty at all"


async def test_one_volume_that_cannot_be_backed_up_ends_the_whole_plan() -> None:
    assert await _fail(BackupScene(), _choose(_DATA, _LOOSE)) == (
        "PVC app/loose: no CSI snapshot: no VolumeSnapshotClass has its driver none.example.com; "
        "no backup of files: no Running pod mounts it"
    )


async def test_a_wrong_name_has_no_hint_without_the_permission_to_list(scene: BackupScene) -> None:
    for status in (404, 403):
        scene.kube.fail_next("GET", "/persistentvolumeclaims", status)
    assert await _fail(scene, _choose(ClaimName("app", "dat"))) == "PVC app/dat does not exist"


@pytest.mark.parametrize(
    ("locations", "asked", "used", "known"),
    [
        ({"default": {}, "b": {"default": True}}, "", "b", ""),
        ({"default": {}, "b": {}}, "", "default", ""),
        ({"b": {}}, "", "b", ""),
        ({"default": {}, "b": {}}, "b", "b", ""),
        ({}, "", None, "none"),
        ({"b": {}, "a": {}}, "", None, "a, b"),
    ],
    ids=["marked", "named default", "the only one", "chosen", "none", "several"],
)
async def test_the_location_is_the_default_one_or_must_be_chosen(
    locations: dict[str, Any], asked: str, used: str | None, known: str, scene: BackupScene
) -> None:
    await scene.client.delete(BACKUP_STORAGE_LOCATIONS, "velero", "default")
    for name, spec in locations.items():
        scene.put_location(name, **spec)
    if used is None:
        expected = f"no default BackupStorageLocation in namespace velero: --storage-location: {known}"
        assert await _fail(scene, _choose(_DATA)) == expected
    else:
        (volume,) = await plan_backup(scene.tools, scene.request(location=asked), _choose(_DATA))
        assert volume.request.location == used


async def test_a_location_that_cannot_be_written_to_is_refused_and_one_away_is_noted(scene: BackupScene) -> None:
    scene.put_location("default", accessMode="ReadOnly")
    assert "BackupStorageLocation velero/default is read-only" in await _fail(scene, _choose(_DATA))
    scene.put_location("default", status={"phase": "Unavailable", "message": "403"})
    await _plan(scene, _choose(_DATA))
    assert scene.notes == ["BackupStorageLocation velero/default is Unavailable: 403: data movers wait for it"]


async def test_a_velero_server_is_to_be_asked_and_one_that_may_be_there(scene: BackupScene) -> None:
    scene.put("Deployment", "velero", "apps/v1", spec={})
    message = await _fail(scene, _choose(_DATA))
    assert message.startswith("a Velero server is in namespace velero: ask it (velero backup create)")
    assert await _plan(scene, _choose(_DATA, ignore_velero_server=True))
    scene.kube.fail_next("GET", "/deployments", 403, message="deployments is forbidden")
    message = await _fail(scene, _choose(_DATA))
    assert message.startswith("cannot find out whether a Velero server is in namespace velero: list Deployment velero")
    assert message.endswith("--ignore-velero-server creates the backup nevertheless")


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"name": "Night"}, '"Night" is no name of a backup'),
        ({"name": "n" * 254}, f'"{"n" * 254}" is no name of a backup: up to 253 '),
        ({"annotations": {"nodeagent.io/claim": "y"}}, "--annotations: nodeagent.io/claim is reserved"),
        ({"annotations": {"a b": "y"}}, '--annotations: "a b=y" is not allowed'),
        ({"labels": {"a": "b c"}}, '--labels: "a=b c" is not allowed'),
        ({"labels": {f"{'d' * 254}/a": "b"}}, "--labels: "),
    ],
    ids=["name", "long name", "annotation", "key", "label", "long key"],
)
async def test_an_invalid_request_is_refused(request_: dict[str, Any], message: str, scene: BackupScene) -> None:
    with pytest.raises(ConfigError) as e:
        await plan_backup(scene.tools, scene.request(**request_), _choose(_DATA))
    assert str(e.value).startswith(message)
    assert scene.kube.requests == []


async def test_a_cluster_without_snapshots_needs_running_pods(scene: BackupScene) -> None:
    scene.kube.unserved.add(VOLUME_SNAPSHOT_CLASSES)
    assert await _plan(scene, _choose(_FILES)) == [("files", Method.FS_BACKUP)]
    message = await _fail(scene, _choose(_DATA))
    assert message.startswith("PVC app/data: no CSI snapshot: the cluster has no snapshot API; no backup of files: ")


@pytest.mark.parametrize("path", ["/volumesnapshotclasses", "/storageclasses"])
async def test_classes_that_may_not_be_read_are_named(path: str, scene: BackupScene) -> None:
    scene.kube.fail_next("GET", path, 403, message="the user cannot do that")
    assert "the user cannot do that; no backup of files: " in await _fail(scene, _choose(_LOOSE))


@pytest.mark.parametrize("path", ["/pods", "/persistentvolumeclaims", "/backupstoragelocations", "/datauploads"])
async def test_what_may_not_be_read_is_an_error(path: str, scene: BackupScene) -> None:
    scene.kube.fail_next("GET", path, 403, times=9, message="the user cannot do that")
    with pytest.raises(ForbiddenError, match="the user cannot do that"):
        await _plan(scene, _choose(_FILES))


@pytest.mark.parametrize(
    ("claims", "location", "difference"),
    [
        ([_DATA], "", "the volume app/files"),
        ([_DATA, _FILES, _LOOSE], "", "2 volumes instead of 3"),
        ([_DATA, _FILES], "other", "the location default"),
    ],
    ids=["fewer", "more", "location"],
)
async def test_another_backup_is_untouched(
    claims: list[ClaimName], location: str, difference: str, scene: BackupScene
) -> None:
    scene.put_location("other")
    await start_backup(scene.tools, await plan_backup(scene.tools, scene.request(), _choose(_DATA, _FILES)))
    with pytest.raises(BackupError) as e:
        await plan_backup(scene.tools, scene.request(location=location), _choose(*claims))
    assert str(e.value) == f"backup night exists already, and has {difference}: choose another name"


async def _plan_three(scene: BackupScene) -> list[PlannedVolume]:
    scene.put_claim("data-2", "fast")
    return await plan_backup(scene.tools, scene.request(), _choose(_DATA, ClaimName("app", "data-2"), _FILES))


async def _planned() -> tuple[BackupScene, list[PlannedVolume]]:
    scene = BackupScene()
    return scene, await _plan_three(scene)


async def test_all_snapshots_are_taken_before_the_first_transfer_and_nothing_by_the_check() -> None:
    scene, volumes = await _planned()
    await check_backup(scene.tools, volumes)
    assert scene.made == []
    scene.kube.requests.clear()
    await start_backup(scene.tools, volumes)
    created = [request.path.split("/")[-1] for request in scene.kube.requests if request.method == "POST"]
    assert created == ["volumesnapshots"] * 2 + ["datauploads"] * 2 + ["podvolumebackups"]
    assert len(scene.made) == 5


@pytest.mark.parametrize(
    ("path", "missing", "made"),
    [("/volumesnapshots", "app/data", 3), ("/datauploads", "app/data", 3), ("/podvolumebackups", "app/files", 4)],
)
async def test_a_rejection_names_the_volume_leaves_no_snapshot_and_starts_others(
    path: str, missing: str, made: int
) -> None:
    scene, volumes = await _planned()
    scene.kube.fail_next("POST", path, 403, message="exceeded quota")
    (reason,) = await start_backup(scene.tools, volumes)
    assert reason.startswith(f"PVC {missing} is missing in the backup: ")
    assert "exceeded quota" in reason
    assert len(scene.made) == made
    # What is missing is created by the same command.
    assert await start_backup(scene.tools, await _plan_three(scene)) == []
    assert len(scene.made) == 5


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
        assert named.startswith("not all volumes were started, repeat the command: PVC app/")
        # It is not asked for the other volumes.
        assert len([one for one in scene.kube.requests if one.method == "POST"]) == number + 1
    bare = scene.objects(VOLUME_SNAPSHOTS).keys() - scene.objects(DATA_UPLOADS).keys()
    assert [name for name in bare if name not in "".join([named, *scene.notes])] == []
    assert len(scene.notes) == len(bare) + (fault == "lost" and number < 2)


@pytest.mark.parametrize(("method", "path"), [("DELETE", "/volumesnapshots"), ("GET", "/datauploads")])
async def test_a_snapshot_that_is_not_deleted_is_noted_with_the_command(method: str, path: str) -> None:
    """It cannot be, or it is not known whether there is a transfer."""
    scene, volumes = await _planned()
    for one in (("POST", "/datauploads"), (method, path)):
        scene.kube.fail_next(*one, 504)
    assert len(await start_backup(scene.tools, volumes)) == 1
    assert f"VolumeSnapshot/{volumes[0].name}" in scene.made
    assert f"was not deleted (kubectl -n app delete volumesnapshot {volumes[0].name})" in scene.notes[0]


async def test_the_snapshot_of_another_run_which_may_go_on_stays() -> None:
    """Of two users who create one backup at once, one may not be permitted to create its transfers."""
    scene, volumes = await _planned()
    snapshot = volumes[0].build_snapshot()
    assert snapshot is not None
    await scene.client.create(VOLUME_SNAPSHOTS, snapshot)
    scene.kube.fail_next("POST", "/datauploads", 403)
    assert len(await start_backup(scene.tools, volumes)) == 1
    assert f"VolumeSnapshot/{volumes[0].name}" in scene.made
    assert scene.notes[0].endswith("another run of the command made it")
    await start_backup(scene.tools, volumes)
    assert len(scene.made) == 5


@pytest.mark.parametrize(("phase", "left"), [("New", True), ("Prepared", False), ("Failed", False)])
async def test_a_snapshot_that_another_run_s_transfer_no_longer_needs_is_deleted(phase: str, left: bool) -> None:
    """Two runs are planned at once; the snapshot of the first one is handed over before the second one makes its."""
    scene, volumes = await _planned()
    await start_backup(scene.tools, volumes)
    await scene.client.delete(VOLUME_SNAPSHOTS, "app", volumes[0].name)
    scene.move("data", phase)
    assert await start_backup(scene.tools, volumes) == []
    assert (f"VolumeSnapshot/{volumes[0].name}" in scene.made, len(scene.made)) == (left, 4 + left)


@pytest.mark.parametrize("in_pod", [True, False])
@pytest.mark.parametrize("checked", [True, False])
async def test_the_snapshot_of_an_earlier_pod_goes_with_the_rejection_of_its_transfer(
    *, checked: bool, in_pod: bool
) -> None:
    """That pod was killed in between; of a command of a person, it is named."""
    scene, volumes = await _planned()
    snapshot = volumes[0].build_snapshot()
    assert snapshot is not None
    await scene.client.create(VOLUME_SNAPSHOTS, snapshot)
    scene.kube.fail_next("POST", "/datauploads", 403)
    tools = replace(scene.tools, in_pod=in_pod)
    if checked:
        with pytest.raises(BackupError, match="PVC app/data cannot be backed up"):
            await check_backup(tools, volumes[:1])
    else:
        assert len(await start_backup(tools, volumes[:1])) == 1
    assert scene.made == ([] if in_pod else [f"VolumeSnapshot/{volumes[0].name}"])
    assert [f"delete volumesnapshot {volumes[0].name})" in one for one in scene.notes] == ([] if in_pod else [True])


@pytest.mark.parametrize(
    ("resource", "change", "error"),
    [
        (VOLUME_SNAPSHOTS, {"labels": {}}, "exists already, and is of another backup"),
        (DATA_UPLOADS, {"labels": {}}, "exists already, and is of another backup"),
        (VOLUME_SNAPSHOTS, {"deletionTimestamp": "2026-11-21T10:00:00Z"}, "is being deleted: repeat"),
    ],
    ids=["snapshot", "transfer", "deleted"],
)
async def test_an_object_of_another_origin_is_not_ours(resource: object, change: JsonDict, error: str) -> None:
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


async def test_an_interruption_lets_the_creation_finish() -> None:
    scene, volumes = await _planned()
    await interrupt(start_backup(scene.tools, volumes), asyncio.sleep(0))
    assert len(scene.made) == 5
