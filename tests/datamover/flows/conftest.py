from pathlib import Path

import pytest

from datamover.kopia.repository import Repository
from tests.datamover.support.data_paths import VolumeBed
from tests.datamover.support.plainkopia import PlainKopia


@pytest.fixture
def bed(mover_repository: Repository, kopia: PlainKopia, tmp_path: Path) -> VolumeBed:
    return VolumeBed(mover_repository, kopia, tmp_path)
