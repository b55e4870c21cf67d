"""Loads that somebody ends while data moves: nothing of them is left, in the cluster nor in the repository."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from tests.bed.demonstration.manifests import NAMESPACE
from tests.cluster.handkopia import open_kopia
from tests.cluster.listing import everything
from tests.cluster.scenes import UPLOADS, Volume, follow, wait_released

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.bed.api import Json
    from tests.cluster.conftest import Bed

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

_NAMES = ("canceled", "deleted")

_SPARSE_BYTES = 200 << 30
"""More than is read within a minute, and nothing on disk."""

_FILL = f"""
import os
with open("/data/random", "wb") as file:
    file.write(os.urandom(50_000_000))
with open("/data/sparse", "wb") as file:
    file.truncate({_SPARSE_BYTES})
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
    volume.fill(_FILL, size="300Gi")
    volume.take_snapshots(_NAMES)
    before = everything(agent, NAMESPACE, module_space)
    agent.user.apply(*(volume.upload(name, snapshot=name, location="default") for name in _NAMES))
    moving = _wait_moving(agent)["canceled"]
    change = '{"spec":{"cancel":true}}'
    agent.user.kubectl("patch", "dataupload", "canceled", "-n", NAMESPACE, "--type=merge", "-p", change)
    since = moving["metadata"]["resourceVersion"]
    versions = [moving, *follow(agent, UPLOADS, ["canceled"], seconds=120, since=since)]
    interrupted = agent.api.get(UPLOADS, NAMESPACE, "deleted") or {}
    agent.user.kubectl("delete", "dataupload", "deleted", "-n", NAMESPACE, "--timeout=120s")
    wait_released(agent, UPLOADS, ["canceled"])
    with open_kopia(agent, module_space) as kopia:
        kopia.connect()
        manifests = kopia.snapshot_manifests()
    yield Ended(versions, interrupted, everything(agent, NAMESPACE, module_space) - before, manifests)
    left = ["dataupload/canceled", f"backuprepository/{module_space}-default-kopia"]
    agent.user.kubectl("delete", *left, "-n", NAMESPACE, "--wait=false")


def _wait_moving(bed: Bed) -> dict[str, Json]:
    """Wait until data of both uploads moves; returns them as they are then, by name."""
    moving: dict[str, Json] = {}
    for load in follow(bed, UPLOADS, _NAMES, seconds=120):
        if load.get("status", {}).get("progress", {}).get("bytesDone"):
            moving[load["metadata"]["name"]] = load
        if len(moving) == len(_NAMES):
            return moving
    pytest.fail("they ended before their data moved")


def test_a_cancel_in_mid_transfer_ends_canceled(ended: Ended) -> None:
    phases = list(dict.fromkeys(load["status"]["phase"] for load in ended.versions))
    assert phases == ["InProgress", "Canceling", "Canceled"]
    status = ended.versions[-1]["status"]
    assert "canceled" in status["message"]
    assert status["completionTimestamp"]
    assert "snapshotID" not in status
    assert 0 < status["progress"]["bytesDone"] < _SPARSE_BYTES


def test_a_deletion_in_mid_transfer_lets_it_go(agent: Bed, ended: Ended) -> None:
    assert ended.interrupted["status"]["phase"] == "InProgress"
    assert agent.api.get(UPLOADS, NAMESPACE, "deleted") is None


def test_neither_leaves_an_object(ended: Ended) -> None:
    space = ended.versions[-1]["spec"]["sourceNamespace"]
    assert ended.left == {
        f"{NAMESPACE} dataupload.velero.io/canceled",
        f"{NAMESPACE} backuprepository.velero.io/{space}-default-kopia",
    }


def test_neither_leaves_a_snapshot_in_the_repository_not_even_an_incomplete_one(ended: Ended) -> None:
    assert ended.manifests == []
