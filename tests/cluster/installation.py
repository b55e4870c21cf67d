"""Velero's node agent as `velero install` writes it, in a namespace of a test, and what is done to its DaemonSet.

Only the names of the namespace and of what has none and the kubelet's folder are changed, and the test bed's bucket
and credentials are filled in. The image has Velero's name, but a stand-in of the test bed is what runs
(`tests.testbed.images`): it waits until it is to end.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import yaml

from core.kube.resources import CONFIG_MAPS, DAEMON_SETS, PODS, PRIORITY_CLASSES
from tests.cluster.bed import Bed
from tests.support.objects import build_object
from tests.testbed.api import Json
from tests.testbed.demonstration.manifests import build_location
from tests.testbed.layout import ROOT
from tests.testbed.processes import LIMIT_SECONDS
from tests.testbed.settings import AGENT_IMAGE

_RECORDED = ROOT / "tests" / "data" / "velero-1.18.2"
_NAME = "node-agent"
_K0S, _KUBELET = "/var/lib/k0s/kubelet", "/var/lib/kubelet"
"""The kubelet's folder of one recording, which its user chose, and that of the test bed."""


_DOCUMENTS = {
    "node-agent-config": '{"loadConcurrency": {"globalConfig": 2}}',
    "backup-repo-config": '{"kopia": {"cacheLimitMB": 2048}}',
}
"""The ConfigMaps that a recorded DaemonSet names, which are the user's."""


@dataclass(frozen=True)
class Installation:
    """The node agent of one recording in one namespace."""

    bed: Bed
    space: str
    recording: str

    def read_daemon_set(self) -> Json:
        """The recorded DaemonSet, in this namespace."""
        (found,) = self._read(f"daemonset-{self.recording}.yaml")
        for volume in found["spec"]["template"]["spec"]["volumes"]:
            if "hostPath" in volume:
                volume["hostPath"]["path"] = volume["hostPath"]["path"].replace(_K0S, _KUBELET)
        return found

    def build_objects(self) -> list[Json]:
        """What must be there before the DaemonSet: the installer's objects, and those that are the user's."""
        spec = self.read_daemon_set()["spec"]["template"]["spec"]
        secret, location = build_location(self.bed.env)
        found = self._read("objects.yaml")
        for item in found:
            match item["kind"]:
                case "Secret":
                    item["data"] = {}
                    item["stringData"] = secret["stringData"]
                case "BackupStorageLocation":
                    item["spec"]["config"]["s3Url"] = location["spec"]["config"]["s3Url"]
                    item["spec"]["objectStorage"] = location["spec"]["objectStorage"]
                case "ServiceAccount":
                    item["metadata"]["name"] = spec["serviceAccountName"]
                case "ClusterRoleBinding":
                    item["subjects"] = [
                        {**each, "namespace": self.space, "name": spec["serviceAccountName"]}
                        for each in item["subjects"]
                    ]
        return [*found, *self._build_own(spec)]

    def switch(self) -> None:
        """Change the image to this project's, and nothing else; return when it runs on each node."""
        self._kubectl("set", "image", f"daemonset/{_NAME}", f"{_NAME}={AGENT_IMAGE}")
        self.wait_rollout()

    def undo(self) -> None:
        self._kubectl("rollout", "undo", f"daemonset/{_NAME}")
        self.wait_rollout()

    def wait_rollout(self) -> None:
        """Return when each node runs a pod of the current template."""
        self._kubectl("rollout", "status", f"daemonset/{_NAME}", f"--timeout={LIMIT_SECONDS}s")

    @property
    def spec(self) -> Json:
        spec: Json = (self.bed.api.get(DAEMON_SETS, self.space, _NAME) or {})["spec"]
        return spec

    def pods(self) -> dict[str, Json]:
        found = self.bed.api.objects(PODS, self.space, selector=f"name={_NAME}")
        return {pod["spec"]["nodeName"]: pod for pod in found if "deletionTimestamp" not in pod["metadata"]}

    def log(self, node: str) -> str:
        return self._kubectl("logs", self.pods()[node]["metadata"]["name"])

    def _kubectl(self, *arguments: str) -> str:
        return self.bed.user.kubectl(*arguments, "-n", self.space)

    def _read(self, name: str) -> list[Json]:
        """The objects of a file; those without a namespace have its name."""
        found: list[Json] = list(yaml.safe_load_all((_RECORDED / name).read_text(encoding="utf-8")))
        for item in found:
            if "namespace" in item["metadata"]:
                item["metadata"]["namespace"] = self.space
            else:
                item["metadata"]["name"] = self.space
        return found

    def _build_own(self, spec: Json) -> Iterator[Json]:
        for name, text in _DOCUMENTS.items():
            yield build_object(CONFIG_MAPS, name, self.space, data={f"{name}.json": text})
        if "priorityClassName" in spec:
            # The label names the test to which it belongs, for listings of other tests.
            labels = {"labels": {"test": self.space}}
            yield build_object(PRIORITY_CLASSES, spec["priorityClassName"], metadata=labels, value=0)


@contextmanager
def installed(bed: Bed, space: str, recording: str = "plain", *, image: str = "") -> Iterator[Installation]:
    """What `velero install` has installed in a new namespace, without its Deployment; deleted after the context.

    `image`, if given, replaces Velero's from the start.
    """
    installation = Installation(bed, space, recording)
    daemon_set = installation.read_daemon_set()
    if image:
        daemon_set["spec"]["template"]["spec"]["containers"][0]["image"] = image
    objects = installation.build_objects()
    bed.user.apply(*objects)
    try:
        bed.user.apply(daemon_set)
        installation.wait_rollout()
        yield installation
    finally:
        apart = [item for item in objects if "namespace" not in item["metadata"]]
        names = [f"{item['kind']}/{item['metadata']['name']}" for item in apart]
        bed.user.kubectl("delete", *names, "--wait=false")
