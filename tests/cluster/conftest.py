"""Fixtures of the tests that run inside the test bed: the cluster around them, and an agent in it."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.bed import Bed, new_namespace
from tests.cluster.configuration import ONE_SLOT, activate, build_concurrency
from tests.cluster.sharing import Shared, has_alone
from tests.testbed.api import Api
from tests.testbed.demonstration.user import User
from tests.testbed.install import install_agent

_VARIABLES = ("DATA_MOVER_STALL_TIMEOUT=30s",)
"""A storage that does not answer fails a transfer within the tests' limits."""

_OWN = {"retry": {"initialBackoff": "1s"}}
"""What tests that interrupt a transfer would wait for."""

_OUTSIDE = "not in a cluster: python -m tests.testbed run -- pytest -m cluster"

RAN = "tests-that-ran"
"""A folder of the test bed: one file for each module of which tests have run, whichever process ran them."""

_FIRST = ("test_crossing.py", "test_causes.py")
"""Tests of other lanes wait for them."""

_LAST = "test_permissions.py"
"""It checks the requests of all others."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests that come first before all others, and those that come last behind them."""
    items.sort(key=lambda item: (item.path.name == _LAST) - (item.path.name in _FIRST))


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
    """The cluster with the node agent installed and ready; it is shared by all tests, in whatever process."""
    installed = bed.folder / "agent-installed"
    with has_alone(bed, Shared.INSTALLATION):
        if not installed.exists():
            install_agent(bed.user, bed.env, variables=_VARIABLES)
            _set_slots(bed)
            installed.touch()
    return bed


@pytest.fixture
def one_slot(agent: Bed) -> Iterator[str]:
    """A node with one slot while the test runs, so that a second transfer stays Prepared."""
    _set_slots(agent, one_slot=ONE_SLOT)
    yield ONE_SLOT
    _set_slots(agent)


def _set_slots(bed: Bed, *, one_slot: str = "") -> None:
    """Give each node many slots, but the named one only one; return when their agents use them."""
    activate(bed, json.dumps({"loadConcurrency": build_concurrency(one_slot=one_slot), "nodeagent.io": _OWN}))


@pytest.fixture(scope="module", autouse=True)
def ran(bed: Bed, request: pytest.FixtureRequest) -> Iterator[None]:
    """Record that the tests of a module have run."""
    folder = bed.folder / RAN
    folder.mkdir(exist_ok=True)
    yield
    (folder / request.path.name).touch()


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest) -> set[str]:
    """The rows of the module's matrix that run, for what is done once for all of them."""
    calls = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    return {value for call in calls if call for value in call.params.values() if isinstance(value, str)}


@pytest.fixture
def space(bed: Bed) -> Iterator[str]:
    """A namespace that this test has for itself; its pods and volumes are deleted after it."""
    with new_namespace(bed) as name:
        yield name


@pytest.fixture(scope="module")
def module_space(bed: Bed) -> Iterator[str]:
    with new_namespace(bed) as name:
        yield name
