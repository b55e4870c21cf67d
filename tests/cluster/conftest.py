"""Fixtures of the tests that run inside the bed: the cluster around them, and an agent in it."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.bed.api import Api
from tests.bed.demonstration.manifests import build_namespace
from tests.bed.demonstration.user import User
from tests.bed.install import install_agent

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["Bed", "agent", "bed", "space"]

_OUTSIDE = "not in a cluster: python -m tests.bed run -- pytest -m cluster"


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
    return bed


@pytest.fixture
def space(bed: Bed) -> Iterator[str]:
    """A namespace that this test has for itself; it is removed behind it, with its volumes."""
    name = f"test-{secrets.token_hex(4)}"
    bed.user.apply(build_namespace(name))
    yield name
    bed.user.kubectl("delete", "namespace", name, "--wait=false")
