"""The command `nodeagent serve`.

`nodeagent.app` is imported after the command line is parsed, so that `--help` is fast.
"""

import argparse
import asyncio
import logging
import os
from typing import Final

from core.logs import set_up_logging
from nodeagent.runtime.serve_flags import IGNORED_FLAGS, add_serve_flags, parse_settings

__all__ = ["set_up_serve"]

_log = logging.getLogger(__name__)

_ABOUT: Final = """\
Runs the agent until SIGTERM. deploy/agent/daemonset.yaml starts it in a cluster, where only
--node-agent-configmap is needed. Flags of Velero's node-agent have the same meaning here."""

_EXAMPLES: Final = """\
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
    parser.description, parser.epilog = _ABOUT, _EXAMPLES
    parser.set_defaults(run=_run)
    add_serve_flags(parser)


def _run(arguments: argparse.Namespace) -> int:
    settings = parse_settings(arguments, os.environ)
    set_up_logging(settings.log_level, settings.log_format)
    if ignored := getattr(arguments, IGNORED_FLAGS, []):
        _log.info("flags of Velero that have no effect here: %s", ", ".join(sorted(set(ignored))))
    # The agent and its libraries take a second to load; nothing above needs them.
    from nodeagent.app import serve  # noqa: PLC0415

    return asyncio.run(serve(settings))
