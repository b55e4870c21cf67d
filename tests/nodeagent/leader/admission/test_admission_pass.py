"""The stages of a pass: their order, and what each leaves to the next."""

import asyncio
from dataclasses import FrozenInstanceError

import pytest

from core.kube.resources import CONFIG_MAPS, DATA_UPLOADS, EVENTS
from nodeagent.leader.admission.admission_pass import Pass
from tests.nodeagent.leader.admission.test_writer_queue_reports import entry
from tests.nodeagent.support.dispatching import Scene, open_scene

ORDER = [
    "resolve_accepts",
    "wake",
    "cancel",
    "settle",
    "check_reserved",
    "check_interrupted",
    "pick",
    "reserve",
    "resume",
    "accept",
    "report_queued",
    "report_waiting",
]


async def stage_names(scene: Scene) -> list[str]:
    dispatcher = scene.dispatcher()
    async with scene.dispatching(dispatcher):
        await scene.until(lambda: dispatcher._term is not None)
        assert dispatcher._term is not None
        return [stage.__name__ for stage in dispatcher._term._pass.stages]


@pytest.mark.looptime
async def test_the_stages_have_this_order() -> None:
    """An accept before its reservation, or a pick before the quota is settled, would exceed the quota."""
    assert await stage_names(open_scene()) == ORDER


def test_a_pass_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        Pass([]).checks_left = 1  # type: ignore[misc] # what the test is about


def test_what_is_reserved_needs_no_reservation() -> None:
    entries = [entry("a"), entry("b")]
    assert Pass(entries, new=entries, reserved=frozenset({"a"})).unreserved == [entries[1]]


@pytest.mark.looptime
async def test_writes_of_a_pass_come_in_the_order_of_its_stages() -> None:
    """Cancel, reservation, accept, report."""
    scene = open_scene("node-a", limit=1)
    scene.add("canceled", deletionTimestamp="2026-11-21T12:00:00Z", finalizers=["x/y"])
    scene.add("first")
    scene.add("second")
    async with scene.dispatching():
        await scene.until(lambda: scene.message("second") != "")
        await asyncio.sleep(1)
    written: list[str] = []
    for request in scene.kube.requests:
        if request.method not in {"PATCH", "POST"} or EVENTS.plural in request.path.split("/"):
            continue
        if CONFIG_MAPS.plural in request.path:
            written.append("ledger")
        elif DATA_UPLOADS.plural in request.path:
            written.append(request.path.rsplit("/", 1)[1])
    # The first write of the ledger begins the term.
    assert written[:5] == ["ledger", "canceled", "ledger", "first", "second"]
