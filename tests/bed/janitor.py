"""Removes what a bed leaves outside its namespaces, even when the bed was killed.

Runs beside the bed in a session of its own. Its standard input is a pipe whose other end
the bed holds: when that closes, the bed is gone. Processes, mounts and network end with
the namespaces; this removes loop devices, cgroups and the folder.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from tests.bed import cgroups

__all__ = ["main", "start"]

_PATIENCE_SECONDS = 20
_POLL_SECONDS = 0.1


def start(base: Path, bed: str, *, root: Path) -> subprocess.Popen[bytes]:
    """Start the janitor; it begins when the returned process's `stdin` is closed."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.bed.janitor", str(base), bed],
        stdin=subprocess.PIPE,
        cwd=root,
        start_new_session=True,
    )


def main(base: Path, bed: str) -> int:
    """Wait for the end of the bed, then clean up; 1 if something could not be removed."""
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
    for pid in cgroups.processes_in(bed):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    _detach_loop_devices(base)
    shutil.rmtree(base, ignore_errors=True)
    return cgroups.remove_groups(bed) and not base.exists()


def _detach_loop_devices(base: Path) -> None:
    """Detach the devices over files below `base`, and those that kubelets laid over these."""
    files = Path("/sys/block").glob("loop*/loop/backing_file")
    backing = {f"/dev/{file.parts[3]}": _read(file) for file in files}
    ours = {device: Path(file).name for device, file in backing.items() if file.startswith(f"{base}/")}
    # A kubelet's own device has a path of the inside, in which the volume's name is a folder.
    above = {device for device, file in backing.items() if set(Path(file).parts) & set(ours.values())} - set(ours)
    for device in (*above, *ours):
        subprocess.run(["losetup", "--detach", device], check=False, capture_output=True)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""  # detached meanwhile


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
