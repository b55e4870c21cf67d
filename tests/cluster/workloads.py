"""Pods with volumes to move, the custom resources that move them, and the processes that do.

A workload fills its volumes, or waits for them to be filled as a pod that a Velero server has
restored does; then it describes what it finds in them and goes on running.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from core.kube.resources import PODS
from tests.cluster.bed import Bed
from tests.cluster.breakage import HELD_TOLERATION
from tests.cluster.gate import Gate
from tests.cluster.scenes import RESTORE_UID, build_pod_transfer, wait_released, wait_until
from tests.support.objects import build_object
from tests.testbed import demonstration
from tests.testbed.api import Json
from tests.testbed.demonstration.compare import Survey
from tests.testbed.demonstration.manifests import NAMESPACE, build_claim, build_container
from tests.testbed.processes import wait_for
from tests.testbed.settings import AGENT_IMAGE

_SCRIPTS = Path(demonstration.__file__).parent
_FILL = "python3 /scripts/fill.py /machine /volumes/{0} {1}"
_SURVEY = "python3 /scripts/survey.py /volumes/{0} /out/{1}"
_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Workload:
    """A pod with a claim `data` and an emptyDir `scratch`, in a namespace of its own.

    Attributes:
        name: Its name, and its claim's.
        bytes_by_volume: How much it writes into each volume; nothing: it waits for its data.
        block: Its claim is a device, which it does not touch.
        on: The node that it and its volume are for; empty: any, and its volume is where the test bed creates volumes.
    """

    bed: Bed
    space: str
    name: str
    bytes_by_volume: dict[str, int] = field(default_factory=dict)
    block: bool = False
    on: str = ""
    location: str = "default"

    def start(self) -> None:
        claim = build_claim(self.space, self.name, size="1Gi")
        if self.block:
            claim["spec"]["volumeMode"] = "Block"
        if self.on:
            claim["spec"]["storageClassName"] = "bed-wait"
        self._folder.mkdir(exist_ok=True)
        self.bed.user.apply(claim, self._pod())

    def wait_ready(self) -> None:
        """Return once the volumes are filled and described."""
        self.bed.user.wait(f"pod/{self.name}", "condition=Ready", namespace=self.space)

    def backup(self, volume: str) -> Json:
        """The PodVolumeBackup of one volume, called after both; the pod must have its node."""
        return self._transfer("PodVolumeBackup", volume)

    def restore(self, volume: str, *, backup: Json) -> Json:
        """The PodVolumeRestore of what `backup` kept into one volume of this pod, which waits."""
        source = backup["spec"]["pod"]["namespace"]
        snapshot = backup["status"]["snapshotID"]
        return self._transfer("PodVolumeRestore", volume, snapshotID=snapshot, sourceNamespace=source)

    def _transfer(self, kind: str, volume: str, **spec: str) -> Json:
        name = f"{self.space}-{self.name}-{volume}"
        return build_pod_transfer(kind, name, self._existing(), volume=volume, location=self.location, **spec)

    @property
    def node(self) -> str:
        """The node that the pod was given."""
        return str(self._existing()["spec"]["nodeName"])

    def survey(self, volume: str) -> Survey:
        """What the pod has found in a volume."""
        found: Survey = json.loads((self._folder / self._survey_name(volume)).read_text())
        return found

    def delete(self, *, wait: bool = True) -> None:
        """Delete the pod; with `wait`, return when it no longer exists."""
        options = ["--ignore-not-found", f"--wait={str(wait).lower()}"]
        self.bed.user.kubectl("delete", "pod", self.name, "-n", self.space, *options)

    @property
    def _folder(self) -> Path:
        return self.bed.folder / "surveys"

    def _survey_name(self, volume: str) -> str:
        """A file in the folder, which tests that run at the same time share: their pods may have the same names."""
        return f"{self.space}-{self.name}-{volume}.json"

    def _pod(self) -> Json:
        volumes = ["scratch"] if self.block else ["data", "scratch"]
        filled = [_FILL.format(volume, size) for volume, size in self.bytes_by_volume.items()]
        script = " && ".join([*filled, *(_SURVEY.format(v, self._survey_name(v)) for v in volumes), "touch /tmp/ready"])
        container = self._container("app", volumes, f"{script} && exec sleep infinity")
        container["readinessProbe"] = {"exec": {"command": ["test", "-e", "/tmp/ready"]}, "periodSeconds": 1}
        if self.block:
            container["volumeDevices"] = [{"name": "data", "devicePath": "/device"}]
        spec: Json = {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 0,
            "tolerations": [HELD_TOLERATION],
            "containers": [container],
            "volumes": [
                {"name": "data", "persistentVolumeClaim": {"claimName": self.name}},
                {"name": "scratch", "emptyDir": {}},
                *(
                    {"name": name, "hostPath": {"path": str(path), "type": "Directory"}}
                    for name, path in (("scripts", _SCRIPTS), ("machine", Path("/usr")), ("out", self._folder))
                ),
            ],
        }
        if self.on:
            spec["nodeSelector"] = {"kubernetes.io/hostname": self.on}
        if not self.bytes_by_volume and not self.block:
            spec["initContainers"] = [build_restore_wait(volumes) | {"securityContext": {"runAsUser": 0}}]
        return build_object(PODS, self.name, self.space, spec=spec)

    def _existing(self) -> Json:
        pod = self.bed.api.get(PODS, self.space, self.name)
        assert pod is not None
        return pod

    def _container(self, name: str, volumes: list[str], script: str) -> Json:
        mounts = [
            *({"name": volume, "mountPath": f"/volumes/{volume}"} for volume in volumes),
            *({"name": folder, "mountPath": f"/{folder}"} for folder in ("scripts", "machine", "out")),
        ]
        return build_container(name, ["sh", "-ec", script], volumeMounts=mounts)


def build_restore_wait(volumes: Iterable[str]) -> Json:
    """The init container that waits for these volumes of its pod, as a Velero server writes it, with our image."""
    return {
        "name": "restore-wait",
        "image": AGENT_IMAGE,
        "imagePullPolicy": "IfNotPresent",
        "command": ["/velero-restore-helper"],
        "args": [RESTORE_UID],
        "volumeMounts": [{"name": volume, "mountPath": f"/restores/{volume}"} for volume in volumes],
    }


def build_holder(space: str, name: str, volume: Json, *, waits: bool = False, **spec: object) -> Json:
    """A pod that has a volume `data`, for which it waits as one that a Velero server has restored if it `waits`."""
    mounts = [{"name": "data", "mountPath": "/data"}]
    own = {
        "terminationGracePeriodSeconds": 0,
        # It stays on a node that is lost, or tainted by other tests.
        "tolerations": [{"operator": "Exists"}],
        "initContainers": [build_restore_wait(["data"]) | {"securityContext": {"runAsUser": 0}}] if waits else [],
        "containers": [build_container("app", ["sleep", "infinity"], volumeMounts=mounts)],
        "volumes": [{"name": "data", **volume}],
    }
    return build_object(PODS, name, space, spec=own | spec)


def is_waiting(pod: Json) -> bool:
    """Whether the first init container of a pod runs."""
    states = pod.get("status", {}).get("initContainerStatuses") or [{}]
    return "running" in states[0].get("state", {})


def back_up(workload: Workload, volume: str) -> Json:
    """Create a PodVolumeBackup; return it as it was created."""
    item = workload.backup(volume)
    workload.bed.user.apply(item)
    return item


def expect_nothing_left(bed: Bed, *items: Json) -> None:
    """Wait for the cleanup of the transfers, and check that their pods are deleted."""
    for item in items:
        name = item["metadata"]["name"]
        wait_released(bed, item)
        assert bed.user.names(["pods"], "-n", NAMESPACE, f"--field-selector=metadata.name={name}") == []


def wait_held(bed: Bed, gate: Gate, item: Json) -> None:
    """Return once a running backup's data is held at a gate that is shut."""
    wait_until(bed, item, "InProgress")
    gate.wait_held(str(find_mover(bed, item)["status"]["podIP"]))


def wait_logged(bed: Bed, item: Json, text: str) -> None:
    """Wait until the mover of a transfer has logged this text."""
    name = item["metadata"]["name"]

    def read() -> str:
        return bed.user.kubectl("logs", name, "-n", NAMESPACE)

    wait_for(lambda: f"{text!r} in the log of {name}: {read()}", lambda: text in read())


def find_mover(bed: Bed, item: Json) -> Json:
    """The mover pod of a transfer, which must be there."""
    pod = bed.api.get(PODS, NAMESPACE, item["metadata"]["name"])
    assert pod is not None
    return pod
