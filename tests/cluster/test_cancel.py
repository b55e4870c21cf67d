"""Transfers canceled or deleted while data moves: nothing is left in the cluster, nor in the repository."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from core.kube.resources import DATA_UPLOADS
from tests.cluster.bed import Bed
from tests.cluster.followed import Followed
from tests.cluster.gate import HELD_BYTES
from tests.cluster.handkopia import open_kopia
from tests.cluster.listing import everything
from tests.cluster.scenes import Volume, open_gated_place, wait_released
from tests.cluster.sharing import WITH_LOCKS, Shared, relies_on
from tests.testbed.api import Json
from tests.testbed.demonstration.manifests import NAMESPACE

pytestmark = [pytest.mark.cluster, pytest.mark.lane(name="failing"), pytest.mark.timeout(WITH_LOCKS)]

_BYTES = 3 * HELD_BYTES
"""In one file, of which a gate that is shut lets a third through at most."""

_FILL = f"""
import os
with open("/data/random", "wb") as file:
    file.write(os.urandom({_BYTES}))
"""


@dataclass
class Ended:
    """What became of two uploads, one canceled and one deleted while its data moved.

    Attributes:
        canceled: The canceled one.
        interrupted: The deleted one as it was just before.
        left: All objects that are new since before the two.
        manifests: Snapshots in the repository, complete or not.
    """

    canceled: Followed
    interrupted: Json
    left: set[str]
    manifests: list[dict[str, Any]]


@pytest.fixture(scope="module")
def ended(agent: Bed, module_space: str) -> Iterator[Ended]:
    """Two uploads at the same time."""
    volume = Volume(agent, module_space)
    names = [f"{module_space}-canceled", f"{module_space}-deleted"]
    volume.fill(_FILL, size="128Mi")
    volume.take_snapshots(names)
    with open_gated_place(agent, module_space) as (gate, place), relies_on(agent, Shared.AGENTS):
        before = everything(agent, module_space)
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
        with open_kopia(agent, module_space, prefix=place.name) as kopia:
            manifests = kopia.snapshot_manifests()
        yield Ended(canceled, interrupted, everything(agent, module_space) - before, manifests)
    agent.user.kubectl("delete", "dataupload", canceled.name, "-n", NAMESPACE, "--wait=false")


def test_a_cancel_in_mid_transfer_ends_canceled(ended: Ended) -> None:
    assert ended.canceled.phases[-3:] == ["InProgress", "Canceling", "Canceled"]
    status = ended.canceled.last["status"]
    assert "canceled" in status["message"]
    assert status["completionTimestamp"]
    assert "snapshotID" not in status
    assert 0 < status["progress"]["bytesDone"] < _BYTES


def test_a_deletion_in_mid_transfer_is_completed(agent: Bed, ended: Ended) -> None:
    assert ended.interrupted["status"]["phase"] == "InProgress"
    assert agent.api.get(DATA_UPLOADS, NAMESPACE, ended.interrupted["metadata"]["name"]) is None


def test_neither_leaves_an_object(ended: Ended) -> None:
    canceled = ended.canceled
    space, name = canceled.transfer["spec"]["sourceNamespace"], canceled.name
    assert ended.left == {
        f"{NAMESPACE} dataupload.velero.io/{name}",
        f"{NAMESPACE} backuprepository.velero.io/{space}-{space}-kopia",
    }


def test_neither_leaves_a_snapshot_in_the_repository_not_even_an_incomplete_one(ended: Ended) -> None:
    assert ended.manifests == []
