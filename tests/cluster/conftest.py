"""Fixtures of the tests that run inside the bed: the cluster around them, and an agent in it."""

from __future__ import annotations

import json
import os
import secrets
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.bed.api import Api
from tests.bed.demonstration.manifests import build_namespace
from tests.bed.demonstration.user import User
from tests.bed.install import install_agent
from tests.cluster.configuration import put_in_force

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["Bed", "agent", "bed", "module_space", "new_namespace", "one_at_a_time", "space"]

_OUTSIDE = "not in a cluster: python -m tests.bed run -- pytest -m cluster"


_LOADS_AT_A_TIME = 16

_LAST = "test_rights.py"
"""It judges what all others did."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests that come last behind all others."""
    items.sort(key=lambda item: item.path.name == _LAST)


@dataclass(frozen=True)
class Bed:
    """The cluster that this process runs in."""

    env: Mapping[str, str]
    user: User

    @property
    def api(self) -> Api:
        """A client with the administrator's rights."""
        return self.user.api

    @property
    def folder(self) -> Path:
        """Where the bed keeps its files."""
        return Path(self.env["BED_DIR"])


@pytest.fixture(scope="session")
def bed() -> Bed:
    """The cluster; without one the test is skipped, unless `CI=true`: there it fails."""
    if "BED_DIR" not in os.environ:
        if os.environ.get("CI") == "true":
            pytest.fail(_OUTSIDE, pytrace=False)
        pytest.skip(_OUTSIDE)
    return Bed(dict(os.environ), User(Api(Path(os.environ["KUBECONFIG"]))))


@pytest.fixture(scope="session")
def agent(bed: Bed) -> Bed:
    """The cluster with the node agent installed and ready; it is shared by all tests."""
    install_agent(bed.user, bed.env)
    _allow_loads(bed, _LOADS_AT_A_TIME)
    return bed


@pytest.fixture
def one_at_a_time(agent: Bed) -> Iterator[None]:
    """While the test runs a node carries out one load at a time, so that a second one stays Prepared."""
    _allow_loads(agent, 1)
    yield
    _allow_loads(agent, _LOADS_AT_A_TIME)


def _allow_loads(bed: Bed, number: int) -> None:
    """Let each node carry out so many loads at a time; returns when its agent does."""
    put_in_force(bed, json.dumps({"loadConcurrency": {"globalConfig": number}}))


@pytest.fixture
def space(bed: Bed) -> Iterator[str]:
    """A namespace that this test has for itself; it is removed behind it, with its volumes."""
    with new_namespace(bed) as name:
        yield name


@pytest.fixture(scope="module")
def module_space(bed: Bed) -> Iterator[str]:
    """A namespace for all tests of a module."""
    with new_namespace(bed) as name:
        yield name


@contextmanager
def new_namespace(bed: Bed) -> Iterator[str]:
    """A namespace for as long as the context lasts; it is removed behind it, with its volumes."""
    name = f"test-{secrets.token_hex(4)}"
    bed.user.apply(build_namespace(name))
    yield name
    bed.user.kubectl("delete", "namespace", name, "--wait=false")
