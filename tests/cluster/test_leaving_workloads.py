"""Workload pods that are deleted while their volumes are backed up, or before."""

import pytest

from tests.cluster.bed import Bed
from tests.cluster.gate import HELD_BYTES
from tests.cluster.scenes import open_gated_place, wait_until
from tests.cluster.workloads import Workload, back_up, expect_nothing_left, wait_held

pytestmark = [pytest.mark.cluster, pytest.mark.lane(name="changing"), pytest.mark.timeout(1800)]


def test_a_deleted_workload_fails_its_backup_and_the_one_that_is_prepared(
    agent: Bed, space: str, one_slot: str
) -> None:
    """In mid-transfer, while Prepared behind it, and before a mover is started."""
    with open_gated_place(agent, space) as (gate, place):
        moving = Workload(agent, space, "moving", {"data": 2 * HELD_BYTES}, on=one_slot, location=place.name)
        ready = Workload(agent, space, "ready", {"scratch": 100_000}, on=one_slot, location=place.name)
        for workload in (moving, ready):
            workload.start()
        for workload in (moving, ready):
            workload.wait_ready()
        third = ready.backup("data")
        gate.shut()
        first = back_up(moving, "data")
        wait_held(agent, gate, first)
        second = back_up(ready, "scratch")
        wait_until(agent, second, "Prepared")
        # As long as a mover reads, its volume cannot be unmounted.
        moving.delete(wait=False)
        ready.delete()
        gate.open()
        agent.user.apply(third)
        ended = [wait_until(agent, item, "Failed")["status"] for item in (first, second, third)]
        assert ended[0]["message"].startswith(f"workload pod {space}/moving is not available: ")
        for status in ended[1:]:
            assert status["message"] == f"workload pod {space}/ready is not available: it does not exist"
        assert not any("snapshotID" in status for status in ended)
        moving.delete()
        expect_nothing_left(agent, first, second, third)
