"""Command lines of Velero: those of its DaemonSets, of its chart, and every global flag of its binary."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from nodeagent.__main__ import _parser
from nodeagent.runtime.settings import IGNORED_FLAGS, ListenAddress, Settings, parse_settings

_ROOT = Path(__file__).parents[3]
_RECORDED = sorted((_ROOT / "tests" / "data" / "velero-1.18.2").glob("daemonset-*.yaml"))

_OWN: dict[str, dict[str, Any]] = {
    "--node-agent-configmap=agent": {"config_map_name": "agent"},
    "--backup-repository-configmap=repositories": {"backup_repository_config_map": "repositories"},
    "--data-mover-prepare-timeout=1h0m0s": {"prepare_timeout": timedelta(hours=1)},
    "--resource-timeout=90s": {"resource_timeout": timedelta(seconds=90)},
    "--metrics-address=127.0.0.1:1": {"metrics_address": ListenAddress("127.0.0.1", 1)},
    "--log-level=warning": {"log_level": "warning"},
    "--log-format=json": {"log_format": "json"},
    "--kubeconfig=/k": {"kubeconfig": "/k"},
    "--kubecontext=other": {"kubecontext": "other"},
    "--namespace=backups": {"namespace": "backups"},
}
"""Flags that mean the same here. Source: `velero node-agent server --help`, 1.18."""

_IGNORED = (
    "--features=EnableCSI,EnableAPIGroupVersions",
    "--colorized=false",
    "--add_dir_header",
    "--alsologtostderr",
    "--alsologtostderrthreshold=2",
    "--log_backtrace_at=:0",
    "--log_dir=/tmp",
    "--log_file=/tmp/log",
    "--log_file_max_size=1800",
    "--legacy_stderr_threshold_behavior=false",
    "--logtostderr=true",
    "--one_output",
    "--skip_headers=false",
    "--skip_log_headers",
    "--stderrthreshold=2",
    "--v=4",
    "--vmodule=file=2",
)


def _parse(*arguments: str) -> tuple[Settings, list[str]]:
    parsed = _parser().parse_args(["node-agent", "server", *arguments])
    return parse_settings(parsed, {"NODE_NAME": "node-a"}), getattr(parsed, IGNORED_FLAGS, [])


def test_every_flag_of_velero_at_once() -> None:
    settings, ignored = _parse(*_OWN, *_IGNORED)
    wanted: dict[str, Any] = {}
    for fields in _OWN.values():
        wanted |= fields
    assert settings == Settings(node_name="node-a", **wanted)
    assert ignored == [flag.partition("=")[0] for flag in _IGNORED]


@pytest.mark.parametrize("arguments", [["-n", "a"], ["-na"], ["-n=a"], ["--namespace", "a"]], ids=" ".join)
def test_the_namespace_has_veleros_short_form(arguments: list[str]) -> None:
    assert _parse(*arguments)[0].namespace == "a"


@pytest.mark.parametrize("arguments", [["-v", "4"], ["-v=4"], ["--v", "4"]], ids=" ".join)
def test_klogs_verbosity_has_its_short_form(arguments: list[str]) -> None:
    assert _parse(*arguments, "--log-level=debug")[0].log_level == "debug"


def test_a_switch_does_not_take_the_next_flag() -> None:
    assert _parse("--logtostderr", "--log-level=error") == (
        Settings(node_name="node-a", log_level="error"),
        ["--logtostderr"],
    )


@pytest.mark.parametrize("recorded", _RECORDED, ids=lambda path: path.stem)
def test_the_command_of_a_recorded_daemonset_means_serve(recorded: Path) -> None:
    container = yaml.safe_load(recorded.read_text())["spec"]["template"]["spec"]["containers"][0]
    assert container["command"] == ["/velero"]
    parsed = _parser().parse_args(container["args"])
    assert parsed.run is _parser().parse_args(["serve"]).run
    settings = parse_settings(parsed, {"NODE_NAME": "node-a"})
    named = "--node-agent-configmap=node-agent-config" in container["args"]
    assert settings.config_map_name == ("node-agent-config" if named else None)
    assert getattr(parsed, IGNORED_FLAGS) == ["--features"]
