"""What `deploy/monitoring` asks Prometheus for."""

import json
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from tests.support.tools import tool

MONITORING = Path(__file__).parents[2] / "deploy" / "monitoring"

_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_DURATION = re.compile(r"\b([0-9]+)([smhd])\b")
_SECONDS = re.compile(r"(_seconds(?:{[^}]*})? [<>]) ([0-9]+)")
_CHOICE = re.compile(r"\$\w+")
_METRIC = re.compile(r"\b(?:nodeagent|podVolume|velero|process)_\w+|\bup\b")


def promtool(*words: str, folder: Path) -> tuple[bool, str]:
    """Run promtool in a folder; return whether it succeeded, and what it printed."""
    argv = [str(tool("prometheus", "promtool")), *words]
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode == 0, done.stdout + done.stderr


def read_rules() -> list[dict[str, Any]]:
    """Return the alerting rules."""
    (group,) = yaml.safe_load((MONITORING / "rules.yaml").read_text(encoding="utf-8"))["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


def rule_queries() -> list[str]:
    """Return the expressions of the alerts."""
    return [rule["expr"] for rule in read_rules()]


def dashboard_queries() -> list[str]:
    """Return the expressions of all panels, in which Grafana's variables have values."""
    dashboard = json.loads((MONITORING / "dashboard.json").read_text(encoding="utf-8"))
    found = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    return [_CHOICE.sub(".*", one.replace("$__rate_interval", "5m")) for one in found]


def metrics_in(queries: Iterable[str]) -> set[str]:
    """Return the names of the metrics that the expressions select."""
    return {name for query in queries for name in _METRIC.findall(query)}


def divide_durations(rule: dict[str, Any], factor: int) -> dict[str, Any]:
    """Return the rule with each duration divided: ranges, offsets, `for`, and seconds that an age is compared with."""

    def divide(match: re.Match[str]) -> str:
        return f"{int(match[1]) * _UNIT_SECONDS[match[2]] * 1000 // factor}ms"

    def divide_seconds(match: re.Match[str]) -> str:
        return f"{match[1]} {int(match[2]) / factor:g}"

    changed = {key: _DURATION.sub(divide, rule[key]) for key in ("expr", "for") if key in rule}
    return rule | changed | {"expr": _SECONDS.sub(divide_seconds, changed["expr"])}
