"""Any content of a volume that kopia keeps is restored."""

import os
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from core.contract import VolumeMode
from datamover.data_path.backup import BackupParameters, back_up
from datamover.data_path.restore import RestoreParameters, restore
from datamover.kopia.repository import Repository
from tests.datamover.support.data_paths import backup_data_path, restore_data_path
from tests.datamover.support.thorough import EXAMPLES, TIMEOUT_SECONDS
from tests.datamover.support.trees import describe_tree

pytestmark = pytest.mark.processes

_ROOT = os.geteuid() == 0
_numbers = count(1)


@dataclass(frozen=True)
class Kept:
    """The metadata of a file or directory."""

    mode: int
    owner: tuple[int, int]
    mtime_ns: int


@dataclass(frozen=True)
class File:
    kept: Kept
    content: bytes
    hole_bytes: int = 0


@dataclass(frozen=True)
class Link:
    target: str
    mtime_us: int


@dataclass(frozen=True)
class Folder:
    kept: Kept
    entries: "Mapping[str, Entry]"


Entry = File | Link | Folder


def _owner() -> SearchStrategy[tuple[int, int]]:
    ids = st.integers(0, 2**31)
    return st.tuples(ids, ids) if _ROOT else st.just((os.getuid(), os.getgid()))


def _kept(always: int) -> SearchStrategy[Kept]:
    """Any mode, except that the owner can read it unless that is root."""
    modes = st.integers(0, 0o7777).map(lambda mode: mode if _ROOT else mode | always)
    return st.builds(Kept, modes, _owner(), st.integers(0, 4_000_000_000_000_000_000))


_TEXT = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=60)
_IGNORE_FILE = ".kopiaignore"
"""kopia takes its lines as rules for what it leaves out, unless the source's policy tells it otherwise."""
_NAMES = st.just(_IGNORE_FILE) | _TEXT.filter(
    lambda name: name not in {".", ".."} and not name.endswith(".kopia-entry")
)
_CONTENTS = st.sampled_from([b"*", b"*\n!a\n", b"[0-9a-z]*"]) | st.binary(max_size=2000)
_FILES = st.builds(File, _kept(0o600), _CONTENTS, st.sampled_from([0, 0, 0, 4096, 100_000, 3_000_000]))
_LINKS = st.builds(Link, _TEXT | st.just("../a/b"), st.integers(0, 4_000_000_000_000_000))


def _folders(entries: SearchStrategy[Entry]) -> SearchStrategy[Entry]:
    return st.builds(Folder, _kept(0o700), st.dictionaries(_NAMES, entries, max_size=6))


_ENTRIES: SearchStrategy[Entry] = st.recursive(_FILES | _LINKS, _folders, max_leaves=15)


def _keep(path: Path, kept: Kept) -> None:
    os.chown(path, *kept.owner)
    path.chmod(kept.mode)
    os.utime(path, ns=(kept.mtime_ns, kept.mtime_ns))


def _create(path: Path, entry: Entry) -> None:
    match entry:
        case File(kept, content, hole_bytes):
            path.write_bytes(content)
            os.truncate(path, len(content) + hole_bytes)
            _keep(path, kept)
        case Link(target, mtime_us):
            path.symlink_to(target)
            os.utime(path, ns=(mtime_us * 1000, mtime_us * 1000), follow_symlinks=False)
        case Folder(kept, entries):
            path.mkdir()
            for name, one in entries.items():
                _create(path / name, one)
            _keep(path, kept)


@pytest.mark.timeout(TIMEOUT_SECONDS)
@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(kept=_kept(0o700), entries=st.dictionaries(_NAMES, _ENTRIES, max_size=6), sparse=st.booleans())
async def test_any_tree_is_restored(
    mover_repository: Repository, tmp_path: Path, kept: Kept, entries: Mapping[str, Entry], sparse: bool
) -> None:
    here = tmp_path / str(next(_numbers))
    volume, target = here / "volume", here / "target"
    target.mkdir(parents=True)
    _create(volume, Folder(kept, entries))

    async def unheard(message: str) -> None:
        pytest.fail(message)

    request = BackupParameters(volume, VolumeMode.FILESYSTEM, f"any/{here.name}", parallel=2)
    backup = await back_up(mover_repository, request, backup_data_path(unheard))
    wanted = RestoreParameters(backup.snapshot_id, target, VolumeMode.FILESYSTEM, workers=2, sparse=sparse)
    await restore(mover_repository, wanted, restore_data_path())
    assert describe_tree(target) == describe_tree(volume)
    assert backup.empty_snapshot is (not entries)
    assert backup.total_bytes == sum(
        path.lstat().st_size for path in volume.rglob("*") if stat.S_ISREG(path.lstat().st_mode)
    )
    shutil.rmtree(here)
