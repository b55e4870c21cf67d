"""SIGKILL while data moves, to agent, kubelet and API server, with a transfer of each kind.

`test_interruptions` kills data movers.
"""

import pytest

from tests.cluster.bed import Bed
from tests.cluster.interruptions import movers_of
from tests.cluster.processes import is_agent, is_program, wait_for_one
from tests.cluster_full.quartet import Quartet
from tests.cluster_full.respawn import Component, is_kubelet
from tests.testbed.api import Json
from tests.testbed.demonstration.manifests import NAMESPACE
from tests.testbed.install import AGENT_LABEL
from tests.testbed.processes import BedError, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

_NODE = "bed-1"
_SECONDS = 90


@pytest.fixture
def held(quartet: Quartet) -> Quartet:
    quartet.hold()
    return quartet


def _wait_movers_ended(pods: list[Json]) -> None:
    wait_for("the ends of movers", lambda: not any(map(movers_of, pods)), seconds=_SECONDS)


def _wait_api(bed: Bed) -> None:
    def answers() -> bool:
        try:
            bed.user.kubectl("get", "--raw", "/readyz")
        except BedError:
            return False
        return True

    wait_for("the API server", answers, seconds=_SECONDS)


def test_agent(held: Quartet) -> None:
    before = wait_for_one("the agent", is_agent(_NODE))
    before.kill()
    wait_for_one("the agent that was started again", is_agent(_NODE))
    agents = ["pod", "-l", AGENT_LABEL, "-n", NAMESPACE]
    held.bed.user.kubectl("wait", "--for=condition=Ready", "--timeout=90s", *agents)
    held.gate.open()
    held.expect_completed()


def test_kubelet(held: Quartet) -> None:
    """The movers end while no kubelet manages their pods."""
    pods = held.pods()
    kubelet = Component.find("kubelet", is_kubelet(_NODE), held.bed.folder / "logs" / "kubelet-1.log")
    kubelet.kill()
    held.gate.open()
    _wait_movers_ended(pods)
    kubelet.start()
    held.expect_completed()


def test_api_server(held: Quartet) -> None:
    """The movers end while no result can be reported."""
    pods = held.pods()
    server = Component.find("API server", is_program("kube-apiserver"), held.bed.folder / "logs" / "kube-apiserver.log")
    server.kill()
    held.gate.open()
    _wait_movers_ended(pods)
    server.start()
    _wait_api(held.bed)
    held.expect_completed()
