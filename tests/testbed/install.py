"""Installs the node agent in the test bed as its README says, with a location that is the test bed's bucket.

Shared by the demonstration and the cluster tests.
"""

from collections.abc import Iterable, Mapping

from tests.testbed.demonstration.manifests import NAMESPACE, build_location, build_namespace
from tests.testbed.demonstration.user import User
from tests.testbed.layout import ROOT
from tests.testbed.processes import LIMIT_SECONDS, BedError

AGENT_LABEL = "role=node-agent"
METRICS_PORT = 8085


def install_agent(user: User, env: Mapping[str, str], *, variables: Iterable[str] = ()) -> None:
    """Apply `deploy/`, the Secret and the location; returns when an agent is ready on each node.

    Args:
        variables: More variables of the agents and their movers, as `NAME=value`.
    """
    deploy = ROOT / "deploy"
    user.apply_folders(deploy / "crds", option="-f")
    user.apply(build_namespace(NAMESPACE))
    user.apply(*build_location(env))
    user.apply_folders(deploy, option="-k")
    if variables:
        user.kubectl("set", "env", "daemonset/node-agent", "-n", NAMESPACE, *variables)
    timeout = f"--timeout={LIMIT_SECONDS}s"
    try:
        user.kubectl("rollout", "status", "daemonset/node-agent", "-n", NAMESPACE, timeout)
    except BedError as error:
        raise BedError(f"{error}\n{_what_agents_say(user)}") from error


def _what_agents_say(user: User) -> str:
    """The state of the agents' pods and the end of their logs."""
    options = ["-n", NAMESPACE, "-l", AGENT_LABEL]
    try:
        logs = user.kubectl("logs", *options, "--tail=20", "--prefix")
    except BedError as error:
        logs = str(error)
    events = user.kubectl("get", "events", "-n", NAMESPACE, "-o", "custom-columns=R:.reason,M:.message", "--no-headers")
    return "\n".join([user.kubectl("get", "pods", "-o", "wide", *options), events, logs])
