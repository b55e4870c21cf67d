"""What a mover pod may write, and what it does not get of the agent's pod."""

from dataclasses import replace

import pytest

from core.contract import VolumeMode
from core.kube.types import EnvVar
from core.mover_specs import InitRepository
from exposer.model import Owner
from exposer.pod_manifest import MoverPod, MoverVolume, PodFiles, build_pod_files
from exposer.settings import ExposeSettings, StorageAccess
from exposer.template import AgentTemplate
from tests.exposer.support.inputs import template
from tests.support.objects import JsonDict

VOLUME = MoverVolume({"persistentVolumeClaim": {"claimName": "data"}})
SCRATCH = {"name": "scratch", "mountPath": "/scratch"}
CREDENTIALS = {"name": "cloud-credentials", "mountPath": "/credentials"}


def inheriting(*mounts: JsonDict, **sources: JsonDict) -> AgentTemplate:
    """Return the template of an agent with these mounts, and volumes with these sources."""
    volumes: JsonDict = tuple({"name": name, **source} for name, source in sources.items())
    return AgentTemplate("image", volumes=volumes, volume_mounts=mounts)


def files(
    inherited: AgentTemplate | None = None,
    *,
    volume: MoverVolume | None = VOLUME,
    cache: str = "",
    storage: StorageAccess | None = None,
) -> PodFiles:
    owner = Owner("velero.io/v2alpha1", "DataUpload", "velero", "du-1", "uid")
    plan = MoverPod(owner, "du-1", InitRepository(), storage or StorageAccess(), volume, cache or None)
    return build_pod_files(plan, ExposeSettings(inherited or template()))


def writable(built: PodFiles) -> list[str]:
    return [mount["mountPath"] for mount in built.mounts if not mount.get("readOnly")]


def test_volume_and_cache_are_below_the_scratch_volume_and_a_device_is_not() -> None:
    built = files(cache="cache")
    assert (built.volume_path, built.cache_path) == ("/scratch/volume", "/scratch/cache")
    assert writable(built) == ["/scratch", "/scratch/volume", "/scratch/cache"]
    built = files(volume=replace(VOLUME, mode=VolumeMode.BLOCK))
    assert built.volume_path == "/uid"
    assert built.devices == [{"name": "uid", "devicePath": "/uid"}]
    assert "uid" not in {mount["name"] for mount in built.mounts}
    built = files(volume=None)
    assert (built.volume_path, built.devices) == (None, [])
    assert writable(built) == ["/scratch"]


def test_other_inherited_mounts_are_read_only() -> None:
    ca, tmp = {"name": "ca", "mountPath": "/etc/ca"}, {"name": "tmp", "mountPath": "/tmp"}
    built = files(inheriting(ca, tmp, SCRATCH, ca={"configMap": {"name": "ca"}}, tmp={"emptyDir": {}}, scratch={}))
    assert ca | {"readOnly": True} in built.mounts
    assert tmp | {"readOnly": True} in built.mounts


@pytest.mark.parametrize(
    ("path", "is_writable"), [("/backups", True), ("/backups/a", False), ("/backup", False), ("/", True)]
)
def test_the_mount_that_holds_a_repository_stays_writable(path: str, is_writable: bool) -> None:
    mount = {"name": "nfs", "mountPath": path}
    inherited = inheriting(mount, nfs={"nfs": {"server": "s", "path": "/"}})
    built = files(inherited, storage=StorageAccess(directory="/backups/../backups"))
    assert (path in writable(built)) is is_writable


def test_credentials_are_only_inherited_by_locations_without_their_own() -> None:
    own, inherits = files(), files(storage=StorageAccess(inherits_credentials=True))
    assert CREDENTIALS["name"] not in {item["name"] for item in (*own.volumes, *own.mounts)}
    assert CREDENTIALS | {"readOnly": True} in inherits.mounts
    assert CREDENTIALS["name"] in {volume["name"] for volume in inherits.volumes}


def test_a_volume_that_is_not_mounted_is_not_inherited() -> None:
    built = files(inheriting(SCRATCH, scratch={"emptyDir": {}}, other={"secret": {"secretName": "other"}}))
    assert [volume["name"] for volume in built.volumes] == ["uid", "scratch"]


@pytest.mark.parametrize(
    ("source", "shared"),
    [
        ({"emptyDir": {"sizeLimit": "9Gi"}}, False),
        ({"ephemeral": {"volumeClaimTemplate": {}}}, False),
        ({"hostPath": {"path": "/data"}}, True),
        ({"persistentVolumeClaim": {"claimName": "shared"}}, True),
    ],
    ids=["directory", "own claim", "directory of the node", "shared claim"],
)
def test_a_scratch_volume_that_movers_share_is_replaced(source: JsonDict, *, shared: bool) -> None:
    built = files(inheriting(SCRATCH, scratch=source))
    name = "mover-scratch" if shared else "scratch"
    assert [volume["name"] for volume in built.volumes] == ["uid", name]
    assert built.mounts[0] == {"name": name, "mountPath": "/scratch"}
    assert shared or {"name": "scratch", **source} in built.volumes


def test_scratch_is_where_the_agent_has_it_or_else_added() -> None:
    built = files(AgentTemplate("image"))
    assert {"name": "mover-scratch", "emptyDir": {}} in built.volumes
    assert built.env == [{"name": "VELERO_SCRATCH_DIR", "value": "/scratch"}]
    inherited = inheriting({"name": "tmp", "mountPath": "/work/"}, tmp={"emptyDir": {}})
    env = (EnvVar(name="VELERO_SCRATCH_DIR", value="/work/"),)
    built = files(replace(inherited, env=env))
    assert built.volume_path == "/work/volume"
    assert {"name": "tmp", "mountPath": "/work"} in built.mounts
    assert built.env == list(env)
