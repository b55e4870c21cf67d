"""Exclusions in a backup, and other rules: what they leave out, what is known of it, and that none of them stays."""

import asyncio
import json
import os
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Final

import pytest
from msgspec import UNSET

from core.contract import BackupResult, MoverArgs, MoverMethod, MoverVerb
from core.errors import DataPathError
from core.models.base import JsonDict
from core.models.transfer_settings import Exclusions, InPlace, LeftOut, check_pattern
from datamover.arguments import PodOptions, parse_arguments
from datamover.kopia.policy import excluding
from datamover.kopia.repository import Repository
from datamover.kopia.snapshots import read_snapshot
from tests.datamover.support.data_paths import back_up_volume, restore_volume
from tests.datamover.support.plainkopia import PlainKopia
from tests.datamover.support.thorough import EXAMPLES
from tests.datamover.support.trees import describe_tree

pytestmark = pytest.mark.processes

_SOURCE: Final = "some/volume"
_TARGET: Final = f"default@default:{_SOURCE}"

_PATTERNS: Final = (
    "q01*.tmp",
    "/q02",
    "q03/x",
    "**/q04/x",
    "q05/**",
    "q06/**/x",
    "q07?",
    "q08[a-c]",
    "q09[!a-c]",
    "q10/",
    "/q11/*/x",
    "q12\\*",
    "q13[a-]",
    "**q14",
    "q15**x",
    "q16/*",
    "*/q17",
    "q18[\\]]",
    "**/sub/q19",
    "q20/d*/",
    "q21[\\d]",
    "**q22/x",
    "q23*x",
    "q24**/**/x",
    "q25/**/**/x",
    "/q26*e/x",
    "q27*d*x",
    "[!a]28",
)
"""Each is about names that begin alike."""


def _walk(root: Path) -> Iterator[tuple[str, bool]]:
    """Yield each entry below the root: its path, and whether it is a directory."""
    for directory, folders, files in os.walk(root):
        for name in (*folders, *files):
            yield os.path.relpath(Path(directory) / name, root), name in folders


def _write(volume: Path, *files: str, size: int = 1) -> None:
    for name in files:
        (volume / name).parent.mkdir(parents=True, exist_ok=True)
        (volume / name).write_bytes(b"a" * size)


def _files_policy(kopia: PlainKopia) -> JsonDict:
    found: JsonDict = json.loads(kopia.run("policy", "show", "--json", _TARGET))["files"]
    return {key: found.get(key) for key in ("ignore", "maxFileSize", "oneFileSystem")}


async def test_kopia_leaves_out_what_this_module_says(mover_repository: Repository, tmp_path: Path) -> None:
    volume, out = tmp_path / "volume", tmp_path / "out"
    for number in range(1, len(_PATTERNS) + 1):
        name = f"q{number:02}"
        _write(volume, *(f"{name}/{below}" for below in ("x", "y", "d/x", "d/e/x", ".x")))
        _write(volume, *(f"{name}{end}" for end in ("a", "d", "-", "*", "]", "zx", "aax", ".tmp", "é")))
        _write(volume, f"sub/{name}", f"sub/x{name}", f"sub/deep/{name}/x", f"sub/deep/x{name}/x", f"sub/{name}.tmp")
    exclude = Exclusions(patterns=_PATTERNS)
    result = await back_up_volume(mover_repository, volume, exclude=exclude)
    await restore_volume(mover_repository, result.snapshot_id, out)
    every = dict(_walk(volume))
    kept = {path for path, is_dir in every.items() if not exclude.excludes_path(path, is_dir=is_dir)}
    assert {path for path, _ in _walk(out)} == kept
    assert isinstance(result.left_out, LeftOut)
    gone = [is_dir for path, is_dir in every.items() if path not in kept]
    assert (result.left_out.files, result.left_out.directories) == (gone.count(False), gone.count(True))
    assert result.files == sum(not every[path] for path in kept)


def _random_pattern(random: Random) -> str:
    """Return a pattern of few characters, with stars in all places."""
    while True:
        pieces = random.choices(("a", "b", "*", "/", "?", "**", "/**/", "[!a]", "[ab]"), k=random.randint(2, 7))
        with suppress(ValueError):
            return check_pattern("".join(pieces).lstrip("/"))


async def test_random_patterns_leave_out_in_kopia_what_this_module_says(
    mover_repository: Repository, tmp_path: Path
) -> None:
    """Each pattern is about a directory of its own."""
    random, volume, out = Random(7), tmp_path / "volume", tmp_path / "out"
    exclude = Exclusions(patterns=tuple(f"/{number}/{_random_pattern(random)}" for number in range(EXAMPLES)))
    paths = ("a", "b", "aab", "ba/a", "ba/b", "ab/ab/a", "ab/ab/b", "bb/a/a", "bb/ba/ba", "aa/b/aab/b", "aa/abab")
    for number in range(EXAMPLES):
        _write(volume, *(f"{number}/{path}" for path in paths))
    result = await back_up_volume(mover_repository, volume, exclude=exclude)
    await restore_volume(mover_repository, result.snapshot_id, out)
    kept = {path for path, is_dir in _walk(volume) if not exclude.excludes_path(path, is_dir=is_dir)}
    assert {path for path, _ in _walk(out)} == kept


async def test_names_that_are_left_out_are_escaped_and_leave_room_for_other_notes(
    mover_repository: Repository, tmp_path: Path
) -> None:
    volume = tmp_path / "volume"
    _write(volume, *(f"{number}\n\x1b[31m{'x' * 200}/{'y' * 220}.tmp" for number in range(5)))
    os.mkfifo(volume / "pipe")
    result = await back_up_volume(mover_repository, volume, exclude=Exclusions(patterns=("*.tmp",)))
    assert str(result.note).isprintable()
    assert "left out 1 pipes, devices" in str(result.note)


async def test_what_is_left_out_is_counted_and_named_and_its_rules_are_in_tags(
    mover_repository: Repository, kopia: PlainKopia, tmp_path: Path
) -> None:
    volume = tmp_path / "volume"
    _write(volume, "kept", "cache/one", "cache/below/two", "lost+found/x")
    _write(volume, "large", size=5000)
    exclude = Exclusions(patterns=("/cache/", "/lost+found/"), max_bytes=4096, one_file_system=True)
    result = await back_up_volume(mover_repository, volume, exclude=exclude)
    assert isinstance(result.left_out, LeftOut)
    names = ("cache", "cache/below", "cache/below/two", "cache/one", "large", "lost+found", "lost+found/x")
    assert set(result.left_out.names) < set(names)
    found = (result.left_out.files, result.left_out.bytes, result.left_out.directories)
    assert (found, result.left_out.rules, result.files) == ((4, 5003, 3), exclude.digest, 1)
    assert str(result.note).startswith("left out 4 files with 5003 bytes and 3 directories by exclusions (rules ")
    snapshot = await read_snapshot(mover_repository.kopia, result.snapshot_id)
    assert (Exclusions.parse(snapshot.exclude or ""), snapshot.rules) == (exclude, exclude.digest)
    assert _files_policy(kopia) == {"ignore": None, "maxFileSize": None, "oneFileSystem": None}


async def test_what_an_operator_has_set_stays(mover_repository: Repository, kopia: PlainKopia, tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    _write(volume, "kept", "a.tmp", "cache/one")
    kopia.run("policy", "set", _TARGET, "--add-ignore=*.tmp", "--max-file-size=9000", "--one-file-system=false")
    before = _files_policy(kopia)
    exclude = Exclusions(patterns=("*.tmp", "cache/"), max_bytes=5000, one_file_system=True)
    result = await back_up_volume(mover_repository, volume, exclude=exclude)
    assert (result.files, _files_policy(kopia)) == (1, before)


async def test_what_a_source_inherits_counts_during_a_backup_and_is_not_its_own_afterward(
    mover_repository: Repository, kopia: PlainKopia, tmp_path: Path
) -> None:
    volume = tmp_path / "volume"
    _write(volume, "kept", "a.tmp", "cache/one", "secret/one")
    _write(volume, "large", size=6000)
    kopia.run("policy", "set", "--global", "--add-ignore=*.tmp", "--add-ignore=/secret/", "--max-file-size=1000000000")
    exclude = Exclusions(patterns=("*.tmp", "/cache/"), max_bytes=5000)
    result = await back_up_volume(mover_repository, volume, exclude=exclude)
    own = json.loads(kopia.run("policy", "export", _TARGET))[_TARGET]["files"]
    assert (result.files, {"ignore", "maxFileSize", "oneFileSystem"} & set(own)) == (1, set())


@pytest.mark.sample("without-plain", "with others-one-open")
@pytest.mark.parametrize("mover", list(MoverMethod), ids=str)
@pytest.mark.parametrize("exclude", [Exclusions(), Exclusions(patterns=("b",))], ids=["without", "with others"])
async def test_what_a_killed_backup_has_left_is_taken_back_before_the_next(
    mover_repository: Repository, kopia: PlainKopia, tmp_path: Path, exclude: Exclusions, mover: MoverMethod
) -> None:
    volume = tmp_path / "volume"
    _write(volume, "a", "b")
    await mover_repository.open(partial(asyncio.sleep, 0))
    killed = Exclusions(patterns=("a",), max_bytes=4096, one_file_system=True)
    async with excluding(mover_repository.kopia, _TARGET, killed):
        left = json.loads(kopia.run("policy", "export", _TARGET))
    kopia.run("policy", "set", _TARGET, *(f"--add-ignore={one}" for one in left[_TARGET]["files"]["ignore"]))
    kopia.run("policy", "set", _TARGET, "--max-file-size=4096", "--one-file-system=true")
    result = await back_up_volume(mover_repository, volume, exclude=exclude, mover=mover)
    assert result.files == 2 - bool(exclude)
    assert _files_policy(kopia) == {"ignore": None, "maxFileSize": None, "oneFileSystem": None}


async def test_rules_are_taken_back_after_a_backup_that_fails(mover_repository: Repository, kopia: PlainKopia) -> None:
    await mover_repository.open(partial(asyncio.sleep, 0))

    async def fail() -> None:
        async with excluding(mover_repository.kopia, _TARGET, Exclusions(patterns=("a",))):
            assert "a" in _files_policy(kopia)["ignore"]
            raise DataPathError

    with pytest.raises(DataPathError):
        await fail()
    assert _files_policy(kopia)["ignore"] is None


@pytest.mark.parametrize("folder", ["cache", ".snapshot"], ids=["counted", "not counted"])
async def test_a_new_rule_makes_no_backup_shrunk_and_lost_files_do(
    mover_repository: Repository, tmp_path: Path, folder: str
) -> None:
    volume, exclude = tmp_path / "volume", Exclusions(patterns=(f"/{folder}/",))
    _write(volume, *(f"{folder}/{number}" for number in range(200)), *(f"{number}" for number in range(150)))
    results = [await back_up_volume(mover_repository, volume, exclude=rules) for rules in (Exclusions(), exclude)]
    for number in range(140):
        (volume / str(number)).unlink()
    results.append(await back_up_volume(mover_repository, volume, exclude=exclude))
    assert [one.files for one in results] == [350, 150, 10]
    assert [bool(one.shrunk) for one in results] == [False, False, True]


@pytest.mark.parametrize("incremental", [True, False], ids=["incremental", "full"])
async def test_a_restore_in_place_deletes_nothing_that_was_left_out(
    mover_repository: Repository, tmp_path: Path, incremental: bool
) -> None:
    volume = tmp_path / "volume"
    exclude = Exclusions(patterns=("/cache/", "*.tmp"), max_bytes=4096)
    _write(volume, "file", "deep/file", "cache/old", "way/below")
    result = await back_up_volume(mover_repository, volume, exclude=exclude)
    _write(volume, "cache/new", "x.tmp", "deep/y.tmp", "extra/z.tmp", "extra/gone", "extra/far/gone", "gone")
    _write(volume, "large", "deep/large", size=5000)
    (volume / "way/below").unlink()
    rule = InPlace(incremental=incremental, delete_extra_files=True)
    await restore_volume(mover_repository, result.snapshot_id, volume, in_place=rule)
    kept = {path for path, is_dir in _walk(volume) if not is_dir}
    restored = {"file", "deep/file", "way/below"}
    assert kept == restored | {"cache/old", "cache/new", "x.tmp", "deep/y.tmp", "extra/z.tmp", "large", "deep/large"}
    assert not (volume / "extra/far").exists()


@pytest.mark.sample("a file of rules")
@pytest.mark.parametrize("by", ["a file of rules", "a mark of a cache"])
async def test_a_restore_in_place_deletes_nothing_when_rules_that_it_does_not_know_left_something_out(
    mover_repository: Repository, kopia: PlainKopia, tmp_path: Path, by: str
) -> None:
    """The backup is one of Velero, as far as its policy goes."""
    volume = tmp_path / "volume"
    _write(volume, "file", "build/x")
    _mark(volume, by)
    snapshot_id = kopia.snapshot(volume)
    _write(volume, "extra")
    before = set(_walk(volume))
    with pytest.raises(DataPathError, match="lacks 1 files and directories that its backup left out"):
        await restore_volume(mover_repository, snapshot_id, volume, in_place=InPlace(delete_extra_files=True))
    assert set(_walk(volume)) == before
    await restore_volume(mover_repository, snapshot_id, volume, in_place=InPlace())
    assert set(_walk(volume)) == before


async def test_a_restore_in_place_deletes_nothing_that_a_policy_may_have_left_out_beside_own_rules(
    mover_repository: Repository, kopia: PlainKopia, tmp_path: Path
) -> None:
    volume = tmp_path / "volume"
    _write(volume, "kept", "a.tmp", "a.bak")
    kopia.run("policy", "set", "--global", "--add-ignore=*.bak")
    result = await back_up_volume(mover_repository, volume, exclude=Exclusions(patterns=("*.tmp",)))
    _write(volume, "extra")
    with pytest.raises(DataPathError, match=r'leave out: what its ignore rules name \("\*.bak"\), and they would be'):
        await restore_volume(mover_repository, result.snapshot_id, volume, in_place=InPlace(delete_extra_files=True))
    assert {path for path, _ in _walk(volume)} == {"kept", "a.tmp", "a.bak", "extra"}


def _mark(volume: Path, by: str) -> None:
    if by == "a file of rules":
        (volume / ".kopiaignore").write_text("build/\n")
    else:
        (volume / "build/CACHEDIR.TAG").write_text("Signature: 8a477f597d28d172789f06886806bc55")


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


async def _check_whole(repository: Repository, volume: Path, result: BackupResult) -> None:
    out = volume.parent / "out"
    await restore_volume(repository, result.snapshot_id, out)
    assert describe_tree(out) == describe_tree(volume)
    assert result.note is UNSET


async def test_the_first_backup_has_what_files_in_the_volume_would_leave_out(
    mover_repository: Repository, volume: Path
) -> None:
    await _check_whole(mover_repository, volume, await back_up_volume(mover_repository, volume))


async def test_they_leave_out_what_they_name_where_it_is_allowed_and_the_result_says_so(
    mover_repository: Repository, volume: Path
) -> None:
    """The policy is then the one that earlier versions have set."""
    await back_up_volume(mover_repository, volume)
    allowed = await back_up_volume(mover_repository, volume, ignore_files=True)
    assert allowed.note == _BY_FILES
    await _check_whole(mover_repository, volume, await back_up_volume(mover_repository, volume))


async def test_a_backup_after_one_of_velero_is_whole(
    mover_repository: Repository, volume: Path, kopia: PlainKopia
) -> None:
    """Velero replaces the policy; its backups leave out what the files name."""
    await back_up_volume(mover_repository, volume)
    kopia.run("policy", "delete", _TARGET)
    kopia.run("policy", "set", _TARGET, "--keep-latest=2147483647", "--manual", "--add-dot-ignore=.gitignore")
    await _check_whole(mover_repository, volume, await back_up_volume(mover_repository, volume))


@pytest.mark.parametrize("first", [True, False], ids=["first backup", "later one"])
async def test_what_an_operator_has_set_stays_and_is_counted_and_named(
    mover_repository: Repository, volume: Path, kopia: PlainKopia, first: bool
) -> None:
    (volume / "large").write_bytes(b"x" * 20_000)
    if not first:
        await back_up_volume(mover_repository, volume)
    kopia.run("policy", "set", "--global", "--add-ignore=*.tmp", "--add-ignore=b*d", "--max-file-size=10000")
    result = await back_up_volume(mover_repository, volume)
    assert result.note == (
        "left out 4 entries of the volume, by policies of the repository: "
        'what its ignore rules name ("*.tmp", "b*d"), files larger than 10000 bytes'
    )


async def test_rules_for_a_directory_in_the_volume_are_counted(
    mover_repository: Repository, volume: Path, kopia: PlainKopia
) -> None:
    kopia.run("policy", "set", f"{_TARGET}/deep", "--add-ignore=other")
    result = await back_up_volume(mover_repository, volume)
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
    result = await back_up_volume(mover_repository, volume, exclude=exclude)
    assert result.files == 7 - len(exclude.patterns)
    assert isinstance(result.left_out, LeftOut)
    assert ".nodeagent-restore-files/new/1.kopia-entry" in result.left_out.names


@pytest.mark.parametrize("hidden", [False, True], ids=["the stage alone", "beside what unknown rules leave out"])
async def test_extra_files_are_deleted_although_a_stage_was_left_out_but_not_beside_unknown_rules(
    mover_repository: Repository, volume: Path, hidden: bool
) -> None:
    (volume / ".nodeagent-restore-files" / "new").mkdir(parents=True)
    result = await back_up_volume(mover_repository, volume, ignore_files=hidden)
    (volume / "extra").touch()
    rule = InPlace(incremental=True, delete_extra_files=True)
    with pytest.raises(DataPathError, match="that its backup left out by policies") if hidden else nullcontext():
        await restore_volume(mover_repository, result.snapshot_id, volume, in_place=rule)
    assert (volume / "extra").exists() is hidden
    assert (volume / "deep" / "other").exists()
