"""An agent of a test's own: that of `deploy/`, on one node and in another namespace, changed by the test."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from core.kube.resources import DAEMON_SETS, PODS
from tests.cluster.bed import Bed
from tests.support.objects import build_object
from tests.testbed.api import Json
from tests.testbed.demonstration.manifests import NAMESPACE, build_location
from tests.testbed.install import AGENT_LABEL
from tests.testbed.processes import LIMIT_SECONDS, wait_for

_ACCOUNTS = ("node-agent", "node-agent-mover")
OTHER_NODE = "bed-2"
CALM_NODE = "bed-1"
"""No test evicts the pods of this node, so a transfer may be held there for minutes."""


@dataclass
class ApartAgent:
    bed: Bed
    space: str
    node: str = OTHER_NODE

    def run(self, change: Callable[[Json], None] = lambda _: None, *, arguments: Sequence[str] = ()) -> None:
        """Apply the DaemonSet with these arguments more; `change` is called with its pod's spec."""
        spec: Json = (self.bed.api.get(DAEMON_SETS, NAMESPACE, "node-agent") or {})["spec"]
        # A test of another lane may have changed how that one is updated.
        spec["updateStrategy"] = {"type": "RollingUpdate"}
        pod = spec["template"]["spec"]
        # Tests of other lanes taint nodes.
        pod["tolerations"] = [{"operator": "Exists"}]
        pod["nodeSelector"] = {"kubernetes.io/hostname": self.node}
        pod["containers"][0]["args"] = ["serve", "--mover-service-account=node-agent-mover", *arguments]
        change(pod)
        self.kubectl("delete", "daemonset", "node-agent", "--ignore-not-found", "--wait")
        self.kubectl("delete", "pod", "-l", AGENT_LABEL, "--wait")
        self.bed.user.apply(build_object(DAEMON_SETS, "node-agent", self.space, spec=spec))

    def ready_log(self) -> list[str]:
        """Return the log of the agent, once it is ready."""
        # A DaemonSet without a pod counts as rolled out while a test of another lane keeps pods off the node.
        what = f"a pod of the agent on {self.node}, namespace {self.space}"
        wait_for(what, lambda: self.bed.api.objects(PODS, self.space, selector=AGENT_LABEL))
        self.kubectl("rollout", "status", "daemonset/node-agent", f"--timeout={LIMIT_SECONDS}s")
        self.kubectl("wait", "pod", "-l", AGENT_LABEL, "--for=condition=Ready", f"--timeout={LIMIT_SECONDS}s")
        return self.kubectl("logs", "daemonset/node-agent").splitlines()

    def kubectl(self, *arguments: str) -> str:
        return self.bed.user.kubectl(*arguments, "-n", self.space)


@contextmanager
def installed_apart(bed: Bed, space: str, *, url: str = "", node: str = OTHER_NODE) -> Iterator[ApartAgent]:
    """Accounts with all permissions, and a location, for an agent in the namespace `space`; `url` is the storage's."""
    for account in _ACCOUNTS:
        bed.user.kubectl("create", "serviceaccount", account, "-n", space)
    group = f"--group=system:serviceaccounts:{space}"
    bed.user.kubectl("create", "clusterrolebinding", space, "--clusterrole=cluster-admin", group)
    for item in build_location(bed.env):
        if url and "config" in item.get("spec", {}):
            item["spec"]["config"]["s3Url"] = url
            # A storage that a test holds is not Unavailable.
            item["spec"]["validationFrequency"] = "0s"
        bed.user.apply(item | {"metadata": item["metadata"] | {"namespace": space}})
    try:
        yield ApartAgent(bed, space, node)
    finally:
        # It is not in the namespace.
        bed.user.kubectl("delete", "clusterrolebinding", space)
