"""Fixtures of a mover pod."""

import shutil
from pathlib import Path

import pytest

from tests.datamover.support.plainkopia import PlainKopia
from tests.datamover.support.pods import MoverPod
from tests.datamover.support.stored_files import SnapshotBed, make_volume
from tests.support.fakekube import FakeKube

__all__: list[str] = []


@pytest.fixture
async def pod(tmp_path: Path, _new_repository: Path) -> MoverPod:
    """A pod whose repository exists and is Ready."""
    folder = tmp_path / "backups" / "kopia" / "app"
    shutil.copytree(_new_repository, folder)
    pod = MoverPod(FakeKube(), tmp_path)
    pod.put_repository(phase="Ready")
    return pod


@pytest.fixture(scope="session")
def _stored_volume(kopia_program: Path, tmp_path_factory: pytest.TempPathFactory) -> SnapshotBed:
    """A volume with a snapshot, which is only read."""
    folder = tmp_path_factory.mktemp("stored-volume")
    return SnapshotBed.make(PlainKopia(kopia_program, folder), folder, make_volume(folder / "volume"))
