"""Makes the new namespaces look like a machine of their own: mounts, addresses, kernel settings.

Everything here happens in a mount and a network namespace that end with the test bed.
"""

import re
import subprocess
from contextlib import suppress
from pathlib import Path

from tests.testbed.processes import BedError

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

_KUBELET = Path("/var/lib/kubelet")


def prepare_mounts(base: Path) -> None:
    """Give this mount namespace its own `/run` and a writable layer over `/var`, kept in `base`."""
    run("mount", "-t", "tmpfs", "tmpfs", "/run")
    # Another kubelet's, seen from here: containerd would find them, though hidden, instead of this node's own.
    _unmount_all(_KUBELET.resolve())
    for private in _PRIVATE:
        _cover(Path(private), base / "over" / private.strip("/").replace("/", "-"))
    source = base / "kubelet"
    for path in (_KUBELET, source):
        path.mkdir(parents=True, exist_ok=True)
    run("mount", "--bind", str(source), str(_KUBELET))
    # Mounts that the kubelet makes for a pod must show in containers, and the other way round.
    run("mount", "--make-rshared", str(_KUBELET))
    _shield_sysctls(base / "sysctl")


def share(folder: Path) -> None:
    """Create a folder; mounts below it show in the mount namespaces that are made from this one."""
    folder.mkdir()
    run("mount", "--bind", str(folder), str(folder))
    run("mount", "--make-rshared", str(folder))


def add_addresses(*addresses: str) -> None:
    """Set `lo` up with further addresses, and forward packets between pods."""
    run("ip", "link", "set", "lo", "up")
    for address in addresses:
        run("ip", "address", "add", f"{address}/32", "dev", "lo")
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")


def run(*argv: str) -> str:
    done = subprocess.run(argv, check=False, capture_output=True, text=True)
    if done.returncode:
        raise BedError(f"{' '.join(argv)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def _unmount_all(path: Path) -> None:
    """Remove every mount at and below `path` from this mount namespace, the last one first, which hides none."""
    while mounted := [each for each in _mountpoints() if each.is_relative_to(path)]:
        try:
            run("umount", "--lazy", str(mounted[-1]))
        except BedError:
            # A folder that the other kubelet deletes takes the mount on it from every namespace.
            if mounted[-1] in _mountpoints():
                raise


def _mountpoints() -> list[Path]:
    """Where something is mounted, hidden or not; bind mounts, which `Path.is_mount` does not know, are included.

    Source: proc_pid_mountinfo(5); white space and backslashes are written in octal.
    """
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), line.split(" ")[4])) for line in lines]


def _cover(path: Path, layer: Path) -> None:
    """Mount a writable overlay over `path`; where overlays cannot be nested, an empty folder."""
    upper, work = layer / "upper", layer / "work"
    for folder in (upper, work):
        # A node that is started again has them.
        folder.mkdir(parents=True, exist_ok=True)
    options = f"lowerdir={path},upperdir={upper},workdir={work}"
    try:
        run("mount", "-t", "overlay", "overlay", "-o", options, str(path))
    except BedError:
        run("mount", "--bind", str(upper), str(path))


def _shield_sysctls(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for name, wanted in _SYSCTLS.items():
        setting = Path("/proc/sys") / name
        with suppress(FileNotFoundError):
            if setting.read_text().strip() != wanted:
                shown = folder / name.replace("/", "-")
                shown.write_text(f"{wanted}\n")
                run("mount", "--bind", str(shown), str(setting))
