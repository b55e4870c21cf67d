"""The command line: help, version, one-line errors, and the command lines of Velero's DaemonSets and its chart."""

import argparse
import dataclasses
import os
import re
import subprocess
import sys
import tomllib
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from core.errors import ConfigError
from core.version import VERSION
from nodeagent.__main__ import _parser
from nodeagent.runtime.settings import (
    IGNORED_FLAGS,
    ListenAddress,
    MaintenanceSwitch,
    RepositoryControllerMode,
    Settings,
    node_name_from,
    parse_address,
    parse_settings,
)

pytestmark = pytest.mark.processes

_ROOT = Path(__file__).parents[2]
_OUTSIDE = {
    key: value
    for key, value in os.environ.items()
    if key not in {"NODE_NAME", "VELERO_NAMESPACE", "KUBECONFIG", "KUBERNETES_SERVICE_HOST"}
}


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "nodeagent", *arguments]
    return subprocess.run(argv, cwd=_ROOT, env=_OUTSIDE, capture_output=True, text=True, check=False)


def _settings(*arguments: str, **environ: str) -> Settings:
    parsed: argparse.Namespace = _parser().parse_args(["serve", *arguments])
    return parse_settings(parsed, {"NODE_NAME": "node-a", **environ})


def test_version_is_that_of_the_package() -> None:
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "core.version.VERSION"}
    assert _run("--version").stdout == f"node-agent {VERSION}\n"


def test_help_loads_no_library() -> None:
    heavy = "{'aiohttp', 'kubernetes_asyncio', 'prometheus_client', 'pydantic'}"
    code = f"import sys, nodeagent.__main__; print({heavy} & set(sys.modules))"
    argv = [sys.executable, "-c", code]
    assert subprocess.run(argv, cwd=_ROOT, capture_output=True, text=True, check=True).stdout == "set()\n"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([], "required: COMMAND"),
        (["serv"], 'no such command "serv" (did you mean serve?) (see nodeagent --help)'),
        (["bakcup", "get"], 'no such command "bakcup" (did you mean backup?) (see nodeagent --help)'),
        (["serve"], "not running in a pod"),
        (["serve", "--node-name=a", "--kubeconfig=/absent"], "kubeconfig /absent does not exist"),
        (["serve", "--node-name=a", "--kubeconfig=pyproject.toml"], "cannot use kubeconfig pyproject.toml"),
        (["serve", "--resource-timeout=3x"], 'not a duration such as 30s, 10m or 1h30m: "3x"'),
        (["serve", "--resource-timeout=-3m"], "not a positive duration"),
        (["serve", "--client-qps=0"], 'not a positive number: "0"'),
        (["serve", "--client-qps=nan"], 'not a positive number: "nan"'),
        (["serve", "--client-qps=many"], 'not a positive number: "many"'),
        (["serve", "--client-burst=1.5"], 'not a positive whole number: "1.5"'),
        (["serve", "--metrics-address=8085"], 'not an address such as :8085 or 127.0.0.1:8085: "8085"'),
        (["serve", "--mover-service-account=Mover"], 'not a name of lower-case letters, digits, "-" and ".": "Mover"'),
        (["serve", "--log-level=loud"], "invalid choice: 'loud'"),
        (["serve", "--repo-maintenance=maybe"], "invalid choice: 'maybe'"),
        (["node-agent"], "required: COMMAND"),
        (["node-agent", "serve"], "invalid choice: 'serve'"),
        (["node-agent", "server", "--feature=x"], "unrecognized arguments: --feature=x"),
        (["node-agent", "server", "-x"], "unrecognized arguments: -x"),
        (["node-agent", "server", "--colorized"], "expected one argument"),
        (["check-config", "--features=x", "-"], "unrecognized arguments: --features=x"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_unusable_command_line_is_one_line_and_exit_code_2(arguments: list[str], error: str) -> None:
    done = _run(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert re.fullmatch(r"error: [^\n]+\n", done.stderr)
    assert error in done.stderr


def test_ignored_flags_are_named_in_one_log_line() -> None:
    done = _run("node-agent", "server", "--node-name=a", "--kubeconfig=/absent", "--v=4", "--features=x", "--v=5")
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if "no effect" in line]
    assert re.search(r"flags of Velero that have no effect here: --features, --v\b", line)


def test_settings_without_flags_are_the_defaults() -> None:
    settings = _settings()
    assert settings == Settings(node_name="node-a")
    assert settings.prepare_timeout == timedelta(minutes=30)
    assert settings.resource_timeout == timedelta(minutes=10)
    assert settings.node_gone_after == timedelta(minutes=5)
    assert str(settings.metrics_address) == ":8085"
    assert settings.datamover_names == {"", "velero", "velero-fs", "velero-block"}


_FLAGS: dict[str, dict[str, Any]] = {
    "--node-name=node-b": {"node_name": "node-b"},
    "--namespace=other": {"namespace": "other"},
    "--kubeconfig=/k": {"kubeconfig": "/k"},
    "--kubecontext=c": {"kubecontext": "c"},
    "--node-agent-configmap=agent": {"config_map_name": "agent"},
    "--backup-repository-configmap=repositories": {"backup_repository_config_map": "repositories"},
    "--repo-maintenance-job-configmap=maintenance": {"maintenance_config_map": "maintenance"},
    "--mover-service-account=movers": {"mover_service_account": "movers"},
    "--data-mover-prepare-timeout=1h": {"prepare_timeout": timedelta(hours=1)},
    "--resource-timeout=90s": {"resource_timeout": timedelta(seconds=90)},
    "--node-gone-after=7m": {"node_gone_after": timedelta(minutes=7)},
    "--metrics-address=127.0.0.1:1": {"metrics_address": ListenAddress("127.0.0.1", 1)},
    "--status-address=127.0.0.1:2": {"status_address": ListenAddress("127.0.0.1", 2)},
    "--log-level=debug": {"log_level": "debug"},
    "--log-format=json": {"log_format": "json"},
    "--datamover=mine": {"datamover_names": frozenset({"mine"})},
    "--repository-controller=off": {"repository_controller": RepositoryControllerMode.OFF},
    "--repo-maintenance=on": {"maintenance": MaintenanceSwitch.ON},
    "--default-repo-maintain-frequency=30m": {"maintenance_frequency": timedelta(minutes=30)},
    "--lease-duration=5s": {"lease_duration": timedelta(seconds=5)},
    "--client-qps=7.5": {"client_qps": 7.5},
    "--client-burst=9": {"client_burst": 9},
}


def test_every_flag_is_used() -> None:
    fields = {name: value for each in _FLAGS.values() for name, value in each.items()}
    assert fields.keys() == {field.name for field in dataclasses.fields(Settings)}
    assert _settings(*_FLAGS, VELERO_NAMESPACE="velero") == Settings(**fields)


@pytest.mark.parametrize("duration", ["0", "-1h"])
def test_a_maintenance_frequency_that_is_not_positive_is_none(duration: str) -> None:
    """As with a Velero server, which then takes its default."""
    assert _settings(f"--default-repo-maintain-frequency={duration}").maintenance_frequency <= timedelta()


def test_the_namespace_comes_from_the_environment() -> None:
    assert _settings(VELERO_NAMESPACE="backups").namespace == "backups"


@pytest.mark.parametrize("name", ["", "velero", "velero-fs"])
def test_each_name_of_the_built_in_data_mover_includes_the_others_and_claims_the_block_data_mover(name: str) -> None:
    built_in = {"", "velero", "velero-fs", "velero-block"}
    assert _settings(f"--datamover={name}", "--datamover=mine").datamover_names == built_in | {"mine"}


@pytest.mark.parametrize(
    ("environ", "kubeconfig", "error"),
    [
        ({}, None, "not running in a pod"),
        ({"KUBERNETES_SERVICE_HOST": "10.96.0.1"}, None, "set NODE_NAME"),
        ({"KUBECONFIG": "/k"}, None, "--node-name"),
        ({}, "/k", "--node-name"),
    ],
    ids=["outside", "pod", "environment", "flag"],
)
def test_an_unknown_node_name_is_an_error(environ: dict[str, str], kubeconfig: str | None, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        node_name_from("", environ, kubeconfig=kubeconfig)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        (":8085", None, 8085),
        ("127.0.0.1:80", "127.0.0.1", 80),
        ("[::1]:80", "::1", 80),
        ("localhost:0", "localhost", 0),
    ],
)
def test_an_address_is_parsed_and_printed_alike(text: str, host: str | None, port: int) -> None:
    assert parse_address(text) == ListenAddress(host, port)
    assert str(parse_address(text)) == text


@pytest.mark.parametrize("text", ["", "8085", ":", ":x", ":70000", ":-1"])
def test_an_invalid_address_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="not an address"):
        parse_address(text)


_RECORDED = sorted((_ROOT / "tests" / "data" / "velero-1.18.2").glob("daemonset-*.yaml"))

_VELEROS = {
    "--node-agent-configmap",
    "--backup-repository-configmap",
    "--data-mover-prepare-timeout",
    "--resource-timeout",
    "--metrics-address",
    "--log-level",
    "--log-format",
    "--kubeconfig",
    "--kubecontext",
    "--namespace",
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
    own = {flag: fields for flag, fields in _FLAGS.items() if flag.partition("=")[0] in _VELEROS}
    settings, ignored = _parse(*own, *_IGNORED)
    wanted = {name: value for fields in own.values() for name, value in fields.items()}
    assert (len(own), settings) == (len(_VELEROS), Settings(node_name="node-a", **wanted))
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
