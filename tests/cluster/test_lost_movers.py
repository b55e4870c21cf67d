"""Evicted movers on a real cluster: recreated before they start; afterward the failure names the eviction.

A backup that is evicted afterward keeps what it has sent.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.cluster.gate import HELD_BYTES
from tests.cluster.scenes import open_gated_place
from tests.cluster.workloads import BACKUPS, Workload, back_up, expect_nothing_left, wait_held, wait_logged, wait_until
from tests.testbed.demonstration.manifests import NAMESPACE

if TYPE_CHECKING:
    from tests.cluster.conftest import Bed
    from tests.testbed.api import Json

pytestmark = [pytest.mark.cluster, pytest.mark.lane(name="changing"), pytest.mark.timeout(400)]

_LOST = "nodeagent.io/mover-lost"


def _evict(bed: Bed, transfer: Json) -> None:
    """Have the mover pod of a transfer evicted as a drain does."""
    name = transfer["metadata"]["name"]
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"namespace": NAMESPACE, "name": name}}
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/{name}/eviction"
    bed.user.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(body))


def test_an_evicted_mover_is_recreated_before_it_starts_and_fails_its_transfer_afterward(
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
        prepared = wait_until(agent, BACKUPS, second, "Prepared")

        _evict(agent, prepared)
        recreated = wait_until(
            agent, BACKUPS, second, "Prepared", when=lambda transfer: _LOST in transfer["metadata"]["annotations"]
        )
        assert json.loads(recreated["metadata"]["annotations"][_LOST])["times"] == 1
        _evict(agent, first)
        wait_logged(agent, first, "kopia may save a checkpoint within 25s")
        gate.open()

        ended = wait_until(agent, BACKUPS, first, "Failed")["status"]
        assert "Eviction API: evicting" in ended["message"]
        assert "; kopia saved a checkpoint, " in ended["message"]
        completed = wait_until(agent, BACKUPS, second, "Completed")
        assert "message" not in completed["status"]
        moving.delete()
        expect_nothing_left(agent, first, second)
