"""Volumes of running pods on a real kubelet: out, back into a pod that waits, and pods that go away.

The claims' volumes are `local` ones: the paths of CSI volumes are covered by tests from the
recordings (tests/exposer/test_kubelet_folders.py).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.bed.demonstration.compare import compare
from tests.bed.demonstration.manifests import NAMESPACE
from tests.bed.layout import ROOT
from tests.bed.settings import node_name
from tests.cluster.workloads import (
    BACKUPS,
    RESTORES,
    Workload,
    build_backup,
    build_restore,
    stop_kopia,
    wait_until,
)

if TYPE_CHECKING:
    from tests.bed.api import Json
    from tests.cluster.conftest import Bed

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

_FILLED = {"data": 20_000_000, "scratch": 3_000_000}


def back_up(bed: Bed, workload: Workload, uid: str, volume: str) -> Json:
    """Make a PodVolumeBackup; returns it as it was made."""
    item = build_backup(workload, uid, volume)
    bed.user.apply(item)
    return item


def expect_nothing_left(bed: Bed, *items: Json) -> None:
    """Wait until the agent has let go of the loads, and check that their pods are gone."""
    for item in items:
        name, resource = item["metadata"]["name"], BACKUPS if item["kind"] == "PodVolumeBackup" else RESTORES
        wait_until(bed, resource, item, when=lambda load: not load["metadata"].get("finalizers"))
        assert bed.user.names(["pods"], "-n", NAMESPACE, f"--field-selector=metadata.name={name}") == []


def example(space: str, name: str, **given: str) -> str:
    """A file of `examples/`, in a namespace of the test's own, with what its reader fills in."""
    text = (ROOT / "examples" / f"{name}.yaml").read_text()
    for word, value in {"amespace: app": f"amespace: {space}", "name: app\n": f"name: {space}\n", **given}.items():
        text = text.replace(word, value)
    return text.replace("name: example\n", f"name: {space}\n")


def apply_example(agent: Bed, space: str, name: str, **given: str) -> Json:
    """Apply an example of one object; returns it."""
    made: Json = json.loads(agent.user.kubectl("apply", "-o", "json", "-f", "-", stdin=example(space, name, **given)))
    return made


def uid_of(agent: Bed, space: str, pod: str) -> str:
    """The UID of a pod."""
    return agent.user.kubectl("get", "pod", pod, "-n", space, "-o", "jsonpath={.metadata.uid}")


def test_volumes_come_back_into_a_pod_that_waits(agent: Bed, space: str) -> None:
    writer = Workload(agent, space, "writer", _FILLED)
    uid = writer.start()
    writer.wait_ready()
    backups = {volume: back_up(agent, writer, uid, volume) for volume in _FILLED}
    kept = {volume: wait_until(agent, BACKUPS, item, "Completed") for volume, item in backups.items()}
    writer.delete()

    reader = Workload(agent, space, "reader")
    uid = reader.start()
    restores = {volume: build_restore(reader, uid, volume, backup=kept[volume]) for volume in _FILLED}
    agent.user.apply(*restores.values())
    done = {volume: wait_until(agent, RESTORES, item, "Completed") for volume, item in restores.items()}
    reader.wait_ready()

    for volume, load in done.items():
        found = compare(writer.survey(volume), reader.survey(volume))
        assert (found.differences, found.size_bytes) == ((), load["status"]["progress"]["totalBytes"])
        assert load["status"]["node"] == node_name(1)
        assert "message" not in load["status"]
    assert kept["data"]["status"]["path"] == f"/{kept['data']['metadata']['uid']}"
    expect_nothing_left(agent, *backups.values(), *restores.values())


def test_the_examples_move_a_volume_out_and_back(agent: Bed, space: str) -> None:
    agent.user.kubectl("apply", "-f", "-", stdin=example(space, "source"))
    agent.user.wait("pod/writer", "condition=Ready", namespace=space, seconds=60)
    kept = apply_example(agent, space, "podvolumebackup", POD_UID=uid_of(agent, space, "writer"), NODE=node_name(1))
    snapshot = wait_until(agent, BACKUPS, kept, "Completed")["status"]["snapshotID"]

    agent.user.kubectl("apply", "-f", "-", stdin=example(space, "reader"))
    given = {"POD_UID": uid_of(agent, space, "reader"), "SNAPSHOT_ID": snapshot}
    wait_until(agent, RESTORES, apply_example(agent, space, "podvolumerestore", **given), "Completed")

    agent.user.wait("pod/reader", "condition=Ready", namespace=space, seconds=30)
    assert "file-4" in agent.user.kubectl("logs", "reader", "-n", space)


def test_a_node_that_takes_nobody_new_still_serves_its_own(agent: Bed, space: str) -> None:
    writer = Workload(agent, space, "writer", {"scratch": 100_000})
    uid = writer.start()
    writer.wait_ready()
    # The repository's own pod is bound to no node, and would have none to go to.
    before = wait_until(agent, BACKUPS, back_up(agent, writer, uid, "data"), "Completed")
    node = node_name(1)
    try:
        agent.user.kubectl("cordon", node)
        agent.user.kubectl("taint", "node", node, "maintenance=soon:NoSchedule")
        found = wait_until(agent, BACKUPS, back_up(agent, writer, uid, "scratch"), "Completed")
    finally:
        agent.user.kubectl("taint", "node", node, "maintenance=soon:NoSchedule-")
        agent.user.kubectl("uncordon", node)

    expect_nothing_left(agent, before, found)


def test_a_workload_that_goes_ends_its_backup_and_the_one_that_is_prepared(agent: Bed, space: str) -> None:
    """In mid-transfer, while Prepared behind it, and before a mover is started."""
    moving = Workload(agent, space, "moving", {"scratch": 200_000_000})
    ready = Workload(agent, space, "ready", {"scratch": 100_000})
    uids = {workload.name: workload.start() for workload in (moving, ready)}
    for workload in (moving, ready):
        workload.wait_ready()
    first = back_up(agent, moving, uids["moving"], "scratch")
    go_on = stop_kopia(agent, wait_until(agent, BACKUPS, first, "InProgress"))
    second = back_up(agent, ready, uids["ready"], "scratch")
    wait_until(agent, BACKUPS, second, "Prepared")

    moving.delete()
    ready.delete()
    go_on()
    third = build_backup(ready, uids["ready"], "data")
    agent.user.apply(third)

    for item, name in ((first, "moving"), (second, "ready"), (third, "ready")):
        status = wait_until(agent, BACKUPS, item, "Failed")["status"]
        assert status["message"].startswith(f"workload pod {space}/{name} is gone: it does not exist")
        assert "snapshotID" not in status
    expect_nothing_left(agent, first, second, third)


def test_what_cannot_be_moved_is_refused_with_its_reason(agent: Bed, space: str) -> None:
    device = Workload(agent, space, "device", block=True)
    uid = device.start()
    device.wait_ready()
    items = [build_backup(device, uid, volume) for volume in ("data", "scripts", "nothing")]
    restic = build_backup(device, uid, "scratch")
    restic["spec"]["uploaderType"] = "restic"
    agent.user.apply(*items, restic)

    said = [wait_until(agent, BACKUPS, item, "Failed")["status"]["message"] for item in (*items, restic)]

    assert said == [
        f"volume data of workload pod {space}/device is a block volume: only file systems are moved pod by pod",
        "volume scripts is of hostPath: no folder of the pod's own holds its data",
        f"workload pod {space}/device has no volume nothing",
        "restic is not supported",
    ]
