"""A backup that opens its repository once: the same as one by kopia's own commands, and no change is missed."""

import asyncio
import os
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from unittest.mock import AsyncMock

import pytest
from msgspec import UNSET

from core.contract import BackupResult, MoverMethod
from core.errors import RepositoryError
from core.models.base import JsonDict
from core.models.names import CHANGES_TAG, TRANSFER_UID_TAG
from datamover.data_path.checkpoints import BackupAttempt
from datamover.kinds import NO_PARENT
from datamover.kopia.backup_process import MoverBackup
from datamover.kopia.policy import SourcePolicy, ensure_policy
from datamover.kopia.process import KopiaAnswer
from datamover.kopia.repository import Repository
from datamover.storage.providers import FileStorage
from tests.datamover.support.backup_movers import plain_only
from tests.datamover.support.data_paths import back_up_volume, backup_data_path, restore_volume
from tests.datamover.support.plainkopia import PlainKopia
from tests.datamover.support.repositories import opened
from tests.datamover.support.trees import describe_tree

# It names each way itself, so the run with the other default has nothing to add.
pytestmark = [pytest.mark.processes, plain_only]

_SOURCE: Final = "some/volume"
_TARGET: Final = f"default@default:{_SOURCE}"
_MOVERS: Final = pytest.mark.parametrize("mover", list(MoverMethod), ids=str)


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    folder = tmp_path / "volume"
    for name in ("one", "deep/two", "deep/three"):
        _write(folder / name, name)
    return folder


def _write(path: Path, text: str) -> None:
    """Write a file whose modification time is the same each time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (1_700_000_000, 1_700_000_000))


async def _back_up(
    repository: Repository, volume: Path, mover: MoverMethod = MoverMethod.ONE_OPEN, **more: Any
) -> BackupResult:
    return await back_up_volume(repository, volume, mover=mover, **more)


async def _restored(repository: Repository, result: BackupResult, target: Path) -> Any:
    await restore_volume(repository, result.snapshot_id, target)
    return describe_tree(target)


def _policy(kopia: PlainKopia) -> dict[str, Any]:
    return {key: value for key, value in kopia.policy(_SOURCE).items() if key != "id"}


def _comparable(snapshot: dict[str, Any]) -> dict[str, Any]:
    tags = {key: value for key, value in snapshot["tags"].items() if key != f"tag:{CHANGES_TAG}"}
    root = {key: value for key, value in snapshot["rootEntry"].items() if key not in {"mtime", "obj", "summ"}}
    return {"source": snapshot["source"], "pins": snapshot["pins"], "tags": tags, "root": root}


async def test_snapshot_policy_and_result_are_those_of_plain(
    repository: Path, volume: Path, tmp_path: Path, kopia: PlainKopia
) -> None:
    other = Path(shutil.copytree(repository, tmp_path / "other"))
    with opened(FileStorage(repository)) as one, opened(FileStorage(other)) as two:
        plain = await _back_up(one, volume, MoverMethod.PLAIN, tags={"a": "1"})
        once = await _back_up(two, volume, tags={"a": "1"})
        assert await _restored(two, once, tmp_path / "out") == describe_tree(volume)
    plain_snapshots, plain_policy = kopia.snapshots(), _policy(kopia)
    kopia.connect(other)

    (found,) = kopia.snapshots()
    assert _comparable(found) == _comparable(plain_snapshots[0])
    assert _policy(kopia) == plain_policy
    assert once.to_json() == plain.to_json().replace(plain.snapshot_id, once.snapshot_id)


async def test_only_one_kopia_runs(record: Path, repository: Path, volume: Path) -> None:
    for _ in range(2):
        record.write_text("")
        with opened(FileStorage(repository)) as found:
            await _back_up(found, volume)
        (line,) = record.read_text().splitlines()
        assert f" mover-backup --source={_TARGET}" in line


@_MOVERS
async def test_changes_that_size_and_time_do_not_show(
    mover_repository: Repository, volume: Path, tmp_path: Path, mover: MoverMethod
) -> None:
    await _back_up(mover_repository, volume, mover)
    _write(volume / "deep" / "two", "DEEP/TWO")

    second = await _back_up(mover_repository, volume, mover)

    found = (await _restored(mover_repository, second, tmp_path / "out")) == describe_tree(volume)
    assert found is (mover is MoverMethod.ONE_OPEN)
    assert second.incremental_bytes == (len("deep/two") if mover is MoverMethod.ONE_OPEN else 0)


async def test_a_copied_volume_is_not_read_again(mover_repository: Repository, volume: Path, tmp_path: Path) -> None:
    await _back_up(mover_repository, volume)
    copy = Path(shutil.copytree(volume, tmp_path / "copy"))

    second = await _back_up(mover_repository, copy)
    assert second.incremental_bytes == 0
    assert second.note == (
        "the volume is a copy, by its driver or a restore, or was labeled at its mount: files whose size and time are "
        "unchanged were not read again"
    )

    _write(copy / "one", "ONE")
    third = await _back_up(mover_repository, copy)
    assert (third.incremental_bytes, third.note) == (len("one"), UNSET)


async def test_an_older_state_takes_nothing_from_a_later_one(
    mover_repository: Repository, volume: Path, tmp_path: Path
) -> None:
    older, requested_at = Path(shutil.copytree(volume, tmp_path / "older")), datetime.now(UTC)
    _write(volume / "deep" / "two", "DEEP/TWO")
    await _back_up(mover_repository, volume)

    found = await _back_up(mover_repository, older, requested_at=requested_at)

    assert await _restored(mover_repository, found, tmp_path / "out") == describe_tree(older)


async def test_a_volume_that_is_labeled_at_its_mount_is_not_read_again(
    mover_repository: Repository, volume: Path
) -> None:
    await _back_up(mover_repository, volume)
    requested_at = datetime.now(UTC)
    # The API server cuts off nearly a second, and the kernel's clock for files is behind.
    await asyncio.sleep(1.05)
    for path in (volume, *volume.rglob("*")):
        os.chown(path, os.getuid(), os.getgid())

    second = await _back_up(mover_repository, volume, requested_at=requested_at)

    assert second.incremental_bytes == 0


async def test_a_live_volume_is_no_copy(mover_repository: Repository, volume: Path, tmp_path: Path) -> None:
    await _back_up(mover_repository, volume, in_use=True)
    restored = Path(shutil.copytree(volume, tmp_path / "copy"))

    second = await _back_up(mover_repository, restored, in_use=True)

    assert (second.incremental_bytes, second.note) == (second.total_bytes, UNSET)


async def test_a_change_that_plain_missed_is_found_later(
    mover_repository: Repository, volume: Path, tmp_path: Path
) -> None:
    await _back_up(mover_repository, volume, in_use=True)
    _write(volume / "deep" / "two", "DEEP/TWO")
    await _back_up(mover_repository, volume, MoverMethod.PLAIN, in_use=True)

    third = await _back_up(mover_repository, volume, in_use=True)

    assert await _restored(mover_repository, third, tmp_path / "out") == describe_tree(volume)


def _leave_checkpoint(kopia: PlainKopia) -> BackupAttempt:
    """Return the second attempt of a backup whose first one has left a checkpoint."""
    incomplete = [
        f"--override-source={_TARGET}",
        "--fail-fast",
        f"--tags={CHANGES_TAG}:{datetime.now(UTC).isoformat()}",
    ]
    kopia.run("snapshot", "create", "/proc/sys/net/ipv4/route", *incomplete, fails=True)
    (checkpoint,) = [one for one in kopia.snapshots() if one.get("incomplete")]
    started = datetime.fromisoformat(checkpoint["startTime"][:26]).replace(tzinfo=UTC)
    return BackupAttempt("u", 2, AsyncMock(return_value=True), AsyncMock(), (started,))


async def test_another_attempt_continues_from_the_checkpoint_of_an_earlier_one(
    mover_repository: Repository, volume: Path, kopia: PlainKopia
) -> None:
    first = await _back_up(mover_repository, volume)
    _write(volume / "one", "ONE")
    attempt = _leave_checkpoint(kopia)

    second = await _back_up(mover_repository, volume, attempt=attempt)

    found = {one["id"]: one for one in kopia.snapshots()}
    assert found.keys() == {first.snapshot_id, second.snapshot_id}
    assert found[second.snapshot_id]["tags"][f"tag:{TRANSFER_UID_TAG}"] == "u"
    assert second.incremental_bytes == len("one")


async def test_each_attempt_reads_all_on_request(
    mover_repository: Repository, volume: Path, kopia: PlainKopia, monkeypatch: pytest.MonkeyPatch
) -> None:
    await _back_up(mover_repository, volume)
    attempt, carry_out, parents = _leave_checkpoint(kopia), MoverBackup.carry_out, []

    async def decide(backup: MoverBackup, decision: JsonDict) -> KopiaAnswer:
        parents.append(decision["parents"])
        return await carry_out(backup, decision)

    monkeypatch.setattr(MoverBackup, "carry_out", decide)
    await _back_up(mover_repository, volume, attempt=attempt, parent=NO_PARENT)

    assert parents == [[]]


async def test_checkpoints_that_cannot_be_deleted_fail_no_backup(
    mover_repository: Repository, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, warn = MoverBackup._take_output, AsyncMock()

    def take_fault(backup: MoverBackup, line: str) -> None:
        take(backup, line.replace('"delete_fault":""', '"delete_fault":"no answer"'))

    monkeypatch.setattr(MoverBackup, "_take_output", take_fault)
    await back_up_volume(mover_repository, volume, backup_data_path(warn), mover=MoverMethod.ONE_OPEN)

    warn.assert_awaited_once_with("could not remove incomplete snapshots of earlier backups: no answer")


async def test_a_backup_that_is_canceled_while_it_warns_leaves_no_snapshot(
    mover_repository: Repository, volume: Path, kopia: PlainKopia, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, warn = MoverBackup._take_output, AsyncMock(side_effect=asyncio.CancelledError)

    def take_fault(backup: MoverBackup, line: str) -> None:
        take(backup, line.replace('"delete_fault":""', '"delete_fault":"no answer"'))

    monkeypatch.setattr(MoverBackup, "_take_output", take_fault)
    with pytest.raises(asyncio.CancelledError):
        await back_up_volume(mover_repository, volume, backup_data_path(warn), mover=MoverMethod.ONE_OPEN)

    assert kopia.snapshots() == []


async def test_a_policy_of_an_operator_stays_and_is_described(
    mover_repository: Repository, volume: Path, kopia: PlainKopia
) -> None:
    await _back_up(mover_repository, volume)
    kopia.run("policy", "set", _TARGET, "--add-ignore=one", "--keep-latest=3")

    second = await _back_up(mover_repository, volume)

    assert (
        second.note
        == 'left out 1 entries of the volume, by policies of the repository: what its ignore rules name ("one")'
    )
    policy = _policy(kopia)
    assert (policy["files"]["ignore"], policy["retention"]["keepLatest"]) == (["one"], 2**31 - 1)


@pytest.mark.parametrize("ignore_files", [True, False], ids=["read", "not read"])
async def test_policies_are_those_that_the_command_line_sets(
    mover_repository: Repository, volume: Path, kopia: PlainKopia, ignore_files: bool
) -> None:
    rules = ("--add-dot-ignore=.a", "--add-dot-ignore=.b", "--max-file-size=5000")
    schedule = ("--snapshot-interval=1h", "--snapshot-time=03:00", "--snapshot-time-crontab=0 4 * * *")
    kopia.run("policy", "set", _TARGET, *rules, *schedule)
    await _back_up(mover_repository, volume, ignore_files=ignore_files)
    found = _policy(kopia)
    kopia.run("policy", "delete", _TARGET)
    kopia.run("policy", "set", _TARGET, *rules, *schedule)

    await ensure_policy(mover_repository, _TARGET, SourcePolicy(2, ignore_files=ignore_files))

    assert found == _policy(kopia)


async def test_a_repository_with_another_id_is_not_written_to(
    repository: Path, volume: Path, kopia: PlainKopia
) -> None:
    with opened(FileStorage(repository), unique_id="0" * 64) as found, pytest.raises(RepositoryError, match="recorded"):
        await _back_up(found, volume)
    assert kopia.snapshots() == []


async def test_a_named_parent_that_is_not_usable_has_everything_read(
    mover_repository: Repository, volume: Path
) -> None:
    first = await _back_up(mover_repository, volume)
    await _back_up(mover_repository, volume)

    third = await _back_up(mover_repository, volume, parent=first.snapshot_id)

    assert third.incremental_bytes == third.total_bytes
    assert third.note == (
        f"read everything, since spec.parentSnapshot is not usable: snapshot {first.snapshot_id}: "
        "it is not the last complete one of its source"
    )
