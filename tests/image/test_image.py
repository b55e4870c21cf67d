"""The image runs read-only and as an ordinary user, loads what was compiled for it, and takes little memory."""

from __future__ import annotations

import json
import shutil
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.datamover.support import disks
from tests.image.container import run_tool
from tests.support.tools import image_archive
from tests.testbed.settings import AGENT_IMAGE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.bed import Bed
    from tests.image.container import Container

pytestmark = [pytest.mark.cluster, pytest.mark.lane(name="waiting"), pytest.mark.timeout(1800)]

MOVER_RSS_LIMIT_KIB = 45 * 1024
AGENT_RSS_LIMIT_KIB = 60 * 1024

PROBE = """
import importlib, json, os, sys
importlib.import_module(sys.argv[1])
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
caches = {name: module.__cached__ for name, module in sys.modules.items() if getattr(module, "__cached__", None)}
print(json.dumps({
    "rss_kib": int(status["VmRSS"].split()[0]),
    "modules": sorted(sys.modules),
    "not_compiled": sorted(name for name, path in caches.items() if not os.path.exists(path)),
    "not_optimized": sorted(name for name, path in caches.items() if not path.endswith(".opt-2.pyc")),
}))
"""
"""Imports the module named by its argument and prints what that cost."""


def import_in(container: Container, module: str) -> dict[str, Any]:
    done = container.run("python", "-c", PROBE, module)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.mark.sample("nodeagent-serve-help", "velero-version", "datamover-version", "kopia")
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(("python", "-m", "nodeagent", "--version"), id="nodeagent-version"),
        pytest.param(("python", "-m", "nodeagent", "serve", "--help"), id="nodeagent-serve-help"),
        pytest.param(("/velero", "--version"), id="velero-version"),
        pytest.param(("/velero", "node-agent", "server", "--help"), id="velero-node-agent-server-help"),
        pytest.param(("/velero", "data-mover", "backup", "--help"), id="velero-data-mover-backup-help"),
        pytest.param(("/velero", "pod-volume", "restore", "--help"), id="velero-pod-volume-restore-help"),
        pytest.param(("python", "-m", "datamover", "--version"), id="datamover-version"),
        pytest.param(("python", "-m", "datamover", "backup", "--help"), id="datamover-backup-help"),
        pytest.param(("kopia", "--version"), id="kopia"),
    ],
)
def test_program_starts_in_a_read_only_container(container: Container, command: tuple[str, ...]) -> None:
    done = container.run(*command)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()


def test_the_command_of_velero_passes_on_arguments_and_exit_code(container: Container) -> None:
    done = container.run("/velero", "node-agent", "server", "--features=Enable CSI", "--log-level=no such level")
    assert done.returncode == 2
    assert done.stderr.startswith("error: argument --log-level: invalid choice: 'no such level'")


def test_nothing_can_be_written(container: Container) -> None:
    """Without this the other tests would prove nothing about a read-only container."""
    done = container.run("python", "-c", "open('/opt/node-agent/written', 'w')")
    assert "Read-only file system" in done.stderr


def test_user_is_not_root(container: Container) -> None:
    done = container.run("python", "-c", "import os; print(os.getresuid(), os.getresgid(), os.getgroups())")
    assert done.stdout == "(65532, 65532, 65532) (65532, 65532, 65532) []\n", done.stderr


@pytest.mark.sample("runAsNonRoot")
@pytest.mark.parametrize("security", [{}, {"runAsNonRoot": True}], ids=["no securityContext", "runAsNonRoot"])
def test_pod_that_sets_no_user_does_not_run_as_root(bed: Bed, space: str, security: dict[str, bool]) -> None:
    """A kubelet rejects `runAsNonRoot` if the image has no user, or one by name."""
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"namespace": space, "name": "user"},
        "spec": {
            "restartPolicy": "Never",
            # Tests that run at the same time taint nodes for a while.
            "tolerations": [{"operator": "Exists"}],
            "securityContext": security,
            "containers": [
                {
                    "name": "user",
                    "image": AGENT_IMAGE,
                    "imagePullPolicy": "IfNotPresent",
                    "command": ["python", "-c", "import os; raise SystemExit(os.getuid() != 65532)"],
                }
            ],
        },
    }
    bed.user.run_pod(pod)


@pytest.mark.sample("nodeagent.app", "datamover.__main__")
@pytest.mark.parametrize("module", ["nodeagent.app", "nodeagent.__main__", "datamover.__main__"])
def test_every_module_is_loaded_from_its_optimized_cache(container: Container, module: str) -> None:
    report = import_in(container, module)
    assert report["not_compiled"] == []
    assert report["not_optimized"] == []


def test_mover_is_light(container: Container) -> None:
    report = import_in(container, "datamover.__main__")
    assert "kubernetes_asyncio" not in report["modules"]
    assert report["rss_kib"] < MOVER_RSS_LIMIT_KIB


def test_agent_is_light(container: Container) -> None:
    """The generated classes of the client library of Kubernetes would not fit in."""
    report = import_in(container, "nodeagent.runtime.transport")
    assert report["rss_kib"] < AGENT_RSS_LIMIT_KIB


LOOK = """
import asyncio, json, sys
from pathlib import Path
sys.path.append("/probe")
from datamover.runtime.confinement import find_means
from disks import opened_disk, read_file
async def look():
    async with opened_disk(Path("/probe/disk"), Path("/tmp/look")) as (files, _):
        names = [one.name async for one in files.list(await files.find("sub"))]
        return [find_means().description, names, (await read_file(files, "small")).decode()]
print(json.dumps(asyncio.run(look())))
"""
"""Reads files of a device as the product does, and prints what confined debugfs, and what was read."""


@contextmanager
def nothing_else_of_e2fsprogs(root: Path, aside: Path) -> Iterator[None]:
    """Have no other file of the Debian package than debugfs in the image."""
    listed = (root / "var/lib/dpkg/info/e2fsprogs.list").read_text().splitlines()
    paths = [root / name.lstrip("/") for name in listed if Path(name).name != "debugfs"]
    others = [path for path in paths if path.is_file() and not path.is_symlink()]
    assert {"e2fsck", "mke2fs", "mke2fs.conf"} <= {path.name for path in others}
    aside.mkdir()
    for number, path in enumerate(others):
        shutil.move(path, aside / str(number))
    try:
        yield
    finally:
        for number, path in enumerate(others):
            shutil.move(aside / str(number), path)


def test_of_e2fsprogs_only_debugfs_is_needed_to_read_files_of_a_device(container: Container, tmp_path: Path) -> None:
    probe = container.root / "probe"
    probe.mkdir()
    shutil.copy(disks.__file__, probe)
    shutil.copy(disks.make_disk(tmp_path)[1], probe / "disk")
    with nothing_else_of_e2fsprogs(container.root, tmp_path / "aside"):
        for user in (container.user, "0:0"):
            done = replace(container, user=user).run("python", "-c", LOOK)
            assert done.returncode == 0, done.stderr
            means, names, content = json.loads(done.stdout)
            assert "Landlock" in means
            assert (names, content) == (["deep", "large", "pipe", "sparse"], "one")


def test_the_bill_of_materials_and_the_licenses_have_what_debugfs_is_made_of(
    container: Container, tmp_path: Path
) -> None:
    done = run_tool("sbom.py", image_archive(), "v1", tmp_path / "sbom.json")
    assert done.returncode == 0, done.stderr
    named = {one["name"] for one in json.loads((tmp_path / "sbom.json").read_text())["components"]}
    of_debugfs = {"e2fsprogs", "libext2fs2", "libss2", "libcom-err2", "libblkid1", "libuuid1"}
    assert of_debugfs <= named
    texts = {one: container.root / "usr/share/doc" / one / "copyright" for one in of_debugfs}
    assert [one for one, path in texts.items() if "GPL" not in path.read_text()] == []
