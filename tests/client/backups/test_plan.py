"""The plan of a backup: every volume is checked, and nothing is created."""

from typing import Any

import pytest

from client.backups.manifests import BackupError, DataMover, Method
from client.backups.plan import Choice, ClaimName, plan_backup, start_backup
from core.errors import AgentError, ConfigError
from core.kube.errors import ForbiddenError
from core.kube.resources import BACKUP_STORAGE_LOCATIONS, VOLUME_SNAPSHOT_CLASSES
from tests.client.support.backup_scene import BackupScene

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


async def test_each_volume_has_its_method_in_the_order_of_names() -> None:
    planned = await _plan(BackupScene(), _choose(_FILES, _DATA, _FILES))
    assert planned == [("data", Method.CSI_SNAPSHOT), ("files", Method.FS_BACKUP)]


async def test_by_block_a_volume_needs_a_snapshot(scene: BackupScene) -> None:
    planned = await plan_backup(scene.tools, scene.request(), _choose(_DATA, data_mover=DataMover.BLOCK))
    assert [volume.data_mover for volume in planned] == [DataMover.BLOCK]
    cause = await _fail(BackupScene(), _choose(_FILES, data_mover=DataMover.BLOCK))
    assert cause.startswith("PVC app/files: no CSI snapshot: ")
    assert "no backup of files" not in cause
    with pytest.raises(ConfigError, match="--data-mover block needs a CSI snapshot"):
        Choice.parse(["app/data"], "", None, method="fs-backup", data_mover="block", ignore_velero_server=False)


async def test_a_selector_chooses_the_claims_of_a_namespace(scene: BackupScene) -> None:
    assert await _plan(scene, Choice(namespace="app", selector="tier=web")) == [("files", Method.FS_BACKUP)]
    assert "there is no PVC in namespace app with the labels" in await _fail(
        scene, Choice(namespace="app", selector="tier=db")
    )
    assert await _fail(scene, Choice(namespace="empty")) == "there is no PVC in namespace empty at all"


async def test_one_volume_that_cannot_be_backed_up_ends_the_whole_plan() -> None:
    assert await _fail(BackupScene(), _choose(_DATA, _LOOSE)) == (
        "PVC app/loose: no CSI snapshot: no VolumeSnapshotClass has its driver none.example.com; "
        "no backup of files: no Running pod mounts it"
    )


async def test_a_wrong_name_says_which_may_be_meant(scene: BackupScene) -> None:
    wrong = _choose(ClaimName("app", "dat"))
    assert await _fail(scene, wrong) == "PVC app/dat does not exist (did you mean data?)"
    assert await _fail(scene, _choose(_DATA), location="defalt") == (
        "BackupStorageLocation velero/defalt does not exist (did you mean default?)"
    )
    scene.kube.fail_next("GET", "/persistentvolumeclaims", 404)
    scene.kube.fail_next("GET", "/persistentvolumeclaims", 403)
    assert await _fail(scene, wrong) == "PVC app/dat does not exist"


@pytest.mark.parametrize(
    ("locations", "asked", "used"),
    [
        pytest.param({"default": {}, "b": {"default": True}}, "", "b", id="marked"),
        pytest.param({"default": {}, "b": {}}, "", "default", id="named default"),
        pytest.param({"b": {}}, "", "b", id="the only one"),
        pytest.param({"default": {}, "b": {}}, "b", "b", id="asked for"),
    ],
)
async def test_the_location_is_the_default_one(
    locations: dict[str, Any], asked: str, used: str, scene: BackupScene
) -> None:
    await scene.client.delete(BACKUP_STORAGE_LOCATIONS, "velero", "default")
    for name, spec in locations.items():
        scene.put_location(name, **spec)
    (volume,) = await plan_backup(scene.tools, scene.request(location=asked), _choose(_DATA))
    assert volume.request.location == used


async def test_a_location_must_be_chosen_where_there_is_no_default_one(scene: BackupScene) -> None:
    await scene.client.delete(BACKUP_STORAGE_LOCATIONS, "velero", "default")
    expected = "no default BackupStorageLocation in namespace velero: --storage-location: "
    assert await _fail(scene, _choose(_DATA)) == f"{expected}none"
    for name in ("b", "a"):
        scene.put_location(name)
    assert await _fail(scene, _choose(_DATA)) == f"{expected}a, b"


async def test_a_location_that_cannot_be_written_to_is_refused_and_one_that_is_away_is_noted(
    scene: BackupScene,
) -> None:
    scene.put_location("default", accessMode="ReadOnly")
    assert "BackupStorageLocation velero/default is read-only" in await _fail(scene, _choose(_DATA))
    scene.put_location("default", status={"phase": "Unavailable", "message": "403"})
    await _plan(scene, _choose(_DATA))
    assert scene.notes == ["BackupStorageLocation velero/default is Unavailable: 403: data movers wait for it"]


async def test_a_velero_server_is_to_be_asked_instead(scene: BackupScene) -> None:
    scene.put("Deployment", "velero", "apps/v1", spec={})
    message = await _fail(scene, _choose(_DATA))
    assert message.startswith("a Velero server is in namespace velero: ask it (velero backup create)")
    assert await _plan(scene, _choose(_DATA, ignore_velero_server=True))


async def test_without_the_permission_it_cannot_be_known_that_there_is_no_server(scene: BackupScene) -> None:
    scene.kube.fail_next("GET", "/deployments", 403, message="deployments is forbidden")
    message = await _fail(scene, _choose(_DATA))
    assert message.startswith("cannot find out whether a Velero server is in namespace velero: list Deployment velero")
    assert message.endswith("--ignore-velero-server creates the backup nevertheless")


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        pytest.param({"name": "Night"}, '"Night" is no name of a backup', id="name"),
        pytest.param({"name": "n" * 254}, f'"{"n" * 254}" is no name of a backup: up to 253 ', id="long name"),
        pytest.param({"labels": {"velero.io/x": "y"}}, "--labels: velero.io/x is reserved", id="Velero's label"),
        pytest.param({"annotations": {"nodeagent.io/claim": "y"}}, "--annotations: nodeagent.io/claim is", id="ours"),
    ],
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


@pytest.mark.parametrize(
    ("path", "claim", "error"),
    [
        pytest.param("/volumesnapshotclasses", _LOOSE, BackupError, id="snapshot classes"),
        pytest.param("/storageclasses", _LOOSE, BackupError, id="storage classes"),
        pytest.param("/pods", _FILES, ForbiddenError, id="pods"),
        pytest.param("/persistentvolumeclaims", _DATA, ForbiddenError, id="claims"),
        pytest.param("/backupstoragelocations", _DATA, ForbiddenError, id="locations"),
        pytest.param("/datauploads", _DATA, ForbiddenError, id="transfers"),
    ],
)
async def test_a_missing_permission_is_named(
    path: str, claim: ClaimName, error: type[AgentError], scene: BackupScene
) -> None:
    scene.kube.fail_next("GET", path, 403, times=9, message="the user cannot do that")
    with pytest.raises(error, match="the user cannot do that"):
        await plan_backup(scene.tools, scene.request(), _choose(claim))


@pytest.mark.parametrize(
    ("claims", "location", "difference"),
    [
        pytest.param([_DATA], "", "the volume app/files", id="fewer volumes"),
        pytest.param([_DATA, _FILES, _LOOSE], "", "2 volumes instead of 3", id="more volumes"),
        pytest.param([_DATA, _FILES], "other", "the location default", id="location"),
    ],
)
async def test_another_backup_of_the_name_is_not_touched(
    claims: list[ClaimName], location: str, difference: str, scene: BackupScene
) -> None:
    scene.put_location("other")
    await start_backup(scene.tools, await plan_backup(scene.tools, scene.request(), _choose(_DATA, _FILES)))
    with pytest.raises(BackupError) as e:
        await plan_backup(scene.tools, scene.request(location=location), _choose(*claims))
    assert str(e.value) == f"backup night exists already, and has {difference}: choose another name"
