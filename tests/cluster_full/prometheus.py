"""A real Prometheus that scrapes the agent of a test, with rules whose durations are divided."""

import json
import subprocess
import urllib.request
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.error import URLError

from core.kube.resources import PODS
from tests.cluster.apart import ApartAgent
from tests.support.monitoring import divide_durations, read_rules
from tests.support.sockets import free_port
from tests.support.tools import tool
from tests.testbed.install import AGENT_LABEL, METRICS_PORT
from tests.testbed.processes import wait_for

FACTOR = 240
"""A day is six minutes, and ten minutes are 2.5 s, in which there are five scrapes."""

_INTERVAL = "500ms"
_POLL_SECONDS = 0.5


@dataclass
class Prometheus:
    """Prometheus, and the alerts that have fired so far."""

    folder: Path
    port: int
    own: ApartAgent
    fired: set[str] = field(default_factory=set)

    def target_agent(self) -> None:
        """Scrape the pod that is there now; until the next call it stays the target, also when it is gone."""
        pods = self.own.bed.api.objects(PODS, self.own.space, selector=AGENT_LABEL)
        targets = [f"{pod['status']['podIP']}:{METRICS_PORT}" for pod in pods]
        path = self.folder / "targets.json"
        new = path.with_suffix(".new")
        new.write_text(json.dumps([{"targets": targets}]), encoding="utf-8")
        new.rename(path)

    def alerts(self) -> AbstractSet[str]:
        """Return the alerts that fire now."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api/v1/alerts", timeout=10) as answer:
            found: Any = json.load(answer)
        firing = {one["labels"]["alertname"] for one in found["data"]["alerts"] if one["state"] == "firing"}
        self.fired |= firing
        return firing

    def wait_fired(self, *names: str, seconds: float) -> None:
        """Return once each of these has fired since the start."""
        wait_for(
            lambda: f"alerts to fire: {sorted(set(names) - self.fired)}",
            lambda: set(names) <= self.fired | self.alerts(),
            seconds=seconds,
            pause_seconds=_POLL_SECONDS,
        )

    def wait_quiet(self, *names: str, seconds: float) -> None:
        """Return once none of these fires."""
        wait_for(
            lambda: f"alerts to end: {sorted(set(names) & self.alerts())}",
            lambda: set(names).isdisjoint(self.alerts()),
            seconds=seconds,
            pause_seconds=_POLL_SECONDS,
        )


@contextmanager
def run_prometheus(folder: Path, own: ApartAgent) -> Iterator[Prometheus]:
    """Run Prometheus; its target is the agent's pod."""
    divided = [divide_durations(rule, FACTOR) for rule in read_rules()]
    rules = {"groups": [{"name": "node-agent", "rules": divided}]}
    (folder / "rules.yaml").write_text(json.dumps(rules), encoding="utf-8")
    job = {"job_name": "node-agent", "file_sd_configs": [{"files": ["targets.json"], "refresh_interval": "1s"}]}
    config = {
        "global": {"scrape_interval": _INTERVAL, "scrape_timeout": _INTERVAL, "evaluation_interval": _INTERVAL},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [job],
    }
    (folder / "prometheus.yaml").write_text(json.dumps(config), encoding="utf-8")
    prometheus = Prometheus(folder, free_port(), own)
    prometheus.target_agent()
    argv: list[str | Path] = [
        tool("prometheus", "prometheus"),
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{prometheus.port}",
    ]
    log = folder / "log"
    with log.open("w") as out, subprocess.Popen(argv, stdout=out, stderr=out) as process:
        try:
            wait_for(lambda: f"Prometheus: {log.read_text()}", lambda: _answers(prometheus), seconds=60)
            yield prometheus
        finally:
            process.kill()


def _answers(prometheus: Prometheus) -> bool:
    try:
        prometheus.alerts()
    except URLError:
        return False
    return True
