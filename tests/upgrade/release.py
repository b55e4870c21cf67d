"""A version of the agent as a user installs it: its manifests and its image.

Both versions' images are `node-agent`, with different tags; a node gets the previous one by its archive.
"""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

import yaml

from core.kube.resources import PODS
from tests.cluster.bed import Bed
from tests.cluster.processes import find_all, is_program
from tests.support.tools import previous_image, previous_sources
from tests.testbed.api import Json
from tests.testbed.demonstration.manifests import NAMESPACE, build_location, build_namespace
from tests.testbed.install import AGENT_LABEL
from tests.testbed.layout import ROOT
from tests.testbed.processes import BedError
from tests.testbed.settings import AGENT_IMAGE
from tests.upgrade.scene import SLOTS

_PREVIOUS_IMAGE = "node-agent:previous"

_DAEMON_SET = "daemonset/node-agent"
_CONFIG_MAP = "node-agent-config"
_CONFIGURATION = json.dumps({"loadConcurrency": {"globalConfig": SLOTS}})
_ROLLOUT_SECONDS = 240
_REGISTRY = "docker.io/library"
_CTR = ("ctr", "--address", "/run/containerd/containerd.sock", "--namespace", "k8s.io", "images")


@dataclass(frozen=True)
class Release:
    """The manifests of one version."""

    deploy: Path
    image: str

    def install(self, bed: Bed) -> None:
        """Apply everything as for a first installation or an update; return when its agents are ready on each node."""
        bed.user.apply_folders(self.deploy / "crds", option="-f")
        bed.user.apply(build_namespace(NAMESPACE))
        bed.user.apply(*build_location(bed.env))
        bed.user.apply(*self.build(bed))
        self.wait_rollout(bed)

    def wait_rollout(self, bed: Bed) -> None:
        """Return when each node has a ready agent of this version, and no other."""
        options = ["-n", NAMESPACE, f"--timeout={_ROLLOUT_SECONDS}s"]
        try:
            bed.user.kubectl("rollout", "status", _DAEMON_SET, *options)
        except BedError as error:
            logs = bed.user.kubectl("logs", "-n", NAMESPACE, "-l", AGENT_LABEL, "--tail=20", "--prefix")
            raise BedError(f"{error}\n{logs}") from error
        if (images := _agent_images(bed)) != {self.image}:
            raise BedError(f"agents run {images}, and not {self.image}")

    def build(self, bed: Bed) -> list[Json]:
        """Return what its kustomization has, with its image and a user's configuration, as a user's overlay would."""
        found: list[Json] = list(yaml.safe_load_all(bed.user.kubectl("kustomize", str(self.deploy))))
        for item in found:
            if item["kind"] == "DaemonSet":
                (container,) = item["spec"]["template"]["spec"]["containers"]
                container["image"] = self.image
            elif item["kind"] == "ConfigMap" and item["metadata"]["name"] == _CONFIG_MAP:
                item["data"] = dict.fromkeys(item["data"], _CONFIGURATION)
        return found


def current() -> Release:
    return Release(ROOT / "deploy", AGENT_IMAGE)


def previous() -> Release:
    return Release(previous_sources() / "deploy", _PREVIOUS_IMAGE)


def undo_update(bed: Bed, release: Release) -> None:
    """Return the DaemonSet to its template before the last change, which is `release`'s; return when it runs."""
    bed.user.kubectl("rollout", "undo", _DAEMON_SET, "-n", NAMESPACE)
    release.wait_rollout(bed)


def find_left_behind(bed: Bed) -> list[str]:
    """Return what the previous version's manifests have and this version's do not, as kind/name."""
    theirs, ours = ({_identity(item) for item in release.build(bed)} for release in (previous(), current()))
    return sorted(theirs - ours)


def import_previous_image() -> None:
    """Import the previous version's image on every node, under a name of its own.

    Its archive has the name of this version's image, which is kept under another one meanwhile.
    """
    ours, theirs, kept = (f"{_REGISTRY}/{name}" for name in (AGENT_IMAGE, _PREVIOUS_IMAGE, "node-agent:kept"))
    archive = str(previous_image())
    for node in find_all(is_program("containerd")):
        for arguments in (
            ["tag", ours, kept],
            ["import", archive],
            ["tag", ours, theirs],
            ["tag", "--force", kept, ours],
            ["remove", kept],
        ):
            argv = ["nsenter", f"--mount=/proc/{node.pid}/ns/mnt", "--", *_CTR, *arguments]
            done = subprocess.run(argv, capture_output=True, text=True, check=False)
            if done.returncode:
                raise BedError(f"{' '.join(argv)}: {done.stderr.strip()}")


def _identity(item: Json) -> str:
    namespace = item["metadata"].get("namespace")
    if namespace not in {None, NAMESPACE}:
        raise BedError(f"{item['kind']} {item['metadata']['name']} is in {namespace}")
    return f"{item['kind'].lower()}/{item['metadata']['name']}"


def _agent_images(bed: Bed) -> set[str]:
    agents = bed.api.objects(PODS, NAMESPACE, selector=AGENT_LABEL)
    return {agent["spec"]["containers"][0]["image"] for agent in agents if "deletionTimestamp" not in agent["metadata"]}
