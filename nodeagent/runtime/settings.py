"""The settings that a node agent is started with, and the command line that they are read from.

Source: Velero v1.18, pkg/cmd/velero/velero.go and pkg/install/daemonset.go; its Helm chart 12.1,
templates/node-agent-daemonset.yaml; klog v2.140, klog.go.
"""

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from enum import StrEnum
from typing import Any, Final, NoReturn

from core.errors import ConfigError
from core.logs import LEVELS, LOG_FORMATS
from core.models.names import BLOCK_DATA_MOVER, BUILT_IN_DATA_MOVERS, OBJECT_NAME
from core.models.units import format_duration, parse_duration

DEFAULT_NAMESPACE: Final = "velero"
_LARGEST_PORT: Final = 65535


class RepositoryControllerMode(StrEnum):
    """Whether the leader makes BackupRepositories ready."""

    AUTO = "auto"
    """Yes, unless a Velero server's Deployment is in the namespace."""
    ON = "on"
    OFF = "off"


class MaintenanceSwitch(StrEnum):
    """Whether the leader runs the maintenance of backup repositories; never where there is a Velero server."""

    AUTO = "auto"
    """An hour after the last sign of a server, and not where another cluster maintains the repository."""
    ON = "on"
    OFF = "off"


@dataclass(frozen=True)
class ListenAddress:
    """An address to listen on; `host` None means all addresses of the machine."""

    host: str | None
    port: int

    def __str__(self) -> str:
        host = self.host or ""
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"


def parse_address(text: str) -> ListenAddress:
    """Parse an address such as `:8085`, `127.0.0.1:8085` or `[::1]:8085`; raise ValueError if it is none."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not port.isdecimal() or int(port) > _LARGEST_PORT:
        raise ValueError(f'not an address such as :8085 or 127.0.0.1:8085: "{text}"')
    return ListenAddress(host or None, int(port))


@dataclass(frozen=True)
class Settings:
    """The settings of `nodeagent serve`.

    Attributes:
        namespace: None: the kubeconfig's namespace counts, else `DEFAULT_NAMESPACE`.
        kubecontext: None: the kubeconfig's current context.
        maintenance_frequency: `spec.maintenanceFrequency` of repositories that have none; not positive: 1 hour.
        mover_service_account: the account of mover pods; None: the agent's own.
        prepare_timeout: from Accepted to Prepared. Default: Velero's; so is the default of
            `resource_timeout`. Source: Velero v1.18, pkg/cmd/cli/nodeagent/server.go.
        node_gone_after: how long a node may be not Ready before its transfers are Failed.
        status_address: where `/status` is served; None: where the metrics are.
        lease_duration: of the leader's Lease. Source: Kubernetes v1.34, the default of its own components.
        datamover_names: the values of `spec.datamover` that this agent handles.
        client_qps: sustained requests per second to the API server, and `client_burst` at once:
            an agent makes a few per minute, the leader about a hundred per second while it
            admits a large backup.
    """

    node_name: str
    namespace: str | None = None
    kubeconfig: str | None = None
    kubecontext: str | None = None
    config_map_name: str | None = None
    backup_repository_config_map: str | None = None
    maintenance_config_map: str | None = None
    mover_service_account: str | None = None
    prepare_timeout: timedelta = timedelta(minutes=30)
    resource_timeout: timedelta = timedelta(minutes=10)
    node_gone_after: timedelta = timedelta(minutes=5)
    metrics_address: ListenAddress = ListenAddress(None, 8085)
    status_address: ListenAddress | None = None
    log_level: str = "info"
    log_format: str = "text"
    datamover_names: frozenset[str] = BUILT_IN_DATA_MOVERS | {BLOCK_DATA_MOVER}
    repository_controller: RepositoryControllerMode = RepositoryControllerMode.AUTO
    maintenance: MaintenanceSwitch = MaintenanceSwitch.AUTO
    maintenance_frequency: timedelta = timedelta()
    lease_duration: timedelta = timedelta(seconds=15)
    client_qps: float = 400.0
    client_burst: int = 800


def node_name_from(flag: str, environ: Mapping[str, str], *, kubeconfig: str | None) -> str:
    """Return the name of the agent's node: the flag's value, else NODE_NAME's; raise ConfigError if neither is set."""
    name = flag or environ.get("NODE_NAME", "")
    if name:
        return name
    inside = "KUBERNETES_SERVICE_HOST" in environ
    if not inside and not kubeconfig and not environ.get("KUBECONFIG"):
        raise ConfigError(
            "not running in a pod: install the agent from deploy/, "
            "or set --kubeconfig PATH and --node-name NAME to run it outside of a cluster"
        )
    raise ConfigError(
        "unknown node name: set NODE_NAME from spec.nodeName as deploy/agent/daemonset.yaml does, "
        "or set --node-name NAME"
    )


KUBECONFIG_HELP: Final = (
    "kubeconfig file (default: $KUBECONFIG, then ~/.kube/config; in a pod without them, its ServiceAccount)"
)
KUBECONTEXT_HELP: Final = "context of the kubeconfig (default: its current one)"


USER_COMMANDS: Final = {
    "backup": "back up volumes, show, verify and cancel backups",
    "describe": "show everything about one transfer, and what to do next",
    "install": "install the agents, or update them",
    "preflight": "check the installed agents by a small volume",
    "repo": "show backup repositories, and connect kopia to one",
    "restore": "restore volumes into new PVCs, show and cancel restores",
    "schedule": "back up volumes regularly, and delete expired backups",
    "status": "show the health of the agents, the queue and the transfers",
    "support-bundle": "collect what helps to find a fault, without secrets",
    "ui": "show what is going on, in a browser",
    "uninstall": "remove the agents; backups stay",
    "version": "show the versions of this command and of the agents",
    "volumes": "show which volumes are protected, and why others are not",
}
"""Commands that need the extra `cli`; their modules are imported when one of them runs, and never by an agent."""


class CommandParser(argparse.ArgumentParser):
    """Raises an error where argparse would print the usage and exit."""

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError about an invalid command line."""
        raise ConfigError(f"{message} (see {self.prog} --help)")


def add_kubeconfig(group: argparse._ArgumentGroup) -> None:
    """Add `--kubeconfig` and `--kubecontext`; the defaults are empty."""
    group.add_argument("--kubeconfig", metavar="PATH", default="", help=KUBECONFIG_HELP)
    group.add_argument("--kubecontext", metavar="NAME", default="", help=KUBECONTEXT_HELP)


def add_namespace(group: argparse._ArgumentGroup, text: str) -> None:
    """Add `--namespace` and `-n`, described by `text`; the default is empty."""
    group.add_argument(
        "--namespace",
        "-n",
        metavar="NAME",
        default="",
        help=f"{text} (default: $VELERO_NAMESPACE, then the kubeconfig's, then velero)",
    )


IGNORED_FLAGS: Final = "ignored_flags"
"""The attribute of a parsed command line with the flags that were given, and are ignored: a list of strings."""

_WITH_VALUE: Final = {
    ("--features",): ("NAMES", "features of Velero's server"),
    ("--colorized",): ("BOOL", "colors of Velero's command line"),
    ("--alsologtostderrthreshold",): ("LEVEL", "klog: level from which lines go to files and standard error"),
    ("--log_backtrace_at",): ("PLACE", "klog: stack trace at a line of code"),
    ("--log_dir",): ("PATH", "klog: directory of log files"),
    ("--log_file",): ("PATH", "klog: log file"),
    ("--log_file_max_size",): ("NUMBER", "klog: size of a log file"),
    ("--stderrthreshold",): ("LEVEL", "klog: level from which lines go to standard error"),
    ("--v", "-v"): ("NUMBER", "klog: verbosity; use --log-level"),
    ("--vmodule",): ("PATTERNS", "klog: verbosity by file"),
}

_SWITCHES: Final = {
    "--add_dir_header": "klog: directories in the headers of lines",
    "--alsologtostderr": "klog: files and standard error",
    "--legacy_stderr_threshold_behavior": "klog: --stderrthreshold only for files",
    "--logtostderr": "klog: standard error instead of files",
    "--one_output": "klog: one file for each line",
    "--skip_headers": "klog: lines without headers",
    "--skip_log_headers": "klog: files without headers",
}


class _Ignore(argparse.Action):
    """Remembers that the flag was given, and drops its value."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002 - the signature is argparse's
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,  # noqa: ARG002 - as above
        option_string: str | None = None,
    ) -> None:
        given: list[str] = getattr(namespace, IGNORED_FLAGS, [])
        setattr(namespace, IGNORED_FLAGS, [*given, option_string or self.option_strings[0]])


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags to `parser`."""
    _add_cluster(parser)
    _add_configuration(parser)
    _add_behavior(parser)
    _add_api_client(parser)
    _add_observability(parser)
    group = parser.add_argument_group("accepted for DaemonSets of Velero, without effect")
    for names, (metavar, text) in _WITH_VALUE.items():
        group.add_argument(*names, action=_Ignore, dest=argparse.SUPPRESS, metavar=metavar, help=text)
    for name, text in _SWITCHES.items():
        group.add_argument(name, action=_Ignore, dest=argparse.SUPPRESS, nargs="?", metavar="BOOL", help=text)


def parse_settings(arguments: argparse.Namespace, environ: Mapping[str, str]) -> Settings:
    """Return the settings of the parsed command line and `environ`; raise ConfigError if no node name is set."""
    kubeconfig = arguments.kubeconfig or None
    names = frozenset(arguments.datamover or ["velero"])
    if names & BUILT_IN_DATA_MOVERS:
        # No other agent handles transfers of the block data mover: they would stay New.
        names |= BUILT_IN_DATA_MOVERS | {BLOCK_DATA_MOVER}
    known = {one.name for one in fields(Settings)}
    own: dict[str, Any] = {
        "node_name": node_name_from(arguments.node_name, environ, kubeconfig=kubeconfig),
        "namespace": arguments.namespace or environ.get("VELERO_NAMESPACE") or None,
        "kubeconfig": kubeconfig,
        "kubecontext": arguments.kubecontext or None,
        "datamover_names": names,
        "repository_controller": RepositoryControllerMode(arguments.repository_controller),
        "maintenance": MaintenanceSwitch(arguments.maintenance),
    }
    return Settings(**{name: value for name, value in vars(arguments).items() if name in known} | own)


def parse_serve(words: Sequence[str]) -> Settings:
    """Return the settings of an agent that `serve` started with these arguments, on any node, or raise ConfigError."""
    parser = CommandParser(prog="nodeagent serve", allow_abbrev=False)
    add_serve_flags(parser)
    # Each agent has the name of its own node.
    return parse_settings(parser.parse_args(words), {"NODE_NAME": "any"})


def _add_cluster(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("cluster")
    group.add_argument("--node-name", metavar="NAME", default="", help="name of the agent's node (default: $NODE_NAME)")
    add_namespace(group, "namespace of the agent and of the custom resources")
    add_kubeconfig(group)


def _add(
    group: argparse._ArgumentGroup, flag: str, field: str, metavar: str, parse: Callable[[str], object], text: str
) -> None:
    """Add the flag of a field of `Settings`, with its default, which replaces `{}` in the text."""

    def convert(word: str) -> object:
        try:
            return parse(word)
        except ValueError as e:
            raise argparse.ArgumentTypeError(str(e)) from e

    default = getattr(Settings, field)
    shown = _shown(default) if isinstance(default, timedelta) else f"{default:g}" if field == "client_qps" else default
    group.add_argument(flag, dest=field, metavar=metavar, type=convert, default=default, help=text.format(shown))


def _add_configuration(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("configuration")
    text = "ConfigMap with the configuration: one key, a JSON document. It must exist (default: none)"
    _add(group, "--node-agent-configmap", "config_map_name", "NAME", _text, text)
    text = (
        "ConfigMap with the configuration of new backup repositories: one key per type (kopia), a JSON document. It "
        "must exist (default: none)"
    )
    _add(group, "--backup-repository-configmap", "backup_repository_config_map", "NAME", _text, text)
    text = (
        "ConfigMap with the configuration of maintenance Jobs: the key global, and one for each repository, JSON "
        "documents. It must exist (default: none)"
    )
    _add(group, "--repo-maintenance-job-configmap", "maintenance_config_map", "NAME", _text, text)


def _add_behavior(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("behavior")
    text = "timeout from Accepted to Prepared, and of checks before admission (default: {})"
    _add(group, "--data-mover-prepare-timeout", "prepare_timeout", "DURATION", _duration, text)
    text = "timeout of one operation on the cluster, such as a snapshot or a repository becoming ready (default: {})"
    _add(group, "--resource-timeout", "resource_timeout", "DURATION", _duration, text)
    text = (
        "duration for which a node may be not Ready before it counts as lost: its transfers then continue on another "
        "node where they can, or fail (default: {})"
    )
    _add(group, "--node-gone-after", "node_gone_after", "DURATION", _duration, text)
    text = (
        "ServiceAccount of mover pods, unless the configuration names one (default: the agent's DaemonSet, with all "
        "its permissions)"
    )
    _add(group, "--mover-service-account", "mover_service_account", "NAME", _object_name, text)
    group.add_argument(
        "--datamover",
        metavar="NAME",
        action="append",
        help="handle transfers whose spec.datamover is NAME; may be repeated. "
        "velero includes velero-fs, velero-block and transfers that name none (default: velero)",
    )
    group.add_argument(
        "--repository-controller",
        choices=[choice.value for choice in RepositoryControllerMode],
        default=RepositoryControllerMode.AUTO.value,
        help="make backup repositories ready; auto: unless the namespace has a Velero server; unless off, "
        "backup storage locations are validated in a namespace without one (default: auto)",
    )
    group.add_argument(
        "--repo-maintenance",
        dest="maintenance",
        choices=[choice.value for choice in MaintenanceSwitch],
        default=MaintenanceSwitch.AUTO.value,
        help="run the maintenance of backup repositories, in a namespace without a Velero server; auto: from an hour "
        "after the last sign of one, and not while another cluster maintains the repository (default: auto)",
    )
    text = (
        "how often the maintenance of a repository without a maintenanceFrequency may run; 0: every hour (default: 0)"
    )
    _add(group, "--default-repo-maintain-frequency", "maintenance_frequency", "DURATION", parse_duration, text)


def _add_api_client(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("API server")
    text = "duration for which the Lease is valid without a renewal (default: {})"
    _add(group, "--lease-duration", "lease_duration", "DURATION", _duration, text)
    text = (
        "sustained request rate to the API server, per second; Lease renewals and final statuses are not delayed "
        "(default: {})"
    )
    _add(group, "--client-qps", "client_qps", "NUMBER", _positive, text)
    _add(group, "--client-burst", "client_burst", "NUMBER", _count, "maximum burst of requests (default: {})")


def _add_observability(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("observability")
    text = "address of /metrics, /healthz, /readyz and /status; without a host, all addresses (default: {})"
    _add(group, "--metrics-address", "metrics_address", "ADDRESS", parse_address, text)
    text = "address of /status, such as 127.0.0.1:8086 for the pod itself (default: as in --metrics-address)"
    _add(group, "--status-address", "status_address", "ADDRESS", parse_address, text)
    group.add_argument("--log-level", choices=list(LEVELS), default="info", help="minimum log level (default: info)")
    group.add_argument("--log-format", choices=LOG_FORMATS, default="text", help="format of log lines (default: text)")


def _shown(duration: timedelta) -> str:
    """Return `duration` in its short form: 30m, not 30m0s."""
    text = format_duration(duration)
    return text.removesuffix("0s") if text.endswith("m0s") else text


def _duration(text: str) -> timedelta:
    duration = parse_duration(text)
    if duration <= timedelta(0):
        raise ValueError(f'not a positive duration such as 30s, 10m or 1h30m: "{text}"')
    return duration


def _text(text: str) -> str | None:
    return text or None


def _object_name(text: str) -> str | None:
    if text and not OBJECT_NAME.fullmatch(text):
        raise ValueError(f'not a name of lower-case letters, digits, "-" and ".": "{text}"')
    return text or None


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ValueError(f'not a positive number: "{text}"')
    return number


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise ValueError(f'not a positive whole number: "{text}"')
    return int(text)
