"""The volume `host-pods` on a real kubelet: the right folder, a wrong one, none, and agents that may not read it.

Agents of the test's own, in a namespace of its own: a wrong folder would end those of the cluster.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from core.kube.resources import POD_VOLUME_BACKUPS, PODS
from tests.cluster.apart import ApartAgent, installed_apart
from tests.cluster.bed import Bed
from tests.cluster.scenes import build_pod_transfer
from tests.cluster.sharing import WITH_LOCKS, Shared, relies_on
from tests.testbed.api import Json
from tests.testbed.demonstration.manifests import NAMESPACE
from tests.testbed.install import AGENT_LABEL
from tests.testbed.processes import wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.lane(name="apart"), pytest.mark.timeout(WITH_LOCKS)]

_PODS_FOLDER = "/var/lib/kubelet/pods"


class _Install(ApartAgent):
    """An agent that has the volume in a way that a test chooses."""

    def install(self, *, folder: str = _PODS_FOLDER, mounted: bool = True, **security: Any) -> None:
        """Apply the DaemonSet with this folder of the node as `host-pods`, or without that volume."""

        def change(pod: Json) -> None:
            pod["securityContext"] |= security
            for holder, field in ((pod, "volumes"), (pod["containers"][0], "volumeMounts")):
                holder[field] = [each for each in holder[field] if mounted or each["name"] != "host-pods"]
            for volume in pod["volumes"]:
                if volume["name"] == "host-pods":
                    volume["hostPath"]["path"] = folder

        self.run(change)

    def end(self) -> tuple[int, str]:
        """Return the exit code of the agent and the last line of its log, once it has ended."""
        name, code = wait_for("the end of the agent", self._find_end)
        log = self.kubectl("logs", name, "--previous")
        return code, log.splitlines()[-1]

    def _find_end(self) -> tuple[str, int] | None:
        for pod in self.bed.api.objects(PODS, self.space, selector=AGENT_LABEL):
            for status in pod["status"].get("containerStatuses", []):
                if ended := status["lastState"].get("terminated"):
                    return pod["metadata"]["name"], ended["exitCode"]
        return None

    def back_up(self) -> str:
        """Return the message of a PodVolumeBackup, once it has failed."""
        pod: Json = {"metadata": {"namespace": self.space, "name": "app", "uid": "0"}, "spec": {"nodeName": self.node}}
        item = build_pod_transfer("PodVolumeBackup", "backup", pod)
        item["metadata"]["namespace"] = self.space
        self.bed.user.apply(item)
        self.bed.user.wait("podvolumebackup/backup", "jsonpath={.status.phase}=Failed", namespace=self.space)
        found = self.bed.api.get(POD_VOLUME_BACKUPS, self.space, "backup") or {}
        return str(found["status"]["message"])


@pytest.fixture
def own(agent: Bed, space: str) -> Iterator[_Install]:
    """A namespace in which a test may run an agent."""
    with installed_apart(agent, space) as apart:
        yield _Install(apart.bed, apart.space)


def _warnings(log: list[str]) -> list[str]:
    return [line for line in log if "host-pods" in line or "cannot be read" in line]


def test_the_agents_of_the_cluster_have_found_the_folder_of_each_pod(agent: Bed) -> None:
    """As user 65532, in a folder that the kubelet has created with mode 0750."""
    with relies_on(agent, Shared.AGENTS):
        pods = agent.api.objects(PODS, NAMESPACE, selector=AGENT_LABEL)
        logs = [agent.user.kubectl("logs", pod["metadata"]["name"], "-n", NAMESPACE) for pod in pods]
    assert len(logs) > 1
    for log in map(str.splitlines, logs):
        assert [line for line in log if "directory /host_pods has an entry for each of the" in line]
        assert _warnings(log) == []


def test_an_agent_with_a_wrong_folder_ends_and_continues_when_it_is_corrected(own: _Install) -> None:
    own.install(folder="/var/lib/kubelet/plugins")
    code, line = own.end()
    assert code == 2
    assert line.startswith(
        "error: the volume host-pods is not the kubelet's pods directory: /host_pods has no entry for "
    )
    assert "its hostPath in the DaemonSet must be the directory pods in the kubelet's root directory" in line
    own.install()
    log = own.ready_log()
    assert [entry for entry in log if "directory /host_pods has an entry for each of the" in entry]
    assert _warnings(log) == []


@pytest.mark.thorough
@pytest.mark.cause("pod-volumes-off")
def test_an_agent_without_the_folder_warns_and_fails_pod_volumes(own: _Install) -> None:
    own.install(mounted=False)
    (warning,) = _warnings(own.ready_log())
    assert "PodVolumeBackups and PodVolumeRestores will fail" in warning
    assert own.back_up() == (
        "pod volumes are not accessible: the node agent's DaemonSet does not mount the volume host-pods"
    )


@pytest.mark.thorough
def test_an_agent_that_may_not_read_the_folder_warns_and_serves(own: _Install) -> None:
    own.install(supplementalGroups=[])
    (warning,) = _warnings(own.ready_log())
    assert "directory /host_pods cannot be read: Permission denied" in warning


@pytest.mark.thorough
def test_an_agent_as_root_reads_the_folder_as_in_veleros_daemonset(own: _Install) -> None:
    own.install(supplementalGroups=[], runAsNonRoot=False, runAsUser=0, runAsGroup=0)
    assert _warnings(own.ready_log()) == []
