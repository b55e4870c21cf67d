"""The mounts of a test bed beside those of a kubelet that the machine has already."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.testbed.layout import ROOT

pytestmark = [pytest.mark.processes, pytest.mark.skipif(os.geteuid() != 0, reason="only root may create mounts")]

_KUBELET = "/var/lib/kubelet"

_MOUNTS = {
    "file system": "mount -t tmpfs kubelet $K",
    "folder": "mount --bind $K $K",
    "twice": "mount -t tmpfs kubelet $K; mount --bind $K $K",
    "link": "rmdir $K; ln -s elsewhere $K; mkdir /var/lib/elsewhere; mount --bind $K $K",
    "only below": "mkdir $K/pods; mount --bind $K/pods $K/pods",
}
"""How a kubelet's folder may be mounted. A bind mount has the device number of the folder around it."""

_MACHINE = r"""
awk '$5 ~ "^/var/lib/kubelet(/|$)" {{print $5}}' /proc/self/mountinfo | tac | while read -r mounted; do
  umount --lazy "$(printf '%b' "$mounted")"
done
mount -t tmpfs lib /var/lib
K=/var/lib/kubelet
mkdir $K
{mounts}
mount --make-r{propagation} /var/lib
mkdir -p "$K/pods/one/a volume"
mount -t tmpfs volume "$K/pods/one/a volume"
cp /proc/self/mountinfo {out}/before
unshare --mount --net --pid --fork --mount-proc {python} -c '{prepare}' {out}/bed >{out}/inside
cp /proc/self/mountinfo {out}/after
"""
"""A machine with a kubelet, in a mount namespace that ends with it, and a test bed's namespaces in that.

Mounts of a kubelet that this machine has are removed first: hidden below another one, no path leads to them.
"""

_PREPARE = """
import json, pathlib, sys
from tests.testbed import machine
machine.prepare_mounts(pathlib.Path(sys.argv[1]))
mounts = [line.split(" ") for line in open("/proc/self/mountinfo")]
found = pathlib.Path("/var/lib/kubelet").resolve()
print(json.dumps([[m[4], m[6]] for m in mounts if pathlib.Path(m[4]).is_relative_to(found)]))
"""


def _prepare(mounts: str, propagation: str, out: Path) -> list[Any]:
    """Prepare a test bed on a machine with these mounts; return mountpoint and propagation of the kubelet's."""
    script = _MACHINE.format(mounts=mounts, propagation=propagation, out=out, python=sys.executable, prepare=_PREPARE)
    argv = ["unshare", "--mount", "--propagation", "private", "sh", "-e", "-c", script]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads((out / "inside").read_text())
    return found


def _mounts(table: Path) -> list[str]:
    """Return the lines of a mount table that a test bed could change; other processes mount elsewhere."""
    lines = table.read_text().splitlines()
    return [line for line in lines if line.split(" ")[4].startswith(("/run", "/var/l", "/proc"))]


@pytest.mark.parametrize("propagation", ["private", "shared"])
@pytest.mark.parametrize("mounts", _MOUNTS.values(), ids=_MOUNTS.keys())
def test_folder_of_the_kubelet_is_one_shared_mount_and_the_machine_keeps_its_own(
    tmp_path: Path, mounts: str, propagation: str
) -> None:
    """containerd looks a path up among all mounts, hidden ones too, and may find one that is not shared."""
    ((mountpoint, propagated),) = _prepare(mounts, propagation, tmp_path)
    assert mountpoint == ("/var/lib/elsewhere" if "elsewhere" in mounts else _KUBELET)
    assert propagated.startswith("shared:")
    assert _mounts(tmp_path / "before") == _mounts(tmp_path / "after")
