"""Transfers canceled or deleted while data moves: nothing is left in the cluster, nor in the repository."""

import pytest

from core.kube.resources import DATA_UPLOADS
from tests.cluster.bed import Bed
from tests.cluster.followed import Followed
from tests.cluster.gate import HELD_BYTES
from tests.cluster.handkopia import open_kopia
from tests.cluster.listing import everything
from tests.cluster.scenes import Volume, open_gated_place, wait_released
from tests.cluster.sharing import WITH_LOCKS, Shared, relies_on
from tests.testbed.demonstration.manifests import NAMESPACE

pytestmark = [pytest.mark.cluster, pytest.mark.lane(name="failing"), pytest.mark.timeout(WITH_LOCKS)]

_BYTES = 3 * HELD_BYTES
"""In one file, of which a gate that is shut lets a third through at most."""

_FILL = f"""
import os
with open("/data/random", "wb") as file:
    file.write(os.urandom({_BYTES}))
"""


def test_a_transfer_that_is_canceled_or_deleted_in_mid_transfer_leaves_nothing(agent: Bed, space: str) -> None:
    """Neither an object, nor a snapshot in the repository, not even an incomplete one."""
    volume = Volume(agent, space)
    names = [f"{space}-canceled", f"{space}-deleted"]
    volume.fill(_FILL, size="128Mi")
    volume.take_snapshots(names)
    with open_gated_place(agent, space) as (gate, place), relies_on(agent, Shared.AGENTS):
        before = everything(agent, space)
        gate.shut()
        uploads = [Followed(agent, volume.upload(name, snapshot=name, location=place.name)) for name in names]
        for each in uploads:
            each.start()
        for each in uploads:
            each.wait("progress", lambda one: any(one.done_bytes))
        canceled, deleted = uploads
        canceled.cancel()
        canceled.wait_phase("Canceled")
        interrupted = agent.api.get(DATA_UPLOADS, NAMESPACE, deleted.name) or {}
        agent.user.kubectl("delete", "dataupload", deleted.name, "-n", NAMESPACE, "--timeout=600s")
        wait_released(agent, canceled.transfer)
        with open_kopia(agent, space, prefix=place.name) as kopia:
            manifests = kopia.snapshot_manifests()
        left = everything(agent, space) - before
    assert canceled.phases[-3:] == ["InProgress", "Canceling", "Canceled"]
    status = canceled.last["status"]
    assert "canceled" in status["message"]
    assert status["completionTimestamp"]
    assert "snapshotID" not in status
    assert 0 < status["progress"]["bytesDone"] < _BYTES
    assert interrupted["status"]["phase"] == "InProgress"
    assert agent.api.get(DATA_UPLOADS, NAMESPACE, deleted.name) is None
    assert left == {
        f"{NAMESPACE} dataupload.velero.io/{canceled.name}",
        f"{NAMESPACE} backuprepository.velero.io/{space}-{space}-kopia",
    }
    assert manifests == []
    agent.user.kubectl("delete", "dataupload", canceled.name, "-n", NAMESPACE, "--wait=false")
