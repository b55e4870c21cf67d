"""Movers run on the node that the configuration names, and their volumes are as it says.

One snapshot is backed up and restored while the configuration sets everything that the kubelet
checks: a node, a read-only claim of another class, resources, a cache volume.
"""

from concurrent.futures import ThreadPoolExecutor
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


def test_movers_and_their_volumes_are_as_the_configuration_says(agent: Bed, space: str) -> None:
    """Volumes without a chosen node are created on another one than the rule for their class names."""
    need_two_nodes(agent)
    volume, place = Volume(agent, space), Place(agent, space)
    backup, restore = f"{space}-backup", f"{space}-restore"
    fast, waiting = classes = [f"{space}-fast", f"{space}-waiting"]
    agent.user.apply(build_class(fast, waits=False), build_class(waiting, waits=True))
    volume.fill(_FILL)
    volume.take_snapshots([backup])
    agent.user.apply(*place.build())
    changes = _build_configuration(fast, waiting)
    with ThreadPoolExecutor() as pool, has_alone(agent, Shared.GROUND), configured(agent, **changes):
        ended_pods = watch_ends(pool, agent, PODS, {backup, restore})
        ended_claims = watch_ends(pool, agent, PERSISTENT_VOLUME_CLAIMS, {backup, restore, f"{restore}-cache"})
        transfer = volume.upload(backup, snapshot=backup, location=place.name)
        transfer["spec"]["csiSnapshot"]["storageClass"] = fast
        agent.user.apply(transfer)
        upload = wait_released(agent, transfer, "Completed")
        target = volume.target(restore, storage_class=waiting)
        download = volume.restore(target, snapshot_id=upload["status"]["snapshotID"], location=place.name)
    assert download["status"]["phase"] == "Completed", download["status"]
    pods, claims = ended_pods.result(), ended_claims.result()
    for moved in (upload, download):
        assert moved["status"]["node"] == _OTHER
    for pod in pods.values():
        assert pod["spec"]["nodeName"] == _OTHER
        resources = pod["spec"]["containers"][0]["resources"]
        assert resources == {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"memory": "1Gi"}}
        assert pod["metadata"]["labels"]["example.com/team"] == "storage"
    # A backup reads from a read-only claim of the configured class.
    claim, (mount,) = claims[backup], _mounts(pods, upload)
    assert claim["spec"]["storageClassName"] == waiting
    assert claim["spec"]["accessModes"] == ["ReadOnlyMany"]
    assert claim["metadata"]["annotations"]["example.com/note"] == "x"
    assert mount["readOnly"]
    # A restore has its cache in a volume of its own.
    cache, uid = claims[f"{restore}-cache"], download["metadata"]["uid"]
    assert cache["spec"]["resources"]["requests"]["storage"] == "6Gi"
    assert cache["spec"]["volumeName"]
    assert {mount["name"] for mount in _mounts(pods, download)} == {uid, f"{uid}-cache"}
    source = _files(volume)
    assert source.keys() == {"random", "folder/small"}
    assert _files(Volume(agent, space, restore)) == source
    left = [f"storageclass/{name}" for name in classes]
    place.remove(space, *left, f"dataupload/{backup}", f"datadownload/{restore}")


def _mounts(pods: dict[str, Json], transfer: Json) -> list[Json]:
    """The mounts of the mover's own volumes."""
    mounts: list[Json] = pods[transfer["metadata"]["name"]]["spec"]["containers"][0]["volumeMounts"]
    return [mount for mount in mounts if mount["name"].startswith(transfer["metadata"]["uid"])]
