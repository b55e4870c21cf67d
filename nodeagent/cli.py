"""The commands of the agent itself: `nodeagent serve` and `nodeagent check-config`.

What they run is imported after the command line is parsed, so that `--help` is fast.
"""

import argparse
import asyncio
import logging
import os
from typing import Final

from core.errors import ConfigError
from core.logs import set_up_logging
from nodeagent.runtime.settings import IGNORED_FLAGS, add_kubeconfig, add_namespace, add_serve_flags, parse_settings

_log = logging.getLogger(__name__)

_SERVE_ABOUT: Final = """\
Runs the agent until SIGTERM. deploy/agent/daemonset.yaml starts it in a cluster, where only
--node-agent-configmap is needed. Flags of Velero's node-agent have the same meaning here."""

_SERVE_EXAMPLES: Final = """\
examples:
  nodeagent serve --node-agent-configmap=node-agent-config
        in a pod: node and namespace come from NODE_NAME and VELERO_NAMESPACE, and the
        configuration from the only key of that ConfigMap
  nodeagent serve --kubeconfig ~/.kube/config --node-name worker-1 --namespace velero
        on your own machine, with your own permissions
  nodeagent serve --log-format json --log-level debug --metrics-address 127.0.0.1:8085

while it runs:
  http://ADDRESS/metrics   counters for Prometheus
  http://ADDRESS/status    state of the agent, as JSON
  http://ADDRESS/healthz, http://ADDRESS/readyz

exit codes:
  0  stopped by a signal
  1  ended by an error
  2  cannot start: invalid flags or configuration, missing permissions or definitions
"""


def set_up_serve(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags and help to `parser`."""
    parser.description, parser.epilog = _SERVE_ABOUT, _SERVE_EXAMPLES
    parser.set_defaults(run=_run_serve)
    add_serve_flags(parser)


def _run_serve(arguments: argparse.Namespace) -> int:
    settings = parse_settings(arguments, os.environ)
    set_up_logging(settings.log_level, settings.log_format)
    if ignored := getattr(arguments, IGNORED_FLAGS, []):
        _log.info("flags of Velero that have no effect here: %s", ", ".join(sorted(set(ignored))))
    # The agent and its libraries take a second to load; nothing above needs them.
    from nodeagent.app import serve  # noqa: PLC0415

    return asyncio.run(serve(settings))


_CHECK_CONFIG_ABOUT: Final = """\
Checks a configuration and reports each error with its JSON path, what was expected and, if it can
be guessed, what was meant. If a cluster is reachable, names of storage classes and priority
classes and node selectors are checked against it."""

_CHECK_CONFIG_EXAMPLES: Final = """\
examples:
  nodeagent check-config node-agent-config.json
        a JSON document
  nodeagent check-config --strict --offline deploy/config.yaml
        a ConfigMap manifest, in a pipeline: warnings count as errors, and no cluster is needed
  kubectl -n velero get configmap node-agent-config -o yaml | nodeagent check-config -
        standard input
  nodeagent check-config --from-cluster
        the ConfigMap that the installed agent uses
  nodeagent check-config --repo-maintenance maintenance.yaml
        the manifest of the ConfigMap of --repo-maintenance-job-configmap

exit codes:
  0  valid; there may be warnings
  1  errors, or with --strict warnings
  2  not checked: no such file, or the cluster is not reachable
"""


def set_up_check_config(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags and help to `parser`."""
    parser.description, parser.epilog = _CHECK_CONFIG_ABOUT, _CHECK_CONFIG_EXAMPLES
    parser.set_defaults(run=_run)
    source = parser.add_argument_group("input")
    source.add_argument(
        "file", metavar="PATH", nargs="?", default="", help="JSON document or ConfigMap manifest; - is standard input"
    )
    source.add_argument("--from-cluster", action="store_true", help="check the ConfigMap in the cluster instead")
    source.add_argument(
        "--node-agent-configmap",
        metavar="NAME",
        default="",
        help="name of the ConfigMap (default: the one that the DaemonSet node-agent names)",
    )
    source.add_argument(
        "--repo-maintenance",
        action="store_true",
        help="check the ConfigMap of maintenance Jobs (serve --repo-maintenance-job-configmap) instead",
    )
    source.add_argument(
        "--repo-maintenance-job-configmap",
        metavar="NAME",
        default="",
        help="name of that ConfigMap (default: the one that the DaemonSet node-agent names)",
    )
    add_namespace(source, "namespace of the ConfigMap")
    behavior = parser.add_argument_group("behavior")
    add_kubeconfig(behavior)
    behavior.add_argument("--offline", action="store_true", help="do not check names against a cluster")
    behavior.add_argument("--strict", action="store_true", help="treat warnings as errors")
    behavior.add_argument("--json", action="store_true", help="print one JSON object")


def _run(arguments: argparse.Namespace) -> int:
    if bool(arguments.file) is arguments.from_cluster:
        raise ConfigError("need either a PATH or --from-cluster (see nodeagent check-config --help)")
    if arguments.from_cluster and arguments.offline:
        raise ConfigError("--from-cluster and --offline are mutually exclusive")
    # pydantic and the API client take a second to load; nothing above needs them.
    from nodeagent.config.check import CheckRequest, check_config  # noqa: PLC0415
    from nodeagent.runtime.connection import ClusterAccess  # noqa: PLC0415

    request = CheckRequest(
        path=arguments.file,
        access=ClusterAccess(
            kubeconfig=arguments.kubeconfig or None,
            kubecontext=arguments.kubecontext or None,
            namespace=arguments.namespace or os.environ.get("VELERO_NAMESPACE", ""),
        ),
        config_map_name=(
            arguments.repo_maintenance_job_configmap if arguments.repo_maintenance else arguments.node_agent_configmap
        )
        or None,
        maintenance=arguments.repo_maintenance,
        strict=arguments.strict,
        offline=arguments.offline,
        as_json=arguments.json,
    )
    return asyncio.run(check_config(request))
