"""The snapshot report of a pod, with a real kopia and a bucket: what is listed, and that nothing is changed."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from core.contract import parse_result
from core.kube.resources import BACKUPS
from core.snapshot_contract import REPORTED_LINE, ReportedSnapshot, SnapshotReport, SnapshotVerdict
from tests.datamover.support.backupfiles import put_backup
from tests.datamover.support.plainkopia import IDENTITY, PlainKopia
from tests.datamover.support.pods import MoverPod
from tests.datamover.support.s3proxy import S3Proxy
from tests.datamover.support.s3server import S3Server
from tests.support.fakekube import FakeKube

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

_BUCKET: Final = "report"
_UIDS: Final = [f"{digit * 8}-{digit * 4}-{digit * 4}-{digit * 4}-{digit * 12}" for digit in "abcdef"]
_OWN, _REMOVED, _FOREIGN, _RESTORED, _RECENT, *_ = _UIDS
_SOURCE: Final = "snapshot-data-upload-download/kopia/app/data"
_LISTING: Final = "prefix=p%2Fbackups%2F"


@dataclass
class Bed:
    """A pod whose repository is below the prefix of a bucket behind a proxy; `prefix` is the prefix's directory."""

    pod: MoverPod
    kopia: PlainKopia
    proxy: S3Proxy
    prefix: Path
    data: Path

    def snapshot(self, backup_uid: str, *, old: bool = True) -> str:
        """Create a snapshot as a DataUpload of that backup does; return its ID."""
        tags = {
            "snapshot-requester": "snapshot-data-upload-download",
            "snapshot-uploader": "kopia",
            "velero.io/async-operation-id": f"du-{backup_uid}.6601d200-6a9c-48c7358b3",
        }
        flags = ["--pin=velero-pin"]
        flags += [f"--tags={key}:{value}" for key, value in tags.items()]
        if old:
            flags += ["--start-time=2020-01-01 00:00:00 UTC", "--end-time=2020-01-01 00:01:00 UTC"]
        return self.kopia.snapshot(self.data, *flags, source=_SOURCE)

    def put_backup_object(self, uid: str) -> None:
        meta = {"namespace": "velero", "name": f"b-{uid[0]}", "uid": uid}
        self.pod.kube.put({"apiVersion": "velero.io/v1", "kind": "Backup", "metadata": meta})

    async def report(self) -> SnapshotReport:
        assert await self.pod.report() == 0, self.pod.message
        return parse_result(SnapshotReport, self.pod.message)

    def contents(self) -> dict[str, tuple[int, str]]:
        files = [path for path in self.prefix.rglob("*") if path.is_file()]
        return {str(path): (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest()) for path in files}


@pytest.fixture
async def bed(kopia_program: Path, s3: S3Server, proxy: S3Proxy, tmp_path: Path) -> Bed:
    prefix = s3.folder / s3.make_bucket(_BUCKET) / "p"
    prefix.mkdir()
    pod = MoverPod(FakeKube(), tmp_path)
    pod.put_bucket(s3, _BUCKET, url=proxy.url, objectStorage={"bucket": _BUCKET, "prefix": "p"})
    pod.put_repository(phase="Ready")
    kopia = PlainKopia(kopia_program, tmp_path)
    kopia.run("repository", "create", *s3.kopia_flags(_BUCKET, "p/kopia/app/"), *IDENTITY)
    data = tmp_path / "data"
    data.mkdir()
    (data / "file").write_bytes(b"12345")
    return Bed(pod, kopia, proxy, prefix, data)


def _listed(capsys: pytest.CaptureFixture[str]) -> dict[str, ReportedSnapshot]:
    lines = [REPORTED_LINE.parse(line) for line in capsys.readouterr().out.splitlines()]
    return {line.id: line for line in lines if line is not None}


async def test_the_snapshot_of_a_removed_backup_is_listed_and_no_other(
    bed: Bed, capsys: pytest.CaptureFixture[str]
) -> None:
    bed.put_backup_object(_OWN)
    bed.snapshot(_OWN)
    removed = bed.snapshot(_REMOVED)
    put_backup(bed.prefix, "of-another-cluster", "another", moved=(bed.snapshot(_FOREIGN),))
    put_backup(bed.prefix, "with-volumes", "one-more", volumes=("f" * 32,))
    bed.pod.put_transfer("DataDownload", snapshotID=bed.snapshot(_RESTORED))
    doubted = {bed.snapshot(_RECENT, old=False): "it is younger than 7 days"}
    doubted[bed.snapshot("uid-of-no-form")] = "no tag has the UID of its backup"
    before = bed.contents()
    bed.proxy.requests.clear()
    report = await bed.report()
    listed = _listed(capsys)
    assert listed.pop(removed) == ReportedSnapshot(
        id=removed,
        verdict=SnapshotVerdict.UNREFERENCED,
        reason=f"no Backup has the UID {_REMOVED}, and no transfer and no file in the bucket names the snapshot",
        source=f"default@default:{_SOURCE}",
        start="2020-01-01T00:00:00Z",
        bytes=5,
        command=f"kopia snapshot delete {removed} --delete",
    )
    assert {one.id: one.reason for one in listed.values()} == doubted
    assert {one.verdict for one in listed.values()} == {SnapshotVerdict.UNKNOWN}
    assert (report.referenced.count, report.unreferenced.count, report.unknown.count) == (3, 1, 2)
    assert (report.unreferenced.bytes, report.bucket_read, report.unread) == (5, True, None)
    # kopia only read: the repository and the location are as they were.
    assert {request.partition(" ")[0] for request in bed.proxy.requests} <= {"GET", "HEAD"}
    assert bed.contents() == before


async def test_the_command_deletes_the_snapshot(bed: Bed, capsys: pytest.CaptureFixture[str]) -> None:
    removed, kept = bed.snapshot(_REMOVED), bed.snapshot(_OWN)
    put_backup(bed.prefix, "b", _OWN)
    await bed.report()
    bed.kopia.run(*(_listed(capsys)[removed].command or "").split()[1:])
    assert [one["id"] for one in bed.kopia.snapshots()] == [kept]


async def test_nothing_is_unreferenced_unless_the_cluster_and_all_files_in_the_bucket_can_be_read(
    bed: Bed, capsys: pytest.CaptureFixture[str]
) -> None:
    removed = bed.snapshot(_REMOVED)

    async def check(fault: str, *, bucket_read: bool = False) -> None:
        report = await bed.report()
        assert (report.unreferenced.count, report.unknown.count, report.bucket_read) == (0, 1, bucket_read)
        assert fault in (report.unread or "")
        assert bucket_read or _listed(capsys)[removed].reason.startswith("cannot read the files of all backups: ")

    for folder in ("", "backups/left"):
        (bed.prefix / folder).mkdir(parents=True, exist_ok=True)
        (bed.prefix / folder / "stray").touch()
        await check("the location has no backups")
    file = put_backup(bed.prefix, "b", _OWN, moved=("e" * 32,)) / "b-volumeinfo.json.gz"
    for denied in (_LISTING, file.name):
        bed.proxy.denied = denied
        await check("Access Denied")
    bed.proxy.denied = ""
    whole = file.read_bytes()
    file.write_bytes(whole[:-9])
    await check("a file is damaged")
    file.write_bytes(whole)
    bed.pod.kube.unserved.add(BACKUPS)
    await check("a resource of Velero is not defined in this cluster: list Backup velero", bucket_read=True)


async def test_a_backup_in_the_bucket_is_a_reference_by_its_uid_alone(bed: Bed) -> None:
    """Velero 1.12 named no snapshot of a DataUpload in these files, and a backup in progress has not written them."""
    bed.snapshot(_FOREIGN)
    for file in put_backup(bed.prefix, "b", _FOREIGN).glob("*.gz"):
        file.unlink()
    report = await bed.report()
    assert (report.referenced.count, report.bucket_read) == (1, True)


async def test_the_bucket_is_not_read_when_the_cluster_names_every_snapshot(bed: Bed) -> None:
    bed.put_backup_object(_OWN)
    bed.snapshot(_OWN)
    bed.proxy.denied = _LISTING
    report = await bed.report()
    assert (report.referenced.count, report.referenced.bytes) == (1, 5)
    assert (report.bucket_read, report.unread) == (False, None)


async def test_the_files_of_many_backups_are_read_though_one_is_missing(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datamover.kopia.location_files._FILES_A_CALL", 4)
    named = bed.snapshot(_FOREIGN)
    for number in range(5):
        folder = put_backup(bed.prefix, f"b-{number}", f"uid-{number}", moved=(named,) if number == 4 else ())
        if number == 2:
            (folder / f"b-{number}-volumeinfo.json.gz").unlink()
    report = await bed.report()
    assert (report.referenced.count, report.bucket_read, report.unread) == (1, True, None)


async def test_a_report_fails_when_the_repository_cannot_be_opened(bed: Bed) -> None:
    bed.pod.put_secret("velero-repo-credentials", "repository-password", "a wrong password")
    assert await bed.pod.report() == 12
    assert "the repository password does not match" in bed.pod.message
    assert "a wrong password" not in bed.pod.message
