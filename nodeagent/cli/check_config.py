"""The words of `nodeagent check-config`.

Knows its flags and their help. Does not know what is checked: `nodeagent.config.check` is
imported once the command line makes sense.
"""

import argparse
import asyncio
import os

from core.errors import ConfigError
from nodeagent.cli.flags import add_kubeconfig, add_namespace

__all__ = ["set_up_check_config"]

_ABOUT = """\
Says everything that is wrong with a configuration: each mistake with its JSON path, what was
expected there and, where one can guess, what was meant. Names of storage classes and priority
classes and selectors of nodes are checked against the cluster where there is a way to one."""

_EXAMPLES = """\
examples:
  nodeagent check-config node-agent-config.json
        a JSON document
  nodeagent check-config --strict --offline deploy/config.yaml
        the manifest of a ConfigMap, in a pipeline: unknown keys count too, and no cluster is asked
  kubectl -n velero get configmap node-agent-config -o yaml | nodeagent check-config -
        standard input
  nodeagent check-config --from-cluster
        the ConfigMap that the installed agent was told

exit codes:
  0  nothing wrong; there may be warnings
  1  mistakes, or with --strict also warnings
  2  it could not be checked: no such file, no way to the cluster
"""


def set_up_check_config(parser: argparse.ArgumentParser) -> None:
    """Give the command's parser its words and flags."""
    parser.description, parser.epilog = _ABOUT, _EXAMPLES
    parser.set_defaults(run=_run)
    what = parser.add_argument_group("what is checked")
    what.add_argument(
        "file", metavar="FILE", nargs="?", default="", help="a JSON document or a manifest of a ConfigMap; - is stdin"
    )
    what.add_argument("--from-cluster", action="store_true", help="check the ConfigMap in the cluster instead")
    what.add_argument(
        "--node-agent-configmap",
        metavar="NAME",
        default="",
        help="its name (default: the one that the DaemonSet node-agent was told)",
    )
    add_namespace(what, "its namespace")
    how = parser.add_argument_group("how")
    add_kubeconfig(how)
    how.add_argument("--offline", action="store_true", help="ask no cluster; names are not checked then")
    how.add_argument("--strict", action="store_true", help="warnings count like mistakes")
    how.add_argument("--json", action="store_true", help="print one JSON object instead of lines")


def _run(arguments: argparse.Namespace) -> int:
    if bool(arguments.file) is arguments.from_cluster:
        raise ConfigError("give either a FILE or --from-cluster (see nodeagent check-config --help)")
    if arguments.from_cluster and arguments.offline:
        raise ConfigError("--from-cluster and --offline exclude each other")
    # pydantic and the API client take a second to load; nothing above needs them.
    from nodeagent.config.check import CheckRequest, check_config  # noqa: PLC0415

    request = CheckRequest(
        path=arguments.file,
        kubeconfig=arguments.kubeconfig or None,
        namespace=arguments.namespace or os.environ.get("VELERO_NAMESPACE", ""),
        config_map_name=arguments.node_agent_configmap,
        strict=arguments.strict,
        offline=arguments.offline,
        as_json=arguments.json,
    )
    return asyncio.run(check_config(request))
