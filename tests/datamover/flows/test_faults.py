"""Faults of storage and volumes: a clear error for each."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from core.errors import DataPathError, KopiaError
from datamover.local.command import LocalMover
from tests.datamover.conftest import build_local_mover
from tests.datamover.support.mounts import mounted
from tests.datamover.support.plainkopia import PASSWORD
from tests.datamover.support.trees import make_large_file

pytestmark = pytest.mark.processes


async def test_a_full_disk_fails_the_restore_and_names_the_file(local_mover: LocalMover, tmp_path: Path) -> None:
    file = make_large_file(tmp_path / "volume" / "file of 20 MiB", 20)
    backup = await local_mover.back_up(file.parent, "", None)
    with (
        mounted(tmp_path / "small", "size=5m") as target,
        pytest.raises(
            KopiaError,
            match=rf"^restore snapshot {backup.snapshot_id} to {target}: the disk is full\n(.*\n)*.*file of 20 MiB",
        ),
    ):
        await local_mover.restore(backup.snapshot_id, target, None)


async def test_a_target_that_is_not_writable_is_reported(local_mover: LocalMover, tree: Path, tmp_path: Path) -> None:
    backup = await local_mover.back_up(tree, "", None)
    with (
        mounted(tmp_path / "fixed", "ro") as target,
        pytest.raises(
            KopiaError, match=rf"^restore snapshot {backup.snapshot_id} to {target}: the file system is read-only"
        ),
    ):
        await local_mover.restore(backup.snapshot_id, target, None)


def _indexes(repository: Path) -> list[Path]:
    return [path for path in repository.glob("x*/**/*") if path.is_file()]


def _manifests(repository: Path) -> list[Path]:
    return [path for path in repository.glob("q*/**/*") if path.is_file()]


def _format(repository: Path) -> list[Path]:
    return [*repository.glob("kopia.repository*")]


@pytest.mark.sample("zeros-_indexes", "cut-_manifests", "gone-_format")
@pytest.mark.parametrize("found", [_indexes, _manifests, _format])
@pytest.mark.parametrize("damage", ["zeros", "cut", "gone"])
async def test_a_damaged_repository_is_reported(
    repository: Path, tree: Path, tmp_path: Path, found: Callable[[Path], list[Path]], damage: str
) -> None:
    backup = await build_local_mover(str(repository)).back_up(tree, "", None)
    files = found(repository)
    assert files
    for file in files:
        if damage == "zeros":
            file.write_bytes(bytes(file.stat().st_size))
        elif damage == "cut":
            os.truncate(file, file.stat().st_size // 2)
        else:
            file.unlink()
    with pytest.raises(DataPathError) as failed:
        await build_local_mover(str(repository)).restore(backup.snapshot_id, tmp_path / "out", None)
    first = str(failed.value).splitlines()[0]
    assert str(repository) in first or backup.snapshot_id in first
    assert re.search("damaged|file is missing|is not in the repository|no repository found|exited with code", first)
    assert "damaged" in first or damage != "zeros"
    assert PASSWORD not in str(failed.value)
