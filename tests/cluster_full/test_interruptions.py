"""Transfers of all kinds, and of a device, interrupted at several points in each way, and compared byte for byte."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import pytest

from core.kube.resources import PODS
from tests.cluster.bed import Bed
from tests.cluster.followed import PHASES, Followed
from tests.cluster.interruptions import INTERRUPTIONS, cordoned
from tests.cluster.writers import Observer, observed
from tests.cluster_full.quartet import Quartet, Seed, open_seed
from tests.cluster_full.respawn import LostNode
from tests.testbed.demonstration.manifests import NAMESPACE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

_PERCENT = (10, 50, 90)
_NODE, _OTHER = LostNode.name, "bed-1"
_OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"
_LOST_SECONDS = 240
"""The node controller alone takes 50 s to set a lost node to not Ready."""

_FENCED_SECONDS = 420
"""A restore whose container is not reported as ended waits for 3 minutes besides."""

_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def seed(agent: Bed) -> Iterator[Seed]:
    """Volumes that all nodes reach, a device, and a pod on the second node."""
    with open_seed(agent, node=_NODE, devices=True) as seed:
        yield seed


@pytest.fixture(scope="module")
def observer(seed: Seed) -> Iterator[Observer]:
    """Sees the writers of all tests here."""
    with observed(seed.site.space) as observer:
        yield observer


@pytest.fixture
def sextet(seed: Seed) -> Iterator[Quartet]:
    sextet = Quartet(seed, f"at-{next(_numbers)}")
    yield sextet
    seed.gate.open()
    seed.site.remove(sextet.transfers, sextet.location)


def _expect_completed(sextet: Quartet, *causes: str, in_time: Sequence[Followed] = ()) -> None:
    """Wait for their ends; each was interrupted once, by one of the causes, and its data is as it was.

    Those `in_time` were not: they completed before the interruption ended them.
    """
    sextet.expect_completed(seconds=_FENCED_SECONDS)
    for each in sextet.transfers:
        story = f"{each.transfer['kind']} {each.name}: {each.attempts}"
        assert each.phases == PHASES, story
        assert each.done_bytes == sorted(each.done_bytes), story
        if each in in_time:
            continue
        assert (each.number, len(each.causes)) == (2, 1), story
        assert set(each.causes) <= set(causes), story
        assert each.events("Interrupted"), story


@pytest.mark.parametrize("percent", _PERCENT)
@pytest.mark.parametrize("name", INTERRUPTIONS)
def test_interrupted_transfers_complete(sextet: Quartet, observer: Observer, name: str, percent: int) -> None:
    sextet.hold(percent)
    interruption = INTERRUPTIONS[name]
    interruption.strike(sextet.bed, sextet.gate, sextet.transfers)
    for each in sextet.transfers:
        interruption.wait_done(each)
    sextet.gate.open()
    # At 90 % kopia may have read all files: it then needs no other attempt.
    in_time = [each for each in sextet.transfers if each.phase == "Completed" and each.number == 1]
    assert not in_time or (interruption.graceful and percent > _PERCENT[1]), [each.name for each in in_time]
    _expect_completed(sextet, *interruption.causes, in_time=in_time)
    assert observer.double_writers == []


@pytest.mark.parametrize("percent", _PERCENT)
def test_transfers_of_a_lost_node_complete(
    quick_to_notice: Bed, sextet: Quartet, observer: Observer, percent: int
) -> None:
    """Elsewhere if they can; on their node when it is back if they are about a pod of it."""
    bed = sextet.bed
    with cordoned(bed, _OTHER):
        sextet.hold(percent)
    movers = {each.name: each.pod() for each in sextet.transfers}
    assert {pod["spec"]["nodeName"] for pod in movers.values()} == {_NODE}
    node = LostNode(bed)
    with ExitStack() as stack:
        stack.callback(node.start)
        bound = [each for each in sextet.transfers if each.transfer["kind"].startswith("PodVolume")]
        unbound = [each for each in sextet.transfers if each not in bound]
        for each in unbound:
            each.wait_interrupted(seconds=_LOST_SECONDS)
        for each in bound:
            each.wait("message about the node", lambda one: _NODE in one.last["status"].get("message", ""))
        assert {each.phase for each in sextet.transfers} == {"InProgress"}
        # An administrator says so: the volumes of its pods may be used elsewhere.
        bed.user.kubectl("taint", "node", _NODE, f"{_OUT_OF_SERVICE}=lost:NoExecute")
        stack.callback(lambda: bed.user.kubectl("taint", "node", _NODE, f"{_OUT_OF_SERVICE}-"))
        sextet.gate.open()
        for each in unbound:
            each.wait_phase("Completed", seconds=_FENCED_SECONDS)
            assert each.last["status"].get("node") == _OTHER
        left = {pod["metadata"]["uid"] for pod in bed.api.objects(PODS, NAMESPACE)}
        assert left.isdisjoint(movers[each.name]["metadata"]["uid"] for each in unbound)
    _expect_completed(sextet, "NodeLost")
    assert observer.double_writers == []
