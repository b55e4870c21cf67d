"""The data mover of a Velero release: its own program, on a real API server.

Knows the program's command line and what it needs of its pod. Does not know what is backed up.
Source: Velero v1.18.2, pkg/cmd/cli/datamover and pkg/cmd/cli/podvolume.
"""

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from core.kube.resources import BACKUP_REPOSITORIES, BACKUP_STORAGE_LOCATIONS, SECRETS, TRANSFERS, Resource
from core.models.base import JsonDict
from tests.datamover.support.pods import MoverPod
from tests.support.apiserver import ApiServer
from tests.support.tools import tool

_COMMANDS = {
    "DataUpload": ("data-mover", "backup", "--data-upload"),
    "DataDownload": ("data-mover", "restore", "--data-download"),
    "PodVolumeBackup": ("pod-volume", "backup", "--pod-volume-backup"),
    "PodVolumeRestore": ("pod-volume", "restore", "--pod-volume-restore"),
}
_COPIED = (SECRETS, BACKUP_STORAGE_LOCATIONS, BACKUP_REPOSITORIES, *TRANSFERS)
_SECONDS = 180
_DEVICES = ("null", "zero", "random", "urandom")

_ENTER = """
for device in $2; do touch "$1/$device"; mount --bind "/dev/$device" "$1/$device"; done
mount --rbind "$1" /dev
shift 2
exec "$@"
"""
"""Its termination message is always /dev/termination-log: it gets a /dev of its own."""


@dataclass(frozen=True)
class VeleroRun:
    """A run of a data mover, and the file of its termination message."""

    argv: Sequence[str | Path]
    environment: Mapping[str, str]
    message_file: Path


@dataclass(frozen=True)
class VeleroMover:
    """Runs the program of one version on what `pod` has in its cluster, which is copied to the API server."""

    version: str
    server: ApiServer
    folder: Path

    def run(self, pod: MoverPod, kind: str, name: str, volume: Path) -> str:
        """Run the data mover of the transfer `name` to its end, and return its termination message."""
        run = self.prepare(pod, kind, name, volume, folder=self.folder / f"{kind}-{name}")
        done = subprocess.run(
            run.argv,
            env=run.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
        message = run.message_file
        assert done.returncode == 0, message.read_text() if message.exists() else done.stdout
        return message.read_text()

    def prepare(
        self, pod: MoverPod, kind: str, name: str, volume: Path, *, folder: Path, mode: str = "Filesystem"
    ) -> VeleroRun:
        """Return how to run the data mover of the transfer `name` with its temporary files in `folder`."""
        self._copy(pod)
        (folder / "dev").mkdir(parents=True)
        (folder / "credentials").mkdir()
        group, verb, flag = _COMMANDS[kind]
        argv: list[str | Path] = [
            tool(f"velero-{self.version}", "velero"),
            group,
            verb,
            f"{flag}={name}",
            f"--volume-path={volume}",
        ]
        argv += [f"--volume-mode={mode}"] if group == "data-mover" else []
        argv += ["--resource-timeout=1m", "--namespace=velero", f"--kubeconfig={self.server.kubeconfig}"]
        environment = {
            "HOME": str(folder),
            "TMPDIR": str(folder),
            "PATH": "/usr/bin:/bin",
            "NODE_NAME": "node-a",
            "VELERO_NAMESPACE": "velero",
        }
        devices = [*_DEVICES, volume.name] if mode == "Block" else _DEVICES
        enter: list[str | Path] = ["unshare", "--mount", "sh", "-euc", _ENTER, "sh", folder / "dev", " ".join(devices)]
        return VeleroRun([*enter, *argv], environment, folder / "dev/termination-log")

    def _copy(self, pod: MoverPod) -> None:
        """Replace the objects of the API server by the ones of `pod`."""
        for resource in _COPIED:
            for stored in pod.stored(resource):
                self._put(resource, stored)

    def _put(self, resource: Resource, stored: JsonDict) -> None:
        meta = stored["metadata"]
        self.server.api.delete(resource, meta["namespace"], meta["name"])
        kept = {key: meta[key] for key in ("namespace", "name", "labels") if key in meta}
        self.server.api.create(resource, stored | {"metadata": kept})
