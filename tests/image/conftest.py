"""The image of the sources as they are, built if need be and unpacked once for all its tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.cluster.conftest import bed, space
from tests.image.container import unpacked
from tests.support.tools import image_archive

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.image.container import Container

__all__ = ["bed", "container", "space"]


@pytest.fixture(scope="session")
def container() -> Iterator[Container]:
    """The project's image, unpacked."""
    with unpacked(image_archive()) as container:
        yield container
