"""Transfers of all kinds, and of a device, interrupted at several points in each way, and compared byte for byte."""

import itertools
import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import pytest

from core.kube.resources import PODS
from tests.cluster.bed import Bed
from tests.cluster.followed import PHASES, Followed
from tests.cluster.gate import Gate, open_gate
from tests.cluster.interruptions import INTERRUPTIONS
from tests.cluster.site import DATA_BYTES, Site
from tests.cluster.writers import Observer, observed
from tests.cluster_full.quartet import wait_leaked
from tests.cluster_full.respawn import LostNode
from tests.testbed.demonstration.manifests import NAMESPACE, build_namespace

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

_PERCENT = (10, 50, 90)
_NODE, _OTHER = LostNode.name, "bed-1"
_OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"
_LOST_SECONDS = 240
"""The node controller alone takes 50 s to set a lost node to not Ready."""

_FENCED_SECONDS = 420
"""A restore whose container is not reported as ended waits for 3 minutes besides."""

_numbers = itertools.count(1)


class Sextet:
    """A transfer of each kind, and two of a device, held while data moves."""

    def __init__(self, site: Site, kept: dict[str, Followed], gate: Gate) -> None:
        """Make them, but do not start them."""
        number = next(_numbers)
        self.site, self.gate = site, gate
        self.location = location = site.open_place(f"at-{number}")
        self.transfers = [
            site.upload(f"du-{number}", location=location),
            site.upload(f"bu-{number}", location=location, block=True),
            site.backup(f"pvb-{number}", location=location),
            site.download(f"dd-{number}", of=kept["du"]),
            site.download(f"bd-{number}", of=kept["bu"]),
            site.restore(f"pvr-{number}", of=kept["pvb"]),
        ]

    @property
    def bound(self) -> list[Followed]:
        """Those that stay on the node of a pod."""
        return [each for each in self.transfers if each.transfer["kind"].startswith("PodVolume")]

    @property
    def unbound(self) -> list[Followed]:
        """Those that any node can take."""
        return [each for each in self.transfers if not each.transfer["kind"].startswith("PodVolume")]

    def hold(self, percent: int) -> None:
        """Start them; returns when each has moved that share of its data, and is held."""
        self.gate.shut(passes_bytes=DATA_BYTES * percent // 100, together=True)
        for each in self.transfers:
            each.start()
        for each in self.transfers:
            each.wait_phase("InProgress")
        self.gate.wait_held(*(str(each.pod()["status"]["podIP"]) for each in self.transfers))

    def expect_completed(self, *causes: str, in_time: Sequence[Followed] = ()) -> None:
        """Wait for their ends; each was interrupted once, by one of the causes, and its data is as it was.

        Those `in_time` were not: they completed before the interruption ended them.
        """
        for each in self.transfers:
            each.wait_phase("Completed", seconds=_FENCED_SECONDS)
        for each in self.transfers:
            story = f"{each.transfer['kind']} {each.name}: {each.attempts}"
            assert each.phases == PHASES, story
            assert each.done_bytes == sorted(each.done_bytes), story
            assert "message" not in each.last["status"], story
            if each in in_time:
                continue
            assert (each.number, len(each.causes)) == (2, 1), story
            assert set(each.causes) <= set(causes), story
            assert each.events("Interrupted"), story
        assert wait_leaked(self.site.bed) == []
        assert [line for each in self.transfers for line in self.site.differences(each)] == []


@pytest.fixture(scope="module")
def observer(site: Site) -> Iterator[Observer]:
    """Sees the writers of all tests here."""
    with observed(site.space) as observer:
        yield observer


@pytest.fixture(scope="module")
def gate() -> Iterator[Gate]:
    with open_gate() as gate:
        yield gate


@pytest.fixture(scope="module")
def site(agent: Bed, gate: Gate) -> Iterator[Site]:
    """Volumes of a namespace, and a pod on the second node."""
    space = f"test-{secrets.token_hex(4)}"
    agent.user.apply(build_namespace(space))
    site = Site(agent, space, gate.url, node=_NODE, devices=True)
    site.prepare()
    yield site
    agent.user.kubectl("delete", "namespace", space, "--wait=false")


@pytest.fixture(scope="module")
def kept(site: Site) -> Iterator[dict[str, Followed]]:
    """Completed backups, to restore."""
    location = site.open_place("kept")
    found = {
        "du": site.upload("du", location=location),
        "bu": site.upload("bu", location=location, block=True),
        "pvb": site.backup("pvb", location=location),
    }
    for each in found.values():
        each.start()
    for each in found.values():
        each.wait_phase("Completed")
    yield found
    site.remove(found.values(), location)


@pytest.fixture
def sextet(site: Site, kept: dict[str, Followed], gate: Gate) -> Iterator[Sextet]:
    sextet = Sextet(site, kept, gate)
    yield sextet
    gate.open()
    site.remove(sextet.transfers, sextet.location)


@pytest.mark.parametrize("percent", _PERCENT)
@pytest.mark.parametrize("name", INTERRUPTIONS)
def test_interrupted_transfers_complete(sextet: Sextet, observer: Observer, name: str, percent: int) -> None:
    sextet.hold(percent)
    interruption = INTERRUPTIONS[name]
    interruption.strike(sextet.site.bed, sextet.gate, sextet.transfers)
    for each in sextet.transfers:
        interruption.wait_done(each)
    sextet.gate.open()
    # At 90 % kopia may have read all files: it then needs no other attempt.
    in_time = [each for each in sextet.transfers if each.phase == "Completed" and each.number == 1]
    assert not in_time or (interruption.graceful and percent > _PERCENT[1]), [each.name for each in in_time]
    sextet.expect_completed(*interruption.causes, in_time=in_time)
    assert observer.double_writers == []


@pytest.mark.parametrize("percent", _PERCENT)
def test_transfers_of_a_lost_node_complete(
    quick_to_notice: Bed, sextet: Sextet, observer: Observer, percent: int
) -> None:
    """Elsewhere if they can; on their node when it is back if they are about a pod of it."""
    bed = sextet.site.bed
    with ExitStack() as stack:
        bed.user.kubectl("cordon", _OTHER)
        stack.callback(lambda: bed.user.kubectl("uncordon", _OTHER))
        sextet.hold(percent)
    movers = {each.name: each.pod() for each in sextet.transfers}
    assert {pod["spec"]["nodeName"] for pod in movers.values()} == {_NODE}
    node = LostNode(bed)
    with ExitStack() as stack:
        stack.callback(node.start)
        for each in sextet.unbound:
            each.wait_interrupted(seconds=_LOST_SECONDS)
        for each in sextet.bound:
            each.wait("message about the node", lambda one: _NODE in one.last["status"].get("message", ""))
        assert {each.phase for each in sextet.transfers} == {"InProgress"}
        # An administrator says so: the volumes of its pods may be used elsewhere.
        bed.user.kubectl("taint", "node", _NODE, f"{_OUT_OF_SERVICE}=lost:NoExecute")
        stack.callback(lambda: bed.user.kubectl("taint", "node", _NODE, f"{_OUT_OF_SERVICE}-"))
        sextet.gate.open()
        for each in sextet.unbound:
            each.wait_phase("Completed", seconds=_FENCED_SECONDS)
            assert each.last["status"].get("node") == _OTHER
        left = {pod["metadata"]["uid"] for pod in bed.api.objects(PODS, NAMESPACE)}
        assert left.isdisjoint(movers[each.name]["metadata"]["uid"] for each in sextet.unbound)
    sextet.expect_completed("NodeLost")
    assert observer.double_writers == []
