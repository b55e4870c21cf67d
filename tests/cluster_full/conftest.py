"""Fixtures: the cluster tier's, and transfers of all kinds behind a gate."""

import json
from collections.abc import Iterator

import pytest

from tests.cluster.bed import Bed
from tests.cluster.conftest import agent, bed
from tests.cluster.gate import Gate, open_gate
from tests.cluster_full.quartet import Quartet, Seed, open_seed
from tests.testbed.demonstration.manifests import NAMESPACE

__all__ = ["agent", "bed", "gate", "quartet", "quick_to_notice", "seed"]

_GONE_AFTER = "--node-gone-after=20s"
_LAST = "test_lost_node.py"
"""It leaves one node only."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests that come last behind all others."""
    items.sort(key=lambda item: item.path.name == _LAST)


@pytest.fixture(scope="session")
def quick_to_notice(agent: Bed) -> Bed:
    """Agents with a short `--node-gone-after`."""
    change = [{"op": "add", "path": "/spec/template/spec/containers/0/args/-", "value": _GONE_AFTER}]
    agent.user.kubectl("patch", "daemonset/node-agent", "-n", NAMESPACE, "--type=json", "-p", json.dumps(change))
    agent.user.kubectl("rollout", "status", "daemonset/node-agent", "-n", NAMESPACE, "--timeout=120s")
    return agent


@pytest.fixture(scope="module")
def seed(agent: Bed) -> Iterator[Seed]:
    """Volumes on the first node, with backups of them."""
    with open_seed(agent, node="bed-1", shared=False) as seed:
        yield seed


@pytest.fixture
def quartet(seed: Seed, request: pytest.FixtureRequest) -> Iterator[Quartet]:
    """Four transfers that are not started yet."""
    quartet = Quartet(seed, request.node.name.rpartition("_")[2])
    yield quartet
    seed.gate.open()
    quartet.remove()


@pytest.fixture
def gate() -> Iterator[Gate]:
    """What only the storage of one test is behind."""
    with open_gate() as gate:
        yield gate
