"""Devices over two nodes: the agent that exposes and the mover are apart, and an agent dies in mid-transfer.

All of it happens once, to two uploads at the same time and to the download of one of them.
"""

import pytest

from core.kube.resources import PODS
from tests.cluster.bed import Bed
from tests.cluster.breakage import break_storage
from tests.cluster.changes import Content
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


def test_an_agent_exposes_what_another_node_moves_and_continues_after_a_kill(agent: Bed, space: str) -> None:
    need_two_nodes(agent)
    volume, place = Volume(agent, space), Place(agent, space)
    names, back = [f"{space}-one", f"{space}-two"], f"{space}-back"
    with open_gate() as gate:
        with has_alone(agent, Shared.AGENTS):
            volume.fill(_FILL, block=True)
            volume.take_snapshots(names)
            before = everything(agent, space)
            agent.user.apply(*place.build(url=gate.url))
            uploads = [volume.upload(name, snapshot=name, location=place.name) for name in names]
            accepted = _accept_apart(agent, space, uploads)
            held = _lose_agent(agent, gate, uploads)
        gate.open()
        ended = [wait_released(agent, upload, "Completed") for upload in uploads]
        target = volume.target(back, block=True)
        download = volume.restore(target, snapshot_id=ended[0]["status"]["snapshotID"], location=place.name)
    left = everything(agent, space) - before
    assert {transfer["status"]["acceptedByNode"] for transfer in accepted} == {_NODE, _OTHER}
    assert [transfer["status"]["node"] for transfer in held] == [_NODE, _NODE]
    assert {transfer["metadata"]["labels"]["nodeagent.io/node"] for transfer in held} == {_NODE}
    for transfer in ended:
        status = transfer["status"]
        assert status["progress"] == {"totalBytes": 64 << 20, "bytesDone": 64 << 20}
        assert "message" not in status
    assert download["status"]["phase"] == "Completed", download["status"]
    assert Content.read(volume.path()) == Content.read(Volume(agent, space, back).path())
    # Nothing is left but the volume and the resources themselves.
    own = ("backuprepository", "backupstoragelocation", "datadownload", "dataupload", "dataupload")
    assert sorted(name.partition("/")[0] for name in left) == sorted(
        [
            "persistentvolume",
            f"{NAMESPACE} secret",
            f"{space} persistentvolumeclaim",
            *(f"{NAMESPACE} {kind}.velero.io" for kind in own),
        ]
    )
    place.remove(space, *(f"dataupload/{name}" for name in names), f"datadownload/{back}")
