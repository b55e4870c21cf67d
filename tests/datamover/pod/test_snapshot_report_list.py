"""The snapshots in a location, with a real kopia and no BackupRepository: what is listed, and what is not."""

import asyncio
import hashlib
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
from msgspec.structs import replace

from core.contract import parse_result
from core.kube.resources import BACKUP_REPOSITORIES
from core.models.backups import SavedClaim
from core.models.job_output import read_output
from core.mover_specs import ListSnapshots
from core.redact import Redactor
from core.snapshot_contract import STORED_LINE, SnapshotListing, StoredSnapshot
from datamover.kopia.process import KopiaAnswer
from datamover.pod.snapshot_report import build_unread
from datamover.pod.storage_commands import run_storage_command
from datamover.storage.providers import FileStorage
from tests.datamover.support.checkpoints import leave_device_checkpoint
from tests.datamover.support.location_bed import LocationBed
from tests.datamover.support.pods import MoverPod
from tests.datamover.support.s3server import S3Server
from tests.support.fakekube import FakeKube

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180), pytest.mark.sample("directory")]

_UPLOAD: Final = "snapshot-data-upload-download/kopia"
_POD_VOLUME: Final = "snapshot-pod-volume/kopia"
_CLAIM: Final = SavedClaim(
    namespace="app", name="data", size="2Gi", storage_class="fast", access_modes=("ReadWriteOnce",), labels={"a": "b,c"}
)
_UID: Final = "6bc33b7d-f98e-42f3-b79d-e2c5b7f42847"


class Bed(LocationBed):
    """A location whose snapshots are listed."""

    async def list(self, *namespaces: str) -> int:
        spec = ListSnapshots(backup_storage_location="default", volume_namespaces=namespaces)
        return await run_storage_command(spec, self.pod.context)

    async def listing(self, *namespaces: str) -> SnapshotListing:
        assert await self.list(*namespaces) == 0, self.pod.message
        return parse_result(SnapshotListing, self.pod.message)

    def contents(self) -> dict[str, str]:
        files = [path for path in self.root.rglob("*") if path.is_file()]
        return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _listed(capsys: pytest.CaptureFixture[str]) -> dict[str, StoredSnapshot]:
    return {line.id: line for line in STORED_LINE.find(capsys.readouterr().out)}


@pytest.fixture(params=[pytest.param("", id="directory"), pytest.param("listed", id="bucket")])
def bed(request: pytest.FixtureRequest, kopia_program: Path, s3: S3Server, tmp_path: Path) -> Bed:
    return Bed.make(request.param, s3, kopia_program, tmp_path)


async def test_a_directory_that_does_not_answer_keeps_no_mover_from_a_signal(
    kopia_program: Path, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, answered = asyncio.get_running_loop(), threading.Event()

    def list_folders(_: FileStorage) -> list[str]:
        loop.call_soon_threadsafe(answered.set)
        assert answered.wait(10), "the event loop waits for the directory"
        return []

    monkeypatch.setattr(FileStorage, "list_folders", list_folders)
    assert await Bed.make("", s3, kopia_program, tmp_path).listing() == SnapshotListing()


@pytest.mark.sample("*")
async def test_ours_and_velero_s_are_listed(bed: Bed, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert await bed.listing() == SnapshotListing()
    assert (_listed(capsys), bed.contents()) == ({}, {})
    tags = {"snapshot-requester": "snapshot-data-upload-download", "snapshot-uploader": "kopia"}
    mine = {
        "nodeagent.io/cluster": "uid-1",
        "nodeagent.io/backup": "night-1",
        "nodeagent.io/backup-volumes": "3",
        "nodeagent.io/claim": _CLAIM.text,
    }
    own = bed.add_snapshot("app", f"{_UPLOAD}/app/data", tags | mine)
    velero = bed.add_snapshot("app", f"{_UPLOAD}/app/web", tags | {"velero.io/async-operation-id": f"du-{_UID}.6601d2"})
    # A claim of another namespace than the repository's counts as none.
    foreign = {"nodeagent.io/claim": replace(_CLAIM, namespace="other").text}
    by_source = bed.add_snapshot("app", f"{_UPLOAD}/app/by-source", foreign)
    by_nothing = bed.add_snapshot("app", f"{_UPLOAD}/other/data", foreign)
    # It has the tags of its backup: a restore would take it for the volume.
    leave_device_checkpoint(bed.kopia, tmp_path, "uid-1")
    pod_volume = tags | {"snapshot-requester": "snapshot-pod-volume"}
    files = bed.add_snapshot("db", f"{_POD_VOLUME}/db/writer/fsdata", pod_volume)
    blocks = bed.add_snapshot("db", "snapshot-data-upload-download/velero-block/db/disk", {})
    odd = bed.add_snapshot("db", "/home/me", {})
    before = bed.contents()
    listing = await bed.listing()
    listed = _listed(capsys)
    assert listing == SnapshotListing()
    assert listed.keys() == {own, velero, by_source, by_nothing, files, blocks, odd}
    one = listed[own]
    assert (one.claim, one.described, one.backup, one.cluster) == (_CLAIM, True, "night-1", "uid-1")
    assert (one.bytes, one.volume_namespace, one.backup_volumes) == (5, "app", 3)
    assert (listed[velero].backup_volumes, listed[velero].backup_uid) == (None, _UID)
    claims = {name: (listed[name].claim, listed[name].described) for name in (velero, by_source, by_nothing)}
    assert claims == {
        velero: (SavedClaim(namespace="app", name="web"), False),
        by_source: (SavedClaim(namespace="app", name="by-source"), False),
        by_nothing: (None, False),
    }
    assert listed[files].claim == SavedClaim(namespace="db", name="fsdata")
    assert listed[blocks].claim == SavedClaim(namespace="db", name="disk", volume_mode="Block")
    assert (listed[odd].claim, listed[odd].source) == (None, "default@default:/home/me")
    # Nothing was created, here or there.
    assert bed.contents() == before
    assert bed.pod.stored(BACKUP_REPOSITORIES) == []
    assert await bed.listing("app", "missing") == SnapshotListing()
    assert len(read_output(STORED_LINE, bed.pod.message, capsys.readouterr().out)) == 4
    assert not (bed.root / "kopia" / "missing").exists()


@pytest.mark.sample("*directory*")
@pytest.mark.parametrize("damage", [Path.unlink, lambda file: file.write_bytes(b"not a repository")], ids=["lost", "x"])
async def test_a_repository_that_cannot_be_opened_is_named_and_the_others_are_listed(
    bed: Bed, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], object]
) -> None:
    good = bed.add_snapshot("app", f"{_UPLOAD}/app/data", {})
    bed.add_snapshot("db", f"{_UPLOAD}/db/data", {})
    (damaged,) = bed.root.glob("kopia/db/kopia.repository*")
    damage(damaged)
    listing = await bed.listing()
    assert listing.unread_count == 1
    assert listing.unread[0].volume_namespace == "db"
    assert listing.unread[0].message
    assert _listed(capsys).keys() == {good}
    bed.pod.put_secret("velero-repo-credentials", "repository-password", "another")
    assert await bed.list("app") == 12
    assert re.search(r"none of 1 repositories can be listed.*password", bed.pod.message)
    assert "another" not in bed.pod.message


def test_a_cause_that_is_not_known_is_named_by_the_last_words_of_kopia() -> None:
    words = "A conflicting conditional operation is in progress."
    error = KopiaAnswer("list snapshots", 1, b"", ["ERROR flush", f"despite 10 retries: {words}"]).error()
    message = build_unread("app", error, Redactor()).message
    assert message == f"list snapshots: kopia exited with code 1: despite 10 retries: {words}"


async def test_a_name_that_leads_out_of_the_location_is_refused(bed: Bed) -> None:
    assert await bed.list("../../other") == 2
    assert 'not the name of a namespace: "../../other"' in bed.pod.message


async def test_a_storage_whose_folders_kopia_cannot_list_needs_a_namespace(tmp_path: Path) -> None:
    pod = MoverPod(FakeKube(), tmp_path)
    pod.put_location({}, provider="velero.io/gcp", credential={"name": "c", "key": "k"})
    pod.put_secret("c", "k", '{"type": "service_account"}')
    assert await run_storage_command(ListSnapshots(backup_storage_location="default"), pod.context) == 12
    assert pod.message.endswith(
        "its folders cannot be listed in a storage of the provider velero.io/gcp: name a namespace (-n)"
    )
