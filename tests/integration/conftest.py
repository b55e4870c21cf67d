"""Fixtures of the integration tests: one API server for all, one namespace for each."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from core.kube.client import KubeClient
from tests.crash.worlds import open_client
from tests.integration.installer import Installer
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


@pytest.fixture
async def client(apiserver: ApiServer) -> AsyncIterator[KubeClient]:
    """The product's client, with the administrator's permissions."""
    async with open_client(apiserver) as client:
        yield client


@pytest.fixture
def installer(
    apiserver: ApiServer, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Installer:
    """A person who installs, in the folder with the files that the flags name."""
    monkeypatch.chdir(tmp_path)
    return Installer(apiserver, capsys, tmp_path)
