"""An unmodified Velero server whose node agent is this project's, or was until a moment ago, by its image alone."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from core.kube.resources import BACKUP_REPOSITORIES, BACKUPS, DATA_UPLOADS, POD_VOLUME_BACKUPS, PODS, SCHEDULES
from tests.cluster.bed import Bed
from tests.cluster.gate import HELD_BYTES, Gate
from tests.cluster.handkopia import open_kopia
from tests.support.objects import build_object
from tests.testbed.api import Json
from tests.testbed.demonstration.manifests import build_claim, build_container
from tests.velero_cluster.server import DELETIONS, VeleroInstallation

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

_SMALL = 300_000

_APP = """
import hashlib, os, pathlib, sys, time
root = pathlib.Path("/data")
if not (root / "first").exists():
    (root / "sub").mkdir()
    (root / "first").write_bytes(os.urandom(int(sys.argv[1])))
    (root / "sub" / "second").write_bytes(b"second" * 1000)
    (root / "sub" / "second").chmod(0o640)
    os.chown(root / "sub" / "second", 1234, 5678)
    os.utime(root / "sub" / "second", ns=(1, 1_500_000_000_123_456_789))
    (root / "link").symlink_to("sub/second")
digest = hashlib.sha256()
for path in sorted(root.rglob("*")):
    if {"lost+found", ".velero"} & set(path.parts):
        continue
    found = path.lstat()
    digest.update(repr((str(path), found.st_mode, found.st_uid, found.st_gid)).encode())
    if path.is_symlink():
        digest.update(os.readlink(path).encode())
    elif path.is_file():
        digest.update(repr(found.st_mtime_ns).encode() + path.read_bytes())
print(digest.hexdigest(), flush=True)
time.sleep(1_000_000)
"""


@dataclass(frozen=True)
class App:
    """A pod that fills an empty volume and prints the digest of what is in it."""

    bed: Bed
    space: str

    def start(self, size_bytes: int = _SMALL, *, moves: bool = True) -> str:
        """Create pod and claim; return the digest. Its volume is for fs-backup unless it `moves` from a snapshot."""
        mounts = [{"name": "data", "mountPath": "/data"}]
        container = build_container("app", ["python3", "-c", _APP, str(size_bytes)], volumeMounts=mounts)
        annotations = {} if moves else {"backup.velero.io/backup-volumes": "data"}
        spec = {
            "terminationGracePeriodSeconds": 0,
            "containers": [container],
            "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
        }
        pod = build_object(PODS, "app", self.space, metadata={"annotations": annotations}, spec=spec)
        self.bed.user.apply(build_claim(self.space, "data", size="1Gi"), pod)
        return self.digest()

    def digest(self) -> str:
        """Return the digest, once the pod runs."""
        self.bed.user.wait("pod/app", "condition=Ready", namespace=self.space, seconds=240)
        arguments = ("logs", "app", "-n", self.space, "-c", "app", "--follow", "--limit-bytes=65")
        return self.bed.user.kubectl(*arguments).strip()

    def lose(self) -> None:
        self.bed.user.kubectl("delete", "pod/app", "pvc/data", "-n", self.space, "--wait=true")


@pytest.fixture
def app(bed: Bed, space: str) -> App:
    return App(bed, space)


@pytest.fixture
def ours(velero: VeleroInstallation) -> VeleroInstallation:
    """The release with this project's node agent."""
    velero.use_ours()
    return velero


def _in_progress(item: Json) -> bool:
    return bool(item.get("status", {}).get("phase") == "InProgress")


def _of(backup: str) -> Callable[[Json], bool]:
    return lambda item: bool(item["metadata"]["labels"].get("velero.io/backup-name") == backup)


def _hold(velero: VeleroInstallation, gate: Gate, space: str, name: str, **spec: object) -> None:
    """Begin a Backup that moves more data than passes the gate; return when it is held."""
    gate.shut()
    velero.back_up(name, space, moves=True, **spec)
    velero.until_any(DATA_UPLOADS, lambda item: _of(name)(item) and _in_progress(item))


@pytest.mark.parametrize("moves", [True, False], ids=["data movement", "fs-backup"])
def test_each_agent_restores_what_the_other_has_backed_up(velero: VeleroInstallation, app: App, moves: bool) -> None:
    theirs, our = f"{app.space}-theirs", f"{app.space}-ours"
    velero.use_velero()
    digest = app.start(moves=moves)
    velero.back_up(theirs, app.space, moves=moves)
    velero.expect(BACKUPS, theirs, "Completed")
    velero.use_ours()
    app.lose()
    velero.restore(f"{theirs}-restored", theirs)
    assert app.digest() == digest
    velero.back_up(our, app.space, moves=moves)
    velero.expect(BACKUPS, our, "Completed")
    velero.use_velero()
    app.lose()
    velero.restore(f"{our}-restored", our)
    assert app.digest() == digest


def test_the_image_is_swapped_while_a_backup_moves_data(velero: VeleroInstallation, app: App, gate: Gate) -> None:
    name = f"{app.space}-swapped"
    velero.use_velero()
    digest = app.start(HELD_BYTES)
    _hold(velero, gate, app.space, name)
    velero.use_ours()
    gate.open()
    velero.expect(BACKUPS, name, "Completed")
    app.lose()
    velero.restore(f"{name}-restored", name)
    assert app.digest() == digest


@pytest.mark.parametrize("restarts", [True, False], ids=["restarted", "scaled to zero"])
def test_a_backup_outlives_its_server(ours: VeleroInstallation, app: App, gate: Gate, restarts: bool) -> None:
    name = f"{app.space}-outlives"
    digest = app.start(HELD_BYTES)
    _hold(ours, gate, app.space, name)
    ours.until(BACKUPS, name, lambda item: item["status"]["phase"].startswith("WaitingForPluginOperations"))
    ours.scale_server(0)
    if restarts:
        ours.scale_server(1)
    gate.open()
    ours.until_any(DATA_UPLOADS, lambda item: _of(name)(item) and item["status"]["phase"] == "Completed")
    ours.scale_server(1)
    ours.expect(BACKUPS, name, "Completed")
    app.lose()
    ours.restore(f"{name}-restored", name)
    assert app.digest() == digest


def test_the_server_cancels_what_takes_too_long(ours: VeleroInstallation, app: App, gate: Gate) -> None:
    name = f"{app.space}-canceled"
    app.start(HELD_BYTES)
    _hold(ours, gate, app.space, name, itemOperationTimeout="20s")
    ours.until_any(DATA_UPLOADS, lambda item: _of(name)(item) and item["status"]["phase"] == "Canceled")
    gate.open()
    ours.expect(BACKUPS, name, "PartiallyFailed")


def test_a_schedule_runs(ours: VeleroInstallation, app: App) -> None:
    name = f"{app.space}-minutely"
    app.start()
    template = {"includedNamespaces": [app.space], "snapshotMoveData": True}
    ours.create(SCHEDULES, name, {"schedule": "* * * * *", "template": template})
    made = ours.until_any(BACKUPS, lambda item: item["metadata"]["labels"].get("velero.io/schedule-name") == name)
    ours.bed.api.delete(SCHEDULES, ours.space, name)
    ours.expect(BACKUPS, made["metadata"]["name"], "Completed")


@pytest.mark.parametrize("moves", [True, False], ids=["data movement", "fs-backup"])
def test_a_deleted_backup_leaves_nothing(ours: VeleroInstallation, app: App, moves: bool) -> None:
    name = f"{app.space}-deleted"
    app.start(moves=moves)
    ours.back_up(name, app.space, moves=moves)
    ours.expect(BACKUPS, name, "Completed")
    kept = ours.until_any(DATA_UPLOADS if moves else POD_VOLUME_BACKUPS, _of(name))
    ours.create(DELETIONS, name, {"backupName": name})
    ours.until_gone(BACKUPS, name)
    ours.until_gone(DATA_UPLOADS if moves else POD_VOLUME_BACKUPS, kept["metadata"]["name"])
    with open_kopia(ours.bed, app.space, prefix=ours.space) as kopia:
        assert kept["status"]["snapshotID"] not in {item["id"] for item in kopia.json("snapshot", "list", "--all")}


def test_the_server_maintains_what_our_agent_fills(ours: VeleroInstallation, app: App) -> None:
    name = f"{app.space}-maintained"
    app.start()
    ours.back_up(name, app.space, moves=True)
    ours.expect(BACKUPS, name, "Completed")
    found = ours.until_any(BACKUP_REPOSITORIES, lambda item: item["spec"]["volumeNamespace"] == app.space)
    ours.bed.api.patch(
        BACKUP_REPOSITORIES,
        {"spec": {"maintenanceFrequency": "5s"}},
        name=found["metadata"]["name"],
        namespace=ours.space,
    )
    done = ours.until(
        BACKUP_REPOSITORIES,
        found["metadata"]["name"],
        lambda item: "Succeeded" in [one["result"] for one in item["status"].get("recentMaintenance", [])],
    )
    assert done["status"]["phase"] == "Ready"
