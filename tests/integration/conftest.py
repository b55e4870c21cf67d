"""Fixtures of the integration tests: one API server for all, one namespace for each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.apiserver import run_apiserver

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.apiserver import ApiServer


@pytest.fixture(scope="session")
def apiserver() -> Iterator[ApiServer]:
    """A kube-apiserver that knows the custom resources; it is shared, so use `namespace`."""
    with run_apiserver() as server:
        yield server


@pytest.fixture
def namespace(apiserver: ApiServer) -> str:
    """The name of a namespace that this test has for itself.

    It is not removed: without controllers a namespace never ends, and the server goes
    away with everything in it.
    """
    return apiserver.create_namespace()
