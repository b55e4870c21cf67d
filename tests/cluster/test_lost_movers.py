"""Evicted movers on a real cluster: recreated before they start; afterward their transfer gets another attempt.

A backup that is evicted afterward keeps what it has sent.
"""

import json

import pytest

from tests.cluster.bed import Bed
from tests.cluster.gate import HELD_BYTES
from tests.cluster.interruptions import evict
from tests.cluster.scenes import open_gated_place, wait_until
from tests.cluster.workloads import Workload, back_up, expect_nothing_left, find_mover, wait_held, wait_logged
from tests.testbed.api import Json

pytestmark = [pytest.mark.cluster, pytest.mark.lane(name="changing"), pytest.mark.timeout(1800)]

_LOST = "nodeagent.io/mover-lost"
_ATTEMPTS = "nodeagent.io/attempts"


def _attempts(transfer: Json) -> Json:
    found: Json = json.loads(transfer["metadata"]["annotations"].get(_ATTEMPTS, "{}"))
    return found


def test_an_evicted_mover_is_recreated_before_it_starts_and_replaced_afterward(
    agent: Bed, space: str, one_slot: str
) -> None:
    with open_gated_place(agent, space) as (gate, place):
        filled = {"data": 2 * HELD_BYTES, "scratch": 100_000}
        moving = Workload(agent, space, "moving", filled, on=one_slot, location=place.name)
        moving.start()
        moving.wait_ready()
        gate.shut()
        first = back_up(moving, "data")
        # Held in the middle of its data, it keeps the node's only slot.
        wait_held(agent, gate, first)
        second = back_up(moving, "scratch")
        prepared = wait_until(agent, second, "Prepared")
        evict(agent, find_mover(agent, prepared))
        recreated = wait_until(
            agent, second, "Prepared", when=lambda transfer: _LOST in transfer["metadata"]["annotations"]
        )
        assert json.loads(recreated["metadata"]["annotations"][_LOST])["times"] == 1
        evict(agent, find_mover(agent, first))
        wait_logged(agent, first, "kopia may save a checkpoint within 25s")
        gate.open()
        wait_until(agent, first, "InProgress", when=lambda transfer: _attempts(transfer).get("number") == 2)
        for transfer, attempts in ((first, 2), (second, 1)):
            completed = wait_until(agent, transfer, "Completed")
            assert "message" not in completed["status"]
            assert _attempts(completed).get("number", 1) == attempts
        (interruption,) = _attempts(wait_until(agent, first, "Completed"))["interruptions"]
        assert interruption["cause"] == "Evicted"
        assert "; kopia saved a checkpoint, " in interruption["message"]
        moving.delete()
        expect_nothing_left(agent, first, second)
