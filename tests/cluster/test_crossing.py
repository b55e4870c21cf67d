"""Devices over two nodes: the agent that exposes and the mover are apart, and an agent dies in mid-transfer.

All of it happens once, to two uploads at the same time and to the download of one of them.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from core.kube.resources import PODS
from tests.cluster.bed import Bed
from tests.cluster.breakage import break_storage
from tests.cluster.gate import HELD_BYTES, Gate, open_gate
from tests.cluster.listing import everything
from tests.cluster.processes import is_agent, wait_for_one
from tests.cluster.scenes import Place, Volume, need_two_nodes, wait_released, wait_until
from tests.cluster.sharing import WITH_LOCKS, Shared, has_alone
from tests.cluster.workloads import find_mover
from tests.testbed.api import Json
from tests.testbed.demonstration.manifests import NAMESPACE
from tests.testbed.install import AGENT_LABEL

pytestmark = [pytest.mark.cluster, pytest.mark.lane(name="changing"), pytest.mark.timeout(WITH_LOCKS)]

_NODE, _OTHER = "bed-1", "bed-2"
"""Where the volumes are, and where they are not."""

_FILL = f"""
import os
with open("/data", "r+b") as device:
    device.write(os.urandom({HELD_BYTES}))
    device.seek({60 << 20})
    device.write(b"after a hole")
    device.flush()
    os.fsync(device.fileno())
"""


@dataclass
class Moved:
    """What became of the transfers.

    Attributes:
        accepted: The uploads when both had been accepted.
        held: The uploads while their data was held and the agent of their node was killed.
        uploads: The uploads as they ended.
        download: The download as it ended.
        images: The source's device and the restored one, as files.
        left: All objects that are new since before.
    """

    accepted: list[Json]
    held: list[Json]
    uploads: list[Json]
    download: Json
    images: tuple[Path, Path]
    left: set[str]


@pytest.fixture(scope="module")
def moved(agent: Bed, module_space: str) -> Iterator[Moved]:
    """Two uploads and a download of a device."""
    need_two_nodes(agent)
    volume, place = Volume(agent, module_space), Place(agent, module_space)
    names = [f"{module_space}-one", f"{module_space}-two"]
    with open_gate() as gate:
        with has_alone(agent, Shared.AGENTS):
            volume.fill(_FILL, block=True)
            volume.take_snapshots(names)
            before = everything(agent, module_space)
            agent.user.apply(*place.build(url=gate.url))
            uploads = [volume.upload(name, snapshot=name, location=place.name) for name in names]
            accepted = _accept_apart(agent, module_space, uploads)
            held = _lose_agent(agent, gate, uploads)
        gate.open()
        ended = [wait_released(agent, upload) for upload in uploads]
        target = volume.target(f"{module_space}-back", block=True)
        snapshot_id = ended[0]["status"].get("snapshotID", "")
        download = volume.restore(target, snapshot_id=snapshot_id, location=place.name)
    images = volume.path(), Volume(agent, module_space, download["metadata"]["name"]).path()
    left = everything(agent, module_space) - before
    yield Moved(accepted, held, ended, download, images, left)
    place.remove(
        module_space, *(f"dataupload/{name}" for name in names), f"datadownload/{download['metadata']['name']}"
    )


def _accept_apart(bed: Bed, space: str, uploads: list[Json]) -> list[Json]:
    """Have the uploads accepted while no volume is created, so that they stay Accepted; they go to both agents then."""
    faults = [("provision", f"{NAMESPACE}/{upload['metadata']['name']}", "never") for upload in uploads]
    with break_storage(bed, space, faults):
        bed.user.apply(*uploads)
        return [wait_until(bed, upload, "Accepted") for upload in uploads]


def _lose_agent(bed: Bed, gate: Gate, uploads: list[Json]) -> list[Json]:
    """Kill the agent of the movers' node in mid-transfer; returns the uploads once it is back."""
    gate.shut()
    for upload in uploads:
        wait_until(bed, upload, "InProgress")
    gate.wait_held(*(str(find_mover(bed, upload)["status"]["podIP"]) for upload in uploads))
    before = wait_for_one("the agent", is_agent(_NODE))
    before.kill()
    after = wait_for_one("the restarted agent", is_agent(_NODE))
    assert after.pid != before.pid
    bed.user.wait(f"pod/{_agent_pod(bed)}", "condition=Ready", namespace=NAMESPACE)
    return [wait_until(bed, upload, "InProgress") for upload in uploads]


def _agent_pod(bed: Bed) -> str:
    pods = bed.api.objects(PODS, NAMESPACE, selector=AGENT_LABEL)
    return next(str(pod["metadata"]["name"]) for pod in pods if pod["spec"].get("nodeName") == _NODE)


def test_one_agent_exposes_what_a_mover_on_another_node_moves(moved: Moved) -> None:
    assert {transfer["status"]["acceptedByNode"] for transfer in moved.accepted} == {_NODE, _OTHER}
    assert [transfer["status"]["node"] for transfer in moved.held] == [_NODE, _NODE]
    assert {transfer["metadata"]["labels"]["nodeagent.io/node"] for transfer in moved.held} == {_NODE}


def test_an_agent_that_is_killed_in_mid_transfer_continues_where_it_was(moved: Moved) -> None:
    for transfer in moved.uploads:
        status = transfer["status"]
        assert status["phase"] == "Completed", status
        assert status["progress"] == {"totalBytes": 64 << 20, "bytesDone": 64 << 20}
        assert "message" not in status


def test_a_device_comes_back_bit_for_bit(moved: Moved) -> None:
    assert moved.download["status"]["phase"] == "Completed", moved.download["status"]
    source, copy = moved.images
    with source.open("rb") as one, copy.open("rb") as other:
        assert hashlib.file_digest(one, "sha256").digest() == hashlib.file_digest(other, "sha256").digest()


def test_nothing_is_left_but_the_volume_and_the_resources_themselves(moved: Moved) -> None:
    kinds = sorted(name.partition("/")[0] for name in moved.left)
    velero = f"{NAMESPACE} {{}}.velero.io"
    space = moved.download["spec"]["targetVolume"]["namespace"]
    assert kinds == sorted(
        [
            "persistentvolume",
            f"{NAMESPACE} secret",
            f"{space} persistentvolumeclaim",
            velero.format("backuprepository"),
            velero.format("backupstoragelocation"),
            velero.format("datadownload"),
            velero.format("dataupload"),
            velero.format("dataupload"),
        ]
    )
