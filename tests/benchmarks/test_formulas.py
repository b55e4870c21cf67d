"""The formulas of docs/scaling.md: the page and the code have the same figures, and these follow the load."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.scale import formulas
from benchmarks.scale.formulas import Course, predict

_PAGE = Path(__file__).parents[2] / "docs" / "scaling.md"
LARGEST = Course(
    nodes=5000,
    transfers=100_000,
    seconds=4 * 3600,
    known=100_000,
    pending=100_000,
    held=20_000,
    checked=10_000,
)
"""The cluster of the page: twice the slots are Accepted or Prepared, half of them wait, as volumes of pods."""


def page_rows() -> dict[str, str]:
    """Return the second cells of all tables of the page by the first ones."""
    lines = (line for line in _PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| "))
    return {cells[1].strip(): cells[2].strip() for cells in (line.split("|") for line in lines)}


def test_the_page_has_the_costs_of_the_formulas() -> None:
    rows = page_rows()
    assert {what: rows.get(what) for what in _costs()} == _costs()


def test_the_page_has_the_largest_cluster_of_the_formulas() -> None:
    rows = page_rows()
    assert {what: rows.get(what) for what in _largest()} == _largest()


def _costs() -> dict[str, str]:
    return {
        "requests of the agents": f"{formulas.REQUESTS_A_TRANSFER:.0f}",
        "objects written to etcd by all components": f"{formulas.STORED_OBJECTS_A_TRANSFER:.0f}",
        "growth of etcd's file": f"{formulas.STORED_KIB_A_TRANSFER:.0f} KiB",
        "Events": f"{formulas.EVENTS_A_TRANSFER:.0f}",
        "bytes encoded for the agents' watches": f"{formulas.ENCODED_KIB_A_TRANSFER:.0f} KiB",
        "processor time of its agent": f"{formulas.CPU_MS_A_TRANSFER:.0f} ms",
        "memory of the leader while it is pending": f"{formulas.KIB_A_PENDING_TRANSFER} KiB",
        "entry in the admission ledger": f"{formulas.LEDGER_BYTES_AN_ENTRY:.0f} bytes",
        "watches": f"{formulas.WATCHES_AN_AGENT:.0f}",
        "memory of the API server for a watch": f"{formulas.KIB_A_WATCH:.0f} KiB",
        "renewal of a watch": f"{formulas.WATCH_SECONDS:.0f} s",
        "bytes of a renewal of the Lease": f"{formulas.RENEWAL_BYTES:.0f} bytes",
        "processor time": f"{formulas.IDLE_CPU_PERCENT} %",
    }


def _largest() -> dict[str, str]:
    cost = predict(LARGEST)
    return {
        "requests of all agents": f"{cost.requests_per_transfer * LARGEST.per_s:,.0f} per second",
        "requests of all agents without transfers": f"{cost.idle_requests_s:,.0f} per second",
        "objects written to etcd": f"{cost.stored_objects_per_transfer * LARGEST.per_s:,.0f} per second",
        "events sent by etcd": f"{cost.events_per_transfer * LARGEST.per_s:,.0f} per second",
        "growth of etcd's file in all": f"{cost.etcd_mib:,.0f} MiB",
        "bytes encoded for watches": f"{cost.encoded_kib_per_transfer * LARGEST.per_s:,.0f} KiB per second",
        "watches of all agents": f"{cost.watches:,.0f}",
        "memory of the API servers for them": f"{cost.watches_mib / 1024:,.1f} GiB",
        "renewals of the Lease delivered": f"{cost.renewals_s:,.0f} per second",
        "passes of the dispatcher": f"{cost.passes_s:.2f} per second",
        "processor time of the leader": f"{cost.leader_cpu_percent:.0f} % of a core",
        "admission ledger": f"{cost.ledger_kib:,.0f} KiB",
        "memory of the leader for pending transfers": f"{cost.leader_mib:,.0f} MiB",
        "rejected writes when the leader changes": f"{cost.takeover_conflicts:.0f}",
    }


def test_transfers_that_wait_for_a_slot_cost_requests() -> None:
    without = predict(replace(LARGEST, checked=0)).requests_per_transfer
    with_them = predict(LARGEST).requests_per_transfer
    assert (with_them - without) * LARGEST.per_s == pytest.approx(10_000 / 8)


@pytest.mark.parametrize("watch_events", [True, False])
def test_every_agent_that_watches_events_adds_to_what_etcd_sends(watch_events: bool) -> None:
    courses = (replace(LARGEST, nodes=nodes, watch_events=watch_events) for nodes in (1000, 2000))
    one, two = (predict(course).events_per_transfer for course in courses)
    assert two - one == (1000 * formulas.EVENTS_A_TRANSFER if watch_events else 0)


@pytest.mark.parametrize("write_seconds", [0.01, 0.1, 1.0])
def test_passes_follow_one_another_more_slowly_where_writes_are_slow(write_seconds: float) -> None:
    course = replace(LARGEST, transfers=1000, seconds=1000.0, known=500, held=50)
    assert predict(replace(course, write_seconds=write_seconds)).passes_s < 1 / write_seconds / formulas.PASS_REQUESTS
    assert predict(replace(course, write_seconds=0.0)).passes_s < course.per_s


def test_few_candidates_try_for_the_lease_before_they_observe_the_first() -> None:
    few, many = (predict(replace(LARGEST, nodes=nodes)).takeover_conflicts for nodes in (50, 5000))
    assert 0 < few < many < 1
