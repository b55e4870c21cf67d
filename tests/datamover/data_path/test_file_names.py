"""Names that are not UTF-8, and times far away: kopia changes them, and the mover reports that."""

import asyncio
import os
import socket
import threading
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from core.errors import DataPathError, KopiaError
from core.models.transfer_settings import Exclusions
from datamover.data_path.file_names import NameReport, inspect_names, mangle
from datamover.kopia.process import Kopia
from datamover.kopia.repository import Repository
from datamover.local.command import LocalMover
from datamover.runtime.cancellation import ShouldStop, run_in_background
from tests.datamover.support.data_paths import back_up_volume, backup_data_path
from tests.datamover.support.mounts import mounted, mounted_folding
from tests.datamover.support.plainkopia import PlainKopia
from tests.datamover.support.pods import MoverPod
from tests.support.tasks import interrupt

pytestmark = pytest.mark.processes


def _go_on() -> bool:
    return False


def _fill(root: Path, *names: bytes) -> Path:
    """Create a file for each path; its content is the path."""
    for name in names:
        path = root / os.fsdecode(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name)
    return root


async def test_names_are_mangled_as_by_kopia(local_mover: LocalMover, tmp_path: Path) -> None:
    names = [b"\xff", b"a\xe2\x82b", b"\xed\xa0\x80", b"\xc0\xaf", b"\xf0\x9f\x98", b"\xef\xbf\xbd"]
    names.append("größe ☃ 😀".encode())
    volume = _fill(tmp_path / "volume", *(b"%d/%s" % (number, name) for number, name in enumerate(names)))
    backup = await local_mover.back_up(volume, "", None)
    await local_mover.restore(backup.snapshot_id, tmp_path / "out", None)
    for number, name in enumerate(names):
        assert [path.name for path in (tmp_path / "out" / str(number)).iterdir()] == [mangle(name)]


@pytest.mark.sample("one is valid")
@pytest.mark.parametrize(
    "names",
    [(b"x/\xff", b"x/\xfe"), (b"x/\xff", b"x/\xef\xbf\xbd"), (b"x/a\xe2\x82", b"x/a\xff\xff")],
    ids=["both", "one is valid", "as many bytes"],
)
async def test_names_that_become_the_same_fail_the_backup_and_leave_no_snapshot(
    names: tuple[bytes, bytes], local_mover: LocalMover, tmp_path: Path, kopia: PlainKopia
) -> None:
    volume = _fill(tmp_path / "volume", *names, b"other/\xff")
    with pytest.raises(DataPathError, match="1 names would be lost") as failed:
        await local_mover.back_up(volume, "", None)
    assert all(name.decode(errors="backslashreplace") in str(failed.value) for name in names)
    assert kopia.snapshots() == []


_LONG = ("имя" * 40).encode("cp1251")
"""120 bytes, which kopia keeps as 360."""


async def test_names_that_become_too_long_fail_the_backup(
    local_mover: LocalMover, tmp_path: Path, kopia: PlainKopia
) -> None:
    volume = _fill(tmp_path / "volume", b"dir/" + _LONG, *(b"x%d" % number + _LONG for number in range(4)))
    with pytest.raises(DataPathError, match=r"^5 names would be too long to restore: .*255 bytes") as failed:
        await local_mover.back_up(volume, "", None)
    paths = str(failed.value).partition("Rename them: ")[2].split("; ")
    assert len(paths) == 3
    shown = _LONG.decode(errors="backslashreplace")
    assert set(paths) <= {f"dir/{shown}", *(f"x{number}{shown}" for number in range(4))}
    assert kopia.snapshots() == []


_DEEP = b"/".join([b"\xe9" * 85] * 15)
"""A path of 3839 bytes as kopia keeps it."""


@pytest.mark.parametrize(
    ("path", "too_long"),
    [
        (b"\xe9" * 85, 0),
        (b"\xe9" * 85 + b"a", 1),
        ("я".encode() * 127 + b"a", 0),
        (_DEEP + b"/a" + b"\xe9" * 72, 0),
        (_DEEP + b"/aa" + b"\xe9" * 72, 1),
        (_DEEP + b"/" + b"\xe9" * 84 + b"/plain", 2),
    ],
    ids=["255", "256", "255 of UTF-8", "path of 4057", "path of 4058", "and all below"],
)
def test_a_name_may_have_255_bytes_and_a_path_4057_in_kopia(tmp_path: Path, path: bytes, too_long: int) -> None:
    (tmp_path / os.fsdecode(path)).mkdir(parents=True)
    report = inspect_names(tmp_path, _go_on)
    assert report.too_long.count == too_long
    assert all(len(shown) <= 1001 for shown in report.too_long.examples)


def _touch(path: Path, at_ns: int) -> None:
    os.utime(path, ns=(at_ns, at_ns), follow_symlinks=False)


def test_times_outside_of_64_bits_are_counted_and_named() -> None:
    times = {"first": -(2**63), "last": 2**63 - 1, "zero": 0, "old": -(2**63) - 1, "dir/new": 2**63}
    # A tmpfs keeps any time.
    with TemporaryDirectory(dir="/dev/shm") as folder:
        volume = _fill(Path(folder), *(name.encode() for name in times))
        # kopia rounds the time of a link up to a microsecond.
        links = {"link": 2**63 - 1, "last link": 2**63 - 1000}
        for name in links:
            (volume / name).symlink_to("nowhere")
        for name, at_ns in {**times, **links}.items():
            _touch(volume / name, at_ns)
        report = inspect_names(volume, _go_on)
    assert (report.far_times.count, sorted(report.far_times.examples)) == (3, ["dir/new", "link", "old"])


async def test_a_failed_deletion_hides_no_names(
    local_mover: LocalMover, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_: Kopia, snapshot_id: str) -> None:
        raise KopiaError(f"delete incomplete snapshot {snapshot_id}: the disk is full")

    monkeypatch.setattr("datamover.data_path.backup.delete_snapshot", fail)
    with pytest.raises(DataPathError, match=r"^1 names would be lost: .*\\xff.*; delete incomplete snapshot \w+: "):
        await local_mover.back_up(_fill(tmp_path / "volume", b"x/\xff", b"x/\xfe"), "", None)


def test_the_same_name_in_two_directories_and_skipped_entries_do_not_collide(tmp_path: Path) -> None:
    volume = _fill(tmp_path / "v", b"a/\xff", b"b/\xfe")
    with socket.socket(socket.AF_UNIX) as here:
        here.bind(os.fsencode(volume) + b"/a/\xfd")
    for name in (b"/b/\xfd", b"/" + _LONG):
        os.mkfifo(os.fsencode(volume) + name)
    report = inspect_names(volume, _go_on)
    assert (report.mangled.count, report.collisions.count, report.too_long.count) == (2, 0, 0)
    report.check()


def test_directories_and_links_collide_too_and_all_are_counted(tmp_path: Path) -> None:
    volume = _fill(tmp_path / "v", b"a/\xff/file", *(b"b/%c" % byte for byte in range(0x80, 0xC0)), _LONG)
    (volume / "a" / os.fsdecode(b"\xfe")).symlink_to("nowhere")
    report = inspect_names(volume, _go_on)
    assert (report.mangled.count, report.collisions.count) == (67, 64)
    assert (len(report.mangled.examples), len(report.collisions.examples)) == (3, 3)
    with pytest.raises(DataPathError, match=r"^64 names would be lost: .*\. 1 names would be too long"):
        report.check()


def test_the_walk_can_be_stopped_and_skips_deleted_entries(tmp_path: Path) -> None:
    volume = _fill(tmp_path / "v", b"\x1b[31m\xff")
    assert r"for example in \x1b[31m\xff" in (inspect_names(volume, _go_on).warning or "")
    assert inspect_names(volume, lambda: True).mangled.count == 0
    for exclude in (None, Exclusions(patterns=("*.tmp",))):
        report = inspect_names(tmp_path / "gone", _go_on, exclude=exclude)
        assert (report.mangled.count, report.complete) == (0, False)


async def test_what_the_volume_lists_and_does_not_find_is_named(mover_repository: Repository, tmp_path: Path) -> None:
    with mounted_folding(tmp_path / "volume", "end") as volume:
        _fill(tmp_path / "volume-kept", b"d/f", b"d/g.", b"h./i")
        result = await back_up_volume(mover_repository, volume)
    assert result.note in {
        f"left out 2 entries that the volume lists and does not find, for example {' '.join(names)}"
        for names in (("d/g.,", "h."), ("h.,", "d/g."))
    }


async def test_a_transfer_records_its_warnings_as_events(pod: MoverPod, tmp_path: Path) -> None:
    volume = _fill(tmp_path / "volume", b"\xff", b"dir/\xfe")
    _touch(volume / "dir" / os.fsdecode(b"\xfe"), 2**63)
    result = await pod.transfer("DataUpload", volume, dataMoverConfig={"Speed": "high", "Colour": "red"})
    warned = [message for reason, message in pod.events() if reason == "Data-Path-Warning"]
    assert warned[0] == "ignored settings: Colour (unknown), Speed (unknown)"
    assert warned[1].startswith("2 names are not UTF-8: ")
    assert r"dir/\xfe" in warned[1]
    assert warned[2].startswith("1 modification times are before 1677-09-21 or after 2262-04-11")
    assert len(warned) == 3
    assert result["totalBytes"] == 6
    assert result["note"] == warned[2]


async def test_background_work_is_stopped_or_abandoned_and_its_error_is_raised() -> None:
    hang, ended, loop = threading.Event(), threading.Event(), asyncio.get_running_loop()
    began = loop.time()
    async with run_in_background(lambda _: hang.wait(30), name="hangs"):
        pass
    assert loop.time() - began < 2
    hang.set()

    def until_stopped(stop: ShouldStop) -> None:
        while not stop():
            ended.wait(0.001)
        ended.set()

    async with run_in_background(until_stopped, name="stopped"):
        pass
    assert ended.is_set()

    def fail(_: ShouldStop) -> None:
        raise DataPathError("from the thread")

    with pytest.raises(DataPathError, match="from the thread"):
        async with run_in_background(fail, name="fails") as failing:
            await failing


async def test_a_late_cancel_leaves_no_snapshot(
    mover_repository: Repository, tmp_path: Path, kopia: PlainKopia
) -> None:
    warned, never = asyncio.Event(), asyncio.Event()

    async def warn(_: str) -> None:
        warned.set()
        await never.wait()

    volume = _fill(tmp_path / "volume", b"\xff")
    await interrupt(back_up_volume(mover_repository, volume, backup_data_path(warn)), warned.wait())
    assert kopia.snapshots() == []


def test_many_names_that_kopia_changes_are_compared_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 0

    class Counting(NameReport):
        def add(self, directory: bytes, names: list[bytes]) -> None:
            nonlocal most
            most = max(most, len(names))
            super().add(directory, names)

    monkeypatch.setattr("datamover.data_path.file_names._COMPARED_NAMES", 100)
    names = [b"x/%d\xff" % number for number in range(1000)]
    volume = _fill(tmp_path / "v", *names, *(name[:-1] + b"\xfe" for name in names[:300]), b"x/plain")
    os.mkfifo(os.fsencode(volume) + b"/x/\xfd")
    report = inspect_names(volume, _go_on, Counting())
    assert (report.mangled.count, report.collisions.count, len(report.collisions.examples)) == (1300, 300, 3)
    assert 100 <= most < 200


@pytest.mark.parametrize(
    "exclude",
    [Exclusions(patterns=("/.snapshot/", "/cache/")), Exclusions(patterns=("/.snapshot/",), one_file_system=True)],
    ids=["patterns", "other file systems"],
)
def test_excluded_mounts_and_snapshots_are_counted_and_not_read(tmp_path: Path, exclude: Exclusions) -> None:
    _fill(tmp_path, b"kept", b".snapshot/old/kept", b"dir/.snapshot/kept", b"cache/one")
    with mounted(tmp_path / "cache/other", "size=1m") as other:
        (other / "below").mkdir()
        report = inspect_names(tmp_path, _go_on, exclude=exclude)
    assert report.excluded is not None
    # `cache` is left out by a pattern in one case only, and then counted with what is in it.
    by_pattern = "/cache/" in exclude.patterns
    excluded = (report.excluded.directories, report.excluded.files, report.uncounted)
    assert excluded == ((3, 1, 2) if by_pattern else (2, 0, 2))
    assert report.complete
