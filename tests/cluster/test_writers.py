"""Volumes that every node reaches, and the observer of those who can write to them, which sees two of them."""

import pytest

from core.kube.resources import PERSISTENT_VOLUME_CLAIMS, PODS, VOLUME_ATTACHMENTS
from tests.cluster.bed import Bed
from tests.cluster.writers import Observer
from tests.support.objects import build_object
from tests.testbed.api import Json
from tests.testbed.demonstration.manifests import build_claim, build_container
from tests.testbed.processes import wait_for
from tests.testbed.storage.objects import SHARED_CLASS

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.lane(name="apart"),
    pytest.mark.timeout(1800),
    pytest.mark.thorough,
]

_FIRST, _OTHER = "bed-1", "bed-2"
_APPEND = """
import time
open("/data/file", "a").write("x")
print(open("/data/file").read(), flush=True)
time.sleep(900)
"""
_READ = "import time; print('reads', flush=True); time.sleep(900)"
_APPEND_DEVICE = """
import os, time
device = os.open("/data", os.O_RDWR)
done = os.read(device, 2).rstrip(bytes(1)) + b"x"
os.pwrite(device, done, 0)
print(done.decode(), flush=True)
time.sleep(900)
"""


def _pod(space: str, node: str, *, block: bool = False, verb: str = "restore", read_only: bool = False) -> Json:
    """A pod that writes one letter and goes on, with the arguments of a data mover."""
    code = _APPEND_DEVICE if block else _READ if read_only else _APPEND
    words = ["python3", "-c", code, "datamover", verb, f"--data-download={space}", "--volume-path=/data"]
    container = build_container("mover", words)
    if block:
        container["volumeDevices"] = [{"name": "data", "devicePath": "/data"}]
    else:
        container["volumeMounts"] = [{"name": "data", "mountPath": "/data", "readOnly": read_only}]
    spec = {
        # With 0 the API server forgets a pod before its container has ended.
        "terminationGracePeriodSeconds": 1,
        "tolerations": [{"operator": "Exists"}],
        "nodeSelector": {"kubernetes.io/hostname": node},
        "containers": [container],
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
    }
    name = f"{verb}-{node}{'-reads' if read_only else ''}"
    return build_object(PODS, name, space, spec=spec)


def _run(bed: Bed, observer: Observer, pod: Json) -> str:
    """Run a pod; returns its log once there is one, after a look."""
    meta = pod["metadata"]
    bed.user.apply(pod)
    bed.user.wait(f"pod/{meta['name']}", "condition=Ready", namespace=meta["namespace"])
    log = wait_for("a log", lambda: bed.user.kubectl("logs", meta["name"], "-n", meta["namespace"]))
    observer.look()
    return log.strip()


def _end(bed: Bed, observer: Observer, pod: Json) -> None:
    meta = pod["metadata"]
    bed.user.kubectl("delete", "pod", meta["name"], "-n", meta["namespace"], "--wait=true")
    observer.look()


def _claim(bed: Bed, space: str, *, block: bool = False) -> None:
    claim = build_claim(space, "data", size="16Mi")
    claim["spec"] |= {
        "accessModes": ["ReadWriteMany"],
        "storageClassName": SHARED_CLASS,
        "volumeMode": "Block" if block else "Filesystem",
    }
    bed.user.apply(claim)


def _wait_attached(bed: Bed, space: str, *nodes: str) -> None:
    """Return once the volume is attached to these nodes and no others."""
    wait_for(f"the volume on {nodes}", lambda: _attached(bed, space) == list(nodes))


def _attached(bed: Bed, space: str) -> list[str]:
    volume = (bed.api.get(PERSISTENT_VOLUME_CLAIMS, space, "data") or {})["spec"]["volumeName"]
    found = [each["spec"] for each in bed.api.objects(VOLUME_ATTACHMENTS)]
    return [spec["nodeName"] for spec in found if spec["source"]["persistentVolumeName"] == volume]


@pytest.mark.parametrize("block", [False, True], ids=["folder", "device"])
def test_a_volume_is_used_on_one_node_after_the_other(bed: Bed, space: str, block: bool) -> None:
    observer = Observer(space)
    _claim(bed, space, block=block)
    for node, written in ((_FIRST, "x"), (_OTHER, "xx")):
        pod = _pod(space, node, block=block)
        assert _run(bed, observer, pod) == written
        _wait_attached(bed, space, node)
        _end(bed, observer, pod)

    _wait_attached(bed, space)
    assert len({writer.pod for writer in observer.writers}) == 2
    assert len({writer.volume for writer in observer.writers}) == 1
    assert observer.double_writers == []


@pytest.mark.parametrize("block", [False, True], ids=["folder", "device"])
def test_two_writers_at_a_time_are_seen(bed: Bed, space: str, block: bool) -> None:
    observer = Observer(space)
    _claim(bed, space, block=block)
    first, second = _pod(space, _FIRST, block=block), _pod(space, _OTHER, block=block)
    _run(bed, observer, first)
    _run(bed, observer, second)
    _end(bed, observer, first)
    _end(bed, observer, second)

    (found,) = observer.double_writers
    assert found.count(f"restore --data-download={space} --volume-path=/data") == 2


def test_those_who_only_read_are_none(bed: Bed, space: str) -> None:
    observer = Observer(space)
    _claim(bed, space)
    pods = [_pod(space, _FIRST), _pod(space, _OTHER, verb="backup"), _pod(space, _OTHER, read_only=True)]
    for pod in pods:
        _run(bed, observer, pod)

    assert len(observer.writers) == 1
    assert observer.double_writers == []
