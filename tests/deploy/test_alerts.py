"""The alerts of `deploy/monitoring/rules.yaml`, by promtool, and their runbook."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster_full.test_alerts import FIRED
from tests.deploy.alerts.healthy_day import build_healthy_day
from tests.support.monitoring import MONITORING, promtool, read_rules

pytestmark = pytest.mark.processes

_ROOT = Path(__file__).parents[2]
_CASES = sorted(Path(__file__).with_name("alerts").glob("*.yaml"))


def _alerts() -> dict[str, Any]:
    return {rule["alert"]: rule for rule in read_rules()}


def _run(text: str, folder: Path) -> str:
    """Run tests of promtool; return what it found wrong."""
    (folder / "rules.yaml").write_text(_without_texts(), encoding="utf-8")
    (folder / "tests.yaml").write_text(text, encoding="utf-8")
    succeeded, printed = promtool("test", "rules", "tests.yaml", folder=folder)
    assert succeeded or "FAILED" in printed, printed
    return "" if succeeded else printed


def _without_texts() -> str:
    """The rules without annotations, which a test of promtool would have to repeat for each alert."""
    rules = [{key: value for key, value in rule.items() if key != "annotations"} for rule in read_rules()]
    return yaml.safe_dump({"groups": [{"name": "node-agent", "rules": rules}]})


def test_the_rules_are_valid() -> None:
    succeeded, printed = promtool("check", "rules", "--lint=all", "--lint-fatal", "rules.yaml", folder=MONITORING)
    assert succeeded, printed


@pytest.mark.parametrize("cases", _CASES, ids=lambda path: path.stem)
def test_each_alert_fires_resolves_and_stays_quiet(cases: Path, tmp_path: Path) -> None:
    assert _run(cases.read_text(encoding="utf-8"), tmp_path) == ""


def test_each_alert_has_times_before_while_and_after_it_fires() -> None:
    found = dict.fromkeys(_alerts(), "")
    tests = [case for path in _CASES for case in yaml.safe_load(path.read_text(encoding="utf-8"))["tests"]]
    for case in tests:
        for each in case["alert_rule_test"]:
            found[each["alertname"]] += "F" if each["exp_alerts"] else "q"
    assert {name for name, times in found.items() if "qFq" not in times.replace("qq", "q")} == set()


def test_a_rule_that_never_fires_is_found(tmp_path: Path) -> None:
    """The tests themselves: one that expects an alert of a healthy system fails."""
    case = yaml.safe_load(_CASES[-1].read_text(encoding="utf-8"))
    case["tests"] = [each for each in case["tests"] if each["name"] == "NodeAgentDown"]
    case["tests"][0]["input_series"][0]["values"] = "1x60"
    assert "NodeAgentDown" in _run(yaml.safe_dump(case), tmp_path)


def test_a_healthy_day_fires_none(tmp_path: Path) -> None:
    assert _run(yaml.safe_dump(build_healthy_day(_alerts())), tmp_path) == ""


def test_each_alert_has_texts_and_a_section_in_the_runbook() -> None:
    page = (_ROOT / "docs" / "alerts.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"(?ms)^### (\w+)\n(.*?)(?=^##|\Z)", page))
    assert sections.keys() == _alerts().keys()
    for name, rule in _alerts().items():
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}, name
        assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}, name
        assert rule["annotations"]["runbook_url"] == f"docs/alerts.md#{name.lower()}", name
        for part in ("**Meaning:**", "**Check:**", "**Action:**"):
            assert part in sections[name], (name, part)


def _block(first: str) -> str:
    """The example of the runbook that begins with this line."""
    page = (_ROOT / "docs" / "alerts.md").read_text(encoding="utf-8")
    found = re.search(rf"(?m)^    {first}\n(?:    .*\n)+", page)
    assert found, first
    return textwrap.dedent(found[0])


def test_the_scrape_configuration_of_the_runbook_is_valid(tmp_path: Path) -> None:
    config = tmp_path / "prometheus.yaml"
    config.write_text(_block("scrape_configs:"), encoding="utf-8")
    succeeded, printed = promtool("check", "config", "--syntax-only", config.name, folder=tmp_path)
    assert succeeded, printed


def test_the_receivers_of_the_runbook_exist() -> None:
    config = yaml.safe_load(_block("route:"))
    receivers = {receiver["name"] for receiver in config["receivers"]}
    assert {config["route"]["receiver"], *(route["receiver"] for route in config["route"]["routes"])} == receivers
    for route in config["route"]["routes"]:
        (names,) = re.findall(r'alertname=~"(.+?)"', " ".join(route["matchers"]))
        assert [name for name in _alerts() if not re.fullmatch(names, name)] == [], route["receiver"]
    kinds = {key for receiver in config["receivers"] for key in receiver} - {"name"}
    assert kinds == {"slack_configs", "pagerduty_configs", "email_configs", "webhook_configs"}


def test_each_alert_is_fired_by_a_test() -> None:
    assert sorted(FIRED) == sorted(_alerts())
