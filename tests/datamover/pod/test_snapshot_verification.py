"""Snapshots are read back with a real kopia: what passes, how faults are named, what cannot be verified."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from core.contract import VolumeMode, parse_result
from core.models.verification import VERIFIED_LINE, SnapshotVerification, VerificationOutcome, VerifiedSnapshot
from core.mover_specs import VerifySnapshots
from datamover.pod.storage_commands import run_storage_command
from tests.datamover.support.plainkopia import PlainKopia
from tests.datamover.support.pods import REPOSITORY, MoverPod
from tests.datamover.support.trees import make_tree

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

_SOURCE: Final = "snapshot-data-upload-download/kopia/app/data"
_PASSED, _FAILED = VerificationOutcome.PASSED, VerificationOutcome.FAILED


@dataclass(frozen=True)
class Stored:
    """A repository with a snapshot of the directory `data`, and one of the device of that content."""

    repository: Path
    data: Path
    snapshot: str
    content: bytes
    device: str


@pytest.fixture(scope="module")
def stored(_new_repository: Path, kopia_program: Path, tmp_path_factory: pytest.TempPathFactory) -> Stored:
    """Two files in packs of different blobs, and a link."""
    root = tmp_path_factory.mktemp("stored")
    folder, device = root / "data", root / "device"
    (folder / "sub").mkdir(parents=True)
    for name in ("first", "second"):
        (folder / "sub" / name).write_bytes(os.urandom(200_000))
        (folder / "sub" / name).chmod(0o644)
    (folder / "link").symlink_to("sub")
    os.utime(folder / "sub" / "second", (1000, 1000))
    os.utime(folder / "link", (folder / "sub").stat()[7:9], follow_symlinks=False)
    device.write_bytes(os.urandom(300_000))
    repository = Path(shutil.copytree(_new_repository, root / "repository"))
    kopia = PlainKopia(kopia_program, root)
    kopia.connect(repository)
    snapshot = kopia.snapshot(folder, source=_SOURCE)
    with device.open("rb") as content:
        of_device = kopia.snapshot(device, "--stdin-file=device", source=_SOURCE, stdin=content)
    return Stored(repository, folder, snapshot, device.read_bytes(), of_device)


@dataclass
class Bed:
    """A pod whose repository is a copy of the stored one, in a directory."""

    pod: MoverPod
    kopia: PlainKopia
    stored: Stored
    capture: pytest.CaptureFixture[str]

    def snapshot(self, path: Path) -> str:
        self.kopia.connect(self.pod.repository)
        return self.kopia.snapshot(path, source=_SOURCE)

    def pack(self) -> Path:
        """Return the file of the repository with the content of files."""
        return max((self.pod.repository / "p").rglob("*.f"), key=lambda path: path.stat().st_size)

    async def run(
        self, *snapshots: str, percent: float = 100.0, volume: Path | None = None, block: bool = False
    ) -> list[VerifiedSnapshot]:
        spec = VerifySnapshots(
            backup_repository=REPOSITORY,
            snapshots=snapshots,
            percent=percent,
            volume_path=str(volume) if volume else None,
            volume_mode=VolumeMode.BLOCK if block else VolumeMode.FILESYSTEM,
        )
        assert await run_storage_command(spec, self.pod.context) == 0, self.pod.message
        assert parse_result(SnapshotVerification, self.pod.message).snapshots == len(snapshots)
        return VERIFIED_LINE.find(self.capture.readouterr().out)


@pytest.fixture
def bed(stored: Stored, kopia_program: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Bed:
    return Bed(MoverPod.ready(stored.repository, tmp_path), PlainKopia(kopia_program, tmp_path), stored, capsys)


async def test_a_share_of_the_files_is_read_but_all_where_it_is_less_than_one(bed: Bed, tmp_path: Path) -> None:
    (folder := tmp_path / "many").mkdir()
    for number in range(200):
        (folder / f"file-{number}").write_bytes(os.urandom(100))
    (found,) = await bed.run(bed.snapshot(folder), percent=25)
    assert (found.outcome, found.percent) == (_PASSED, 25.0)
    assert 10 < found.files < 100
    (found,) = await bed.run(bed.stored.device, percent=1)
    assert (found.outcome, found.percent, found.files, found.bytes) == (_PASSED, 100.0, 1, 300_000)


async def test_a_missing_blob_is_named_even_if_no_file_of_it_is_read(bed: Bed) -> None:
    bed.pack().unlink()
    (found,) = await bed.run(bed.stored.snapshot, percent=30)
    assert found.outcome is _FAILED
    assert len(found.faults) == 3
    assert all("is backed by missing blob p" in fault for fault in found.faults)
    assert {fault.partition(":")[0] for fault in found.faults} <= {"link", "sub/first", "sub/second"}


async def test_names_of_files_neither_forge_a_cause_nor_control_a_terminal(bed: Bed, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "connection refused: \x1b[2J").write_bytes(os.urandom(100_000))
    (folder / "failed to open repository\nerror: access denied").write_bytes(os.urandom(100_000))
    snapshot = bed.snapshot(folder)
    for pack in (bed.pod.repository / "p").rglob("*.f"):
        pack.unlink()
    (found,) = await bed.run(snapshot)
    assert (found.outcome, found.fault_count) == (_FAILED, 2)
    shown = " ".join(found.faults)
    assert "connection refused: \\x1b[2J: object " in shown
    assert "…error: access denied: object " in shown
    assert shown.isprintable()


def _make_tree(root: Path) -> None:
    """Create what a volume may contain, also two names of a file, and two files with the same content."""
    make_tree(root)
    (root / "same").hardlink_to(root / "a" / "b" / "c" / "file 1")
    shutil.copy(root / "sparse", root / "sparse too")


def _make_with_exclusions(root: Path) -> None:
    make_tree(root)
    (root / "a" / "x.tmp").write_text("left out")
    (root / "cache" / "below").mkdir()


@pytest.mark.parametrize("make", [_make_tree, Path.mkdir, _make_with_exclusions], ids=["all", "empty", "exclusions"])
async def test_nothing_is_found_where_all_is_right(bed: Bed, tmp_path: Path, make: Callable[[Path], None]) -> None:
    """The restored one has more than the snapshot."""
    make(tree := tmp_path / "tree")
    bed.kopia.connect(bed.pod.repository)
    if make is _make_with_exclusions:
        rules = ("--add-ignore=*.tmp", "--add-ignore=/cache/")
        bed.kopia.run("policy", "set", f"default@default:{_SOURCE}", *rules)
    snapshot, restored = bed.snapshot(tree), tmp_path / "restored"
    bed.kopia.run("restore", snapshot, str(restored))
    files = [path for path in restored.rglob("*") if path.is_file() or path.is_symlink()]
    (restored / "lost+found").mkdir()
    (restored / "x.tmp").write_text("left out")
    for volume in (None, restored):
        (found,) = await bed.run(snapshot, volume=volume)
        assert (found.id, found.outcome, found.faults, found.percent) == (snapshot, _PASSED, [], 100.0)
    assert found.files == len(files)
    assert found.bytes == sum(path.stat().st_size for path in files if not path.is_symlink())


def _change(root: Path) -> None:
    """Change a byte, a mode and owners."""
    os.chown(root, 7, 0)
    first = root / "sub" / "first"
    times, content = first.stat(), first.read_bytes()
    first.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    os.utime(first, ns=(times.st_atime_ns, times.st_mtime_ns))
    (root / "sub" / "second").chmod(0o600)
    os.chown(root / "sub", 7, 8)
    (root / "link").unlink()
    (root / "link").symlink_to("/x\x1b")
    os.utime(root / "link", (root / "sub").stat()[7:9], follow_symlinks=False)


def _shorten(root: Path) -> None:
    """Change a size and a time, and remove a link."""
    os.truncate(root / "sub" / "first", 5)
    os.utime(root / "sub" / "second", (1, 1))
    (root / "link").unlink()


def _replace(root: Path) -> None:
    """Put a link in the place of a directory."""
    root.chmod(0o711)
    (root / "sub").rename(root / "else")
    (root / "sub").symlink_to("else")


_GONE: Final = "cannot be read in the restored volume"


@pytest.mark.parametrize(
    ("change", "faults"),
    [
        (
            _change,
            {
                "sub/first: its content differs within the 200000 bytes from byte 0 on",
                "sub/second: its mode is 600 instead of 644",
                "sub: its owner is 7:8 instead of 0:0",
                "/: its owner is 7:0 instead of 0:0",
                "link: links to /x\\x1b instead of 'sub'",
            },
        ),
        (
            _shorten,
            {
                "sub/first: it has 5 bytes instead of 200000",
                "sub/second: its time is 1 instead of 1000 (seconds since 1970)",
                f"link: {_GONE}: No such file or directory",
            },
        ),
        (
            _replace,
            {
                "/: its mode is 711 instead of 755",
                "sub: it is of another type",
                *(f"sub/{name}: {_GONE}: Not a directory" for name in ("first", "second")),
            },
        ),
    ],
)
async def test_differences_are_named(
    bed: Bed, tmp_path: Path, change: Callable[[Path], None], faults: set[str]
) -> None:
    restored = Path(shutil.copytree(bed.stored.data, tmp_path / "restored", symlinks=True))
    change(restored)
    (found,) = await bed.run(bed.stored.snapshot, volume=restored)
    assert (found.outcome, found.fault_count) == (_FAILED, len(faults))
    assert set(found.faults) == faults
    (found,) = await bed.run(bed.stored.snapshot, volume=tmp_path / "none")
    assert (found.outcome, found.percent) == (None, 100.0)
    assert found.faults[0].startswith("cannot open the restored volume ")


@pytest.mark.parametrize(("at", "outcome"), [(299_999, _FAILED), (300_000, _PASSED)], ids=["data", "rest"])
async def test_the_bytes_of_a_device_compare(bed: Bed, tmp_path: Path, at: int, outcome: VerificationOutcome) -> None:
    device, content = tmp_path / "device", bytearray(bed.stored.content + bytes(1000))
    content[at] ^= 1
    device.write_bytes(content)
    (found,) = await bed.run(bed.stored.device, volume=device, block=True)
    assert (found.outcome, found.files) == (outcome, 1)
