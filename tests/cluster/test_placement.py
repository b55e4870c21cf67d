"""Movers run on the node that the configuration names, and their volumes are as it says.

One snapshot is backed up and restored while the configuration sets everything that the kubelet
checks: a node, a read-only claim of another class, resources, a cache volume.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from core.kube.resources import PERSISTENT_VOLUME_CLAIMS, PODS
from tests.cluster.bed import Bed
from tests.cluster.configuration import configured
from tests.cluster.scenes import Place, Volume, build_class, need_two_nodes, wait_released, watch_ends
from tests.cluster.sharing import WITH_LOCKS, Shared, has_alone
from tests.testbed.api import Json

pytestmark = [pytest.mark.cluster, pytest.mark.lane(name="changing"), pytest.mark.timeout(WITH_LOCKS)]

_SOURCE, _OTHER = "bed-1", "bed-2"
"""Where volumes without a chosen node are created, and the node that the configuration names."""

_FILL = """
import os, pathlib
pathlib.Path("/data/random").write_bytes(os.urandom(3 << 20))
pathlib.Path("/data/folder").mkdir()
pathlib.Path("/data/folder/small").write_text("small")
"""


@dataclass
class Moved:
    """What became of the transfers.

    Attributes:
        upload: The upload as it ended.
        download: The download as it ended.
        pods: The movers, as they were at last, by the transfer's name.
        claims: The claims in the agent's namespace as they were bound, by their names.
        files: What is in the source's folder and in the restored one.
    """

    upload: Json
    download: Json
    pods: dict[str, Json]
    claims: dict[str, Json]
    files: tuple[dict[str, bytes], dict[str, bytes]]


@pytest.fixture(scope="module")
def moved(agent: Bed, module_space: str) -> Iterator[Moved]:
    """A file system that is backed up and restored."""
    need_two_nodes(agent)
    volume, place = Volume(agent, module_space), Place(agent, module_space)
    backup, restore = f"{module_space}-backup", f"{module_space}-restore"
    fast, waiting = classes = [f"{module_space}-fast", f"{module_space}-waiting"]
    agent.user.apply(build_class(fast, waits=False), build_class(waiting, waits=True))
    volume.fill(_FILL)
    volume.take_snapshots([backup])
    agent.user.apply(*place.build())
    changes = _build_configuration(fast, waiting)
    with ThreadPoolExecutor() as pool, has_alone(agent, Shared.GROUND), configured(agent, **changes):
        pods = watch_ends(pool, agent, PODS, {backup, restore})
        claims = watch_ends(pool, agent, PERSISTENT_VOLUME_CLAIMS, {backup, restore, f"{restore}-cache"})
        transfer = volume.upload(backup, snapshot=backup, location=place.name)
        transfer["spec"]["csiSnapshot"]["storageClass"] = fast
        agent.user.apply(transfer)
        upload = wait_released(agent, transfer)
        target = volume.target(restore, storage_class=waiting)
        download = volume.restore(target, snapshot_id=upload["status"].get("snapshotID", ""), location=place.name)
    yield Moved(
        upload,
        download,
        pods=pods.result(),
        claims=claims.result(),
        files=(_files(volume), _files(Volume(agent, module_space, restore))),
    )
    left = [f"storageclass/{name}" for name in classes]
    place.remove(module_space, *left, f"dataupload/{backup}", f"datadownload/{restore}")


def _build_configuration(fast: str, waiting: str) -> dict[str, Any]:
    """The changed keys: transfers of other tests have volumes of other classes than these two."""
    return {
        "loadAffinity": [
            {"nodeSelector": {"matchLabels": {"kubernetes.io/hostname": _OTHER}}, "storageClass": waiting},
            {"nodeSelector": {"matchLabels": {"kubernetes.io/hostname": _SOURCE}}},
        ],
        "backupPVC": {fast: {"storageClass": waiting, "readOnly": True, "annotations": {"example.com/note": "x"}}},
        "restorePVC": {"ignoreDelayBinding": True},
        "cachePVC": {"storageClass": "bed-wait"},
        "podResources": {"cpuRequest": "10m", "memoryRequest": "64Mi", "memoryLimit": "1Gi"},
        "podLabels": {"example.com/team": "storage"},
    }


def _files(volume: Volume) -> dict[str, bytes]:
    folder = volume.path()
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_movers_run_where_the_rule_for_their_class_says(moved: Moved) -> None:
    """Volumes without a chosen node are created on another one."""
    for transfer in (moved.upload, moved.download):
        assert transfer["status"]["phase"] == "Completed", transfer["status"]
        assert transfer["status"]["node"] == _OTHER
    assert {pod["spec"]["nodeName"] for pod in moved.pods.values()} == {_OTHER}


def test_a_backup_reads_from_a_read_only_claim_of_the_configured_class(moved: Moved) -> None:
    claim = moved.claims[moved.upload["metadata"]["name"]]
    (mount,) = _mounts(moved, moved.upload)

    assert claim["spec"]["storageClassName"] == f"{moved.upload['spec']['sourceNamespace']}-waiting"
    assert claim["spec"]["accessModes"] == ["ReadOnlyMany"]
    assert claim["metadata"]["annotations"]["example.com/note"] == "x"
    assert mount["readOnly"]


def test_a_restore_has_its_cache_in_a_volume_of_its_own(moved: Moved) -> None:
    name = moved.download["metadata"]["name"]
    cache = moved.claims[f"{name}-cache"]
    uid = moved.download["metadata"]["uid"]

    assert cache["spec"]["resources"]["requests"]["storage"] == "6Gi"
    assert cache["spec"]["volumeName"]
    assert {mount["name"] for mount in _mounts(moved, moved.download)} == {uid, f"{uid}-cache"}


def test_movers_have_the_configured_resources_and_labels(moved: Moved) -> None:
    for pod in moved.pods.values():
        resources = pod["spec"]["containers"][0]["resources"]
        assert resources == {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"memory": "1Gi"}}
        assert pod["metadata"]["labels"]["example.com/team"] == "storage"


def test_the_data_is_restored(moved: Moved) -> None:
    source, restored = moved.files

    assert source.keys() == {"random", "folder/small"}
    assert restored == source


def _mounts(moved: Moved, transfer: Json) -> list[Json]:
    """The mounts of the mover's own volumes."""
    pod = moved.pods[transfer["metadata"]["name"]]
    mounts: list[Json] = pod["spec"]["containers"][0]["volumeMounts"]
    return [mount for mount in mounts if mount["name"].startswith(transfer["metadata"]["uid"])]
