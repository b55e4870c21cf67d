"""The benchmark of scale, in small: real agents, a real API server, simulated kubelets and movers.

One leader is killed and one is stopped for longer than its lease while transfers of all kinds run.
"""

from collections import Counter
from pathlib import Path

import pytest

from benchmarks.scale.counts import Counts
from benchmarks.scale.doors import Doors, make_kubelet
from benchmarks.scale.effort import Effort
from benchmarks.scale.leaders import kill_leader, measure_leaders, pause_leader
from tests.support.apiserver import ApiServer

pytestmark = pytest.mark.integration


@pytest.fixture
def doors(apiserver: ApiServer, tmp_path: Path) -> Doors:
    """One API server for all: nothing is counted here."""
    nothing = Counts(1.0, Counter())
    return Doors(apiserver, apiserver.url, apiserver.api, nothing, make_kubelet(apiserver), tmp_path)


# `test_dispatcher.py` has the limit over a change of leaders, `tests/nodeagent/leader` what may go wrong in one.
@pytest.mark.thorough
async def test_limits_are_kept_while_leaders_die_and_come_back(doors: Doors) -> None:
    effort = Effort(agents=5, transfers=100, mover_seconds=0.5, queue_length=20)
    result = await measure_leaders(doors, "scale", effort, disturbs=[kill_leader, pause_leader], log=lambda _: None)
    assert result.verdict.violations == []
    assert result.verdict.final_phases == {"Completed": 100}
    # Otherwise the limits were never put to the test.
    assert result.verdict.most_held > 10
    assert result.verdict.most_running == 2
