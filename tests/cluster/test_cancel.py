"""Transfers canceled or deleted while data moves: nothing is left in the cluster, nor in the repository."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from core.kube.resources import DATA_UPLOADS
from tests.cluster.bed import Bed
from tests.cluster.gate import HELD_BYTES
from tests.cluster.handkopia import open_kopia
from tests.cluster.listing import everything
from tests.cluster.scenes import Volume, follow, open_gated_place, wait_released
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
        versions: The canceled one from before its cancel to its end.
        interrupted: The deleted one as it was just before.
        left: All objects that are new since before the two.
        manifests: Snapshots in the repository, complete or not.
    """

    versions: list[Json]
    interrupted: Json
    left: set[str]
    manifests: list[dict[str, Any]]


@pytest.fixture(scope="module")
def ended(agent: Bed, module_space: str) -> Iterator[Ended]:
    """Two uploads at the same time."""
    volume = Volume(agent, module_space)
    canceled, deleted = names = [f"{module_space}-canceled", f"{module_space}-deleted"]
    volume.fill(_FILL, size="128Mi")
    volume.take_snapshots(names)
    with open_gated_place(agent, module_space) as (gate, place), relies_on(agent, Shared.AGENTS):
        before = everything(agent, module_space)
        gate.shut()
        agent.user.apply(*(volume.upload(name, snapshot=name, location=place.name) for name in names))
        moving = _wait_moving(agent, names)[canceled]
        change = '{"spec":{"cancel":true}}'
        agent.user.kubectl("patch", "dataupload", canceled, "-n", NAMESPACE, "--type=merge", "-p", change)
        since = moving["metadata"]["resourceVersion"]
        versions = [moving, *follow(agent, DATA_UPLOADS, [canceled], since=since)]
        interrupted = agent.api.get(DATA_UPLOADS, NAMESPACE, deleted) or {}
        agent.user.kubectl("delete", "dataupload", deleted, "-n", NAMESPACE, "--timeout=600s")
        wait_released(agent, DATA_UPLOADS, [canceled])
        with open_kopia(agent, module_space, prefix=place.name) as kopia:
            manifests = kopia.snapshot_manifests()
        yield Ended(versions, interrupted, everything(agent, module_space) - before, manifests)
    agent.user.kubectl("delete", "dataupload", canceled, "-n", NAMESPACE, "--wait=false")


def _wait_moving(bed: Bed, names: list[str]) -> dict[str, Json]:
    """Wait until data of the uploads moves; returns them as they are then, by name."""
    moving: dict[str, Json] = {}
    for transfer in follow(bed, DATA_UPLOADS, names):
        if transfer.get("status", {}).get("progress", {}).get("bytesDone"):
            moving[transfer["metadata"]["name"]] = transfer
        if len(moving) == len(names):
            return moving
    pytest.fail("they ended before their data moved")


def test_a_cancel_in_mid_transfer_ends_canceled(ended: Ended) -> None:
    phases = list(dict.fromkeys(transfer["status"]["phase"] for transfer in ended.versions))
    assert phases == ["InProgress", "Canceling", "Canceled"]
    status = ended.versions[-1]["status"]
    assert "canceled" in status["message"]
    assert status["completionTimestamp"]
    assert "snapshotID" not in status
    assert 0 < status["progress"]["bytesDone"] < _BYTES


def test_a_deletion_in_mid_transfer_is_completed(agent: Bed, ended: Ended) -> None:
    assert ended.interrupted["status"]["phase"] == "InProgress"
    assert agent.api.get(DATA_UPLOADS, NAMESPACE, ended.interrupted["metadata"]["name"]) is None


def test_neither_leaves_an_object(ended: Ended) -> None:
    canceled = ended.versions[-1]
    space, name = canceled["spec"]["sourceNamespace"], canceled["metadata"]["name"]
    assert ended.left == {
        f"{NAMESPACE} dataupload.velero.io/{name}",
        f"{NAMESPACE} backuprepository.velero.io/{space}-{space}-kopia",
    }


def test_neither_leaves_a_snapshot_in_the_repository_not_even_an_incomplete_one(ended: Ended) -> None:
    assert ended.manifests == []
