"""Removes what a test bed leaves outside its namespaces, even when the test bed was killed.

Runs beside the test bed in a session of its own. Its standard input is a pipe whose other end
the test bed holds: when that closes, the test bed has ended. Processes, mounts and network end with
the namespaces; this removes loop devices, cgroups and the folder.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from tests.testbed import cgroups

_PATIENCE_SECONDS = 20
_POLL_SECONDS = 0.1


def start(base: Path, bed: str, *, root: Path) -> subprocess.Popen[bytes]:
    """Start the janitor; it begins when the returned process's `stdin` is closed."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.testbed.janitor", str(base), bed],
        stdin=subprocess.PIPE,
        cwd=root,
        start_new_session=True,
    )


def main(base: Path, bed: str) -> int:
    """Wait for the end of the test bed, then clean up; 1 if something could not be removed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not _clean(base, bed):
        if time.monotonic() > deadline:
            print(f"could not remove everything of the test bed: {base}, cgroup {bed}", file=sys.stderr)
            return 1
        time.sleep(_POLL_SECONDS)
    return 0


def _clean(base: Path, bed: str) -> bool:
    """Remove what can be removed now; True when nothing is left."""
    for pid in cgroups.processes_in(bed):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    devices = _loop_devices(base)
    for device in devices:
        subprocess.run(["losetup", "--detach", device], check=False, capture_output=True)
    if not devices:
        # Not earlier: a file's name is how its device is found.
        shutil.rmtree(base, ignore_errors=True)
    return cgroups.remove_groups(bed) and not base.exists()


def _loop_devices(base: Path) -> list[str]:
    """Loop devices over files below `base`, behind those that kubelets laid over these.

    A kubelet's own are known by the inode of the device below: their paths were those of the
    mount namespace that has ended.
    """
    argv = ["losetup", "--list", "--json", "--output", "NAME,BACK-INO,BACK-MAJ:MIN,BACK-FILE"]
    output = subprocess.run(argv, check=True, capture_output=True, text=True).stdout
    devices = json.loads(output)["loopdevices"] if output.strip() else []
    ours = [each["name"] for each in devices if (each["back-file"] or "").startswith(f"{base}/")]
    inodes = {_identity(Path(name).stat()) for name in ours}
    above = [each["name"] for each in devices if (each["back-ino"], each["back-maj:min"].strip()) in inodes]
    return [*above, *ours]


def _identity(status: os.stat_result) -> tuple[int, str]:
    device = status.st_dev
    return status.st_ino, f"{os.major(device)}:{os.minor(device)}"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
