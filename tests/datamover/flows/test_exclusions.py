"""Exclusions in a backup, and other rules: what they leave out, what is known of it, and that none of them stays."""

import asyncio
import json
import os
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Final

import pytest
from msgspec import UNSET

from core.contract import MoverArgs, MoverMethod, MoverVerb
from core.errors import DataPathError
from core.models.base import JsonDict
from core.models.transfer_settings import Exclusions, InPlace, LeftOut, check_pattern
from datamover.arguments import PodOptions, parse_arguments
from datamover.data_path import backup
from datamover.data_path.file_names import inspect_names
from datamover.kopia.policy import excluding
from datamover.kopia.snapshots import read_snapshot
from tests.datamover.support.data_paths import VolumeBed
from tests.datamover.support.plainkopia import PlainKopia
from tests.datamover.support.thorough import EXAMPLES
from tests.datamover.support.trees import describe_tree

pytestmark = pytest.mark.processes

_SOURCE: Final = "some/volume"
_TARGET: Final = f"default@default:{_SOURCE}"

_PATTERN_LINES: Final = r"""
q01*.tmp /q02 q03/x **/q04/x q05/** q06/**/x q07? q08[a-c] q09[!a-c] q10/ /q11/*/x q12\* q13[a-] **q14
q15**x q16/* */q17 q18[\]] **/sub/q19 q20/d*/ q21[\d] **q22/x q23*x q24**/**/x q25/**/**/x /q26*e/x q27*d*x [!a]28
"""
_PATTERNS: Final = tuple(_PATTERN_LINES.split())
"""Each is about names that begin alike."""


def _walk(root: Path) -> Iterator[tuple[str, bool]]:
    """Yield each entry below the root: its path, and whether it is a directory."""
    for directory, folders, files in os.walk(root):
        for name in (*folders, *files):
            yield os.path.relpath(Path(directory) / name, root), name in folders


def _files_policy(kopia: PlainKopia) -> JsonDict:
    found: JsonDict = json.loads(kopia.run("policy", "show", "--json", _TARGET))["files"]
    return {key: found.get(key) for key in ("ignore", "maxFileSize", "oneFileSystem")}


def _random_pattern(random: Random) -> str:
    """Return a pattern of few characters, with stars in all places."""
    while True:
        pieces = random.choices(("a", "b", "*", "/", "?", "**", "/**/", "[!a]", "[ab]"), k=random.randint(2, 7))
        with suppress(ValueError):
            return check_pattern("".join(pieces).lstrip("/"))


async def test_kopia_leaves_out_what_this_module_says(bed: VolumeBed) -> None:
    """Each random pattern is about a directory of its own."""
    random, out = Random(7), bed.folder / "out"
    for number in range(1, len(_PATTERNS) + 1):
        name = f"q{number:02}"
        bed.write(*(f"{name}/{below}" for below in ("x", "y", "d/x", "d/e/x", ".x")))
        bed.write(*(f"{name}{end}" for end in ("a", "d", "-", "*", "]", "zx", "aax", ".tmp", "é")))
        bed.write(f"sub/{name}", f"sub/x{name}", f"sub/deep/{name}/x", f"sub/deep/x{name}/x", f"sub/{name}.tmp")
    paths = ("a", "b", "aab", "ba/a", "ba/b", "ab/ab/a", "ab/ab/b", "bb/a/a", "bb/ba/ba", "aa/b/aab/b", "aa/abab")
    for number in range(EXAMPLES):
        bed.write(*(f"{number}/{path}" for path in paths))
    patterns = (*_PATTERNS, *(f"/{number}/{_random_pattern(random)}" for number in range(EXAMPLES)))
    exclude = Exclusions(patterns=patterns)
    result = await bed.back_up(exclude=exclude)
    await bed.restore(result.snapshot_id, out)
    every = dict(_walk(bed.volume))
    kept = {path for path, is_dir in every.items() if not exclude.excludes_path(path, is_dir=is_dir)}
    assert {path for path, _ in _walk(out)} == kept
    assert isinstance(result.left_out, LeftOut)
    gone = [is_dir for path, is_dir in every.items() if path not in kept]
    assert (result.left_out.files, result.left_out.directories) == (gone.count(False), gone.count(True))
    assert result.files == sum(not every[path] for path in kept)


async def test_names_that_are_left_out_are_escaped_and_leave_room_for_other_notes(bed: VolumeBed) -> None:
    bed.write(*(f"{number}\n\x1b[31m{'x' * 200}/{'y' * 220}.tmp" for number in range(5)))
    os.mkfifo(bed.volume / "pipe")
    result = await bed.back_up(exclude=Exclusions(patterns=("*.tmp",)))
    assert str(result.note).isprintable()
    assert "left out 1 pipes, devices" in str(result.note)


async def test_what_is_left_out_is_counted_and_named_and_its_rules_are_in_tags(bed: VolumeBed) -> None:
    bed.write("kept", "cache/one", "cache/below/two", "lost+found/x", text="a")
    bed.write("large", text="a" * 5000)
    exclude = Exclusions(patterns=("/cache/", "/lost+found/"), max_bytes=4096, one_file_system=True)
    result = await bed.back_up(exclude=exclude)
    assert isinstance(result.left_out, LeftOut)
    names = ("cache", "cache/below", "cache/below/two", "cache/one", "large", "lost+found", "lost+found/x")
    assert set(result.left_out.names) < set(names)
    found = (result.left_out.files, result.left_out.bytes, result.left_out.directories)
    assert (found, result.left_out.rules, result.files) == ((4, 5003, 3), exclude.digest, 1)
    assert str(result.note).startswith("left out 4 files with 5003 bytes and 3 directories by exclusions (rules ")
    snapshot = await read_snapshot(bed.movers.kopia, result.snapshot_id)
    assert (Exclusions.parse(snapshot.exclude or ""), snapshot.rules) == (exclude, exclude.digest)
    assert _files_policy(bed.kopia) == {"ignore": None, "maxFileSize": None, "oneFileSystem": None}


async def test_what_an_operator_has_set_stays(bed: VolumeBed) -> None:
    bed.write("kept", "a.tmp", "cache/one")
    bed.kopia.run("policy", "set", _TARGET, "--add-ignore=*.tmp", "--max-file-size=9000", "--one-file-system=false")
    before = _files_policy(bed.kopia)
    exclude = Exclusions(patterns=("*.tmp", "cache/"), max_bytes=5000, one_file_system=True)
    result = await bed.back_up(exclude=exclude)
    assert (result.files, _files_policy(bed.kopia)) == (1, before)


async def test_what_a_source_inherits_counts_during_a_backup_and_is_not_its_own_afterward(bed: VolumeBed) -> None:
    bed.write("kept", "a.tmp", "cache/one", "secret/one")
    bed.write("large", text="a" * 6000)
    bed.kopia.run("policy", "set", "--global", "--add-ignore=*.tmp", "--add-ignore=/secret/", "--max-file-size=9000000")
    exclude = Exclusions(patterns=("*.tmp", "/cache/"), max_bytes=5000)
    result = await bed.back_up(exclude=exclude)
    own = json.loads(bed.kopia.run("policy", "export", _TARGET))[_TARGET]["files"]
    assert (result.files, {"ignore", "maxFileSize", "oneFileSystem"} & set(own)) == (1, set())


@pytest.mark.sample("without-plain", "with others-one-open")
@pytest.mark.parametrize("mover", list(MoverMethod), ids=str)
@pytest.mark.parametrize("exclude", [Exclusions(), Exclusions(patterns=("b",))], ids=["without", "with others"])
async def test_what_a_killed_backup_has_left_is_taken_back_before_the_next(
    bed: VolumeBed, exclude: Exclusions, mover: MoverMethod
) -> None:
    bed.write("a", "b")
    await bed.movers.open(partial(asyncio.sleep, 0))
    killed = Exclusions(patterns=("a",), max_bytes=4096, one_file_system=True)
    async with excluding(bed.movers.kopia, _TARGET, killed):
        left = json.loads(bed.kopia.run("policy", "export", _TARGET))
    bed.kopia.run("policy", "set", _TARGET, *(f"--add-ignore={one}" for one in left[_TARGET]["files"]["ignore"]))
    bed.kopia.run("policy", "set", _TARGET, "--max-file-size=4096", "--one-file-system=true")
    result = await bed.back_up(exclude=exclude, mover=mover)
    assert result.files == 2 - bool(exclude)
    assert _files_policy(bed.kopia) == {"ignore": None, "maxFileSize": None, "oneFileSystem": None}


async def test_rules_are_taken_back_after_a_backup_that_fails(bed: VolumeBed) -> None:
    await bed.movers.open(partial(asyncio.sleep, 0))

    async def fail() -> None:
        async with excluding(bed.movers.kopia, _TARGET, Exclusions(patterns=("a",))):
            assert "a" in _files_policy(bed.kopia)["ignore"]
            raise DataPathError

    with pytest.raises(DataPathError):
        await fail()
    assert _files_policy(bed.kopia)["ignore"] is None


@pytest.mark.parametrize("folder", ["cache", ".snapshot"], ids=["counted", "not counted"])
async def test_a_new_rule_makes_no_backup_shrunk_and_lost_files_do(bed: VolumeBed, folder: str) -> None:
    exclude = Exclusions(patterns=(f"/{folder}/",))
    bed.write(*(f"{folder}/{number}" for number in range(200)), *(f"{number}" for number in range(150)))
    results = [await bed.back_up(exclude=rules) for rules in (Exclusions(), exclude)]
    for number in range(140):
        (bed.volume / str(number)).unlink()
    results.append(await bed.back_up(exclude=exclude))
    assert [one.files for one in results] == [350, 150, 10]
    assert [bool(one.shrunk) for one in results] == [False, False, True]


@pytest.mark.parametrize("incremental", [True, False], ids=["incremental", "full"])
async def test_a_restore_in_place_deletes_nothing_that_was_left_out(bed: VolumeBed, incremental: bool) -> None:
    exclude = Exclusions(patterns=("/cache/", "*.tmp"), max_bytes=4096)
    bed.write("file", "deep/file", "cache/old", "way/below")
    result = await bed.back_up(exclude=exclude)
    bed.write("cache/new", "x.tmp", "deep/y.tmp", "extra/z.tmp", "extra/gone", "extra/far/gone", "gone")
    bed.write("large", "deep/large", text="a" * 5000)
    (bed.volume / "way/below").unlink()
    rule = InPlace(incremental=incremental, delete_extra_files=True)
    await bed.restore(result.snapshot_id, bed.volume, in_place=rule)
    kept = {path for path, is_dir in _walk(bed.volume) if not is_dir}
    restored = {"file", "deep/file", "way/below"}
    assert kept == restored | {"cache/old", "cache/new", "x.tmp", "deep/y.tmp", "extra/z.tmp", "large", "deep/large"}
    assert not (bed.volume / "extra/far").exists()


async def test_a_restore_in_place_deletes_nothing_when_rules_that_it_does_not_know_left_something_out(
    bed: VolumeBed,
) -> None:
    """The backup is one of Velero, as far as its policy goes."""
    bed.write("file", "build/x", "cache/x")
    bed.write(".kopiaignore", text="build/\n")
    bed.write("cache/CACHEDIR.TAG", text="Signature: 8a477f597d28d172789f06886806bc55")
    snapshot_id = bed.kopia.snapshot(bed.volume)
    bed.write("extra")
    before = set(_walk(bed.volume))
    with pytest.raises(DataPathError, match="lacks 2 files and directories that its backup left out"):
        await bed.restore(snapshot_id, bed.volume, in_place=InPlace(delete_extra_files=True))
    assert set(_walk(bed.volume)) == before
    await bed.restore(snapshot_id, bed.volume, in_place=InPlace())
    assert set(_walk(bed.volume)) == before


async def test_a_restore_in_place_deletes_nothing_that_a_policy_may_have_left_out_beside_own_rules(
    bed: VolumeBed,
) -> None:
    bed.write("kept", "a.tmp", "a.bak")
    bed.kopia.run("policy", "set", "--global", "--add-ignore=*.bak")
    result = await bed.back_up(exclude=Exclusions(patterns=("*.tmp",)))
    bed.write("extra")
    with pytest.raises(DataPathError, match=r'leave out: what its ignore rules name \("\*.bak"\), and they would be'):
        await bed.restore(result.snapshot_id, bed.volume, in_place=InPlace(delete_extra_files=True))
    assert {path for path, _ in _walk(bed.volume)} == {"kept", "a.tmp", "a.bak", "extra"}


@pytest.fixture
def volume(bed: VolumeBed) -> Path:
    """A volume with rules that leave out 5 of its 9 entries, one of them in a directory that they leave out."""
    bed.write("kept", "a.tmp", "build/made", "deep/kept", "deep/other")
    bed.write(".kopiaignore", text="*.tmp\nbuild\n")
    return bed.write("deep/.kopiaignore", text="*\n!kept\n")


async def _check_whole(bed: VolumeBed) -> None:
    """Check that a backup has the whole volume."""
    result, out = await bed.back_up(), bed.folder / "out"
    await bed.restore(result.snapshot_id, out)
    assert describe_tree(out) == describe_tree(bed.volume)
    assert result.note is UNSET


async def test_files_in_the_volume_leave_out_what_they_name_where_it_is_allowed_and_the_result_says_so(
    bed: VolumeBed, volume: Path
) -> None:
    """Whichever policy was there before: ours, or Velero's, whose backups leave out what the files name."""
    await _check_whole(bed)
    allowed = await bed.back_up(ignore_files=True)
    by_files = "by policies of the repository: what files named .kopiaignore list"
    assert allowed.note == f"left out 5 entries of the volume, {by_files}"
    await _check_whole(bed)
    bed.kopia.run("policy", "delete", _TARGET)
    of_velero = ("--keep-latest=2147483647", "--manual", "--add-dot-ignore=.gitignore")
    bed.kopia.run("policy", "set", _TARGET, *of_velero, "--ignore-identical-snapshots=true")
    await _check_whole(bed)


@pytest.mark.parametrize("first", [True, False], ids=["first backup", "later one"])
async def test_what_an_operator_has_set_stays_and_is_counted_and_named(
    bed: VolumeBed, volume: Path, first: bool
) -> None:
    (volume / "large").write_bytes(b"x" * 20_000)
    if not first:
        await bed.back_up()
    bed.kopia.run("policy", "set", "--global", "--add-ignore=*.tmp", "--add-ignore=b*d", "--max-file-size=10000")
    result = await bed.back_up()
    assert result.note == (
        "left out 4 entries of the volume, by policies of the repository: "
        'what its ignore rules name ("*.tmp", "b*d"), files larger than 10000 bytes'
    )


@pytest.mark.parametrize("rule", ["--add-ignore=other", "--max-file-size=10"])
async def test_rules_for_a_directory_in_the_volume_are_counted(bed: VolumeBed, volume: Path, rule: str) -> None:
    (volume / "deep" / "other").write_text("longer than the others")
    bed.kopia.run("policy", "set", f"{_TARGET}/deep", rule)
    result = await bed.back_up(requested_at=datetime.now(UTC))
    assert result.note == "left out 1 entries of the volume, by policies of the repository for directories in it"


async def test_what_cannot_be_read_is_counted_although_a_new_file_hides_it(
    bed: VolumeBed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def inspect_before(*arguments: Any) -> None:
        inspect_names(*arguments).kept -= 1

    monkeypatch.setattr(backup, "inspect_names", inspect_before)
    # It has a file that no user can read.
    bed.volume.symlink_to("/proc/sys/net/ipv4/route")
    bed.kopia.run("policy", "set", "--global", "--ignore-file-errors=true")
    result = await bed.back_up(in_use=True)
    assert result.note == "left out about 1 entries of the volume, by policies of the repository: what cannot be read"


def test_the_command_line_of_a_pod_may_allow_them_and_have_all_files_read() -> None:
    allowed = MoverArgs(MoverVerb.BACKUP, "data-upload", "b1", volume_path="/v", ignore_files=True, read_all_files=True)
    options = parse_arguments(allowed.argv, {})
    assert isinstance(options, PodOptions)
    assert (options.ignore_files, options.read_all_files) == (True, True)


@pytest.mark.parametrize("exclude", [Exclusions(), Exclusions(patterns=("a.tmp",))], ids=["without", "with others"])
async def test_what_a_killed_restore_in_place_has_left_is_not_backed_up(
    bed: VolumeBed, volume: Path, exclude: Exclusions
) -> None:
    new = volume / ".nodeagent-restore-files" / "new"
    new.mkdir(parents=True)
    (new / "1.kopia-entry").write_text(json.dumps({"name": "1", "type": "d", "obj": f"k{'0' * 32}"}))
    result = await bed.back_up(exclude=exclude)
    assert result.files == 7 - len(exclude.patterns)
    assert isinstance(result.left_out, LeftOut)
    assert ".nodeagent-restore-files/new/1.kopia-entry" in result.left_out.names


@pytest.mark.parametrize("hidden", [False, True], ids=["the stage alone", "beside what unknown rules leave out"])
async def test_extra_files_are_deleted_although_a_stage_was_left_out_but_not_beside_unknown_rules(
    bed: VolumeBed, volume: Path, hidden: bool
) -> None:
    (volume / ".nodeagent-restore-files" / "new").mkdir(parents=True)
    result = await bed.back_up(ignore_files=hidden)
    (volume / "extra").touch()
    rule = InPlace(incremental=True, delete_extra_files=True)
    with pytest.raises(DataPathError, match="that its backup left out by policies") if hidden else nullcontext():
        await bed.restore(result.snapshot_id, volume, in_place=rule)
    assert (volume / "extra").exists() is hidden
    assert (volume / "deep" / "other").exists()
