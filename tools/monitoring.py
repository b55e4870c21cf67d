"""What is generated of `deploy/monitoring`, and of it in the chart: all but the rules in `rules.yaml`."""

from pathlib import Path
from typing import Final

import yaml

from client.install.options import build_object
from core.models.base import JsonDict
from core.models.names import AGENT_LABELS
from nodeagent.runtime.settings import DEFAULT_NAMESPACE
from tools.dashboard import build_dashboard
from tools.documents import GENERATED, build_file, dump

_RULES: Final = Path(__file__).parents[1] / "deploy" / "monitoring" / "rules.yaml"
_API: Final = "monitoring.coreos.com/v1"
_NAME: Final = "node-agent"

_RULE_ABOUT: Final = "The rules of rules.yaml as an object of the Prometheus Operator."
_MONITOR_ABOUT: Final = """\
The agents as targets, for the Prometheus Operator. The pods of a DaemonSet need no Service to be scraped, and as
targets of a PodMonitor they need none that exists for this alone."""


def generate_monitoring() -> dict[str, str]:
    """Return the text of each generated file by its path in `deploy/monitoring`."""
    rule = {**_build(_API, "PrometheusRule"), "spec": yaml.safe_load(_RULES.read_text(encoding="utf-8"))}
    return {
        "dashboard.json": build_dashboard(),
        "pod-monitor.yaml": build_file([_build(_API, "PodMonitor") | _build_monitor()], about=_MONITOR_ABOUT),
        "prometheus-rule.yaml": build_file([rule], about=_RULE_ABOUT),
    }


def generate_chart_monitoring() -> dict[str, str]:
    """Return the text of each generated file by its path in `deploy/chart/files/monitoring`."""
    return {
        "dashboard.json": build_dashboard(),
        "pod-monitor.yaml": GENERATED + dump(_build_monitor()),
        "rules.yaml": _RULES.read_text(encoding="utf-8"),
    }


def _build(api: str, kind: str) -> JsonDict:
    return build_object(api, kind, _NAME, DEFAULT_NAMESPACE)


def _build_monitor() -> JsonDict:
    """Return the spec of the PodMonitor: the job is the one that the rules name, the instance is the node."""
    endpoint = {
        "port": "metrics",
        "relabelings": [
            {"targetLabel": "job", "replacement": _NAME},
            {"sourceLabels": ["__meta_kubernetes_pod_node_name"], "targetLabel": "instance"},
        ],
    }
    return {"spec": {"selector": {"matchLabels": dict(AGENT_LABELS)}, "podMetricsEndpoints": [endpoint]}}
