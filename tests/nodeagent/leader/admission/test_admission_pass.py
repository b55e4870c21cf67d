"""Which interrupted transfers begin their next attempt, the order of the admission queue, and what delays no accept."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from itertools import product, zip_longest
from typing import Any

import pytest

from core.kube.resources import CONFIG_MAPS, DATA_UPLOADS, EVENTS
from core.models.phases import AttemptStage, InterruptionCause, Phase, in_order, round_robin
from core.models.reasons import PendingReason
from core.models.transfers import Transfer
from exposer.model import Reader
from nodeagent.leader.admission.admission_pass import Resumptions, awaited_locations, plan_resumptions
from nodeagent.leader.admission.writer import QueueView
from nodeagent.leader.index import Entry
from nodeagent.leader.live_agents import choose_node, count_idle
from nodeagent.metrics import Metrics
from nodeagent.transfers.kinds.base import Admission, AdmissionState
from tests.nodeagent.support.dispatching import Gate, Scene, ScriptedKind, entry, is_accept, open_scene
from tests.support.clock import LoopClock
from tests.support.tasks import running

AGENTS = {"a": "node-a", "b": "node-b"}
ANY = (False, True)
LAST = "begins after another transfer's on node node-a"
FULL = "is queued before all New transfers: prepareQueueLength (1) reached"
SILENT = "begins once BackupStorageLocation s3 answers"


def waiting(name: str, label: str = "a", *, outage: bool = False, **others: Any) -> Entry:
    """Return an interrupted transfer whose next attempt may begin."""
    cause = InterruptionCause.STORAGE_UNAVAILABLE if outage else InterruptionCause.EVICTED
    found = entry(name, phase=Phase.IN_PROGRESS, node_label=label, location="s3", **others)
    return replace(found, stage=AttemptStage.READY, interrupted_by=cause)


def plan(*entries: Entry, reserved: tuple[str, ...] = (), limit: int | None = 5, answers: bool = True) -> Resumptions:
    answering = {"s3"} if answers else set[str]()
    return plan_resumptions(entries, frozenset(reserved), limit=limit, agents=AGENTS, answering=answering)


def started(found: Resumptions) -> list[str]:
    return [one.name for one in found.start]


def messages(found: Resumptions) -> dict[str, str]:
    return {uid: pending.message for uid, pending in found.waiting.items()}


def every_case() -> Iterator[tuple[list[Entry], frozenset[str], int | None, bool]]:
    """Yield every combination of two transfers, their reservations, one that is exposed, quota and storage."""
    shapes = [
        {"label": label, "outage": outage, "stop": stop, "bound": bound}
        for label, outage, stop, bound in product(("a", "gone"), ANY, ANY, ANY)
    ]
    for first, second, exposing, held, limit, answers in product(
        shapes, shapes, ANY, product(ANY, ANY), (None, 0, 1, 2), ANY
    ):
        entries = [waiting("old", created="2026-11-21T10:00:00Z", **first), waiting("new", **second)]  # type: ignore[arg-type] # a table
        reserved = {one.uid for one, has in zip(entries, held, strict=True) if has}
        if exposing:
            entries.append(replace(waiting("exposing"), stage=AttemptStage.EXPOSING))
            reserved.add("exposing")
        yield entries, frozenset(reserved), limit, answers


def test_no_case_exceeds_the_quota_or_begins_two_of_a_node_or_keeps_an_unusable_reservation() -> None:
    for entries, reserved, limit, answers in every_case():
        found = plan(*entries, reserved=tuple(reserved), limit=limit, answers=answers)
        names, released = set(started(found)), {one.name for one in found.release}
        case = (entries, reserved, limit, answers)
        if limit is not None:
            assert len(reserved | names) <= max(limit, len(reserved)), case
        on_node = [*found.start, *(one for one in entries if one.stage is AttemptStage.EXPOSING)]
        assert len({one.node_label for one in on_node}) == len(on_node), case
        assert all(one.node_label in ("a" if one.bound else AGENTS) for one in found.start), case
        ready = {one.name: one for one in entries if one.stage is AttemptStage.READY}
        assert released == (reserved & ready.keys()) - names, case
        assert not names & found.waiting.keys(), case
        for name, one in ready.items():
            able = not one.stop and one.node_label == "a" and (answers or one not in _of_outage(entries))
            assert able or name not in names, case
            assert (name in names or name in found.waiting) == (not one.stop and one.node_label == "a"), case


def _of_outage(entries: list[Entry]) -> list[Entry]:
    return [one for one in entries if one.interrupted_by is InterruptionCause.STORAGE_UNAVAILABLE]


def test_the_oldest_goes_first_and_one_of_each_node_at_a_time() -> None:
    entries = [
        waiting("a2", created="2026-11-21T10:00:02Z", bound=True),
        waiting("b1", "b", created="2026-11-21T10:00:03Z"),
        waiting("a1", created="2026-11-21T10:00:01Z"),
    ]
    found = plan(*entries)
    assert started(found) == ["a1", "b1"]
    assert messages(found) == {"a2": LAST}


def test_one_that_any_node_can_carry_out_begins_on_the_agent_with_the_fewest() -> None:
    entries = [
        waiting("first", created="2026-11-21T10:00:00Z"),
        waiting("second", created="2026-11-21T10:00:01Z"),
        waiting("third"),
        entry("idle", phase=Phase.ACCEPTED, node_label="b"),
    ]
    agents = AGENTS | {"c": "node-c", "d": "node-d"}
    found = plan_resumptions(entries, frozenset(), limit=None, agents=agents, answering=set(), passed_over={"d"})
    assert [(one.name, one.node_label) for one in found.start] == [("first", "a"), ("second", "c"), ("third", "b")]


@pytest.mark.parametrize("bound", ANY)
@pytest.mark.parametrize("reason", ["WaitingForSlot", "Scheduling"])
def test_one_that_has_a_mover_and_waits_for_a_slot_delays_those_of_its_node_only(reason: str, *, bound: bool) -> None:
    exposing = [replace(waiting(f"at-{label}", label, reason=reason), stage=AttemptStage.EXPOSING) for label in AGENTS]
    found = plan(*exposing, waiting("next", bound=bound))
    begins = reason == "WaitingForSlot" and not bound
    assert (started(found), messages(found)) == ((["next"], {}) if begins else ([], {"next": LAST}))


def test_one_with_a_reservation_goes_before_an_older_one() -> None:
    older = waiting("older", created="2026-11-21T10:00:00Z")
    found = plan(waiting("held"), older, reserved=("held",), limit=1)
    assert (started(found), messages(found)) == (["held"], {"older": FULL})
    found = plan(waiting("held"), replace(older, bound=True), reserved=("held",), limit=1)
    assert (started(found), messages(found)) == (["held"], {"older": LAST})


def test_what_it_waits_for_first_does_not_depend_on_its_location() -> None:
    exposing = replace(waiting("exposing"), stage=AttemptStage.EXPOSING)
    for answers in ANY:
        found = plan(exposing, waiting("next", outage=True, bound=True), answers=answers)
        assert messages(found) == {"next": LAST}
        assert messages(plan(waiting("next", outage=True), limit=0, answers=answers))["next"].startswith("is queued")


def test_one_that_waits_for_its_location_delays_no_other_of_its_node() -> None:
    entries = [waiting("silent", outage=True, created="2026-11-21T10:00:00Z"), waiting("other")]
    found = plan(*entries, answers=False)
    assert (started(found), messages(found)) == (["other"], {"silent": SILENT})
    assert awaited_locations(entries) == {"s3"}
    assert plan(waiting("theirs", managed=False)) == Resumptions()


@pytest.mark.parametrize(
    "changed", [{"stage": AttemptStage.WAITING}, {"stage": AttemptStage.EXPOSING}, {"stop": True}], ids=str
)
def test_no_other_transfer_waits_for_a_location(changed: dict[str, Any]) -> None:
    assert awaited_locations([replace(waiting("a", outage=True), **changed)]) == set()


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


class _SlowKind(ScriptedKind):
    """Its checks take as long as several requests to a busy API server."""

    async def check_admission(self, cr: Transfer, reader: Reader) -> Admission:
        await asyncio.sleep(0.5)
        return await super().check_admission(cr, reader)


@pytest.mark.parametrize(
    ("limit", "waiting", "ready", "seconds"),
    [(1, 300, 2, 40), (None, 1, 500, 20), pytest.param(None, 700, 1, 30, marks=pytest.mark.thorough)],
)
async def test_what_is_not_ready_and_due_again_holds_back_no_other(
    limit: int | None, waiting: int, ready: int, seconds: float
) -> None:
    """The checks of a pass, or of all before the one that is ready, take longer than the pause of each.

    One for which the quota has no room is reported as queued.
    """
    scene = open_scene(limit=limit)
    scene.kind = _SlowKind()
    not_ready = Admission(AdmissionState.PENDING, PendingReason.SNAPSHOT_NOT_READY, "not ready yet", indefinite=True)
    for number in range(waiting):
        scene.add(name := f"a-{number:03}")
        scene.kind.answers[name] = not_ready
    for number in range(ready):
        scene.add(f"b-{number:03}")
    async with scene.dispatching():
        await scene.until(lambda: scene.accepted[:1] == ["b-000"], seconds=seconds)
        if limit is not None:
            await scene.until(lambda: scene.reason("b-001") == PendingReason.QUEUED, seconds=seconds)


async def test_reservations_of_a_crashed_leader_are_accepted_oldest_first() -> None:
    scene = open_scene(limit=None)
    names = _add_queues(scene, share=10)
    async with scene.paused(is_accept):
        # Before its first accept. One at a time, so that no client observes the second before the first.
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


QUEUED = [
    entry("a2", "a", "2026-11-21T11:00:02Z"),
    entry("a1", "a", "2026-11-21T11:00:01Z"),
    entry("a3", "a", "2026-11-21T11:00:02Z"),
    entry("b1", "b", "2026-11-21T11:00:03Z"),
    entry("c1", "c", "2026-11-21T10:00:00Z"),
    entry("c2", "c", "2026-11-21T10:00:00Z"),
    entry("c0", "c", "2026-11-21T10:00:01Z"),
]


@pytest.mark.parametrize(
    ("after", "order"),
    [
        pytest.param("", "a1 b1 c1 a2 c2 a3 c0", id="from the first namespace"),
        pytest.param("a", "b1 c1 a1 c2 a2 c0 a3", id="behind the one served last"),
        pytest.param("bb", "c1 a1 b1 c2 a2 c0 a3", id="behind a namespace without transfers"),
        pytest.param("c", "a1 b1 c1 a2 c2 a3 c0", id="from the first namespace again"),
    ],
)
def test_namespaces_alternate_and_the_oldest_transfer_goes_first(after: str, order: str) -> None:
    assert " ".join(e.name for e in round_robin(QUEUED, after=after)) == order


def test_the_agent_with_the_fewest_transfers_is_chosen_and_one_that_is_passed_over_if_there_are_no_others() -> None:
    agents = {"a": "a", "b": "b", "skewed": "skewed"}
    idle = {"a": 3, "b": 3, "skewed": 0}
    assert choose_node(agents, idle) == "skewed"
    assert choose_node(agents, idle, frozenset({"skewed"})) == "a"
    assert choose_node(agents, idle | {"a": 4}, frozenset({"skewed"})) == "b"
    assert choose_node(agents, idle, frozenset(agents)) == "skewed"
    assert choose_node({}, idle) is None


@pytest.mark.parametrize("stage", [AttemptStage.WAITING, AttemptStage.READY, AttemptStage.EXPOSING])
def test_transfers_between_two_attempts_count_for_the_agent_they_were_given_to(stage: AttemptStage) -> None:
    entries = [
        entry("1", phase=Phase.IN_PROGRESS, stage=stage, node_label="node-b"),
        entry("2", phase=Phase.IN_PROGRESS, stage=stage, node_label="node-a"),
        entry("3", phase=Phase.IN_PROGRESS, node_label="node-a"),
        entry("4", phase=Phase.ACCEPTED, node_label="node-a"),
        entry("5", phase=Phase.IN_PROGRESS, stage=AttemptStage.RUNNING, node_label="node-b"),
    ]
    # What the index does not show yet counts once.
    assert count_idle(entries, {"2": "node-c", "3": "node-c"}) == {"node-a": 1, "node-b": 1, "node-c": 2}


def test_preferred_kinds_have_an_order_of_their_own() -> None:
    entries = [
        entry("u-b", "b"),
        entry("d-b", "b", kind="DataDownload"),
        entry("d-a", "a", kind="DataDownload"),
        entry("p-a", "a", kind="PodVolumeRestore"),
        entry("u-a", "a"),
    ]
    restores = frozenset({"DataDownload", "PodVolumeRestore"})
    assert [e.name for e in in_order(entries, after="a", first=restores)] == ["d-b", "d-a", "p-a", "u-b", "u-a"]
    assert [e.name for e in in_order(entries, after="a")] == ["d-b", "d-a", "u-b", "p-a", "u-a"]


async def test_pending_transfers_are_counted_by_reasons_that_this_project_defines() -> None:
    metrics = Metrics("node-a")
    entries = [
        entry("a", reason="Queued"),
        entry("b", reason="Queued"),
        entry("c", reason="Unschedulable", phase=Phase.ACCEPTED),
        entry("d", reason="SomethingOfADriver", phase=Phase.ACCEPTED),
        entry("e"),
        entry("f", reason="Queued", managed=False),
        entry("g", reason="Queued", phase=Phase.FAILED),
    ]
    view = QueueView(metrics, LoopClock(), ["DataUpload"], entries=lambda: entries, order=lambda queue: queue)
    async with running(view.run(), lead_seconds=1):
        lines = [line for line in metrics.render().decode().splitlines() if line.startswith("nodeagent_pending{")]
        assert sorted(lines) == [
            'nodeagent_pending{kind="DataUpload",node="node-a",reason="Other",state="Accepted"} 2.0',
            'nodeagent_pending{kind="DataUpload",node="node-a",reason="Queued",state="New"} 2.0',
        ]
    assert "nodeagent_pending{" not in metrics.render().decode()
