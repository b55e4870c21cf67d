"""What `velero install` of a release installs, and what its user does with it: Backups, Restores, deletions."""

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml

from core.kube.resources import BACKUPS, Resource
from tests.cluster.bed import Bed
from tests.support.objects import build_object
from tests.support.tools import tool
from tests.testbed.api import Json
from tests.testbed.demonstration.manifests import build_location
from tests.testbed.processes import BedError, wait_for
from tests.testbed.settings import AGENT_IMAGE, BUCKET
from tests.velero_cluster.images import PLUGIN_IMAGE, velero_image

RESTORES: Final = Resource("Restore", "restores", "velero.io")
DELETIONS: Final = Resource("DeleteBackupRequest", "deletebackuprequests", "velero.io")

_ENDS: Final = {"Completed", "PartiallyFailed", "Failed", "FailedValidation"}
_SECONDS: Final = 300


@dataclass(frozen=True)
class VeleroInstallation:
    """A release of Velero in a namespace of its own."""

    bed: Bed
    version: str
    space: str

    def install(self, folder: Path, *, url: str) -> None:
        """Install it as its user would, with a bucket that is reached under `url`; return when everything is ready."""
        secret, _ = build_location(self.bed.env)
        keys = folder / "keys"
        keys.write_text(secret["stringData"]["cloud"])
        self.bed.user.kubectl("label", "volumesnapshotclass", "bed", "velero.io/csi-volumesnapshot-class=true")
        argv = [str(tool(f"velero-{self.version}", "velero")), "install", f"--namespace={self.space}"]
        argv += [f"--image={velero_image(self.version)}", f"--plugins={PLUGIN_IMAGE}", f"--secret-file={keys}"]
        argv += ["--provider=aws", f"--bucket={BUCKET}", f"--prefix={self.space}", "--use-volume-snapshots=false"]
        argv += [f"--backup-location-config=region=us-east-1,s3ForcePathStyle=true,s3Url={url}"]
        argv += ["--use-node-agent", "--features=EnableCSI", "--dry-run", "-o", "yaml"]
        argv += ["--velero-pod-cpu-request=50m", "--node-agent-pod-cpu-request=50m"]
        printed = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True, timeout=60).stdout
        items: list[Json] = yaml.safe_load(printed)["items"]
        definitions = [item for item in items if item["kind"] == "CustomResourceDefinition"]
        text = yaml.safe_dump_all(definitions)
        self.bed.user.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=text)
        self.bed.user.kubectl("wait", "crd", "--all", "--for=condition=Established", "--timeout=60s")
        self.bed.user.apply(*(item for item in items if item not in definitions))
        self.wait_rollout("deployment/velero")
        self.wait_rollout("daemonset/node-agent")

    def remove(self) -> None:
        self.kubectl("delete", "deployment/velero", "daemonset/node-agent", "--wait=true")
        self.bed.user.kubectl("label", "volumesnapshotclass", "bed", "velero.io/csi-volumesnapshot-class-")

    def use_image(self, image: str) -> None:
        """Change the image of the node agent, and nothing else; return when it runs."""
        self.kubectl("set", "image", "daemonset/node-agent", f"node-agent={image}")
        self.wait_rollout("daemonset/node-agent")

    def use_ours(self) -> None:
        self.use_image(AGENT_IMAGE)

    def use_velero(self) -> None:
        self.use_image(velero_image(self.version))

    def scale_server(self, replicas: int) -> None:
        """Start or end the server; return when it is ready, or gone."""
        self.kubectl("scale", "deployment/velero", f"--replicas={replicas}")
        self.wait_rollout("deployment/velero")
        if not replicas:
            self.kubectl("wait", "pod", "-l", "deploy=velero", "--for=delete", "--timeout=120s")

    def wait_rollout(self, what: str) -> None:
        """Return when `what` runs as it is configured."""
        self.kubectl("rollout", "status", what, f"--timeout={_SECONDS}s")

    def create(self, resource: Resource, name: str, spec: Json) -> Json:
        return self.bed.api.create(resource, build_object(resource, name, self.space, spec=spec))

    def back_up(self, name: str, space: str, *, moves: bool, **spec: object) -> None:
        """Begin a Backup of a namespace: of snapshots if it `moves`, or else of volumes of annotated pods."""
        found = {"includedNamespaces": [space], "snapshotMoveData": moves, "storageLocation": "default", **spec}
        self.create(BACKUPS, name, found)

    def restore(self, name: str, backup: str) -> None:
        """Restore everything of a Backup, and wait for it."""
        self.create(RESTORES, name, {"backupName": backup})
        self.expect(RESTORES, name, "Completed")

    def expect(self, resource: Resource, name: str, phase: str) -> Json:
        """Return a Backup or Restore once it has ended, in this phase."""
        found = self.until(resource, name, lambda item: item.get("status", {}).get("phase") in _ENDS)
        if found["status"]["phase"] != phase:
            raise BedError(f"{name}: {found['status']}; {self._explain()}")
        return found

    def until(self, resource: Resource, name: str, reached: Callable[[Json], bool]) -> Json:
        """Return an object once it exists and `reached` holds."""
        return self.until_any(resource, lambda item: item["metadata"]["name"] == name and reached(item))

    def until_any(self, resource: Resource, reached: Callable[[Json], bool]) -> Json:
        """Return the first object of a kind for which `reached` holds."""
        return wait_for(
            lambda: f"one of {resource.plural}; {self._explain()}",
            lambda: next(filter(reached, self.bed.api.objects(resource, self.space)), None),
            seconds=_SECONDS,
        )

    def until_gone(self, resource: Resource, name: str) -> None:
        self.kubectl("wait", f"{resource.plural}.velero.io/{name}", "--for=delete", f"--timeout={_SECONDS}s")

    def kubectl(self, *arguments: str) -> str:
        return self.bed.user.kubectl(*arguments, "-n", self.space)

    def _explain(self) -> str:
        kinds = "backups,restores,datauploads,datadownloads,podvolumebackups,podvolumerestores,backuprepositories"
        columns = "custom-columns=N:.metadata.name,P:.status.phase,M:.status.message"
        lines = self.kubectl("get", kinds, "-o", columns)
        log = self.kubectl("logs", "deployment/velero", "--tail=200")
        errors = [line[:400] for line in log.splitlines() if "level=error" in line or "level=warning" in line]
        return "\n".join([lines, *errors[-15:]])
