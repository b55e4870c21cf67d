"""Fixtures: a cluster with the previous version, and volumes that it has backed up."""

import secrets
from collections.abc import Iterator

import pytest

from tests.cluster.bed import Bed
from tests.cluster.conftest import bed, space
from tests.cluster.gate import open_gate
from tests.cluster_full.quartet import Seed
from tests.testbed.demonstration.manifests import build_namespace
from tests.upgrade.release import import_previous_image, previous

__all__ = ["bed", "seed", "space", "two_images"]


@pytest.fixture(scope="session")
def two_images() -> None:
    """Give every node the previous version's image, too."""
    import_previous_image()


@pytest.fixture(scope="module")
def seed(bed: Bed, two_images: None) -> Iterator[Seed]:
    """Volumes with data, and what a backup of them by the previous version left in a repository."""
    previous().install(bed)
    name = f"test-{secrets.token_hex(4)}"
    bed.user.apply(build_namespace(name))
    with open_gate() as gate:
        seed = Seed(bed, gate, name)
        seed.prepare()
        yield seed
    bed.user.kubectl("delete", "namespace", name, "--wait=false")
