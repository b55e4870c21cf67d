"""A backup that opens its repository once: the same as one by kopia's own commands, and no change is missed."""

import os
import shutil
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final
from unittest.mock import AsyncMock

import pytest
from msgspec import UNSET

from core.contract import BackupResult, MoverMethod
from core.errors import RepositoryError
from core.models.base import JsonDict
from core.models.names import CHANGES_TAG
from datamover.kinds import NO_PARENT
from datamover.kopia.backup_process import MoverBackup
from datamover.kopia.policy import SourcePolicy, ensure_policy
from datamover.kopia.process import KopiaAnswer
from datamover.storage.providers import FileStorage
from tests.datamover.support.backup_movers import plain_only
from tests.datamover.support.data_paths import VolumeBed, back_up_volume, backup_data_path
from tests.datamover.support.plainkopia import PlainKopia
from tests.datamover.support.repositories import opened
from tests.datamover.support.trees import describe_tree

# It names each way itself, so the run with the other default has nothing to add.
pytestmark = [pytest.mark.processes, plain_only]

_SOURCE: Final = "some/volume"
_TARGET: Final = f"default@default:{_SOURCE}"
_MOVERS: Final = pytest.mark.parametrize("mover", list(MoverMethod), ids=str)


@pytest.fixture
def bed(bed: VolumeBed) -> VolumeBed:
    """One whose volume has three files."""
    for name in ("one", "deep/two", "deep/three"):
        _write(bed.volume / name, name)
    return bed


def _write(path: Path, text: str) -> None:
    """Write a file whose modification time is the same each time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (1_700_000_000, 1_700_000_000))


async def _back_up(
    bed: VolumeBed, mover: MoverMethod = MoverMethod.ONE_OPEN, volume: Path | None = None, **more: Any
) -> BackupResult:
    return await back_up_volume(bed.movers, volume or bed.volume, mover=mover, **more)


async def _restored(bed: VolumeBed, result: BackupResult) -> Any:
    await bed.restore(result.snapshot_id, bed.folder / "out")
    return describe_tree(bed.folder / "out")


def _policy(kopia: PlainKopia) -> dict[str, Any]:
    return {key: value for key, value in kopia.policy(_SOURCE).items() if key != "id"}


def _comparable(snapshot: dict[str, Any]) -> dict[str, Any]:
    tags = {key: value for key, value in snapshot["tags"].items() if key != f"tag:{CHANGES_TAG}"}
    root = {key: value for key, value in snapshot["rootEntry"].items() if key not in {"mtime", "obj", "summ"}}
    return {"source": snapshot["source"], "pins": snapshot["pins"], "tags": tags, "root": root}


async def test_snapshot_policy_and_result_are_those_of_plain(bed: VolumeBed, repository: Path) -> None:
    other = Path(shutil.copytree(repository, bed.folder / "other"))
    plain = await _back_up(bed, MoverMethod.PLAIN, tags={"a": "1"})
    with opened(FileStorage(other)) as two:
        once = await _back_up(replace(bed, movers=two), tags={"a": "1"})
        assert await _restored(replace(bed, movers=two), once) == describe_tree(bed.volume)
    plain_snapshots, plain_policy = bed.kopia.snapshots(), _policy(bed.kopia)
    bed.kopia.connect(other)
    (found,) = bed.kopia.snapshots()
    assert _comparable(found) == _comparable(plain_snapshots[0])
    assert _policy(bed.kopia) == plain_policy
    assert once.to_json() == plain.to_json().replace(plain.snapshot_id, once.snapshot_id)


async def test_only_one_kopia_runs(record: Path, bed: VolumeBed, repository: Path) -> None:
    for _ in range(2):
        record.write_text("")
        with opened(FileStorage(repository)) as found:
            await _back_up(replace(bed, movers=found))
        (line,) = record.read_text().splitlines()
        assert f" mover-backup --source={_TARGET}" in line


@_MOVERS
async def test_changes_that_size_and_time_do_not_show(bed: VolumeBed, mover: MoverMethod) -> None:
    await _back_up(bed, mover)
    _write(bed.volume / "deep" / "two", "DEEP/TWO")
    second = await _back_up(bed, mover)
    found = (await _restored(bed, second)) == describe_tree(bed.volume)
    assert found is (mover is MoverMethod.ONE_OPEN)
    assert second.incremental_bytes == (len("deep/two") if mover is MoverMethod.ONE_OPEN else 0)


async def test_a_copied_volume_is_not_read_again(bed: VolumeBed) -> None:
    await _back_up(bed)
    copy = Path(shutil.copytree(bed.volume, bed.folder / "copy"))
    second = await _back_up(bed, volume=copy)
    assert second.incremental_bytes == 0
    assert second.note == (
        "the volume is a copy, by its driver or a restore, or was labeled at its mount: files whose size and time are "
        "unchanged were not read again"
    )
    _write(copy / "one", "ONE")
    third = await _back_up(bed, volume=copy)
    assert (third.incremental_bytes, third.note) == (len("one"), UNSET)


async def test_directories_that_are_gone_before_they_are_read_are_counted(
    bed: VolumeBed, monkeypatch: pytest.MonkeyPatch
) -> None:
    carry_out = MoverBackup.carry_out

    async def lose(backup: MoverBackup, decision: JsonDict) -> KopiaAnswer:
        answer = await carry_out(backup, decision)
        assert backup.result["gone_directories"] == 0
        backup.result["gone_directories"] = 2
        return answer

    monkeypatch.setattr(MoverBackup, "carry_out", lose)
    result = await _back_up(bed, in_use=True)
    assert result.note == "left out all or a part of 2 directories that were deleted or moved"


async def test_what_the_program_decides_by_is_passed_on(bed: VolumeBed, monkeypatch: pytest.MonkeyPatch) -> None:
    """The API server has cut off the fraction of a second of a request; a volume in use is no copy."""
    carry_out, decisions, requested_at = MoverBackup.carry_out, list[JsonDict](), datetime.now(UTC)

    async def decide(backup: MoverBackup, decision: JsonDict) -> KopiaAnswer:
        decisions.append(decision)
        return await carry_out(backup, decision)

    first = await _back_up(bed)
    monkeypatch.setattr(MoverBackup, "carry_out", decide)
    after = datetime.now(UTC)
    given: list[dict[str, Any]] = [{"requested_at": one} for one in (requested_at, after)]
    for more in (*given, {"in_use": True}, {"parent": NO_PARENT}):
        await _back_up(bed, **more)
    parents = [[one["id"] for one in decision["parents"]] for decision in decisions]
    # The first snapshot was begun after the first request.
    assert (parents[0], parents[1], parents[3]) == ([], [first.snapshot_id], [])
    until = [(one + timedelta(seconds=1)).isoformat() for one in (requested_at, after)]
    assert [one["requested_at"] for one in decisions] == [*until, None, None]
    assert [one["may_be_copy"] for one in decisions] == [True, True, False, True]


async def test_checkpoints_that_cannot_be_deleted_fail_no_backup(
    bed: VolumeBed, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, warn = MoverBackup._take_output, AsyncMock()

    def take_fault(backup: MoverBackup, line: str) -> None:
        take(backup, line.replace('"delete_fault":""', '"delete_fault":"no answer"'))

    monkeypatch.setattr(MoverBackup, "_take_output", take_fault)
    await back_up_volume(bed.movers, bed.volume, backup_data_path(warn), mover=MoverMethod.ONE_OPEN)
    warn.assert_awaited_once_with("could not remove incomplete snapshots of earlier backups: no answer")


@pytest.mark.parametrize("ignore_files", [True, False], ids=["read", "not read"])
async def test_policies_are_those_that_the_command_line_sets(bed: VolumeBed, ignore_files: bool) -> None:
    rules = ("--add-dot-ignore=.a", "--add-dot-ignore=.b", "--max-file-size=5000", "--keep-latest=3")
    schedule = ("--snapshot-interval=1h", "--snapshot-time=03:00", "--snapshot-time-crontab=0 4 * * *")
    bed.kopia.run("policy", "set", _TARGET, *rules, *schedule)
    await _back_up(bed, ignore_files=ignore_files)
    found = _policy(bed.kopia)
    bed.kopia.run("policy", "delete", _TARGET)
    bed.kopia.run("policy", "set", _TARGET, *rules, *schedule)
    await ensure_policy(bed.movers, _TARGET, SourcePolicy(2, ignore_files=ignore_files))
    assert found == _policy(bed.kopia)


async def test_a_repository_with_another_id_is_not_written_to(bed: VolumeBed, repository: Path) -> None:
    with opened(FileStorage(repository), unique_id="0" * 64) as found, pytest.raises(RepositoryError, match="recorded"):
        await _back_up(replace(bed, movers=found))
    assert bed.kopia.snapshots() == []
