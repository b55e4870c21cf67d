"""The API server that all worlds of a test share."""

from collections.abc import Iterator

import pytest

from tests.support.apiserver import ApiServer, run_apiserver


@pytest.fixture
def apiserver() -> Iterator[ApiServer]:
    """A kube-apiserver for one test: the controllers reconcile all objects, so worlds of others would cost time."""
    with run_apiserver() as server:
        yield server
