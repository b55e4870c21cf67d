"""`nodeagent restore` on a real kubelet: backups of both methods come back by both methods, also with late binding."""

import hashlib
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.cluster.bed import Bed
from tests.cluster.scenes import Volume, open_place
from tests.cluster.sharing import WITH_LOCKS, Shared, relies_on
from tests.testbed.demonstration.manifests import NAMESPACE, build_pod

pytestmark = [pytest.mark.cluster, pytest.mark.lane(name="moving"), pytest.mark.timeout(WITH_LOCKS)]

_DATA = "what was there"
_FILL = f"import os; os.mkdir('/data/folder', 0o700); open('/data/folder/file', 'w').write({_DATA!r})"
_CHECK = f"""\
import os
assert open("/data/folder/file").read() == {_DATA!r}
assert os.stat("/data/folder").st_mode & 0o777 == 0o700
assert not os.path.exists("/data/.velero")
"""
_ADD = """\
import os
os.setxattr("/data/folder/file", "user.note", b"kept")
os.link("/data/folder/file", "/data/other")
with open("/data/hole", "wb") as file:
    file.truncate(8 << 20)
os.utime("/data/folder", (1, 2))
"""
_CHECK_ADDED = f"""\
{_CHECK}
assert os.getxattr("/data/folder/file", "user.note") == b"kept"
assert os.stat("/data/other").st_ino == os.stat("/data/folder/file").st_ino
assert (os.stat("/data/hole").st_size, os.stat("/data/hole").st_blocks) == (8 << 20, 0)
assert os.stat("/data/folder").st_mtime == 2
"""
"""What kopia does not keep of files."""

_HOLD = "import time; time.sleep(600)"


class _Scene:
    """A PVC with data in a namespace, a location, and the command as a person runs it."""

    def __init__(self, bed: Bed, space: str) -> None:
        self.bed, self.space = bed, space

    def back_up(self, method: str, *words: str) -> str:
        name = f"{self.space}-{method}"
        words = (f"--storage-location={self.space}", f"--method={method}", "--wait", *words)
        self.bed.document("backup", "create", name, f"--pvc={self.space}/data", *words)
        return name

    def restore(self, backup: str, *words: str, check: str = _CHECK) -> None:
        """Restore into a namespace of its own."""
        with self._restored(backup, "--wait", *words) as (new, found):
            assert [one["phase"] for one in found["volumes"]] == ["Completed"]
            self._wait_without_pods(new)
            script = ["-c", check]
            self.bed.user.run_pod(build_pod(new, "read", claim="data", script=script, folders={}))

    def cancel(self, backup: str, *words: str) -> None:
        """Begin to restore into a namespace of its own, and cancel it."""
        with self._restored(backup, *words) as (new, _):
            self.bed.said("restore", "cancel", new)
            self._wait_without_pods(new)

    @contextmanager
    def _restored(self, backup: str, *words: str) -> Iterator[tuple[str, Any]]:
        # Other tests of the tier leave out objects with such a name.
        new = f"test-{hashlib.sha256(' '.join((backup, *words)).encode()).hexdigest()[:8]}"
        mapping = f"--namespace-mappings={self.space}:{new}"
        try:
            yield new, self.bed.document("restore", "create", new, f"--from-backup={backup}", mapping, *words)
        finally:
            self.bed.user.kubectl("delete", "namespace", new, "--ignore-not-found", "--wait=false")
            label = ("-n", NAMESPACE, "-l", f"nodeagent.io/restore={new}")
            self.bed.user.kubectl("delete", "datadownloads,podvolumerestores", *label)

    def _wait_without_pods(self, namespace: str) -> None:
        self.bed.user.kubectl("wait", "pods", "--all", "--for=delete", "-n", namespace, "--timeout=600s")


@pytest.fixture
def scene(agent: Bed, space: str) -> Iterator[_Scene]:
    Volume(agent, space).fill(_FILL)
    with open_place(agent, space), relies_on(agent, Shared.AGENTS):
        yield _Scene(agent, space)


def test_a_snapshot_comes_back_directly_and_into_a_pod_that_waits(scene: _Scene) -> None:
    backup = scene.back_up("csi-snapshot")
    scene.restore(backup)
    into_pod = ("--method=restore-wait", "--storage-class-mappings=bed:bed-wait")
    scene.restore(backup, *into_pod)
    scene.cancel(backup, *into_pod)


def test_a_volume_comes_back_by_block_with_all_that_its_file_system_has(scene: _Scene) -> None:
    script = _ADD.replace("/data", str(Volume(scene.bed, scene.space).path()))
    subprocess.run([sys.executable, "-c", script], check=True)
    scene.restore(scene.back_up("csi-snapshot", "--data-mover=block"), check=_CHECK_ADDED)


def test_files_of_a_running_pod_come_back_without_a_pod(scene: _Scene) -> None:
    pod = build_pod(scene.space, "holder", claim="data", script=["-c", _HOLD], folders={})
    scene.bed.user.apply(pod)
    scene.bed.user.wait("pod/holder", "condition=Ready", namespace=scene.space)
    scene.restore(scene.back_up("fs-backup"))
