"""Brings images onto a node: the project's own, and the one that holds a pod's namespaces or stands in for Velero's.

No registry is involved: archives are imported into containerd.
"""

import hashlib
import io
import json
import os
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.tools import go_command
from tests.testbed.node import Node
from tests.testbed.processes import BedError
from tests.testbed.settings import AGENT_IMAGE, PAUSE_IMAGE, VELERO_IMAGE

_PAUSE_SOURCE = """\
// Holds the namespaces of a pod until it gets a signal to end. As /velero it takes the place of Velero's program.
package main

import (
	"os"
	"os/signal"
	"syscall"
)

func main() {
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, syscall.SIGINT, syscall.SIGTERM)
	<-ended
}
"""


def import_images(node: Node, agent_archive: Path) -> None:
    """Import both images into a node whose containerd runs.

    Args:
        agent_archive: The project's own image, as a docker-archive.
    """
    for archive, image in ((pause_archive(), PAUSE_IMAGE), (agent_archive, AGENT_IMAGE)):
        argv = node.ctr("images", "import", str(archive))
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BedError(f"could not import {image} from {archive}: {done.stderr.strip()}")


def pause_archive() -> Path:
    """The pause image, under both its names, as a docker-archive; built on first use and then kept in the cache."""
    cache = Path(os.environ.get("NODE_AGENT_CACHE") or Path.home() / ".cache" / "node-agent")
    key = hashlib.sha256(_PAUSE_SOURCE.encode()).hexdigest()[:16]
    archive = cache / "images" / f"pause-{key}.tar"
    if not archive.exists():
        archive.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=archive.parent) as folder:
            part = Path(folder) / archive.name
            pause = _build_pause(Path(folder))
            write_image(part, [PAUSE_IMAGE, VELERO_IMAGE], {"pause": pause, "velero": pause}, start=["/pause"])
            part.rename(archive)
    return archive


def _build_pause(folder: Path) -> bytes:
    source, binary = folder / "pause.go", folder / "pause"
    source.write_text(_PAUSE_SOURCE)
    argv = [str(go_command()), "build", "-trimpath", "-ldflags", "-s -w", "-o", str(binary), str(source)]
    env = {**os.environ, "CGO_ENABLED": "0"}
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BedError(f"could not build the pause image: {done.stderr.strip()}")
    return binary.read_bytes()


def write_image(path: Path, names: Sequence[str], programs: Mapping[str, bytes], *, start: Sequence[str]) -> None:
    """Write an image that has nothing but programs, in the format of `docker save`.

    Source: https://github.com/moby/docker-image-spec/blob/main/v1.2.md

    Args:
        programs: The content of each program, by its path without the leading slash.
        start: What runs if a pod names no command.
    """
    layer = _tar(programs, mode=0o755)
    digest = hashlib.sha256(layer).hexdigest()
    config = {
        "architecture": "amd64" if os.uname().machine == "x86_64" else "arm64",
        "os": "linux",
        "config": {"Entrypoint": list(start)},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
        "history": [{"created_by": Path(start[0]).name}],
    }
    manifest = [{"Config": "config.json", "RepoTags": list(names), "Layers": ["layer.tar"]}]
    files = {
        "layer.tar": layer,
        "config.json": json.dumps(config).encode(),
        "manifest.json": json.dumps(manifest).encode(),
    }
    path.write_bytes(_tar(files, mode=0o644))


def _tar(files: Mapping[str, bytes], *, mode: int) -> bytes:
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), mode
            archive.addfile(entry, io.BytesIO(content))
    return output.getvalue()
