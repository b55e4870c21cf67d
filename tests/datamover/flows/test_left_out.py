"""What rules leave out of a backup: nothing by files in the volume, and what an operator has set is named."""

import json
from pathlib import Path

import pytest
from msgspec import UNSET

from core.contract import BackupResult, MoverArgs, MoverVerb, VolumeMode
from core.errors import DataPathError
from core.models.transfer_settings import Exclusions, InPlace, LeftOut
from datamover.arguments import PodOptions, parse_arguments
from datamover.data_path.backup import BackupParameters, back_up
from datamover.data_path.restore import RestoreParameters, restore
from datamover.kopia.repository import Repository
from tests.datamover.support.data_paths import backup_data_path, restore_data_path
from tests.datamover.support.plainkopia import PlainKopia
from tests.datamover.support.trees import describe_tree

pytestmark = pytest.mark.processes

_SOURCE = "some/volume"
_TARGET = f"default@default:{_SOURCE}"
_BY_FILES = "left out 5 entries of the volume, by policies of the repository: what files named .kopiaignore list"


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    """A volume with rules that leave out 5 of its 9 entries, one of them in a directory that they leave out."""
    found = tmp_path / "volume"
    for name, text in {
        ".kopiaignore": "*.tmp\nbuild\n",
        "kept": "1",
        "a.tmp": "2",
        "build/made": "3",
        "deep/.kopiaignore": "*\n!kept\n",
        "deep/kept": "4",
        "deep/other": "5",
    }.items():
        (found / name).parent.mkdir(parents=True, exist_ok=True)
        (found / name).write_text(text)
    return found


@pytest.fixture
def kopia(kopia_program: Path, tmp_path: Path, repository: Path) -> PlainKopia:
    """kopia as a person runs it, connected to the repository."""
    plain = PlainKopia(kopia_program, tmp_path)
    plain.connect(repository)
    return plain


async def _back_up(repository: Repository, volume: Path, *, ignore_files: bool = False) -> BackupResult:
    parameters = BackupParameters(volume, VolumeMode.FILESYSTEM, _SOURCE, parallel=2, ignore_files=ignore_files)
    return await back_up(repository, parameters, backup_data_path())


async def _check_whole(repository: Repository, volume: Path, result: BackupResult) -> None:
    out = volume.parent / "out"
    out.mkdir()
    wanted = RestoreParameters(result.snapshot_id, out, VolumeMode.FILESYSTEM, workers=2)
    await restore(repository, wanted, restore_data_path())
    assert describe_tree(out) == describe_tree(volume)
    assert result.note is UNSET


async def test_the_first_backup_has_what_files_in_the_volume_would_leave_out(
    mover_repository: Repository, volume: Path
) -> None:
    await _check_whole(mover_repository, volume, await _back_up(mover_repository, volume))


async def test_they_leave_out_what_they_name_where_it_is_allowed_and_the_result_says_so(
    mover_repository: Repository, volume: Path
) -> None:
    """The policy is then the one that earlier versions have set."""
    await _back_up(mover_repository, volume)
    allowed = await _back_up(mover_repository, volume, ignore_files=True)
    assert allowed.note == _BY_FILES
    await _check_whole(mover_repository, volume, await _back_up(mover_repository, volume))


async def test_a_backup_after_one_of_velero_is_whole(
    mover_repository: Repository, volume: Path, kopia: PlainKopia
) -> None:
    """Velero replaces the policy; its backups leave out what the files name."""
    await _back_up(mover_repository, volume)
    kopia.run("policy", "delete", _TARGET)
    kopia.run("policy", "set", _TARGET, "--keep-latest=2147483647", "--manual", "--add-dot-ignore=.gitignore")
    await _check_whole(mover_repository, volume, await _back_up(mover_repository, volume))


@pytest.mark.parametrize("first", [True, False], ids=["first backup", "later one"])
async def test_what_an_operator_has_set_stays_and_is_counted_and_named(
    mover_repository: Repository, volume: Path, kopia: PlainKopia, first: bool
) -> None:
    (volume / "large").write_bytes(b"x" * 20_000)
    if not first:
        await _back_up(mover_repository, volume)
    kopia.run("policy", "set", "--global", "--add-ignore=*.tmp", "--add-ignore=b*d", "--max-file-size=10000")
    result = await _back_up(mover_repository, volume)
    assert result.note == (
        "left out 4 entries of the volume, by policies of the repository: "
        'what its ignore rules name ("*.tmp", "b*d"), files larger than 10000 bytes'
    )


async def test_rules_for_a_directory_in_the_volume_are_counted(
    mover_repository: Repository, volume: Path, kopia: PlainKopia
) -> None:
    kopia.run("policy", "set", f"{_TARGET}/deep", "--add-ignore=other")
    result = await _back_up(mover_repository, volume)
    assert result.note == "left out 1 entries of the volume, by policies of the repository for directories in it"


def test_the_command_line_of_a_pod_may_allow_them_and_have_all_files_read() -> None:
    args = MoverArgs(
        MoverVerb.BACKUP, "data-upload", "b1", volume_path="/volume", ignore_files=True, read_all_files=True
    )
    options = parse_arguments(args.argv, {})
    assert isinstance(options, PodOptions)
    assert options.ignore_files
    assert options.read_all_files


@pytest.mark.parametrize("exclude", [Exclusions(), Exclusions(patterns=("a.tmp",))], ids=["without", "with others"])
async def test_what_a_killed_restore_in_place_has_left_is_not_backed_up(
    mover_repository: Repository, volume: Path, exclude: Exclusions
) -> None:
    new = volume / ".nodeagent-restore-files" / "new"
    new.mkdir(parents=True)
    (new / "1.kopia-entry").write_text(json.dumps({"name": "1", "type": "d", "obj": f"k{'0' * 32}"}))
    parameters = BackupParameters(volume, VolumeMode.FILESYSTEM, _SOURCE, parallel=2, exclude=exclude)
    result = await back_up(mover_repository, parameters, backup_data_path())
    assert result.files == 7 - len(exclude.patterns)
    assert isinstance(result.left_out, LeftOut)
    assert ".nodeagent-restore-files/new/1.kopia-entry" in result.left_out.names


@pytest.mark.parametrize("hidden", [False, True], ids=["the stage alone", "beside what unknown rules leave out"])
async def test_extra_files_are_deleted_although_a_stage_was_left_out_but_not_beside_unknown_rules(
    mover_repository: Repository, volume: Path, hidden: bool
) -> None:
    (volume / ".nodeagent-restore-files" / "new").mkdir(parents=True)
    result = await _back_up(mover_repository, volume, ignore_files=hidden)
    (volume / "extra").touch()
    rule = InPlace(incremental=True, delete_extra_files=True)
    wanted = RestoreParameters(result.snapshot_id, volume, VolumeMode.FILESYSTEM, workers=2, in_place=rule)
    if hidden:
        with pytest.raises(DataPathError, match="that its backup left out by policies"):
            await restore(mover_repository, wanted, restore_data_path())
    else:
        await restore(mover_repository, wanted, restore_data_path())
    assert (volume / "extra").exists() is hidden
    assert (volume / "deep" / "other").exists()
