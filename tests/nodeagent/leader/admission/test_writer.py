"""The order in which many transfers with reservations are accepted, and what does not delay them."""

import asyncio
from itertools import zip_longest

import pytest

from core.kube.resources import CONFIG_MAPS, DATA_UPLOADS, EVENTS
from nodeagent.transfers.kinds.base import Admission, AdmissionState
from tests.nodeagent.support.dispatching import Gate, Scene, is_accept, most_held, open_scene

pytestmark = pytest.mark.looptime

_QUEUES = {"app-a": 300, "app-b": 150, "app-c": 90}
"""More transfers together than one pass checks."""


def _accepted_in_order(scene: Scene) -> list[str]:
    """Return the names of accepted transfers in the order of the API server's history."""
    names: dict[str, None] = {}
    for happening in scene.kube._store.history:
        if happening.resource is DATA_UPLOADS and (happening.after or {}).get("status", {}).get("phase") == "Accepted":
            names.setdefault((happening.after or {})["metadata"]["name"])
    return list(names)


def _add_queues(scene: Scene, *, share: int = 1) -> list[str]:
    """Store transfers of three namespaces, or a share of them; return their names in the order of admission."""
    queues = [[f"{queue}-{number:03}" for number in range(count // share)] for queue, count in _QUEUES.items()]
    for queue, names in zip(_QUEUES, queues, strict=True):
        for name in reversed(names):
            scene.add(name, queue=queue)
    return [name for round_ in zip_longest(*queues) for name in round_ if name is not None]


async def test_every_transfer_is_accepted_in_order_over_all_passes() -> None:
    scene = open_scene("node-a", "node-b", limit=None)
    names = _add_queues(scene)
    async with scene.dispatching():
        await scene.until(lambda: len(scene.accepted) == len(names))
    assert _accepted_in_order(scene) == names
    assert scene.accepted == names


async def test_reservations_of_a_crashed_leader_are_accepted_oldest_first() -> None:
    scene = open_scene(limit=None)
    names = _add_queues(scene, share=10)
    gate = Gate(scene.kube, is_accept)
    async with scene.dispatching(scene.dispatcher(gate)):
        await scene.until(lambda: gate.waiting == 1)
    assert scene.ledger() == {f"uid-of-{name}" for name in names}
    async with scene.dispatching():
        await scene.until(lambda: len(scene.accepted) == len(names))
    accepted = _accepted_in_order(scene)
    for queue in _QUEUES:
        assert [name for name in accepted if name.startswith(queue)] == [n for n in names if n.startswith(queue)]


async def test_a_slow_event_delays_no_accept() -> None:
    scene = open_scene(limit=None)
    for number in range(40):
        scene.add(f"du-{number:02}")
    gate = Gate(scene.kube, lambda request: request.method == "POST" and request.path.endswith("/events"))
    async with scene.dispatching(scene.dispatcher(gate)):
        await scene.until(lambda: len(_accepted_in_order(scene)) == 40)
        assert not scene.kube.objects(EVENTS)
        gate.open.set()
        await scene.until(lambda: len(scene.kube.objects(EVENTS)) == 40)
    assert all(scene.reasons(f"du-{number:02}") == ["Accepted"] for number in range(40))


async def test_the_warning_of_a_ready_transfer_is_recorded_once(caplog: pytest.LogCaptureFixture) -> None:
    scene = open_scene(limit=None)
    scene.add("du")
    warning = "BackupStorageLocation velero/default is Unavailable: no bucket"
    scene.kind.answers["du"] = Admission(AdmissionState.READY, warning=warning)
    async with scene.dispatching():
        await scene.until(lambda: len(scene.kube.objects(EVENTS)) == 2)
        await asyncio.sleep(120)
    assert scene.reasons("du") == ["Accepted", "LocationUnavailable"]
    recorded = scene.kube.objects(EVENTS)[-1]
    assert (recorded["type"], recorded["message"]) == ("Warning", warning)
    assert [record.levelname for record in caplog.records if record.getMessage() == warning] == ["WARNING"]


async def test_reservations_are_written_before_the_first_accept() -> None:
    scene = open_scene(limit=30)
    names = _add_queues(scene, share=10)
    gate = Gate(scene.kube, is_accept)
    async with scene.dispatching(scene.dispatcher(gate)):
        await scene.until(lambda: gate.waiting == 1)
        # One at a time, so that no client observes the second before the first.
        assert scene.ledger() == {f"uid-of-{name}" for name in names[:30]}
        gate.open.set()
        await scene.until(lambda: len(scene.accepted) == 30)
    assert _accepted_in_order(scene) == names[:30]
    assert most_held(scene.kube) == 30


async def test_writes_of_a_pass_come_in_the_order_of_its_stages() -> None:
    """Cancel, reservation, accept, report: an accept before its reservation would exceed the quota."""
    scene = open_scene("node-a", limit=1)
    scene.add("canceled", deletionTimestamp="2026-11-21T12:00:00Z", finalizers=["x/y"])
    scene.add("first")
    scene.add("second")
    async with scene.dispatching():
        await scene.until(lambda: scene.message("second") != "")
    paths = [request.path for request in scene.kube.requests if request.method in {"PATCH", "POST"}]
    written = ["ledger" if CONFIG_MAPS.plural in path else path.rsplit("/", 1)[1] for path in paths]
    # The first write of the ledger begins the term.
    assert [name for name in written if name != EVENTS.plural][:5] == [
        "ledger",
        "canceled",
        "ledger",
        "first",
        "second",
    ]
