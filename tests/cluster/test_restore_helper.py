"""The restore helper in a restored pod, with all that a cluster may restrict: user, privileges, files and memory."""

import secrets
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from core.kube.resources import PODS
from tests.cluster.bed import Bed, new_namespace
from tests.cluster.scenes import RESTORE_UID, build_pod_transfer, wait_until
from tests.cluster.sharing import WITH_LOCKS, Shared, relies_on
from tests.cluster.workloads import build_restore_wait, expect_nothing_left
from tests.support.objects import build_object
from tests.testbed.api import Json
from tests.testbed.demonstration.manifests import build_claim, build_container

pytestmark = [pytest.mark.cluster, pytest.mark.lane(name="moving"), pytest.mark.timeout(WITH_LOCKS)]

_GROUP = 2000
_MEMORY_LIMIT = "15Mi"
_ENFORCE = "pod-security.kubernetes.io/enforce=restricted"

_FILL = "umask 027; mkdir /data/folder && echo kept >/data/folder/file && touch /tmp/ready && exec sleep infinity"
_SHOW = "ls -A /data; cat /data/folder/file; touch /tmp/ready; exec sleep infinity"

_RESTRICTED = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "readOnlyRootFilesystem": True}


@pytest.fixture
def restricted_space(agent: Bed) -> Iterator[str]:
    """A namespace that admits pods of the restricted Pod Security Standard only."""
    with new_namespace(agent) as name:
        agent.user.kubectl("label", "namespace", name, _ENFORCE)
        yield name


@dataclass(frozen=True)
class _RestrictedPod:
    """A pod with the volume `data`, run by a user of its own that shares the volume's group.

    `waits`: it has the init container `restore-wait`.
    """

    space: str
    name: str
    user: int
    script: str
    waits: bool = False

    def build(self) -> Json:
        container = build_container(
            "app",
            ["sh", "-ec", self.script],
            securityContext=_RESTRICTED,
            readinessProbe={"exec": {"command": ["test", "-e", "/tmp/ready"]}, "periodSeconds": 1},
            volumeMounts=[{"name": "data", "mountPath": "/data"}, {"name": "tmp", "mountPath": "/tmp"}],
        )
        limits = {"resources": {"limits": {"memory": _MEMORY_LIMIT}}, "securityContext": _RESTRICTED}
        security = {
            "runAsUser": self.user,
            "runAsNonRoot": True,
            "fsGroup": _GROUP,
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        spec = {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 0,
            "securityContext": security,
            "initContainers": [build_restore_wait(["data"]) | limits] if self.waits else [],
            "containers": [container],
            "volumes": [
                {"name": "data", "persistentVolumeClaim": {"claimName": self.name}},
                {"name": "tmp", "emptyDir": {}},
            ],
        }
        return build_object(PODS, self.name, self.space, spec=spec)

    def transfer(self, bed: Bed, kind: str, **given: str) -> Json:
        """A transfer of its volume, with fields of its own."""
        pod = bed.api.get(PODS, self.space, self.name)
        assert pod is not None
        return build_pod_transfer(kind, f"{self.space}-{self.name}", pod, **given)

    def start(self, bed: Bed) -> None:
        bed.user.apply(build_claim(self.space, self.name, size="1Gi"), self.build())

    def wait_ready(self, bed: Bed) -> None:
        """Return once its script has done what it does."""
        bed.user.wait(f"pod/{self.name}", "condition=Ready", namespace=self.space)


def test_a_restricted_pod_of_any_user_starts_with_its_data_and_nothing_else(agent: Bed, restricted_space: str) -> None:
    writer = _RestrictedPod(restricted_space, "writer", 1000, _FILL)
    reader = _RestrictedPod(restricted_space, "reader", 10_000 + secrets.randbelow(2**31), _SHOW, waits=True)
    with relies_on(agent, Shared.AGENTS):
        writer.start(agent)
        writer.wait_ready(agent)
        backup = writer.transfer(agent, "PodVolumeBackup")
        agent.user.apply(backup)
        snapshot = wait_until(agent, backup, "Completed")["status"]["snapshotID"]
        reader.start(agent)
        agent.user.wait(
            "pod/reader", "jsonpath={.status.initContainerStatuses[0].started}=true", namespace=reader.space
        )
        restore = reader.transfer(agent, "PodVolumeRestore", snapshotID=snapshot)
        agent.user.apply(restore)
        wait_until(agent, restore, "Completed")
        reader.wait_ready(agent)
    assert agent.user.kubectl("logs", "reader", "-n", reader.space) == "folder\nlost+found\nkept\n"
    waited = agent.user.kubectl("logs", "reader", "-c", "restore-wait", "-n", reader.space).splitlines()
    assert waited[-4:] == [
        f"Found the done file /restores/data/.velero/{RESTORE_UID}",
        "All PodVolumeRestores are done",
        "Deleted /restores/data/.velero",
        "Done cleanup .velero folder",
    ]
    (ended,) = (agent.api.get(PODS, reader.space, "reader") or {})["status"]["initContainerStatuses"]
    assert (ended["restartCount"], ended["state"]["terminated"]["exitCode"]) == (0, 0)
    expect_nothing_left(agent, backup, restore)
