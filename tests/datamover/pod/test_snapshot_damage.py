"""A matrix of damage: what a verification by reading back, and one by comparison with a restored volume, say of it.

Each row names what is found in which snapshot. All others pass.
"""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from core.contract import VolumeMode
from core.models.names import REPO_CREDENTIALS_KEY, REPO_CREDENTIALS_SECRET
from core.models.verification import VERIFIED_LINE, VerificationOutcome, VerifiedSnapshot
from core.mover_specs import VerifySnapshots
from datamover.pod.storage_commands import run_storage_command
from tests.datamover.support.damage import Blobs, StoredSnapshots, flip, swap
from tests.datamover.support.plainkopia import PlainKopia
from tests.datamover.support.pods import REPOSITORY, MoverPod
from tests.support.fakekube import FakeKube

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

_ALL: Final = ("one", "two", "device")


@dataclass(frozen=True)
class _Row:
    """A damage, and beginnings of what is found: by the names of the snapshots, each fault once.

    With `cause`, it is the same in all of them.
    """

    apply: Callable[[StoredSnapshots, Blobs], object]
    found: Mapping[str, set[str]]
    cause: str = ""


_ONE: Final = {"empty: ", "link: ", "own: ", "shared: "}
_OF_ONE: Final = {"one": _ONE, "two": {"shared: "}}
"""What depends on the blob with the files of the first snapshot."""

_Damage = Callable[[StoredSnapshots, Blobs], object]
_CHECKSUM: Final = "invalid checksum at p"
_UNLOADED: Final = "unable to load manifest contents"
_DAMAGED: Final = "a repository file is damaged"
_ROWS = {
    "nothing": _Row(lambda _stored, _blobs: None, {}),
    "flipped bit of a file": _Row(lambda stored, blobs: stored.flip(blobs, "one/own"), {"one": {"own: "}}, _CHECKSUM),
    "flipped bit of a file of two": _Row(
        lambda stored, blobs: stored.flip(blobs, "one/shared"), {"one": {"shared: "}, "two": {"shared: "}}, _CHECKSUM
    ),
    "flipped bit of a directory": _Row(lambda stored, blobs: stored.flip(blobs, "one"), {"one": {"/: "}}),
    "missing files": _Row(
        lambda stored, blobs: blobs.pop(stored.pack("one/own")), _OF_ONE, "is backed by missing blob p"
    ),
    "truncated files": _Row(lambda stored, blobs: _cut(blobs, stored.pack("one/own"), 30), _OF_ONE),
    "empty blob of files": _Row(lambda stored, blobs: _cut(blobs, stored.pack("one/own"), 0), _OF_ONE),
    "swapped files": _Row(
        lambda stored, blobs: swap(blobs, stored.pack("one/own"), stored.pack("two/other")),
        {"one": _ONE, "two": {"other: ", "shared: "}},
    ),
    "lost index": _Row(
        lambda stored, blobs: blobs.pop(stored.indexes["one"]), {"one": {"snapshot "}, "two": {"shared: "}}
    ),
}
_OF_ALL: Final[dict[str, tuple[_Damage, str]]] = {
    "missing directories": (lambda stored, blobs: blobs.pop(stored.pack("one")), "a repository file is missing"),
    "truncated directories": (lambda stored, blobs: _cut(blobs, stored.pack("one"), 30), _UNLOADED),
    "swapped directories": (lambda stored, blobs: swap(blobs, stored.pack("one"), stored.pack("two")), _UNLOADED),
    "lost indexes": (
        lambda _, blobs: [blobs.pop(one) for one in [*blobs] if one.startswith("x")],
        "it is not in the repository",
    ),
    "flipped bit of an index": (lambda stored, blobs: flip(blobs, stored.indexes["one"], 100), _DAMAGED),
    "swapped indexes": (lambda stored, blobs: swap(blobs, stored.indexes["one"], stored.indexes["two"]), _DAMAGED),
    "truncated format": (
        lambda _, blobs: _cut(blobs, "kopia.repository", 30),
        "the repository's format file is damaged",
    ),
    "flipped bit of the storage's format": (lambda _, blobs: flip(blobs, "kopia.blobcfg", 5), _DAMAGED),
    "lost repository": (lambda _, blobs: blobs.clear(), "no repository found"),
}
_ROWS |= {name: _Row(apply, {one: {""} for one in _ALL}, cause) for name, (apply, cause) in _OF_ALL.items()}


def _cut(blobs: Blobs, blob: str, size: int) -> None:
    blobs[blob] = blobs[blob][:size]


@pytest.fixture(scope="module")
def stored(_new_repository: Path, kopia_program: Path, tmp_path_factory: pytest.TempPathFactory) -> StoredSnapshots:
    root = tmp_path_factory.mktemp("stored")
    repository = Path(shutil.copytree(_new_repository, root / "repository"))
    kopia = PlainKopia(kopia_program, root)
    kopia.connect(repository)
    return StoredSnapshots.make(kopia, repository, root / "volumes")


@dataclass
class Bed:
    """A pod whose repository is made of these blobs."""

    pod: MoverPod
    stored: StoredSnapshots
    blobs: Blobs
    capture: pytest.CaptureFixture[str]

    async def read_back(self, *names: str) -> dict[str, VerifiedSnapshot]:
        """Return what is found in snapshots by reading them back."""
        return await self._run(names, partial(VerifySnapshots, backup_repository=REPOSITORY))

    async def compare(self, name: str) -> dict[str, VerifiedSnapshot]:
        """Return what is found in a snapshot that was restored well, when it is compared with the volume."""
        volume = self.stored.folder / name
        mode = VolumeMode.FILESYSTEM if volume.is_dir() else VolumeMode.BLOCK
        spec = partial(VerifySnapshots, backup_repository=REPOSITORY, volume_path=str(volume), volume_mode=mode)
        return await self._run((name,), spec)

    async def _run(self, names: tuple[str, ...], spec: Callable[..., VerifySnapshots]) -> dict[str, VerifiedSnapshot]:
        self.stored.write(self.blobs, self.pod.repository)
        ids = {self.stored.ids[name]: name for name in names}
        assert await run_storage_command(spec(snapshots=tuple(ids)), self.pod.context) == 0, self.pod.message
        return {ids[one.id]: one for one in VERIFIED_LINE.find(self.capture.readouterr().out)}


@pytest.fixture
def bed(stored: StoredSnapshots, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Bed:
    pod = MoverPod(FakeKube(), tmp_path)
    pod.put_repository(phase="Ready")
    pod.repository.mkdir(parents=True)
    return Bed(pod, stored, dict(stored.blobs), capsys)


def _check(row: _Row, results: Mapping[str, VerifiedSnapshot]) -> None:
    for name, result in results.items():
        begins = row.found.get(name, set())
        wanted = VerificationOutcome.FAILED if begins else VerificationOutcome.PASSED
        assert (name, result.outcome, result.fault_count) == (name, wanted, len(begins)), result.faults
        assert len(result.faults) == len(begins)
        for begin in begins:
            assert any(one.startswith(begin) and row.cause in one for one in result.faults), result.faults


@pytest.mark.sample("swapped files", "missing directories", "lost index", "flipped bit of an index", "lost repository")
@pytest.mark.parametrize("row", _ROWS.values(), ids=_ROWS)
async def test_reading_back_names_what_is_damaged_and_nothing_else(bed: Bed, row: _Row) -> None:
    row.apply(bed.stored, bed.blobs)
    _check(row, await bed.read_back(*_ALL))


@pytest.mark.sample("flipped bit of a file")
@pytest.mark.parametrize("row", _ROWS.values(), ids=_ROWS)
async def test_a_comparison_names_what_is_damaged_and_nothing_else(bed: Bed, row: _Row) -> None:
    row.apply(bed.stored, bed.blobs)
    for name in _ALL:
        _check(row, await bed.compare(name))


async def test_a_wrong_password_is_no_verification(bed: Bed) -> None:
    bed.pod.put_secret(REPO_CREDENTIALS_SECRET, REPO_CREDENTIALS_KEY, "another")
    found = await bed.read_back("one", "two")
    assert [one.outcome for one in found.values()] == [None, None]
    assert "the repository password does not match" in found["one"].faults[0]
    assert "another" not in found["one"].faults[0]
