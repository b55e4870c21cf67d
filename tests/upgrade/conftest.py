"""Fixtures: a cluster with the previous version, and volumes that it has backed up."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import pytest

from tests.cluster.conftest import bed
from tests.cluster.gate import open_gate
from tests.cluster_full.quartet import Seed
from tests.testbed.demonstration.manifests import build_namespace
from tests.upgrade.release import import_previous_image, previous

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.conftest import Bed

__all__ = ["bed", "seed"]


@pytest.fixture(scope="module")
def seed(bed: Bed) -> Iterator[Seed]:
    """Volumes with data, and what a backup of them by the previous version left in a repository."""
    import_previous_image()
    previous().install(bed)
    space = f"test-{secrets.token_hex(4)}"
    bed.user.apply(build_namespace(space))
    with open_gate() as gate:
        seed = Seed(bed, gate, space)
        seed.prepare()
        yield seed
    bed.user.kubectl("delete", "namespace", space, "--wait=false")
