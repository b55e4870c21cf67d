"""The image, unpacked and run read-only, as a container is: its own root, user, environment; only /tmp is writable.

Knows the format of `docker save`. Does not know what is in the image.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.testbed.layout import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

_RUN = """
mount --bind "$1" "$1"
mount --options remount,bind,ro "$1"
mount --types proc proc "$1/proc"
mount --rbind /dev "$1/dev"
mount --types tmpfs tmpfs "$1/tmp"
root=$1 user=$2; shift 2
exec chroot --groups= --userspec="$user" "$root" /usr/bin/env --ignore-environment "$@"
"""
"""Arguments: the root folder, the user, then NAME=value for the environment, then the command."""

_TIMEOUT_SECONDS = 300
_WHITEOUT = ".wh."


@dataclass(frozen=True)
class Container:
    """An unpacked image: its root folder, architecture, the user of its processes, and their environment as NAME=value.

    `prefix` are the words before a command that runs its programs, on a machine that cannot by itself.
    """

    root: Path
    architecture: str
    user: str
    environment: tuple[str, ...]
    prefix: tuple[str, ...] = ()

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in it, read-only, and return how it ended."""
        script = ["sh", "-e", "-c", _RUN, "sh", str(self.root), self.user, *self.environment, *command]
        argv = [*self.prefix, "unshare", "--mount", "--propagation", "private", *script]
        return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=_TIMEOUT_SECONDS)


@contextmanager
def unpacked(archive: Path) -> Iterator[Container]:
    """Unpack an image, a docker-archive, for as long as the context lasts.

    Source: https://github.com/moby/docker-image-spec/blob/main/v1.2.md
    """
    with tempfile.TemporaryDirectory(prefix="node-agent-image-") as folder:
        root = Path(folder) / "root"
        root.mkdir(mode=0o755)
        with tarfile.open(archive) as image:
            manifest = _read_json(image, "manifest.json")[0]
            config = _read_json(image, manifest["Config"])
            for layer in manifest["Layers"]:
                _apply(image, layer, root)
        settings = config["config"]
        # A runtime sets HOME, to / for a user that /etc/passwd does not have.
        environment = ("HOME=/", *settings["Env"])
        yield Container(root, config["architecture"], settings.get("User") or "0:0", environment)


def tar_of(files: dict[str, bytes]) -> bytes:
    """Return an archive of these files."""
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return output.getvalue()


def run_tool(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a script of `tools/`, and return how it ended."""
    argv = [sys.executable, str(ROOT / "tools" / name), *map(str, arguments)]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


def _read_json(image: tarfile.TarFile, name: str) -> Any:
    member = image.extractfile(name)
    if member is None:
        raise ValueError(f"{name} of the image is no file")
    return json.load(member)


def _apply(image: tarfile.TarFile, layer: str, root: Path) -> None:
    """Unpack a layer over those below it, and remove what it marks as deleted."""
    argv = ["tar", "--extract", "--directory", str(root), "--numeric-owner", "--same-permissions"]
    with tempfile.NamedTemporaryFile(dir=root.parent) as part:
        member = image.extractfile(layer)
        if member is None:
            raise ValueError(f"layer {layer} of the image is no file")
        while chunk := member.read(1 << 20):
            part.write(chunk)
        part.flush()
        with tarfile.open(part.name) as entries:
            deleted = [Path(name) for name in entries.getnames() if Path(name).name.startswith(_WHITEOUT)]
        for path in deleted:
            subprocess.run(["rm", "-rf", str(root / path.parent / path.name.removeprefix(_WHITEOUT))], check=True)
        subprocess.run([*argv, "--exclude", f"{_WHITEOUT}*", "--file", part.name], check=True)
