"""The objects of `deploy/monitoring`, the same in the chart, and the queries of the dashboard."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from core.models.names import AGENT_LABELS
from nodeagent.metrics import Metrics
from tests.support.helm import Helm
from tests.support.monitoring import MONITORING, dashboard_queries, metrics_in, promtool, rule_queries
from tests.support.schemas import validate
from tests.support.tools import tool
from tools.monitoring import generate_monitoring

if TYPE_CHECKING:
    from tests.testbed.api import Json

pytestmark = pytest.mark.processes

_OTHERS = {"up", "process_resident_memory_bytes", "process_start_time_seconds"}
"""What Prometheus and the library of the agents add."""

_ALL = {"podMonitor": True, "rules": True, "dashboard": True}


def _load(name: str) -> Json:
    item: Json = yaml.safe_load((MONITORING / name).read_text(encoding="utf-8"))
    return item


def _rendered(folder: Path, **values: object) -> dict[str, Json]:
    found = Helm(folder).template("velero", {"crds": {"install": False}, "monitoring": values})
    return {f"{item['kind']}/{item['metadata']['name']}": item for item in found}


def test_the_chart_has_the_objects_of_deploy_monitoring(tmp_path: Path) -> None:
    found, without = _rendered(tmp_path, **_ALL), _rendered(tmp_path)
    added = {key: item for key, item in found.items() if key not in without}
    assert added["PodMonitor/node-agent"] == _load("pod-monitor.yaml")
    assert added["PrometheusRule/node-agent"] == _load("prometheus-rule.yaml")
    dashboard = added["ConfigMap/node-agent-dashboard"]
    assert dashboard["data"] == {"node-agent.json": (MONITORING / "dashboard.json").read_text(encoding="utf-8")}
    (generator,) = _load("kustomization.yaml")["configMapGenerator"]
    assert dashboard["metadata"]["labels"] == generator["options"]["labels"]
    assert len(added) == 3


def test_labels_and_the_page_of_the_runbook_are_values(tmp_path: Path) -> None:
    found = _rendered(
        tmp_path, **_ALL, labels={"release": "prometheus"}, dashboardLabels={"team": "a"}, runbook="https://wiki/alerts"
    )
    for key in ("PodMonitor/node-agent", "PrometheusRule/node-agent"):
        assert found[key]["metadata"]["labels"] == {"app.kubernetes.io/part-of": "node-agent", "release": "prometheus"}
    assert found["ConfigMap/node-agent-dashboard"]["metadata"]["labels"]["team"] == "a"
    (group,) = found["PrometheusRule/node-agent"]["spec"]["groups"]
    links = {rule["annotations"]["runbook_url"] for rule in group["rules"]}
    assert {link.partition("#")[0] for link in links} == {"https://wiki/alerts"}


def test_the_objects_fit_the_definitions_of_the_prometheus_operator() -> None:
    validate([_load("pod-monitor.yaml"), _load("prometheus-rule.yaml")])


def test_the_files_are_generated() -> None:
    assert {name: (MONITORING / name).read_text(encoding="utf-8") for name in generate_monitoring()} == (
        generate_monitoring()
    )


def test_the_monitor_selects_the_pods_and_the_port_of_agents() -> None:
    spec = _load("pod-monitor.yaml")["spec"]
    assert spec["selector"] == {"matchLabels": AGENT_LABELS}
    daemonset = yaml.safe_load((MONITORING.parent / "agent" / "daemonset.yaml").read_text(encoding="utf-8"))
    (container,) = daemonset["spec"]["template"]["spec"]["containers"]
    assert spec["podMetricsEndpoints"][0]["port"] in {port["name"] for port in container["ports"]}


@pytest.mark.integration
def test_kustomize_builds_the_component(tmp_path: Path) -> None:
    shutil.copytree(MONITORING.parent, tmp_path / "deploy")
    content = {"resources": ["deploy"], "components": ["deploy/monitoring"]}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    argv: list[str | Path] = [tool("kubernetes", "kubectl"), "kustomize", tmp_path]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    kinds = [item["kind"] for item in yaml.safe_load_all(done.stdout)]
    assert {"PodMonitor", "PrometheusRule", "DaemonSet"} <= set(kinds)
    assert kinds.count("ConfigMap") == 2


def test_each_query_of_the_dashboard_is_valid(tmp_path: Path) -> None:
    """promtool reads them as rules."""
    queries = dashboard_queries()
    rules = [{"record": f"panel:{number}", "expr": query} for number, query in enumerate(queries)]
    (tmp_path / "rules.yaml").write_text(json.dumps({"groups": [{"name": "g", "rules": rules}]}), encoding="utf-8")
    succeeded, printed = promtool("check", "rules", "rules.yaml", folder=tmp_path)
    assert succeeded, printed
    assert len(queries) > 30


def test_the_curves_by_volume_are_of_a_bounded_number(tmp_path: Path) -> None:
    names = ("day_new_bytes", "last_backup_bytes", "day_backup_seconds")
    series = [
        {"series": f'nodeagent_volume_{name}{{volume_namespace="app",claim="c{number}"}}', "values": f"{number}x5"}
        for name in names
        for number in range(30)
    ]
    queries = [query for query in dashboard_queries() if "@ end()" in query]
    tests = [{"expr": f"count({query})", "eval_time": "5m", "exp_samples": [{"value": 20}]} for query in queries]
    content = {"tests": [{"interval": "1m", "input_series": series, "promql_expr_test": tests}]}
    (tmp_path / "tests.yaml").write_text(json.dumps(content), encoding="utf-8")
    succeeded, printed = promtool("test", "rules", "tests.yaml", folder=tmp_path)
    assert (succeeded, len(queries)) == (True, len(names)), printed


def test_rules_and_dashboard_use_metrics_that_agents_have() -> None:
    text = Metrics("a").render().decode()
    known = set(re.findall(r"(?m)^# TYPE (\S+) ", text))
    known |= {f"{name}_{part}" for name in known for part in ("bucket", "count", "sum")}
    used = metrics_in((*rule_queries(), *dashboard_queries()))
    assert used - known - _OTHERS == set()


def test_the_panels_of_a_row_do_not_overlap() -> None:
    dashboard: dict[str, Any] = json.loads((MONITORING / "dashboard.json").read_text(encoding="utf-8"))
    covered: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & covered, panel["title"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        covered |= cells
    assert [panel["title"] for panel in dashboard["panels"] if panel["type"] == "row"] == [
        "Protection",
        "Fleet",
        "Node",
        "Transfers",
        "Repositories",
    ]
