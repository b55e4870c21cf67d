"""The API server that all worlds of a test share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.apiserver import run_apiserver

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.apiserver import ApiServer


@pytest.fixture
def apiserver() -> Iterator[ApiServer]:
    """A kube-apiserver for one test: the controllers reconcile all objects, so worlds of others would cost time."""
    with run_apiserver() as server:
        yield server
