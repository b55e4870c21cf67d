"""Copies of Secrets and ConfigMaps in whole transfers: whatever fails, none is left, and no two transfers share one."""

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from core.kube.resources import CONFIG_MAPS, SECRETS
from core.kube.transport import Request
from core.models.names import COPIES_ANNOTATION
from exposer.settings import BackupPVCSettings
from tests.nodeagent.flows.test_crash_matrix import (
    BROKEN,
    CANCELED,
    FAULTS,
    GOOD,
    STEP_SECONDS,
    THOROUGH,
    Scenario,
    changes,
    expected_changes,
    name_fault,
)
from tests.nodeagent.support.harness import Fault, Fuse, World, accepted, open_world
from tests.nodeagent.support.simulation import Mover
from tests.nodeagent.support.transfers import TRANSFERS, data_upload
from tests.support.objects import JsonDict

pytestmark = pytest.mark.looptime

NAMES = ("Secret/token", "ConfigMap/kms")
SETTINGS: dict[str, Any] = {"backup_pvcs": {"hostpath": BackupPVCSettings(copies=NAMES)}, "restore_copies": NAMES}
KINDS = ("DataUpload", "DataDownload")


def needing(transfer: JsonDict) -> JsonDict:
    """Return a transfer as the dispatcher accepts it if it needs copies."""
    whole = accepted(transfer)
    whole["metadata"]["annotations"] = {COPIES_ANNOTATION: " ".join(NAMES)}
    return whole


def put_sources(world: World, namespace: str) -> None:
    for resource, name in ((SECRETS, "token"), (CONFIG_MAPS, "kms")):
        meta = {"name": name, "namespace": namespace}
        data = {"data": {"of": namespace}}
        world.kube.put({"apiVersion": "v1", "kind": resource.kind, "metadata": meta} | data)


def copied(world: World) -> list[JsonDict]:
    """Return the Secrets that were created in the agent's namespace, in order."""
    return [
        happening.after
        for happening in world.kube._store.history
        if happening.resource == SECRETS and happening.before is None and happening.after is not None
        if happening.after["metadata"]["namespace"] == "velero"
    ]


def copies(world: World) -> list[str]:
    return [name for name in world.everything() if name in {"Secret velero/token", "ConfigMap velero/kms"}]


def of_copies(request: Request) -> bool:
    return "/secrets" in request.path or "/configmaps" in request.path


async def play(kind: str, scenario: Scenario, fuse: Fuse) -> JsonDict:
    """Return how a run with that fuse ends; a second agent continues if the fuse has stopped the first."""
    async with open_world(needing(TRANSFERS[kind]()), mover=scenario.mover) as world:
        put_sources(world, "app" if kind == "DataUpload" else "app3")
        world.cluster.tick_seconds = STEP_SECONDS
        fuse.inner = world.kube
        before = world.everything()
        with suppress(TimeoutError):
            async with world.agent(fuse, **SETTINGS):
                blown = fuse.blown.is_set
                if scenario.canceled:
                    await world.until(lambda: world.phase(kind) == "InProgress" or blown(), every=STEP_SECONDS)
                    await world.stop(world.transfer(kind), "cancel")
                await world.until(lambda: (blown() and fuse.fault.stops) or world.done(kind), every=STEP_SECONDS)
            async with world.agent(**SETTINGS):
                await world.until(lambda: world.done(kind), every=STEP_SECONDS)
                await asyncio.sleep(1)
        assert {one["data"]["of"] for one in copied(world)} <= {"app", "app3"}
        meta = world.transfer(kind)["metadata"]
        found = {"phase": world.phase(kind), "annotations": meta.get("annotations"), "copies": copies(world)}
        return found | changes(before, world.everything())


@pytest.mark.sample("DataUpload-good-*", "DataUpload-broken-stop_before")
@pytest.mark.parametrize("fault", FAULTS, ids=name_fault)
@pytest.mark.parametrize(
    "scenario", [GOOD, pytest.param(BROKEN, marks=THOROUGH), CANCELED], ids=["good", "broken", "canceled"]
)
@pytest.mark.parametrize("kind", KINDS)
async def test_every_request_for_a_copy_may_fail(kind: str, scenario: Scenario, fault: Fault) -> None:
    calm = Fuse(counts=of_copies)
    expected = await play(kind, scenario, calm)
    assert expected["phase"] == scenario.end
    assert expected["copies"] == []
    assert not expected["annotations"]
    if scenario is GOOD:
        assert {key: expected[key] for key in ("created", "deleted")} == expected_changes(kind)
    assert [sum(call.startswith(method) for call in calm.counted) for method in ("POST", "DELETE")] == [2, 2]
    for at, request in enumerate(calm.counted):
        found = await play(kind, scenario, Fuse(counts=of_copies, at=at, fault=fault))
        if scenario.canceled:
            # It may be canceled before there is a data path.
            assert (found["phase"], found["copies"], found["created"]) == ("Canceled", [], [])
            continue
        assert found == expected, f"{fault.name} at {at}: {request}"


async def test_an_accepted_transfer_waits_for_the_copy_of_another_one_for_as_long_as_that_takes() -> None:
    """Longer than the prepare timeout: a leader that was replaced may have accepted both at once."""
    first, second = needing(data_upload("du-1")), needing(data_upload("du-2"))
    second["spec"] = second["spec"] | {"sourceNamespace": "app2"}
    async with open_world(first, second, mover=Mover(seconds=2400)) as world:
        world.cluster.tick_seconds = 5.0
        put_sources(world, "app")
        put_sources(world, "app2")
        async with world.agent(slots=2, **SETTINGS):
            await world.until(lambda: "CopyInUse" in world.reasons(), every=1)
            waiting = "du-2" if world.phase(name="du-2") == "Accepted" else "du-1"
            holder = "du-1" if waiting == "du-2" else "du-2"
            text = "the copy of Secret token is in use by another transfer, until that is cleaned up"
            assert world.transfer(name=waiting)["status"]["message"] == text
            await world.until(lambda: world.done(name="du-1") and world.done(name="du-2"), seconds=6000, every=5)
        assert [world.phase(name=name) for name in ("du-1", "du-2")] == ["Completed"] * 2
        order = ["app", "app2"] if holder == "du-1" else ["app2", "app"]
        assert [one["data"]["of"] for one in copied(world)] == order
        assert copies(world) == []


@pytest.mark.cause("copy-forbidden")
async def test_a_permission_that_is_withdrawn_fails_a_transfer_and_leaves_nothing() -> None:
    async with open_world(needing(data_upload())) as world:
        put_sources(world, "app")
        world.kube.fail_next("GET", "/namespaces/app/configmaps/kms", 403)
        async with world.agent(**SETTINGS):
            await world.until(world.done)
        assert world.phase() == "Failed"
        assert "no permission to get configmaps in namespace app" in world.transfer()["status"]["message"]
        assert copies(world) == []
