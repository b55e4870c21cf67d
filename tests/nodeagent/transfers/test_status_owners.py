"""Whether the owner of a transfer still waits for it."""

import pytest

from core.kube.client import KubeClient
from core.kube.errors import KubeError
from core.kube.resources import BACKUPS
from core.kube.transport import Retry
from core.models.base import JsonDict
from core.models.transfers import DataUpload, PodVolumeBackup, Transfer
from nodeagent.transfers.status import read_owner_refusal
from tests.nodeagent.support.transfers import NAMESPACE, data_upload, pod_volume_backup
from tests.support.clock import LoopClock
from tests.support.fakekube import FakeKube

pytestmark = pytest.mark.looptime

OWNER = {"apiVersion": "velero.io/v1", "kind": "Backup", "name": "nightly", "uid": "uid-of-nightly"}


def kube_with(phase: str | None) -> FakeKube:
    """Return an API server with the Backup `nightly` in that phase; None: without it."""
    kube = FakeKube()
    if phase is not None:
        meta = {"name": "nightly", "namespace": NAMESPACE, "uid": OWNER["uid"]}
        status = {"phase": phase} if phase else {}
        kube.put({"apiVersion": BACKUPS.api_version, "kind": "Backup", "metadata": meta, "status": status})
    return kube


async def refusal(kube: FakeKube, *owners: JsonDict) -> str | None:
    cr = PodVolumeBackup.parse(pod_volume_backup(ownerReferences=list(owners)))
    return await read_owner_refusal(KubeClient(kube, Retry(LoopClock())), cr)


@pytest.mark.parametrize("phase", ["", "New", "InProgress", "WaitingForPluginOperations", "Finalizing"])
async def test_a_backup_that_is_not_final_waits(phase: str) -> None:
    assert await refusal(kube_with(phase), OWNER) is None


@pytest.mark.parametrize("phase", ["Completed", "PartiallyFailed", "Failed", "FailedValidation", "Deleting"])
async def test_a_backup_that_is_final_does_not_wait(phase: str) -> None:
    assert await refusal(kube_with(phase), OWNER) == f"Backup velero/nightly is {phase}"


@pytest.mark.parametrize(
    ("phase", "uid"), [(None, OWNER["uid"]), ("InProgress", "another")], ids=["deleted", "created again"]
)
async def test_a_backup_that_is_gone_does_not_wait(phase: str | None, uid: str) -> None:
    assert await refusal(kube_with(phase), OWNER | {"uid": uid}) == "Backup velero/nightly no longer exists"


@pytest.mark.parametrize(
    "owners",
    [[], [OWNER | {"kind": "Schedule"}], [OWNER | {"apiVersion": "example.com/v1"}]],
    ids=["none", "another kind", "another group"],
)
async def test_without_an_owning_backup_nothing_is_read(owners: list[JsonDict]) -> None:
    kube = kube_with(None)
    assert await refusal(kube, *owners) is None
    assert kube.requests == []


async def test_other_kinds_do_not_depend_on_their_owner() -> None:
    kube = kube_with(None)
    cr: Transfer = DataUpload.parse(data_upload(ownerReferences=[OWNER]))
    assert await read_owner_refusal(KubeClient(kube, Retry(LoopClock())), cr) is None
    assert kube.requests == []


async def test_without_the_permission_the_owner_does_not_matter(caplog: pytest.LogCaptureFixture) -> None:
    kube = kube_with("Failed")
    kube.fail_next("GET", "/backups/nightly", 403)
    assert await refusal(kube, OWNER) is None
    assert "whatever has become of its Backup" in caplog.text


async def test_an_api_server_that_fails_gives_no_answer() -> None:
    kube = kube_with("Failed")
    kube.fail_next("GET", "/backups/nightly", 500, times=10)
    with pytest.raises(KubeError):
        await refusal(kube, OWNER)
