"""What cannot be read: a transfer of a backup holds that backup, a restore holds everything."""

from typing import Any

import pytest

from client.backups.delete import DeletionWish, plan_deletion
from client.backups.retention import DeletionError
from core.errors import ContractError
from tests.client.support.deletion_scene import DeletionScene


@pytest.fixture
def scene() -> DeletionScene:
    """Four backups of a volume, of which three are expired."""
    scene = DeletionScene()
    for name, days in (("first", 9.0), ("second", 7.0), ("third", 5.0), ("last", 0.5)):
        scene.put_backup(name, days)
    return scene


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"status": {"phase": "Odd"}}, "DataUpload second-data cannot be read: invalid DataUpload velero/second-data"),
        ({"spec": {"sourceNamespace": "app/x"}}, "DataUpload second-data names no namespace of its volume: app/x"),
        ({"spec": {"backupStorageLocation": ""}}, "DataUpload second-data names no BackupStorageLocation"),
    ],
    ids=["phase", "namespace", "location"],
)
async def test_an_odd_transfer_holds_its_backup_alone(scene: DeletionScene, change: dict[str, Any], why: str) -> None:
    scene.change("second-data", **change)
    plan = await scene.check()
    ((kept, text),) = [(one.backup, one.holds[0].text) for one in plan.kept]
    assert (kept, text[: len(why)]) == ("second", why)
    with pytest.raises(DeletionError, match=f"backup second cannot be deleted: {why}"):
        await plan_deletion(scene.tools, DeletionWish("second"))
    await scene.execute(plan)
    assert scene.names() == {"second-data", "last-data"}
    assert scene.kube.bucket.keys() == {"s-second-data", "s-last-data"}


async def test_an_odd_newest_transfer_is_no_copy_of_the_volume(scene: DeletionScene) -> None:
    scene.change("last-data", status={"phase": "Odd"})
    plan = await plan_deletion(scene.tools)
    assert [one.backup for one in plan.deleted] == ["first", "second"]
    assert [one.holds[0].text for one in plan.kept] == ["it has the newest copy of app/data in default"]


async def test_a_restore_that_cannot_be_read_holds_everything(scene: DeletionScene) -> None:
    scene.put("DataDownload", "back", "velero.io/v2alpha1", spec={}, status={"phase": "Odd"})
    with pytest.raises(ContractError, match="invalid DataDownload velero/back"):
        await plan_deletion(scene.tools)
