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


def _everywhere(apply: Callable[[StoredSnapshots, Blobs], object], cause: str) -> _Row:
    return _Row(apply, {name: {""} for name in _ALL}, cause)


_ONE: Final = {"empty: ", "link: ", "own: ", "shared: "}
_OF_ONE: Final = {"one": _ONE, "two": {"shared: "}}
"""What depends on the blob with the files of the first snapshot."""

_ROWS: Final = {
    "nothing": _Row(lambda _stored, _blobs: None, {}),
    "flipped bit of a file": _Row(
        lambda stored, blobs: stored.flip(blobs, "one/own"), {"one": {"own: "}}, "invalid checksum at p"
    ),
    "flipped bit of a file of two": _Row(
        lambda stored, blobs: stored.flip(blobs, "one/shared"),
        {"one": {"shared: "}, "two": {"shared: "}},
        "invalid checksum at p",
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
    "missing directories": _everywhere(
        lambda stored, blobs: blobs.pop(stored.pack("one")), "a repository file is missing"
    ),
    "truncated directories": _everywhere(
        lambda stored, blobs: _cut(blobs, stored.pack("one"), 30), "unable to load manifest contents"
    ),
    "swapped directories": _everywhere(
        lambda stored, blobs: swap(blobs, stored.pack("one"), stored.pack("two")), "unable to load manifest contents"
    ),
    "lost index": _Row(
        lambda stored, blobs: blobs.pop(stored.indexes["one"]),
        {"one": {"snapshot "}, "two": {"shared: "}},
    ),
    "lost indexes": _everywhere(
        lambda _, blobs: [blobs.pop(one) for one in [*blobs] if one.startswith("x")], "it is not in the repository"
    ),
    "flipped bit of an index": _everywhere(
        lambda stored, blobs: flip(blobs, stored.indexes["one"], 100), "a repository file is damaged"
    ),
    "swapped indexes": _everywhere(
        lambda stored, blobs: swap(blobs, stored.indexes["one"], stored.indexes["two"]), "a repository file is damaged"
    ),
    "truncated format": _everywhere(
        lambda _, blobs: _cut(blobs, "kopia.repository", 30), "the repository's format file is damaged"
    ),
    "flipped bit of the storage's format": _everywhere(
        lambda _, blobs: flip(blobs, "kopia.blobcfg", 5), "a repository file is damaged"
    ),
    "lost repository": _everywhere(lambda _, blobs: blobs.clear(), "no repository found"),
}


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
        lines = map(VERIFIED_LINE.parse, self.capture.readouterr().out.splitlines())
        return {ids[one.id]: one for one in lines if one is not None}


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
            (fault,) = [one for one in result.faults if one.startswith(begin)]
            assert row.cause in fault


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
