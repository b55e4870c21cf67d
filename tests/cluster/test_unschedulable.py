"""An unschedulable node still runs the transfers of the pods that it has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.cluster.configuration import ONE_SLOT
from tests.cluster.sharing import Shared, has_alone
from tests.cluster.workloads import BACKUPS, Workload, back_up, expect_nothing_left, wait_until

if TYPE_CHECKING:
    from tests.cluster.conftest import Bed

pytestmark = [pytest.mark.cluster, pytest.mark.lane(name="changing"), pytest.mark.timeout(400)]


def test_an_unschedulable_node_still_runs_the_transfers_of_its_pods(agent: Bed, space: str) -> None:
    writer = Workload(agent, space, "writer", {"scratch": 100_000}, on=ONE_SLOT)
    writer.start()
    writer.wait_ready()
    # The repository's own pod is bound to no node, and would have none to run on.
    before = wait_until(agent, BACKUPS, back_up(writer, "data"), "Completed")
    node = writer.node
    with has_alone(agent, Shared.GROUND):
        try:
            agent.user.kubectl("cordon", node)
            agent.user.kubectl("taint", "node", node, "maintenance=soon:NoSchedule")
            found = wait_until(agent, BACKUPS, back_up(writer, "scratch"), "Completed")
        finally:
            agent.user.kubectl("taint", "node", node, "maintenance=soon:NoSchedule-")
            agent.user.kubectl("uncordon", node)

    expect_nothing_left(agent, before, found)
