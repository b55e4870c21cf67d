"""Makes the new namespaces look like a machine of their own: mounts, addresses, kernel settings.

Everything here happens in a mount and a network namespace that end with the test bed.
"""

from __future__ import annotations

import subprocess
from contextlib import suppress
from pathlib import Path

from tests.testbed.processes import BedError

__all__ = ["add_addresses", "prepare_mounts", "run"]

_SYSCTLS = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}
"""What a kubelet wants these settings to be.

They belong to the whole machine. A kubelet that reads the wanted value changes nothing, so
it is shown files with that value.
Source: k8s.io/kubernetes pkg/kubelet/cm, setupKernelTunables, v1.34
"""

_PRIVATE = ("/var/lib", "/var/log")
"""Where kubelet and CNI plugins write under fixed paths."""


def prepare_mounts(base: Path) -> None:
    """Give this mount namespace its own `/run` and a writable layer over `/var`, kept in `base`."""
    run("mount", "-t", "tmpfs", "tmpfs", "/run")
    if Path("/var/lib/kubelet").is_mount():
        # Another node's, seen from here: containerd would use it instead of this node's own.
        run("umount", "--recursive", "--lazy", "/var/lib/kubelet")
    for private in _PRIVATE:
        _cover(Path(private), base / "over" / private.strip("/").replace("/", "-"))
    kubelet, source = Path("/var/lib/kubelet"), base / "kubelet"
    for path in (kubelet, source):
        path.mkdir(parents=True, exist_ok=True)
    run("mount", "--bind", str(source), str(kubelet))
    # Mounts that the kubelet makes for a pod must show in containers, and the other way round.
    run("mount", "--make-rshared", str(kubelet))
    _shield_sysctls(base / "sysctl")


def add_addresses(*addresses: str) -> None:
    """Set `lo` up with further addresses, and forward packets between pods."""
    run("ip", "link", "set", "lo", "up")
    for address in addresses:
        run("ip", "address", "add", f"{address}/32", "dev", "lo")
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")


def run(*argv: str) -> str:
    """Run a program until it ends and return its standard output.

    Raises:
        BedError: It failed.
    """
    done = subprocess.run(argv, check=False, capture_output=True, text=True)
    if done.returncode:
        raise BedError(f"{' '.join(argv)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def _cover(path: Path, layer: Path) -> None:
    """Mount a writable overlay over `path`; where overlays cannot be nested, an empty folder."""
    upper, work = layer / "upper", layer / "work"
    for folder in (upper, work):
        folder.mkdir(parents=True)
    options = f"lowerdir={path},upperdir={upper},workdir={work}"
    try:
        run("mount", "-t", "overlay", "overlay", "-o", options, str(path))
    except BedError:
        run("mount", "--bind", str(upper), str(path))


def _shield_sysctls(folder: Path) -> None:
    folder.mkdir()
    for name, wanted in _SYSCTLS.items():
        setting = Path("/proc/sys") / name
        with suppress(FileNotFoundError):
            if setting.read_text().strip() != wanted:
                shown = folder / name.replace("/", "-")
                shown.write_text(f"{wanted}\n")
                run("mount", "--bind", str(shown), str(setting))
