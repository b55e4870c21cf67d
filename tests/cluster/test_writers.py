"""The observer of those who can write to a volume sees two of them."""

import pytest

from core.kube.resources import PODS
from tests.cluster.bed import Bed
from tests.cluster.site import Site
from tests.cluster.writers import Observer
from tests.support.objects import build_object
from tests.testbed.api import Json
from tests.testbed.demonstration.manifests import build_container
from tests.testbed.processes import wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.lane(name="apart"), pytest.mark.timeout(1800), pytest.mark.thorough]

_FIRST, _OTHER = "bed-1", "bed-2"
_RUN = "import time; print('runs', flush=True); time.sleep(900)"


def _pod(space: str, node: str, *, block: bool = False, verb: str = "restore", read_only: bool = False) -> Json:
    """A pod that can write to the volume, with the arguments of a data mover."""
    words = ["python3", "-c", _RUN, "datamover", verb, f"--data-download={space}", "--volume-path=/data"]
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


def _run(bed: Bed, observer: Observer, pod: Json) -> None:
    """Run a pod; returns after a look, once it has a log."""
    meta = pod["metadata"]
    bed.user.apply(pod)
    bed.user.wait(f"pod/{meta['name']}", "condition=Ready", namespace=meta["namespace"])
    wait_for("a log", lambda: bed.user.kubectl("logs", meta["name"], "-n", meta["namespace"]))
    observer.look()


def _end(bed: Bed, observer: Observer, pod: Json) -> None:
    meta = pod["metadata"]
    bed.user.kubectl("delete", "pod", meta["name"], "-n", meta["namespace"], "--wait=true")
    observer.look()


@pytest.mark.parametrize("block", [False, True], ids=["folder", "device"])
def test_two_writers_at_a_time_are_seen(bed: Bed, space: str, block: bool) -> None:
    observer = Observer(space)
    bed.user.apply(Site(bed, space, "").claim("data", block=block))
    first, second = _pod(space, _FIRST, block=block), _pod(space, _OTHER, block=block)
    _run(bed, observer, first)
    _run(bed, observer, second)
    _end(bed, observer, first)
    _end(bed, observer, second)
    (found,) = observer.double_writers
    assert found.count(f"restore --data-download={space} --volume-path=/data") == 2


def test_those_who_only_read_are_none(bed: Bed, space: str) -> None:
    observer = Observer(space)
    bed.user.apply(Site(bed, space, "").claim("data"))
    pods = [_pod(space, _FIRST), _pod(space, _OTHER, verb="backup"), _pod(space, _OTHER, read_only=True)]
    for pod in pods:
        _run(bed, observer, pod)
    assert len(observer.writers) == 1
    assert observer.double_writers == []
