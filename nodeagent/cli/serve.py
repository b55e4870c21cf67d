"""The words of `nodeagent serve`.

Knows its flags, their help, defaults and forms, and which settings they make. Does not know the
daemon: `nodeagent.app` is imported once everything said makes sense, so that `--help` answers at
once.
"""

import argparse
import asyncio
import math
import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Final

from core.logs import LEVELS, LOG_FORMATS, set_up_logging
from core.models.units import format_duration, parse_duration
from nodeagent.cli.flags import add_kubeconfig, add_namespace
from nodeagent.runtime.settings import ListenAddress, RepositoryControllerMode, Settings, node_name_from, parse_address

__all__ = ["parse_settings", "set_up_serve"]

_ABOUT: Final = """\
Runs the agent until it is told to stop. In a cluster, deploy/agent/daemonset.yaml starts it so, and
nothing has to be said but where the configuration is. Flags that Velero's node-agent has mean
the same here."""

_EXAMPLES: Final = """\
examples:
  nodeagent serve --node-agent-configmap=node-agent-config
        in a pod: node and namespace come from NODE_NAME and VELERO_NAMESPACE, and the
        configuration from the only key of that ConfigMap
  nodeagent serve --kubeconfig ~/.kube/config --node-name worker-1 --namespace velero
        by hand, on your own machine, with your own rights
  nodeagent serve --log-format json --log-level debug --metrics-address 127.0.0.1:8085

while it runs:
  http://ADDRESS/metrics   counters for Prometheus
  http://ADDRESS/status    what it is doing, as JSON
  http://ADDRESS/healthz, http://ADDRESS/readyz

exit codes:
  0  told to stop
  1  ended by an error
  2  cannot start: flags, configuration, rights or definitions; one line says which
"""


def set_up_serve(parser: argparse.ArgumentParser) -> None:
    """Give the command's parser its words and flags."""
    parser.description, parser.epilog = _ABOUT, _EXAMPLES
    parser.set_defaults(run=_run)
    _add_place(parser)
    _add_configuration(parser)
    _add_running(parser)


def _run(arguments: argparse.Namespace) -> int:
    settings = parse_settings(arguments, os.environ)
    set_up_logging(settings.log_level, settings.log_format)
    # The daemon and its libraries take a second to load; nothing above needs them.
    from nodeagent.app import serve  # noqa: PLC0415

    return asyncio.run(serve(settings))


def parse_settings(arguments: argparse.Namespace, environ: Mapping[str, str]) -> Settings:
    """Return the settings that the parsed `serve` command line and `environ` make together.

    Raises:
        ConfigError: the node to serve is not known.
    """
    kubeconfig = arguments.kubeconfig or None
    names = frozenset(arguments.datamover or ["velero"])
    return Settings(
        node_name=node_name_from(arguments.node_name, environ, kubeconfig=kubeconfig),
        namespace=arguments.namespace or environ.get("VELERO_NAMESPACE", ""),
        kubeconfig=kubeconfig,
        config_map_name=arguments.node_agent_configmap,
        backup_repository_config_map=arguments.backup_repository_configmap,
        prepare_timeout=arguments.data_mover_prepare_timeout,
        resource_timeout=arguments.resource_timeout,
        node_gone_after=arguments.node_gone_after,
        metrics_address=arguments.metrics_address,
        log_level=arguments.log_level,
        log_format=arguments.log_format,
        # An empty spec.datamover means the built-in mover, whose name is velero.
        datamover_names=names | {""} if "velero" in names else names,
        repository_controller=RepositoryControllerMode(arguments.repository_controller),
        lease_duration=arguments.lease_duration,
        client_qps=arguments.client_qps,
        client_burst=arguments.client_burst,
    )


def _add_place(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("where")
    group.add_argument("--node-name", metavar="NAME", default="", help="node to serve (default: $NODE_NAME)")
    add_namespace(group, "namespace of the agent and of the resources it carries out")
    add_kubeconfig(group)


def _add_configuration(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what it does")
    group.add_argument(
        "--node-agent-configmap",
        metavar="NAME",
        default="",
        help="ConfigMap with the configuration: one key, a JSON document. Once named, it must exist (default: none)",
    )
    group.add_argument(
        "--backup-repository-configmap",
        metavar="NAME",
        default="",
        help="ConfigMap with the configuration of repositories that are made from now on: a key for each type "
        "(kopia), a JSON document. Once named, it must exist (default: none)",
    )
    group.add_argument(
        "--data-mover-prepare-timeout",
        metavar="SPAN",
        type=_span,
        default=Settings.prepare_timeout,
        help=f"how long a load may take from Accepted to Prepared (default: {_shown(Settings.prepare_timeout)})",
    )
    group.add_argument(
        "--resource-timeout",
        metavar="SPAN",
        type=_span,
        default=Settings.resource_timeout,
        help="how long to wait for something else that must happen, such as a snapshot or a "
        f"repository becoming ready (default: {_shown(Settings.resource_timeout)})",
    )
    group.add_argument(
        "--node-gone-after",
        metavar="SPAN",
        type=_span,
        default=Settings.node_gone_after,
        help="how long a node may be not Ready before the loads on it end as Failed "
        f"(default: {_shown(Settings.node_gone_after)})",
    )
    group.add_argument(
        "--datamover",
        metavar="NAME",
        action="append",
        help="carry out loads whose spec.datamover is NAME; may be given several times. "
        "velero includes loads that name none (default: velero)",
    )
    group.add_argument(
        "--repository-controller",
        choices=[choice.value for choice in RepositoryControllerMode],
        default=RepositoryControllerMode.AUTO.value,
        help="make backup repositories ready: auto does unless a Velero server runs in the namespace (default: auto)",
    )
    group.add_argument(
        "--lease-duration",
        metavar="SPAN",
        type=_span,
        default=Settings.lease_duration,
        help="how long the agents wait before another one takes over from a dispatcher that went silent "
        f"(default: {_shown(Settings.lease_duration)})",
    )
    group.add_argument(
        "--client-qps",
        metavar="NUMBER",
        type=_positive,
        default=Settings.client_qps,
        help="most requests a second to the API server in the long run; renewals of the Lease and final "
        f"statuses never wait (default: {Settings.client_qps:g})",
    )
    group.add_argument(
        "--client-burst",
        metavar="NUMBER",
        type=_count,
        default=Settings.client_burst,
        help=f"most requests at once (default: {Settings.client_burst})",
    )


def _add_running(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how it is watched")
    group.add_argument(
        "--metrics-address",
        metavar="ADDRESS",
        type=_address,
        default=Settings.metrics_address,
        help="where /metrics, /healthz, /readyz and /status are served; "
        f"no host means all addresses (default: {Settings.metrics_address})",
    )
    group.add_argument("--log-level", choices=list(LEVELS), default="info", help="least level to log (default: info)")
    group.add_argument("--log-format", choices=LOG_FORMATS, default="text", help="form of a log line (default: text)")


def _shown(span: timedelta) -> str:
    """Return `span` as one would write it: 30m, not 30m0s."""
    text = format_duration(span)
    return text.removesuffix("0s") if text.endswith("m0s") else text


def _span(text: str) -> timedelta:
    try:
        span = parse_duration(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from e
    if span <= timedelta(0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive duration such as 30s, 10m or 1h30m")
    return span


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return number


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def _address(text: str) -> ListenAddress:
    try:
        return parse_address(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from e
