"""The API server that all worlds share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.apiserver import run_apiserver

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.apiserver import ApiServer

__all__ = ["apiserver"]


@pytest.fixture(scope="module")
def apiserver() -> Iterator[ApiServer]:
    """A kube-apiserver that knows the custom resources, and nobody but this module."""
    with run_apiserver() as server:
        yield server
