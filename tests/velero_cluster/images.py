"""The images of a Velero release and of its plug-in for S3, made of programs that are built from their modules.

A released image has the same programs over a distribution, which the node agent and its data movers do not need.
"""

import subprocess
import tempfile
from pathlib import Path

from tests.support.tools import tool
from tests.testbed.images import write_image

PLUGIN_IMAGE = "docker.io/velero/velero-plugin-for-aws:v1.14.3"

_IMPORT = ("ctr", "--address", "/run/containerd/containerd.sock", "--namespace", "k8s.io", "images", "import")
_SYSTEM = {"tmp/empty": b"", "etc/passwd": b"root:x:0:0:root:/:/bin/false\n"}


def velero_image(version: str) -> str:
    """Return the name of the image of a release, which a server of it also uses for its Jobs and in restored pods."""
    return f"docker.io/velero/velero:v{version}"


def import_velero(version: str) -> None:
    """Give the first node the images of a release and of the plug-in."""
    names = ("velero", "velero-restore-helper")
    programs = {name: tool(f"velero-{version}", name).read_bytes() for name in names}
    _import(velero_image(version), programs | _SYSTEM, start=["/velero"])
    # Source: velero-plugin-for-aws v1.14.3, Dockerfile.
    plugin, copier = (tool("velero-plugin-for-aws", name) for name in ("velero-plugin-for-aws", "cp-plugin"))
    path, target = f"plugins/{plugin.name}", f"/target/{plugin.name}"
    programs = {path: plugin.read_bytes(), "bin/cp-plugin": copier.read_bytes()}
    _import(PLUGIN_IMAGE, programs, start=["/bin/cp-plugin", f"/{path}", target])


def _import(name: str, programs: dict[str, bytes], *, start: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "image.tar"
        write_image(archive, [name], programs, start=start)
        subprocess.run([*_IMPORT, str(archive)], check=True, stdout=subprocess.DEVNULL)
