"""A node agent that `velero install` has installed is switched to this one by its image alone, and back.

There is no image of Velero in the test bed: a stand-in has its name, which only waits until it is to end. So the tests
show what becomes of DaemonSet and pods, and of this agent; not that Velero's agent works afterward. Nor is there a
Velero server: in its place, this agent's controller makes the backup repositories.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack

import pytest

from core.kube.resources import LEASES, PODS
from tests.cluster.bed import Bed, new_namespace
from tests.cluster.installation import Installation, installed
from tests.cluster.scenes import Volume, wait_released
from tests.cluster.sharing import WITH_LOCKS, Shared, relies_on
from tests.cluster.workloads import Workload
from tests.testbed.api import Json
from tests.testbed.settings import AGENT_IMAGE, VELERO_IMAGE

pytestmark = [pytest.mark.cluster, pytest.mark.lane(name="apart"), pytest.mark.timeout(WITH_LOCKS)]


@pytest.fixture(scope="module")
def switches(agent: Bed, rows: set[str]) -> Iterator[dict[str, Future[None]]]:
    """Each recorded DaemonSet, switched and switched back at the same time, in a namespace of its own."""
    wanted = {"plain": _back_up, "no-host-path": _upload, "all-flags": _upload}
    with relies_on(agent, Shared.AGENTS), ExitStack() as spaces, ThreadPoolExecutor(max_workers=len(wanted)) as pool:
        running = {
            recording: pool.submit(_switch, agent, spaces.enter_context(new_namespace(agent)), recording, move)
            for recording, move in wanted.items()
            if recording in rows
        }
        # A test must not end while another flow has a kubectl running.
        wait(running.values())
        yield running


@pytest.mark.sample("plain")
@pytest.mark.parametrize("recording", ["plain", "no-host-path", "all-flags"])
def test_the_image_alone_is_switched_and_switched_back(switches: dict[str, Future[None]], recording: str) -> None:
    switches[recording].result()


def _switch(bed: Bed, space: str, recording: str, move: Callable[[Installation, str], None]) -> None:
    """Switch the image, move a volume of `space`, and undo the switch."""
    with installed(bed, f"{space}-velero", recording) as velero:
        former, before = velero.spec, velero.pods()
        assert set(before) == set(bed.env["BED_NODES"].split())
        assert {_image(pod) for pod in before.values()} == {VELERO_IMAGE}
        velero.switch()
        ours = velero.pods()
        assert velero.spec == _with_image(former, AGENT_IMAGE)
        assert set(ours) == set(before)
        assert {_image(pod) for pod in ours.values()} == {AGENT_IMAGE}
        move(velero, space)
        _, since = bed.api.snapshot(PODS)
        with ThreadPoolExecutor() as pool:
            # The API server keeps past changes for little more than a minute.
            ended = pool.submit(_check_ended, bed, since, ours)
            velero.undo()
            after = velero.pods()
            ended.result()
        assert velero.spec == former
        assert set(after) == set(before)
        assert {_image(pod) for pod in after.values()} == {VELERO_IMAGE}
        lease = bed.api.get(LEASES, velero.space, "node-agent-dispatcher") or {}
        assert not lease["spec"].get("holderIdentity")


def _image(pod: Json) -> str:
    """The image of a pod, which runs and has not been restarted."""
    (status,) = pod["status"]["containerStatuses"]
    assert "running" in status["state"], status
    assert status["restartCount"] == 0
    return str(pod["spec"]["containers"][0]["image"])


def _with_image(spec: Json, image: str) -> Json:
    changed = copy.deepcopy(spec)
    changed["template"]["spec"]["containers"][0]["image"] = image
    return changed


def _check_ended(bed: Bed, since: str, pods: Mapping[str, Json]) -> None:
    """Check that the container of each pod ended by itself, without an error, before the pod was deleted."""
    left = {pod["metadata"]["uid"] for pod in pods.values()}
    for event in bed.api.watch(PODS, since):
        pod = event["object"]
        if event["type"] == "DELETED" and pod["metadata"]["uid"] in left:
            (status,) = pod["status"]["containerStatuses"]
            assert status["state"]["terminated"]["exitCode"] == 0, status
            assert status["restartCount"] == 0
            left.remove(pod["metadata"]["uid"])
            if not left:
                return
    pytest.fail(f"not deleted: {left}")


def _back_up(velero: Installation, space: str) -> None:
    app = Workload(velero.bed, space, "app", {"scratch": 100_000})
    app.start()
    app.wait_ready()
    _move(velero, app.backup("scratch"))
    app.delete(wait=False)


def _upload(velero: Installation, space: str) -> None:
    volume, name = Volume(velero.bed, space), f"{space}-data"
    volume.fill("open('/data/file', 'wb').write(bytes(range(256)) * 256)")
    volume.take_snapshots([name])
    _move(velero, volume.upload(name, snapshot=name, location="default"))


def _move(velero: Installation, transfer: Json) -> None:
    """Complete a transfer in the agent's namespace, and wait for its cleanup."""
    transfer["metadata"]["namespace"] = velero.space
    velero.bed.user.apply(transfer)
    done = wait_released(velero.bed, transfer, "Completed")
    assert done["status"]["snapshotID"]
    # A pod volume is bound to its node by its spec.
    assert (done["status"].get("node") or done["spec"]["node"]) in velero.pods()
