"""What a tenant's pod does to its volumes while they are backed up or restored reaches nothing else of the data mover.

Landlock confines kopia on the first node. The second one has a kernel without Landlock (`tests.testbed.othernode`), so
a chroot jail does. The agents are those of a DaemonSet of Velero's, in a namespace of their own: their movers have what
is most worth to steal, the token of an administrator and a file with the credentials of the bucket.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from core.kube.resources import PODS
from core.landlock import landlock_abi
from tests.cluster.bed import Bed, new_namespace
from tests.cluster.handkopia import open_kopia
from tests.cluster.installation import Installation, installed
from tests.cluster.scenes import RESTORE_UID, build_pod_transfer, wait_until
from tests.cluster.sharing import WITH_LOCKS, Shared, relies_on
from tests.support.attacks import Swap, attacker_command
from tests.support.objects import build_object
from tests.testbed.api import Json
from tests.testbed.demonstration.manifests import build_container
from tests.testbed.settings import AGENT_IMAGE

pytestmark = [pytest.mark.cluster, pytest.mark.lane(name="apart"), pytest.mark.timeout(WITH_LOCKS)]

_NODES = {"bed-1": "Landlock", "bed-2": "a chroot jail"}
"""What confines kopia on each node."""

_TARGETS = {
    "token": ("/var/run/secrets/kubernetes.io/serviceaccount", ["token", "namespace"]),
    "credentials": ("/credentials", ["cloud"]),
    "process": ("/proc/self", ["environ", "cmdline", "status"]),
}
"""By volume: the folder of the mover's pod that takes the place of its own, and the files that are wanted of it."""

_FILES = 300
_PYTHON = ("python3", "-c")
_TREE = "tree"
"""The volume that is restored later."""

_OUTSIDE = "/scratch"
"""A folder of the mover's pod that is writable, and not the volume."""

_TENANT = """
import json, os, subprocess, sys, time
attackers = {}
for volume, (command, names) in json.loads(sys.argv[1]).items():
    os.mkdir(f"/volumes/{volume}/P")
    for name in [*(f"f{number:04}" for number in range(FILES)), *names]:
        with open(f"/volumes/{volume}/P/{name}", "w") as file:
            file.write(name)
    attackers[volume] = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert attackers[volume].stdout.readline() == b"ready\\n"
os.chdir("/volumes/tree")
os.mkdir("full")
os.mkdir("empty")
for name in ("full/file", "file"):
    with open(name, "w") as file:
        file.write(f"of the tenant: {name}")
os.chmod("empty", 0o711)
os.utime("empty", (1_000_000_000, 1_000_000_000))
os.utime("full/file", (1_500_000_000, 1_500_000_000))
open("/tmp/ready", "w").close()
for volume, attacker in attackers.items():
    print("exchanged", volume, attacker.wait(), flush=True)
time.sleep(1_000_000)
""".replace("FILES", str(_FILES))
"""Fills its volumes, and exchanges a folder of each for a link as soon as a file in it is opened."""

_PLANT = f"""
import os
os.chdir("/volumes/tree")
os.symlink("{_OUTSIDE}", "full")
os.symlink("{_OUTSIDE}", "empty")
os.symlink("{_OUTSIDE}/file", "file")
"""
"""Puts links out of the volume in the place of what is restored."""

_WAIT = f"until [ -e /volumes/tree/.velero/{RESTORE_UID} ]; do sleep 0.2; done"

_DESCRIBE = """
import json, os, stat, time
os.chdir("/volumes/tree")
found = {}
for path in ("full", "full/file", "empty", "file"):
    status = os.lstat(path)
    content = open(path).read() if stat.S_ISREG(status.st_mode) else ""
    found[path] = [stat.filemode(status.st_mode), content or int(status.st_mtime)]
print(json.dumps(found), flush=True)
open("/tmp/ready", "w").close()
time.sleep(1_000_000)
"""


@dataclass
class Outcome:
    """What became of the attacks on one node.

    Attributes:
        backups: The PodVolumeBackup of each volume, as it ended.
        tenant: What the pod that was backed up has logged.
        restored: What the pod that was restored has found in its volume.
    """

    backups: dict[str, Json] = field(default_factory=dict)
    restore: Json = field(default_factory=dict)
    tenant: str = ""
    restored: Json = field(default_factory=dict)
    agent: str = ""


@dataclass(frozen=True)
class Outcomes:
    """What became of the attacks on each node, and what the repository then has from outside of the volumes."""

    nodes: dict[str, Outcome]
    leaked: list[str]


@pytest.fixture(scope="module")
def attacked(agent: Bed, rows: set[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcomes]:
    """The attacks, on all nodes at the same time."""
    with (
        relies_on(agent, Shared.AGENTS),
        new_namespace(agent) as space,
        installed(agent, f"{space}-velero", image=AGENT_IMAGE) as velero,
        ThreadPoolExecutor() as pool,
    ):
        running = {node: pool.submit(_attack, velero, space, node) for node in rows}
        nodes = {node: attack.result() for node, attack in running.items()}
        known = {
            backup["status"].get("snapshotID"): f"{node} {volume}"
            for node, outcome in nodes.items()
            for volume, backup in outcome.backups.items()
        }
        yield Outcomes(nodes, _find_leaks(agent, space, known, tmp_path_factory.mktemp("restored")))


def _attack(velero: Installation, space: str, node: str) -> Outcome:
    """Back up the volumes of a pod on that node while it exchanges folders, and restore into one with links."""
    user, tenant, reader, outcome = velero.bed.user, f"tenant-{node}", f"reader-{node}", Outcome()
    exchanges = json.dumps({volume: _exchange(volume) for volume in _TARGETS})
    attacking = {"main": [*_PYTHON, _TENANT, exchanges]}
    waiting = {"plant": [*_PYTHON, _PLANT], "restore-wait": ["sh", "-ec", _WAIT], "main": [*_PYTHON, _DESCRIBE]}
    user.apply(
        _build_pod(space, node, tenant, [*_TARGETS, _TREE], attacking),
        _build_pod(space, node, reader, [_TREE], waiting),
    )
    user.wait(f"pod/{tenant}", "condition=Ready", namespace=space)
    items = {volume: _build_transfer(velero, "PodVolumeBackup", space, tenant, volume) for volume in (*_TARGETS, _TREE)}
    user.apply(*items.values())
    outcome.backups = {volume: wait_until(velero.bed, item) for volume, item in items.items()}
    outcome.tenant = user.kubectl("logs", tenant, "-n", space)
    kept = outcome.backups[_TREE]["status"]
    restore = _build_transfer(velero, "PodVolumeRestore", space, reader, _TREE)
    restore["spec"]["snapshotID"] = kept["snapshotID"]
    user.apply(restore)
    outcome.restore = wait_until(velero.bed, restore)
    user.wait(f"pod/{reader}", "condition=Ready", namespace=space)
    outcome.restored = json.loads(user.kubectl("logs", reader, "-n", space, "-c", "main"))
    outcome.agent = velero.log(node)
    return outcome


def _exchange(volume: str) -> tuple[list[str], list[str]]:
    """The attacker of a volume, and further files for its folder: those that are wanted have the same names."""
    target, names = _TARGETS[volume]
    folder = Path(f"/volumes/{volume}/P")
    return attacker_command(Swap(folder, Path(target), folder), "python3"), names


def _build_pod(space: str, node: str, name: str, volumes: list[str], commands: dict[str, list[str]]) -> Json:
    """A tenant's pod: the last of its containers is its main one, and the others precede it."""
    mounts = [{"name": volume, "mountPath": f"/volumes/{volume}"} for volume in volumes]
    containers = [build_container(each, command, volumeMounts=mounts) for each, command in commands.items()]
    containers[-1]["readinessProbe"] = {"exec": {"command": ["test", "-e", "/tmp/ready"]}, "periodSeconds": 1}
    spec = {
        "nodeSelector": {"kubernetes.io/hostname": node},
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 0,
        "initContainers": containers[:-1],
        "containers": containers[-1:],
        "volumes": [{"name": volume, "emptyDir": {}} for volume in volumes],
    }
    return build_object(PODS, name, space, spec=spec)


def _build_transfer(velero: Installation, kind: str, space: str, name: str, volume: str) -> Json:
    """A backup or restore of one volume of a pod, in the agents' namespace."""
    pod = velero.bed.api.get(PODS, space, name) or {}
    item = build_pod_transfer(kind, f"{space}-{name}-{volume}", pod, volume=volume)
    item["metadata"]["namespace"] = velero.space
    return item


def _find_leaks(bed: Bed, space: str, known: dict[str, str], folder: Path) -> list[str]:
    """Restore every snapshot of the attacked volumes, incomplete ones too; return what is not from the volumes.

    Args:
        known: what to call a snapshot, by its ID.
    """
    found = []
    with open_kopia(bed, space) as kopia:
        for snapshot in kopia.snapshot_manifests():
            restored = folder / snapshot["id"]
            kopia.run("restore", snapshot["id"], str(restored))
            # Each file of the volumes contains its own name.
            files = (path for path in restored.glob("P/*") if path.is_file() and not path.is_symlink())
            leaked = [path.name for path in files if path.read_text(errors="replace") != path.name]
            found += [f"{known.get(snapshot['id'], 'a failed backup')}: {name}" for name in leaked]
    return found


@pytest.mark.sample("bed-1")
@pytest.mark.parametrize("node", _NODES)
def test_an_exchanged_folder_brings_nothing_of_the_mover_into_the_backup(attacked: Outcomes, node: str) -> None:
    outcome = attacked.nodes[node]
    assert sorted(outcome.tenant.splitlines()) == sorted(f"exchanged {volume} 0" for volume in _TARGETS)
    assert f"kopia is confined to its volume by {_means(node)}" in outcome.agent
    assert attacked.leaked == []


def _means(node: str) -> str:
    """What confines kopia on a node; without Landlock in this kernel, it is the jail everywhere."""
    try:
        return _NODES[node] if landlock_abi() else ""
    except OSError:
        return _NODES["bed-2"]


@pytest.mark.sample("bed-1")
@pytest.mark.parametrize("node", _NODES)
def test_links_in_the_target_of_a_restore_are_replaced_and_not_followed(attacked: Outcomes, node: str) -> None:
    """All that is restored is in the volume, so nothing of it was written through a link."""
    outcome = attacked.nodes[node]
    assert outcome.restore["status"]["phase"] == "Completed", outcome.restore["status"]
    assert outcome.restored == {
        "full": ["drwxr-xr-x", 1_500_000_000],
        "full/file": ["-rw-r--r--", "of the tenant: full/file"],
        "empty": ["drwx--x--x", 1_000_000_000],
        "file": ["-rw-r--r--", "of the tenant: file"],
    }
    assert "replaced 3 links in the target" in outcome.agent
