"""Fixtures: a cluster with the previous version, and volumes that it has backed up."""

from collections.abc import Iterator

import pytest

from tests.cluster.bed import Bed
from tests.cluster.conftest import bed, space
from tests.cluster_full.quartet import Seed, open_seed
from tests.upgrade.release import import_previous_image, previous

__all__ = ["bed", "seed", "space", "two_images"]


@pytest.fixture(scope="session")
def two_images() -> None:
    """Give every node the previous version's image, too."""
    import_previous_image()


@pytest.fixture(scope="module")
def seed(bed: Bed, two_images: None) -> Iterator[Seed]:
    """Volumes on the first node, with backups of them by the previous version."""
    previous().install(bed)
    with open_seed(bed, node="bed-1", shared=False) as seed:
        yield seed
