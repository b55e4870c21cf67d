"""Full maintenance deletes the checkpoints of devices, a day after they were saved, if their transfers have ended."""

from datetime import timedelta
from pathlib import Path

import pytest

from core.kube.resources import DATA_UPLOADS
from datamover.pod import maintenance
from tests.datamover.support.checkpoints import leave_device_checkpoint
from tests.datamover.support.plainkopia import PlainKopia
from tests.datamover.support.pods import MoverPod

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


async def test_a_checkpoint_is_deleted_once_nothing_continues_from_it(
    pod: MoverPod, kopia_program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kopia = PlainKopia(kopia_program, tmp_path)
    kopia.connect(tmp_path / "backups" / "kopia" / "app")
    pod.put_job()
    pod.put_transfer("DataUpload")
    (transfer,) = pod.stored(DATA_UPLOADS)
    uids = (transfer["metadata"]["uid"], "uid-of-a-deleted-one")
    for uid in uids:
        leave_device_checkpoint(kopia, tmp_path, uid)
    (data := tmp_path / "data").mkdir()
    kopia.run("snapshot", "create", str(data))
    ids = {str(one.get("tags", {}).get("tag:nodeagent.io/transfer-uid", "")): one["id"] for one in kopia.snapshots()}
    own, deleted, complete = (ids[uid] for uid in (*uids, ""))

    async def maintain() -> set[str]:
        kopia.run("maintenance", "set", "--pause-full=0s")
        assert await pod.maintain(ignore_foreign=True) == 0, pod.message
        assert pod.result["mode"] == "full"
        return {one["id"] for one in kopia.snapshots()}

    assert await maintain() == {own, deleted, complete}
    monkeypatch.setattr(maintenance, "_CHECKPOINT_AGE", timedelta(0))
    assert await maintain() == {own, complete}
    pod.put_transfer("DataUpload", phase="Failed")
    assert await maintain() == {complete}
