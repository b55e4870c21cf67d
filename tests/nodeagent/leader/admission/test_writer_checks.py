"""What follows from the result of each check: an end, a report, a later check, or an admission."""

import asyncio
from datetime import timedelta

import pytest

from core.models.reasons import FailureReason
from nodeagent.leader.admission.examiner import CheckState, Examiner
from nodeagent.leader.admission.pending import PendingTransfers, PodWatch
from nodeagent.leader.admission.writer import AdmissionChecks, AdmissionWriter
from nodeagent.leader.index import Entry, build_entry
from nodeagent.transfers.kinds.base import Admission, AdmissionState
from tests.nodeagent.support.dispatching import Scene, open_scene

pytestmark = pytest.mark.looptime

BLOCKED = Admission(AdmissionState.PENDING, "LocationUnavailable", "the location is unavailable", blocked=True)
OVERDUE = Admission(AdmissionState.PENDING, "TargetClaimMissing", "the PVC does not exist", limit=timedelta(seconds=2))
FAILED = Admission(AdmissionState.FAILED, FailureReason.SOURCE_MISSING, "the snapshot does not exist")


class Bench:
    """Checks of one scene, without a dispatcher."""

    def __init__(self) -> None:
        self.scene: Scene = open_scene("node-a")
        dispatcher = self.scene.dispatcher()
        cluster, rules = dispatcher._cluster, dispatcher._rules
        agents = {"node-a": "node-a"}
        self.pending = PendingTransfers(cluster.clock, PodWatch(cluster.client, cluster.clock, on_change=lambda: None))
        writer = AdmissionWriter(
            cluster, self.pending, agents=lambda feature="": agents, passed_over=frozenset, on_accepted=lambda _: None
        )
        examiner = Examiner(cluster, rules, agents=lambda feature="": agents, velero_nodes=frozenset)
        self.checks = AdmissionChecks(rules, examiner, self.pending, writer)

    def add(self, name: str, admission: Admission | None = None, *, cancel: bool = False) -> Entry:
        raw = self.scene.add(name)
        if cancel:
            raw = self.scene.kube.put(raw | {"spec": raw["spec"] | {"cancel": True}})
        if admission is not None:
            self.scene.kind.answers[name] = admission
        return build_entry(self.scene.kind, raw)

    async def states(self, *entries: Entry) -> list[CheckState]:
        return [checked.state for checked in await self.checks.run(entries)]


async def test_a_ready_transfer_is_returned_without_a_write() -> None:
    bench = Bench()
    entry = bench.add("du")
    assert await bench.states(entry) == [CheckState.READY]
    assert bench.pending.is_due(entry.uid)
    assert bench.scene.message("du") == ""


async def test_a_pending_transfer_is_reported_and_postponed() -> None:
    bench = Bench()
    entry = bench.add("du", BLOCKED)
    assert await bench.states(entry) == [CheckState.PENDING]
    assert (bench.scene.reason("du"), bench.scene.message("du")) == (BLOCKED.reason, BLOCKED.message)
    assert bench.scene.reasons("du") == [BLOCKED.reason]
    assert not bench.pending.is_due(entry.uid)


@pytest.mark.parametrize(
    ("admission", "cancel", "phase", "message"),
    [
        pytest.param(FAILED, False, "Failed", FAILED.message, id="failed"),
        pytest.param(BLOCKED, True, "Canceled", "canceled before admission: ", id="canceled"),
    ],
)
async def test_a_transfer_that_will_not_start_is_ended(
    admission: Admission, cancel: bool, phase: str, message: str
) -> None:
    bench = Bench()
    assert await bench.states(bench.add("du", admission, cancel=cancel)) == []
    assert bench.scene.phase("du") == phase
    assert bench.scene.message("du").startswith(message)


async def test_an_overdue_transfer_is_ended() -> None:
    bench = Bench()
    entry = bench.add("du", OVERDUE)
    assert await bench.states(entry) == [CheckState.PENDING]
    await asyncio.sleep(2)
    assert await bench.states(entry) == []
    assert bench.scene.message("du") == f"could not start within 2s: {OVERDUE.message}"


async def test_a_check_that_fails_is_repeated_later_and_delays_no_other() -> None:
    bench = Bench()
    failing, ready = bench.add("du-1"), bench.add("du-2")
    bench.scene.kube.fail_next("GET", "datauploads/du-1", 403)
    assert [checked.entry for checked in await bench.checks.run([failing, ready])] == [ready]
    assert not bench.pending.is_due(failing.uid)
