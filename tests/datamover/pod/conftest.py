"""Fixtures of a mover pod."""

from pathlib import Path

import pytest

from tests.datamover.support.plainkopia import PlainKopia
from tests.datamover.support.pods import MoverPod
from tests.datamover.support.stored_files import SnapshotBed, make_volume


@pytest.fixture
def released(pod: MoverPod) -> MoverPod:
    """A pod of a Job that the leader has released."""
    pod.put_job()
    return pod


@pytest.fixture(scope="session")
def _stored_volume(kopia_program: Path, tmp_path_factory: pytest.TempPathFactory) -> SnapshotBed:
    """A volume with a snapshot, which is only read."""
    folder = tmp_path_factory.mktemp("stored-volume")
    return SnapshotBed.make(PlainKopia(kopia_program, folder), folder, make_volume(folder / "volume"))


@pytest.fixture
def bed(_stored_volume: SnapshotBed, tmp_path: Path) -> SnapshotBed:
    return _stored_volume.copy(tmp_path)
