"""Locations without a Velero server: their status, and one on a shared volume that the configuration mounts.

The volume is a claim. Its kind makes no difference to a mover: the test bed has no NFS server.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from core.kube.resources import (
    BACKUP_STORAGE_LOCATIONS,
    EVENTS,
    PODS,
)
from tests.cluster.bed import Bed
from tests.cluster.configuration import configured
from tests.cluster.scenes import Place, Volume, build_class, wait_released, watch_ends
from tests.cluster.sharing import WITH_LOCKS, Shared, has_alone
from tests.support.objects import build_object
from tests.testbed.api import Json
from tests.testbed.demonstration.manifests import NAMESPACE, build_claim

pytestmark = [pytest.mark.cluster, pytest.mark.lane(name="changing"), pytest.mark.timeout(WITH_LOCKS)]

_AVAILABLE = "jsonpath={.status.phase}=Available"
_UNAVAILABLE = "jsonpath={.status.phase}=Unavailable"
_MOUNT = "/backups"
_FILL = """
import os, pathlib
pathlib.Path("/data/random").write_bytes(os.urandom(3 << 20))
"""


@dataclass
class Moved:
    """What became of the transfers.

    Attributes:
        location: The location as it was when it was Available.
        transfers: The upload and the download as they ended.
        mounts: The mount of the shared volume in each mover pod, by the transfer's name.
        shared: The directory that is the shared volume.
        files: What is in the source's volume and in the restored one.
    """

    location: Json
    transfers: tuple[Json, Json]
    mounts: dict[str, Json]
    shared: Path
    files: tuple[bytes, bytes]


@pytest.fixture(scope="module")
def moved(agent: Bed, module_space: str) -> Iterator[Moved]:
    """A file system that is backed up to a directory and restored from it."""
    name, shared, waiting = module_space, f"{module_space}-shared", f"{module_space}-waiting"
    volume, restore = Volume(agent, module_space), f"{module_space}-restore"
    # The target's class is one of its own, so that the download does not wait for a pod.
    agent.user.apply(build_class(waiting, waits=True))
    agent.user.apply(build_claim(NAMESPACE, shared, size="64Mi"))
    volume.fill(_FILL)
    volume.take_snapshots([name])
    own = {"repositoryVolumes": [{"mountPath": _MOUNT, "persistentVolumeClaim": shared}]}
    changes = {"nodeagent.io": own, "restorePVC": {"ignoreDelayBinding": True}}
    with ThreadPoolExecutor() as pool, has_alone(agent, Shared.GROUND), configured(agent, **changes):
        pods = watch_ends(pool, agent, PODS, {name, restore, f"{name}-validation"})
        agent.user.apply(_build_location(name))
        agent.user.wait(f"backupstoragelocation/{name}", _AVAILABLE, namespace=NAMESPACE)
        location = agent.api.get(BACKUP_STORAGE_LOCATIONS, NAMESPACE, name) or {}
        agent.user.apply(transfer := volume.upload(name, snapshot=name, location=name))
        upload = wait_released(agent, transfer)
        target = volume.target(restore, storage_class=waiting)
        download = volume.restore(target, snapshot_id=upload["status"].get("snapshotID", ""), location=name)
    yield Moved(
        location,
        (upload, download),
        mounts={each: _shared_mount(pod) for each, pod in pods.result().items()},
        shared=Volume(agent, NAMESPACE, shared).path(),
        files=(
            (volume.path() / "random").read_bytes(),
            (Volume(agent, module_space, restore).path() / "random").read_bytes(),
        ),
    )
    left = [f"dataupload/{name}", f"datadownload/{restore}", f"backuprepository/{name}-{name}-kopia"]
    left += [f"backupstoragelocation/{name}", f"persistentvolumeclaim/{shared}", f"storageclass/{waiting}"]
    agent.user.kubectl("delete", *left, "-n", NAMESPACE, "--wait=false")


def _build_location(name: str) -> Json:
    spec = {"provider": "velero.io/fs", "config": {"fspath": _MOUNT}, "objectStorage": {"bucket": "none"}}
    return build_object(BACKUP_STORAGE_LOCATIONS, name, NAMESPACE, spec=spec)


def _shared_mount(pod: Json) -> Json:
    """The mount of the shared volume in a mover pod."""
    mount: Json
    (mount,) = [each for each in pod["spec"]["containers"][0]["volumeMounts"] if each["name"] == "mover-repository"]
    return mount


def test_the_location_is_validated_by_a_pod_that_can_only_read_the_volume(moved: Moved) -> None:
    (mount,) = [mount for name, mount in moved.mounts.items() if name.endswith("-validation")]

    assert moved.location["status"]["lastValidationTime"]
    assert "message" not in moved.location["status"]
    assert mount["readOnly"]


def test_the_data_is_restored_from_the_repository_in_the_shared_volume(moved: Moved) -> None:
    upload, download = moved.transfers
    for transfer in moved.transfers:
        assert transfer["status"]["phase"] == "Completed", transfer["status"]
    repository = moved.shared / "kopia" / upload["spec"]["sourceNamespace"]

    assert (repository / "kopia.repository.f").is_file()
    assert moved.files[0] == moved.files[1]
    assert not moved.mounts[upload["metadata"]["name"]].get("readOnly")
    assert moved.mounts[download["metadata"]["name"]]["readOnly"]


def test_a_bucket_is_validated_by_the_leader_itself(agent: Bed, module_space: str) -> None:
    place = Place(agent, f"{module_space}-keys")
    target = f"backupstoragelocation/{place.name}"
    agent.user.apply(*place.build(bucket="missing", frequency="1m"))
    try:
        agent.user.wait(target, _UNAVAILABLE, namespace=NAMESPACE)
        status = (agent.api.get(BACKUP_STORAGE_LOCATIONS, NAMESPACE, place.name) or {})["status"]
        assert "the bucket does not exist" in status["message"]
        assert status["lastValidationTime"]
        # A new spec is validated at once.
        agent.user.apply(*place.build(frequency="1m"))
        agent.user.wait(target, _AVAILABLE, namespace=NAMESPACE)
        assert "message" not in (agent.api.get(BACKUP_STORAGE_LOCATIONS, NAMESPACE, place.name) or {})["status"]
        about = {event["involvedObject"]["name"] for event in agent.api.objects(EVENTS, NAMESPACE)}
        assert f"{place.name}-validation" not in about
    finally:
        agent.user.kubectl("delete", target, f"secret/{place.name}-keys", "-n", NAMESPACE, "--wait=false")
