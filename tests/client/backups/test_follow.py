"""Waiting for a backup, finding and canceling it."""

from functools import partial

import pytest

from client.backups.create import start_backup
from client.backups.follow import (
    cancel_backup,
    find_backups,
    find_own_backup,
    wait_for_backup,
)
from client.backups.methods import BackupError
from client.backups.moving import explain_end
from client.backups.plan import Choice, ClaimName, plan_backup
from core.kube.errors import NotFoundError
from core.kube.resources import DATA_UPLOADS, POD_VOLUME_BACKUPS
from core.models.names import VELERO_BACKUP_LABEL
from tests.client.support.backup_scene import BackupScene


async def _started(name: str = "night") -> BackupScene:
    scene = BackupScene()
    claims = (ClaimName("app", "data"), ClaimName("app", "files"))
    await start_backup(scene.tools, await plan_backup(scene.tools, scene.request(name), Choice(claims=claims)))
    return scene


async def test_a_wait_shows_each_reading_and_ends_with_the_last_transfer() -> None:
    scene, shown = await _started(), list[list[str]]()
    scene.clock.steps = [
        partial(scene.move, "data", "InProgress"),
        partial(scene.move, "data", "Completed"),
        partial(scene.move, "files", "Failed", message="disk\nfull"),
    ]
    backup = await wait_for_backup(
        scene.tools, "velero", "night", lambda rows: shown.append([str(row.volume.phase) for row in rows])
    )
    assert shown == [["New", "New"], ["InProgress", "New"], ["Completed", "New"], ["Completed", "Failed"]]
    assert explain_end(backup) == "PVC app/files is Failed: disk\nfull"


async def test_there_is_nothing_to_wait_for_without_transfers() -> None:
    with pytest.raises(NotFoundError, match=r"^backup night has no transfer in namespace velero any more"):
        await wait_for_backup(BackupScene().tools, "velero", "night", lambda _: None)


async def test_a_failure_counts_the_other_volumes_and_names_what_is_missing() -> None:
    scene = await _started()
    scene.move("data", "Failed")
    scene.move("files", "Canceled")
    backup = await find_own_backup(scene.client, "velero", "night")
    assert explain_end(backup) == "PVC app/data is Failed: no message, and 1 more"
    scene.move("data", "Completed")
    (files,) = scene.objects(POD_VOLUME_BACKUPS)
    await scene.client.delete(POD_VOLUME_BACKUPS, "velero", files)
    backup = await find_own_backup(scene.client, "velero", "night")
    assert explain_end(backup) == "1 of 2 volumes have no transfer: it was deleted"


async def test_a_cancel_reaches_the_transfers_that_have_not_ended() -> None:
    scene = await _started()
    scene.move("data", "Completed")
    canceled = await cancel_backup(scene.client, "velero", "night")
    assert [one.claim for one in canceled] == ["files"]
    specs = [one["spec"] for kind in (DATA_UPLOADS, POD_VOLUME_BACKUPS) for one in scene.kube.objects(kind)]
    assert [spec.get("cancel") for spec in specs] == [None, True]
    assert [one.claim for one in await cancel_backup(scene.client, "velero", "night")] == ["files"]


async def test_a_transfer_that_is_deleted_meanwhile_is_left_out() -> None:
    scene = await _started()
    scene.kube.fail_next("PATCH", "/datauploads/", 404)
    assert [one.claim for one in await cancel_backup(scene.client, "velero", "night")] == ["files"]


async def test_a_wrong_name_says_which_may_be_meant() -> None:
    scene = await _started()
    expected = r"^there is no backup nigth in namespace velero \(did you mean night\?\)$"
    for step in (find_own_backup, cancel_backup):
        with pytest.raises(NotFoundError, match=expected):
            await step(scene.client, "velero", "nigth")
    with pytest.raises(NotFoundError, match=expected):
        await find_backups(scene.client, "velero", ("night", "nigth"))


async def test_a_backup_of_velero_is_shown_and_not_canceled() -> None:
    scene = await _started()
    (raw,) = scene.kube.objects(DATA_UPLOADS)
    labels = {VELERO_BACKUP_LABEL: "nightly"}
    meta = {"name": "v", "namespace": "velero", "labels": labels}
    scene.kube.put(raw | {"metadata": meta})
    assert [one.name for one in (await find_backups(scene.client, "velero", ("nightly",))).backups] == ["nightly"]
    with pytest.raises(BackupError, match=r"^backup nightly is Velero's: use the command velero backup for it$"):
        await cancel_backup(scene.client, "velero", "nightly")
