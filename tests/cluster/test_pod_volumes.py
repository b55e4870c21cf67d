"""Volumes of running pods on a real kubelet: backup, restore into a pod that waits, and what is rejected.

The claims' volumes are `local` ones: the paths of CSI volumes are covered by tests from the
recordings (tests/exposer/test_workload.py).
"""

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path

import pytest

from core.kube.resources import PODS
from tests.cluster.bed import Bed, new_namespace
from tests.cluster.scenes import wait_until
from tests.cluster.sharing import WITH_LOCKS, Shared, relies_on
from tests.cluster.workloads import Workload, back_up, expect_nothing_left
from tests.testbed.api import Json
from tests.testbed.demonstration.compare import compare
from tests.testbed.layout import ROOT

pytestmark = [pytest.mark.cluster, pytest.mark.lane(name="moving"), pytest.mark.timeout(WITH_LOCKS)]

_FILLED = {"data": 20_000_000, "scratch": 3_000_000}

_FIRST_NODE = "bed-1"
"""The node whose kubelet's folders the tests can change."""


def example(space: str, name: str, **given: str) -> str:
    """A file of `examples/`, in a namespace of the test's own, with the values that its reader fills in."""
    text = (ROOT / "examples" / f"{name}.yaml").read_text()
    for word, value in {"amespace: app": f"amespace: {space}", "name: app\n": f"name: {space}\n", **given}.items():
        text = text.replace(word, value)
    return text.replace("name: example\n", f"name: {space}\n")


def apply_example(agent: Bed, space: str, name: str, **given: str) -> Json:
    item: Json = json.loads(agent.user.kubectl("apply", "-o", "json", "-f", "-", stdin=example(space, name, **given)))
    return item


def placed(agent: Bed, space: str, name: str) -> dict[str, str]:
    """What the examples leave open of a pod."""
    pod = agent.api.get(PODS, space, name) or {}
    return {"POD_UID": pod["metadata"]["uid"], "NODE": pod["spec"].get("nodeName", "")}


@pytest.fixture(scope="module")
def flows(agent: Bed) -> Iterator[dict[str, Future[None]]]:
    """Independent flows, all at the same time, each in its own namespace."""
    wanted = (restore_into_pod, move_by_examples, reject, look_up)
    with relies_on(agent, Shared.AGENTS), ExitStack() as spaces, ThreadPoolExecutor(max_workers=len(wanted)) as pool:
        running = {
            flow.__name__: pool.submit(flow, agent, spaces.enter_context(new_namespace(agent))) for flow in wanted
        }
        # A test must not end while another flow has a kubectl running.
        wait(running.values())
        yield running


def restore_into_pod(agent: Bed, space: str) -> None:
    """Two volumes of a pod are backed up, and restored into another one that waits for them."""
    writer = Workload(agent, space, "writer", _FILLED)
    writer.start()
    writer.wait_ready()
    backups = {volume: back_up(writer, volume) for volume in _FILLED}
    kept = {volume: wait_until(agent, item, "Completed") for volume, item in backups.items()}
    writer.delete()
    reader = Workload(agent, space, "reader")
    reader.start()
    restores = {volume: reader.restore(volume, backup=kept[volume]) for volume in _FILLED}
    agent.user.apply(*restores.values())
    done = {volume: wait_until(agent, item, "Completed") for volume, item in restores.items()}
    reader.wait_ready()
    for volume, transfer in done.items():
        found = compare(writer.survey(volume), reader.survey(volume))
        assert (found.differences, found.size_bytes) == ((), transfer["status"]["progress"]["totalBytes"])
        assert transfer["status"]["node"] == reader.node
        assert "message" not in transfer["status"]
    assert kept["data"]["status"]["path"] == f"/{kept['data']['metadata']['uid']}"
    expect_nothing_left(agent, *backups.values(), *restores.values())


def move_by_examples(agent: Bed, space: str) -> None:
    """A volume is backed up and restored with the manifests of `examples/`."""
    agent.user.kubectl("apply", "-f", "-", stdin=example(space, "source"))
    agent.user.wait("pod/writer", "condition=Ready", namespace=space)
    kept = apply_example(agent, space, "podvolumebackup", **placed(agent, space, "writer"))
    snapshot = wait_until(agent, kept, "Completed")["status"]["snapshotID"]
    agent.user.kubectl("apply", "-f", "-", stdin=example(space, "reader"))
    given = placed(agent, space, "reader") | {"SNAPSHOT_ID": snapshot}
    wait_until(agent, apply_example(agent, space, "podvolumerestore", **given), "Completed")
    agent.user.wait("pod/reader", "condition=Ready", namespace=space)
    assert "file-4" in agent.user.kubectl("logs", "reader", "-n", space)


def reject(agent: Bed, space: str) -> None:
    """Volumes that cannot be moved pod by pod, and a transfer for restic."""
    device = Workload(agent, space, "device", block=True)
    device.start()
    device.wait_ready()
    items = [device.backup(volume) for volume in ("data", "scripts", "nothing")]
    restic = device.backup("scratch")
    restic["spec"]["uploaderType"] = "restic"
    agent.user.apply(*items, restic)
    messages = [wait_until(agent, item, "Failed")["status"]["message"] for item in (*items, restic)]
    assert messages == [
        f"volume data of workload pod {space}/device is a block volume: pod volumes must be file systems",
        "volume scripts has source hostPath: its data is not in a directory of the pod",
        f"workload pod {space}/device has no volume nothing",
        "restic is not supported",
    ]


def look_up(agent: Bed, space: str) -> None:
    """A volume in the folder of a plugin that the agent does not know; then in several folders, and in none."""
    app = Workload(agent, space, "app", {"scratch": 200_000}, on=_FIRST_NODE)
    app.start()
    app.wait_ready()
    item = app.backup("scratch")
    folder = Path("/var/lib/kubelet/pods", item["spec"]["pod"]["uid"], "volumes")
    usual, moved, second = (folder / f"{plugin}/scratch" for plugin in ("kubernetes.io~empty-dir", "a.io~b", "c.io~d"))

    def back_up_as(name: str, phase: str) -> Json:
        again = item | {"metadata": item["metadata"] | {"name": f"{space}-{name}"}}
        agent.user.apply(again)
        status: Json = wait_until(agent, again, phase)["status"]
        return status

    moved.parent.mkdir()
    usual.rename(moved)
    found = back_up_as("found", "Completed")
    second.mkdir(parents=True)
    several = back_up_as("several", "Failed")
    second.rmdir()
    # The kubelet unmounts the volume where it has mounted it.
    moved.rename(usual.with_name("renamed"))
    none = back_up_as("none", "Failed")
    usual.with_name("renamed").rename(usual)
    for plugin in (moved.parent, second.parent):
        plugin.rmdir()
    assert found["progress"]["totalBytes"] > 200_000
    where, folders = f"volume scratch of workload pod {space}/app is", "the kubelet's directories of the pod"
    assert several["message"] == f"{where} in several of {folders}: a.io~b/scratch, c.io~d/scratch"
    assert none["message"].startswith(f"{where} not in {folders}: looked for volumes/*/scratch, found ")
    assert "kubernetes.io~empty-dir/renamed" in none["message"]


@pytest.mark.interop("1.18.2", "ours to ours", "PodVolumeBackup, PodVolumeRestore", "S3 (versitygw): keys of a user")
def test_volumes_are_restored_into_a_pod_that_waits(flows: dict[str, Future[None]]) -> None:
    flows["restore_into_pod"].result()


def test_the_examples_back_up_and_restore_a_volume(flows: dict[str, Future[None]]) -> None:
    flows["move_by_examples"].result()


@pytest.mark.cause("volume-rejected", "restic")
def test_what_cannot_be_moved_is_rejected_with_its_reason(flows: dict[str, Future[None]]) -> None:
    flows["reject"].result()


@pytest.mark.cause("volume-directory")
def test_a_volume_is_found_by_its_name_in_the_kubelets_folders(flows: dict[str, Future[None]]) -> None:
    flows["look_up"].result()
