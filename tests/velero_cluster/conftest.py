"""Fixtures: a cluster with a Velero release of which each test is one of its users."""

from collections.abc import Iterator

import pytest

from tests.cluster.bed import Bed
from tests.cluster.conftest import bed, space
from tests.cluster.gate import Gate, open_gate
from tests.velero_cluster.images import import_velero
from tests.velero_cluster.server import VeleroInstallation

__all__ = ["bed", "gate", "space", "velero"]


@pytest.fixture(scope="module")
def gate() -> Iterator[Gate]:
    """What all of a release reaches the bucket through."""
    with open_gate() as found:
        yield found


@pytest.fixture(scope="module", params=["1.17.2", "1.18.3"])
def velero(
    bed: Bed, gate: Gate, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VeleroInstallation]:
    """A release as its installer leaves it, with its own node agent."""
    version = str(request.param)
    import_velero(version)
    found = VeleroInstallation(bed, version, f"velero-{version.replace('.', '-')}")
    found.install(tmp_path_factory.mktemp("velero"), url=gate.url)
    yield found
    found.remove()
