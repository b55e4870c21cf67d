"""Shares of a repository are read with a real kopia: what is damaged names its snapshots, and nothing else does."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from unittest.mock import AsyncMock

import pytest
from msgspec.structs import replace

from core.contract import parse_result
from core.errors import RepositoryError
from core.models.verification import (
    SHARE_LINE,
    SHARES,
    VERIFIED_LINE,
    SnapshotVerification,
    VerificationOutcome,
    VerifiedSnapshot,
)
from core.mover_specs import VerifySnapshots
from datamover.kopia.references import ListedSnapshot
from datamover.kopia.repository import Repository
from datamover.pod import snapshot_verification
from datamover.pod.snapshot_report import list_stored
from datamover.pod.storage_commands import run_storage_command
from tests.datamover.support.plainkopia import PlainKopia
from tests.datamover.support.pods import REPOSITORY, MoverPod

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

_ALL: Final = list(range(SHARES))
_MISSING: Final = "0123456789abcdef" * 2
_PASSED, _FAILED = VerificationOutcome.PASSED, VerificationOutcome.FAILED


@dataclass
class Bed:
    """A pod whose repository has two snapshots with a file of their own; a completed backup refers to the first."""

    pod: MoverPod
    first: str
    second: str
    capture: pytest.CaptureFixture[str]
    shares: list[int] = field(default_factory=list)
    contents: int = 0

    async def run(self, *shares: int) -> dict[str, VerifiedSnapshot]:
        """Return what was found out about snapshots, by ID; `shares` and `contents` are what was right."""
        spec = VerifySnapshots(backup_repository=REPOSITORY, shares=shares, least=1)
        assert await run_storage_command(spec, self.pod.context) == 0, self.pod.message
        output = self.capture.readouterr().out
        read = SHARE_LINE.find(output)
        self.shares, self.contents = [one.share for one in read], sum(one.contents or 0 for one in read)
        found = {one.id: one for one in VERIFIED_LINE.find(output)}
        assert parse_result(SnapshotVerification, self.pod.message).snapshots == len(found)
        return found


@pytest.fixture
def bed(pod: MoverPod, plain_kopia: PlainKopia, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Bed:
    snapshots = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_bytes(os.urandom(200_000))
        snapshots.append(plain_kopia.snapshot(tmp_path / name, source=f"/{name}"))
    first, second = snapshots
    _refer(pod, first)
    return Bed(pod, first, second, capsys)


def _put(pod: MoverPod, version: str, kind: str, name: str, *, phase: str, spec: Any = None, **more: Any) -> None:
    meta = {"name": name, "namespace": "velero", "uid": name, "labels": more.pop("labels", {})}
    raw = {"apiVersion": f"velero.io/{version}", "kind": kind, "metadata": meta, "spec": spec or {}}
    pod.kube.put(raw | {"status": {"phase": phase} | more})


def _refer(pod: MoverPod, snapshot: str, **labels: str) -> None:
    """Have a completed DataUpload of the repository refer to the snapshot."""
    names = {"volumeSnapshot": "s", "storageClass": "", "snapshotClass": ""}
    spec = {"sourceNamespace": "app", "backupStorageLocation": "default", "csiSnapshot": names, "snapshotType": "CSI"}
    spec |= {"sourcePVC": "data", "operationTimeout": "10m"}
    _put(
        pod,
        "v2alpha1",
        "DataUpload",
        f"of-{snapshot}",
        phase="Completed",
        spec=spec,
        snapshotID=snapshot,
        labels=labels,
    )


def _packs(repository: Path) -> list[Path]:
    """Return the files with the content of files, the largest first."""
    return sorted((repository / "p").rglob("*.f"), key=lambda path: -path.stat().st_size)


async def test_all_shares_together_have_each_content_once(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await bed.run(*_ALL) == {}
    assert bed.shares == _ALL
    together = bed.contents
    assert together >= 2
    counts = []
    for share in (_ALL[:8], _ALL[8:]):
        await bed.run(*share)
        counts.append(bed.contents)
    assert sum(counts) == together
    # After enough time, the others are left.
    monkeypatch.setattr(snapshot_verification, "_ENOUGH_SECONDS", 0.0)
    assert await bed.run(7, 8, 9) == {}
    assert bed.shares == [7]


async def test_damage_in_a_share_names_the_snapshot_that_has_it(bed: Bed) -> None:
    pack = _packs(bed.pod.repository)[0]
    content = bytearray(pack.read_bytes())
    content[1000:1100] = bytes(100)
    pack.write_bytes(content)
    found = await bed.run(*_ALL)
    outcomes = {name: one.outcome for name, one in found.items()}
    assert outcomes in ({bed.first: _FAILED, bed.second: _PASSED}, {bed.first: _PASSED, bed.second: _FAILED})
    (damaged,) = (one for one in found.values() if one.outcome is _FAILED)
    assert ("first" if damaged.id == bed.first else "second") in damaged.faults[0]
    # All snapshots were read, and so were all shares.
    assert sorted(set(bed.shares)) == _ALL


async def test_a_pack_that_is_missing_is_found_by_each_share(bed: Bed) -> None:
    _packs(bed.pod.repository)[0].unlink()
    for share in (3, 9):
        assert sorted(one.outcome or "" for one in (await bed.run(share)).values()) == [_FAILED, _PASSED]


async def test_a_snapshot_that_is_missing_is_found_and_then_a_repository_that_is_gone(bed: Bed) -> None:
    _refer(bed.pod, _MISSING)
    # It hides no other.
    _put(bed.pod, "v2alpha1", "DataUpload", "malformed", phase="Completed", snapshotID=5)
    assert {name: one.outcome for name, one in (await bed.run(5)).items()} == {_MISSING: _FAILED}
    assert bed.shares == [5]
    # All backups that refer to it have failed then.
    (bed.pod.repository / "kopia.repository.f").unlink()
    found = await bed.run(5)
    assert {name: one.outcome for name, one in found.items()} == {bed.first: _FAILED, _MISSING: _FAILED}


async def test_a_repository_that_is_gone_is_not_right_where_no_known_backup_refers_to_it(bed: Bed) -> None:
    """As in a cluster that has another one's bucket: Velero creates no DataUploads there."""
    _put(bed.pod, "v2alpha1", "DataUpload", f"of-{bed.first}", phase="Failed")
    (bed.pod.repository / "kopia.repository.f").unlink()
    spec = VerifySnapshots(backup_repository=REPOSITORY, shares=tuple(_ALL), least=1)
    assert await run_storage_command(spec, bed.pod.context) == RepositoryError.exit_code
    assert "no repository found" in bed.pod.message
    assert list(SHARE_LINE.find(bed.capture.readouterr().out)) == []


async def test_a_storage_that_lists_nothing_is_not_right(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    """kopia takes a page that a proxy answers with for an empty list, and an empty repository has no damage."""
    monkeypatch.setattr(snapshot_verification, "list_stored", AsyncMock(return_value=list))
    monkeypatch.setattr(Repository, "check_listing", AsyncMock(side_effect=RepositoryError("lists nothing")))
    spec = VerifySnapshots(backup_repository=REPOSITORY, shares=tuple(_ALL), least=1)
    assert await run_storage_command(spec, bed.pod.context) == RepositoryError.exit_code
    assert list(SHARE_LINE.find(bed.capture.readouterr().out)) == []


async def test_a_snapshot_that_is_deleted_meanwhile_is_not_damaged(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    async def list_before(*given: Any) -> Callable[[], list[ListedSnapshot]]:
        found = list((await list_stored(*given))())
        return lambda: [*found, replace(found[0], id=_MISSING)]

    monkeypatch.setattr(snapshot_verification, "list_stored", list_before)
    _packs(bed.pod.repository)[0].unlink()
    found = await bed.run(0)
    assert set(found) == {bed.first, bed.second}
    # A Velero server deletes snapshots before the Backup.
    _refer(bed.pod, _MISSING, **{"velero.io/backup-name": "daily-1"})
    _put(bed.pod, "v1", "Backup", "daily-1", phase="Deleting")
    assert set(await bed.run(0)) == {bed.first, bed.second}
