"""Runs a command of the test bed as the first process of new namespaces, and cleans up behind it.

Outside: this process, which waits, and the janitor. Inside: everything else, which the
kernel ends together with the first process. Nothing inside survives SIGKILL of this one.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tests.support.tools import image_archive, tool
from tests.testbed import cgroups, janitor
from tests.testbed.images import pause_archive
from tests.testbed.layout import ROOT, make_layout
from tests.testbed.processes import BedError

_TOOLS = {
    "etcd": ("etcd",),
    "kubernetes": ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kubectl"),
    "kopia": ("kopia",),
    "versitygw": ("versitygw",),
    "csi": (
        "driver",
        "csi-provisioner",
        "csi-attacher",
        "csi-resizer",
        "csi-snapshotter",
        "csi-snapshot-metadata",
        "snapshot-controller",
    ),
}

_PROGRAMS = {
    "unshare": "util-linux",
    "setpriv": "util-linux",
    "losetup": "mount",
    "mkfs.ext4": "e2fsprogs",
    "mkfs.xfs": "xfsprogs",
    "ip": "iproute2",
    "openssl": "openssl",
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "iptables": "iptables",
}
"""Programs of the machine that the test bed needs, and the Debian packages that bring them."""


def check_machine() -> None:
    """Check what no later step could do without."""
    if os.geteuid() != 0:
        raise BedError("the test bed needs root: it makes namespaces, mounts and containers")
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    missing = {package for name, package in _PROGRAMS.items() if not shutil.which(name, path=path)}
    if missing:
        raise BedError(f"missing programs; install the packages {' '.join(sorted(missing))}")


def build_parts() -> Path:
    """Build what is not in the cache yet, as there is no network inside; returns the image."""
    for name, binaries in _TOOLS.items():
        for binary in binaries:
            tool(name, binary)
    pause_archive()
    return image_archive()


def run_isolated(arguments: Sequence[str], *, nodes: int, image: Path) -> int:
    """Run `python -m tests.testbed.inside` with these arguments in new namespaces.

    Args:
        arguments: For `inside`, behind the test bed's folder and its cgroup.
        nodes: How many kubelets there will be.
        image: The project's image, as a docker-archive.

    Returns:
        The exit code of the command inside, when all traces of the test bed are removed.
    """
    layout = make_layout()
    bed = cgroups.bed_name(os.getpid())
    cleaner = janitor.start(layout.base, bed, root=ROOT)
    try:
        cgroups.make_groups(bed, nodes)
        return _run(["tests.testbed.inside", str(layout.base), bed, str(nodes), str(image), *arguments])
    finally:
        if cleaner.stdin is not None:
            cleaner.stdin.close()
        cleaner.wait()


def _run(module_and_arguments: list[str]) -> int:
    argv = ["setpriv", "--pdeathsig", "KILL", "unshare", "--kill-child"]
    argv += ["--mount", "--net", "--pid", "--fork", "--mount-proc"]
    argv += [sys.executable, "-m", *module_and_arguments]
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    # A terminal's interrupt reaches the inside by itself, as it is in the same process group.
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    child = subprocess.Popen(argv, env=env, preexec_fn=_restore_interrupt)  # noqa: PLW1509 - one thread
    signal.signal(signal.SIGTERM, lambda *_: _terminate_first_process(child.pid))
    try:
        code = child.wait()
    finally:
        signal.signal(signal.SIGINT, previous)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return code if code >= 0 else 128 - code


def _restore_interrupt() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _terminate_first_process(unshare_pid: int) -> None:
    """Signal the first process inside to end; `unshare` passes no signals on."""
    children = Path(f"/proc/{unshare_pid}/task/{unshare_pid}/children").read_text().split()
    for pid in children:
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGTERM)
