"""Fixtures of the integration tests: one API server for all, one namespace for each."""

from collections.abc import Iterator

import pytest

from tests.support.apiserver import ApiServer, run_apiserver


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
