"""The deletion of snapshots with a real kopia: only those whose tags are of the cluster's backup, and nothing else."""

import json
import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import pytest

from core.clock import SystemClock
from core.contract import parse_result
from core.kube.resources import BACKUP_STORAGE_LOCATIONS
from core.mover_specs import DeleteSnapshots
from core.snapshot_contract import (
    CHECKED_LINE,
    DELETED_LINE,
    CopyToCheck,
    DeletedSnapshot,
    SnapshotDeletion,
    TransferToDelete,
)
from datamover.pod import snapshot_deletion
from datamover.pod.snapshot_report import read_named_snapshots
from datamover.pod.storage_commands import run_storage_command
from tests.datamover.support.location_bed import LocationBed
from tests.datamover.support.plainkopia import IDENTITY
from tests.datamover.support.s3proxy import Answer, run_s3_proxy
from tests.datamover.support.s3server import S3Server
from tests.support.objects import JsonDict

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180), pytest.mark.sample("directory")]

_PATH: Final = "snapshot-data-upload-download/kopia/app/data"
_TRANSFER: Final = TransferToDelete("app", "night", "uid-of-night")


class Bed(LocationBed):
    """A location from which snapshots are deleted."""

    def snapshot(self, namespace: str = "app", **tags: str) -> str:
        """Create a snapshot with the tags of the transfer, but for those given, an empty one: none; return its ID."""
        own = {"cluster": "uid-1", "backup": "night", "transfer_uid": "uid-of-night"} | tags
        named = {f"nodeagent.io/{key.replace('_', '-')}": value for key, value in own.items() if value}
        return self.add_snapshot(namespace, _PATH, named)

    def left(self, namespace: str = "app") -> set[str]:
        # Anew: kopia remembers for a while what it has listed.
        self.kopia.run("repository", "connect", *self.storage(namespace), *IDENTITY)
        self.connected = namespace
        return {one["id"] for one in json.loads(self.kopia.run("snapshot", "list", "--all", "--json"))}

    def lose_root(self, snapshot_id: str) -> None:
        """Delete the blob that has the root directory of a snapshot, but none with a manifest."""
        (root,) = [one["rootEntry"]["obj"] for one in self.kopia.snapshots() if one["id"] == snapshot_id]
        first = pack = self._pack(root)
        while pack == first:
            # If contents were written in the same second, kopia takes any.
            self.kopia.run("content", "rewrite", "--dangerous-commands=enabled", "--safety=none", root)
            pack = self._pack(root)
        (blob,) = [one for one in self.root.rglob("*") if one.is_file() and pack in str(one).replace("/", "")]
        blob.unlink()

    def _pack(self, content: str) -> str:
        listed = json.loads(self.kopia.run("content", "list", "--json"))
        return next(str(one["packFile"]) for one in listed if one["contentID"] == content)

    async def delete(
        self, *transfers: TransferToDelete, dry_run: bool = False, checks: tuple[CopyToCheck, ...] = ()
    ) -> int:
        spec = DeleteSnapshots(
            backup_storage_location="default",
            transfer=tuple(map(str, transfers or (_TRANSFER,))),
            check=tuple(map(str, checks)),
            cluster="uid-1",
            dry_run=dry_run,
        )
        return await run_storage_command(spec, self.pod.context)

    async def deletion(self, *transfers: TransferToDelete, **more: Any) -> SnapshotDeletion:
        assert await self.delete(*transfers, **more) == 0, self.pod.message
        return parse_result(SnapshotDeletion, self.pod.message)

    async def check(self, *copies: tuple[str, str]) -> SnapshotDeletion:
        return await self.deletion(dry_run=True, checks=tuple(CopyToCheck(*one) for one in copies))

    def put_download(self, snapshot_id: str, phase: str) -> JsonDict:
        spec: JsonDict = {"snapshotID": snapshot_id, "sourceNamespace": "app", "backupStorageLocation": "default"}
        spec |= {"targetVolume": {"pvc": "new", "namespace": "app"}}
        meta = {"name": "back", "namespace": "velero"}
        raw = {"apiVersion": "velero.io/v2alpha1", "kind": "DataDownload", "metadata": meta, "spec": spec}
        return self.pod.kube.put(raw | {"status": {"phase": phase}})


@pytest.fixture(params=[pytest.param("", id="directory"), pytest.param("deleted", id="bucket")])
def bed(request: pytest.FixtureRequest, kopia_program: Path, s3: S3Server, tmp_path: Path) -> Bed:
    return Bed.make(request.param, s3, kopia_program, tmp_path)


def _written(capsys: pytest.CaptureFixture[str]) -> dict[str, DeletedSnapshot]:
    return {line.id: line for line in DELETED_LINE.find(capsys.readouterr().out)}


def _faults(capsys: pytest.CaptureFixture[str]) -> dict[tuple[str, str], str | None]:
    lines = CHECKED_LINE.find(capsys.readouterr().out)
    return {(line.volume_namespace, line.snapshot_id): line.fault for line in lines}


@pytest.mark.sample("bucket")
async def test_only_what_the_tags_say_is_its_own_is_deleted(bed: Bed, capsys: pytest.CaptureFixture[str]) -> None:
    own, attempt = bed.snapshot(), bed.snapshot(attempt="2")
    others = {
        bed.snapshot(cluster="uid-2"),
        bed.snapshot(cluster=""),
        bed.snapshot(backup="day"),
        bed.snapshot(backup=""),
        bed.snapshot(transfer_uid="uid-of-another"),
        bed.snapshot(transfer_uid=""),
    }
    await bed.deletion(dry_run=True)
    assert bed.left() == others | {own, attempt}
    assert _written(capsys).keys() == {own, attempt}
    done = await bed.deletion(_TRANSFER, TransferToDelete("empty", "night", "uid-of-night"))
    assert done.unread == []
    assert bed.left() == others
    line = _written(capsys)[own]
    assert (line.volume_namespace, line.backup, line.transfer_uid) == ("app", "night", "uid-of-night")
    assert (line.bytes, line.kept) == (5, None)
    # Once more finds nothing to do.
    await bed.deletion()
    assert _written(capsys) == {}


async def test_what_a_running_restore_names_is_kept(bed: Bed, capsys: pytest.CaptureFixture[str]) -> None:
    restored, other = bed.snapshot(), bed.snapshot()
    bed.put_download(restored, "InProgress")
    await bed.deletion()
    assert _written(capsys)[restored].kept == "DataDownload velero/back names it"
    assert other not in bed.left()
    bed.put_download(restored, "Completed")
    await bed.deletion()
    assert bed.left() == set()


@pytest.mark.sample("*")
async def test_a_location_with_files_of_velero_is_refused(bed: Bed) -> None:
    own = bed.snapshot()
    (bed.root / "backups" / "weekly").mkdir(parents=True)
    (bed.root / "backups" / "weekly" / "velero-backup.json").write_text("{}")
    for dry_run in (True, False):
        assert await bed.delete(dry_run=dry_run) == 12
        assert 'BackupStorageLocation default has Velero\'s folder "backups": nothing is deleted' in bed.pod.message
    assert bed.left() == {own}


async def test_a_location_that_changes_meanwhile_keeps_what_it_has(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    own = bed.snapshot()
    changes = iter(({"validationFrequency": "1m"}, {"accessMode": "ReadOnly"}))

    async def read_late(*arguments: Any) -> dict[str, str]:
        (location,) = [
            one for one in bed.pod.kube.objects(BACKUP_STORAGE_LOCATIONS) if one["metadata"]["name"] == "default"
        ]
        bed.pod.kube.put(location | {"spec": location["spec"] | next(changes)})
        return await read_named_snapshots(*arguments)

    monkeypatch.setattr(snapshot_deletion, "read_named_snapshots", read_late)
    for why in ("was changed meanwhile", "is read-only"):
        assert await bed.delete() == 12
        assert bed.pod.message.endswith(f"BackupStorageLocation default {why}")
    assert bed.left() == {own}


@pytest.mark.sample("*")
@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        (Path.unlink, "there is no repository, and the storage is not empty"),
        (lambda file: file.write_bytes(b"no format"), ""),
    ],
    ids=["lost", "x"],
)
async def test_a_repository_that_cannot_be_opened_is_named_and_the_others_are_done(
    bed: Bed, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], object], cause: str
) -> None:
    """A folder that has lost its format is not empty."""
    bed.snapshot("db")
    own = bed.snapshot()
    (broken,) = bed.root.glob("kopia/db/kopia.repository*")
    damage(broken)
    for dry_run in (True, False):
        done = await bed.deletion(_TRANSFER, TransferToDelete("db", "night", "uid-of-night"), dry_run=dry_run)
        assert ([one.volume_namespace for one in done.unread], done.unread_count) == (["db"], 1)
        assert cause in done.unread[0].message
        assert _written(capsys).keys() == {own}
    assert bed.left() == set()


async def test_a_page_in_place_of_a_list_is_not_an_empty_list(
    kopia_program: Path, s3: S3Server, tmp_path: Path
) -> None:
    bed = Bed.make("listless", s3, kopia_program, tmp_path)
    own = bed.snapshot()
    with run_s3_proxy(s3) as proxy:
        bed.pod.put_bucket(s3, "listless", url=proxy.url, objectStorage={"bucket": "listless", "prefix": "p"})
        proxy.denied, proxy.denial = "list-type=2", Answer(200, "<html><body>Please log in</body></html>")
        assert await bed.delete() == 12
    assert "the storage does not list kopia.repository, which it has" in bed.pod.message
    assert bed.left() == {own}


async def test_nothing_is_deleted_where_the_references_cannot_be_read(bed: Bed) -> None:
    own = bed.snapshot()
    raw = bed.put_download("x", "New")
    bed.pod.kube.put(raw | {"spec": raw["spec"] | {"snapshotID": ["x"]}})
    assert await bed.delete() != 0
    assert "DataDownload back is malformed" in bed.pod.message
    assert bed.left() == {own}


async def test_a_dry_run_reads_the_root_directories_of_copies(bed: Bed, capsys: pytest.CaptureFixture[str]) -> None:
    bed.pod.clock = SystemClock(timedelta(days=31))
    own, stays = bed.snapshot(), bed.snapshot(backup="day")
    (bed.data / "second").write_bytes(os.urandom(2_000_000))
    lost = bed.snapshot(backup="lost")
    unfinished = bed.kopia.snapshot(bed.data, "--upload-limit-mb=1")
    single = bed.kopia.snapshot(bed.data / "file")
    bed.lose_root(lost)
    done = await bed.check(*(("app", one) for one in (lost, stays, "gone", unfinished, single)))
    assert done.now is not None
    assert done.now - datetime.now(UTC) > timedelta(days=30)
    faults = _faults(capsys)
    cause = f"root directory of snapshot {lost}: a repository file is missing: error opening object "
    assert (faults.pop(("app", lost)) or "").startswith(cause)
    assert faults == {
        ("app", stays): None,
        ("app", "gone"): "snapshot gone is not in the repository",
        ("app", unfinished): f"snapshot {unfinished} is incomplete",
        ("app", single): f"the root of snapshot {single} is not a directory",
    }
    assert own in bed.left()


async def test_a_copy_without_a_repository_has_a_fault(bed: Bed, capsys: pytest.CaptureFixture[str]) -> None:
    bed.snapshot()
    other = bed.snapshot("db")
    (broken,) = bed.root.glob("kopia/db/kopia.repository*")
    broken.write_bytes(b"no format")
    done = await bed.check(("db", other), ("none", "s1"))
    assert [one.volume_namespace for one in done.unread] == ["db"]
    assert _faults(capsys) == {("none", "s1"): "there is no repository in the folder none"}
