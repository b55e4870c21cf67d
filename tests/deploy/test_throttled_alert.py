"""The alert about throttling fires on what an agent serves whose requests a busy API server rejects."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
import yaml

from core.kube.client import KubeClient
from core.kube.resources import CONFIG_MAPS
from core.kube.transport import Request, Response, Retry
from nodeagent.metrics import API_REQUESTS, Metrics
from nodeagent.runtime.api_server import LimitedTransport, RateLimit
from tests.support.clock import LoopClock
from tests.support.fakekube import FakeKube
from tests.support.monitoring import promtool, read_rules

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.processes, pytest.mark.looptime]

_ALERT = "NodeAgentAPIThrottled"
_REQUESTS = "nodeagent_api_requests_total"
_MINUTES, _BUSY_MINUTES = 60, range(10, 45)


class _Busy(FakeKube):
    """Rejects every second request while it is busy."""

    busy = False
    refuse = False

    async def request(self, request: Request) -> Response:
        self.refuse = self.busy and not self.refuse
        if self.refuse:
            return Response(429, b'{"message": "too many requests", "reason": "TooManyRequests"}', "1")
        return await super().request(request)


@pytest.fixture(name="_only_granted_requests", autouse=True)
def only_granted_requests() -> None:
    """The requests here are made up; permissions are not their subject."""


async def _serve(kube: _Busy) -> dict[str, list[str]]:
    """Let an agent read an object every 5 seconds; return its samples of each minute by series."""
    metrics = Metrics("a")

    def on_answer(verb: str, status: int) -> None:
        metrics.inc(API_REQUESTS, verb, str(status))

    limited = LimitedTransport(kube, RateLimit(LoopClock(), per_second=10, burst=5), on_answer=on_answer)
    client, found = KubeClient(limited, Retry(LoopClock())), dict[str, list[str]]()
    for minute in range(_MINUTES):
        kube.busy = minute in _BUSY_MINUTES
        for _ in range(12):
            await client.read(CONFIG_MAPS, "velero", "any")
            await asyncio.sleep(5)
        for line in metrics.render().decode().splitlines():
            series, _, value = line.rpartition(" ")
            if series.startswith(f"{_REQUESTS}{{"):
                # A counter of labels begins with its first sample.
                found.setdefault(series, ["_"] * minute).append(value)
    return found


async def test_the_alert_fires_while_the_api_server_throttles_an_agent(tmp_path: Path) -> None:
    samples = await _serve(_Busy())
    assert any('status="429"' in series for series in samples)
    (rule,) = [{**one, "annotations": {}} for one in read_rules() if one["alert"] == _ALERT]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "one", "rules": [rule]}]}))
    fired = [{"exp_labels": {"severity": "warning"}}]
    case = {
        "interval": "1m",
        "input_series": [{"series": name, "values": " ".join(values)} for name, values in samples.items()],
        "alert_rule_test": [
            {"eval_time": f"{minute}m", "alertname": _ALERT, "exp_alerts": fired if minute == 40 else []}
            for minute in (9, 20, 40, 58)
        ],
    }
    tests = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [case]}
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(tests))
    succeeded, printed = promtool("test", "rules", "tests.yaml", folder=tmp_path)
    assert succeeded, printed
