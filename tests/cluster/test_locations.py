"""Locations without a Velero server: their status, and one on a shared volume that the configuration mounts.

The volume is a claim. Its kind makes no difference to a mover: the test bed has no NFS server.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest

from core.kube.resources import BACKUP_STORAGE_LOCATIONS, EVENTS, PODS
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


def _build_location(name: str) -> Json:
    spec = {"provider": "velero.io/fs", "config": {"fspath": _MOUNT}, "objectStorage": {"bucket": "none"}}
    return build_object(BACKUP_STORAGE_LOCATIONS, name, NAMESPACE, spec=spec)


def _shared_mount(pod: Json) -> Json:
    """The mount of the shared volume in a mover pod."""
    mount: Json
    (mount,) = [each for each in pod["spec"]["containers"][0]["volumeMounts"] if each["name"] == "mover-repository"]
    return mount


def test_a_repository_in_a_shared_volume_is_validated_written_and_read(agent: Bed, space: str) -> None:
    """A file system is backed up to a directory and restored from it; the location is validated by a pod of its own."""
    name, shared, waiting = space, f"{space}-shared", f"{space}-waiting"
    volume, restore = Volume(agent, space), f"{space}-restore"
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
        upload = wait_released(agent, transfer, "Completed")
        target = volume.target(restore, storage_class=waiting)
        download = volume.restore(target, snapshot_id=upload["status"]["snapshotID"], location=name)
    assert download["status"]["phase"] == "Completed", download["status"]
    mounts = {each: _shared_mount(pod) for each, pod in pods.result().items()}
    assert location["status"]["lastValidationTime"]
    assert "message" not in location["status"]
    assert mounts[f"{name}-validation"]["readOnly"]
    assert not mounts[name].get("readOnly")
    assert mounts[restore]["readOnly"]
    assert (Volume(agent, NAMESPACE, shared).path() / "kopia" / space / "kopia.repository.f").is_file()
    restored = Volume(agent, space, restore).path() / "random"
    assert restored.read_bytes() == (volume.path() / "random").read_bytes()
    left = [f"dataupload/{name}", f"datadownload/{restore}", f"backuprepository/{name}-{name}-kopia"]
    left += [f"backupstoragelocation/{name}", f"persistentvolumeclaim/{shared}", f"storageclass/{waiting}"]
    agent.user.kubectl("delete", *left, "-n", NAMESPACE, "--wait=false")


def test_a_bucket_is_validated_by_the_leader_itself(agent: Bed, space: str) -> None:
    place = Place(agent, f"{space}-keys")
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
