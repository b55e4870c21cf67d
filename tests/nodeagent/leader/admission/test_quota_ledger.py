"""The admission ledger: its reservations, and which agent may write it."""

import pytest

from core.kube.client import KubeClient
from core.kube.errors import ForbiddenError, ServerError
from core.kube.resources import CONFIG_MAPS
from core.kube.transport import Retry
from core.models.phases import Phase
from nodeagent.leader.admission.quota import AdmissionLedger, LedgerLostError, Reservations, free_quota, settle
from nodeagent.leader.election import NotLeaderError
from tests.support.clock import LoopClock
from tests.support.fakekube import FakeKube

pytestmark = pytest.mark.looptime


def open_ledger(kube: FakeKube) -> AdmissionLedger:
    return AdmissionLedger(KubeClient(kube, Retry(LoopClock())), "velero", check_leading=lambda: None)


@pytest.mark.parametrize(
    ("had", "phase", "has"),
    [
        (False, None, False),
        (True, None, False),
        (False, Phase.NEW, False),
        (True, Phase.NEW, True),
        *((had, phase, True) for had in (False, True) for phase in (Phase.ACCEPTED, Phase.PREPARED)),
        *(
            (had, phase, False)
            for had in (False, True)
            for phase in Phase
            if phase not in {Phase.NEW, Phase.ACCEPTED, Phase.PREPARED}
        ),
    ],
)
def test_a_reservation_is_kept_until_the_transfer_is_past_prepared_or_deleted(
    had: bool, phase: Phase | None, has: bool
) -> None:
    seen = {} if phase is None else {"uid": phase}
    assert settle({"uid"} if had else set(), seen) == (frozenset({"uid"}) if has else frozenset())


def test_the_quota_never_exceeds_what_the_ledger_can_hold() -> None:
    used = {str(number) for number in range(19_999)}
    assert free_quota(used, None) == 1
    assert free_quota(used, 1_000_000) == 1
    assert free_quota({"a", "b"}, 3) == 1
    assert free_quota({"a", "b"}, 1) == 0


async def test_a_written_ledger_reads_the_same() -> None:
    kube = FakeKube()
    ledger = open_ledger(kube)
    await ledger.load()
    await ledger.write(Reservations(frozenset({"b", "a"}), "app"))
    await ledger.write(Reservations(frozenset({"a"}), "shop"))
    other = open_ledger(kube)
    await other.load()
    assert other.reservations == Reservations(frozenset({"a"}), "shop")


async def test_a_write_fails_after_a_write_of_another_agent() -> None:
    kube = FakeKube()
    first, second = open_ledger(kube), open_ledger(kube)
    await first.load()
    await first.write(Reservations(frozenset({"a"})))
    await second.load()
    # Even a write of the same content stops the former leader.
    await second.write(second.reservations)
    with pytest.raises(LedgerLostError):
        await first.write(Reservations(frozenset({"a", "b"})))
    await second.load()
    assert second.reservations.uids == {"a"}


async def test_two_agents_that_find_no_ledger_do_not_both_create_it() -> None:
    kube = FakeKube()
    first, second = open_ledger(kube), open_ledger(kube)
    await first.load()
    await second.load()
    await first.write(Reservations(frozenset({"a"})))
    with pytest.raises(LedgerLostError):
        await second.write(Reservations(frozenset({"b"})))


@pytest.mark.parametrize("what", ["lost", "lost-applied", 500, 503])
@pytest.mark.parametrize("method", ["POST", "PATCH"])
async def test_a_write_without_an_answer_is_resolved(method: str, what: str) -> None:
    kube = FakeKube()
    ledger = open_ledger(kube)
    await ledger.load()
    if method == "PATCH":
        await ledger.write(Reservations())
    kube.fail_next(method, "configmaps", what)  # type: ignore[arg-type] # a table of faults
    await ledger.write(Reservations(frozenset({"a"})))
    await ledger.write(Reservations(frozenset({"a", "b"})))
    assert kube.objects(CONFIG_MAPS)[0]["data"]["uids"] == "a\nb"


async def test_a_write_that_never_gets_an_answer_loses_the_ledger() -> None:
    kube = FakeKube()
    ledger = open_ledger(kube)
    await ledger.load()
    await ledger.write(Reservations())
    kube.fail_next("PATCH", "configmaps", "lost", times=5)
    with pytest.raises(LedgerLostError):
        await ledger.write(Reservations(frozenset({"a"})))


@pytest.mark.parametrize(("status", "expected"), [(403, ForbiddenError), (500, ServerError)])
async def test_a_rejected_write_changes_nothing(status: int, expected: type[Exception]) -> None:
    kube = FakeKube()
    ledger = open_ledger(kube)
    await ledger.load()
    await ledger.write(Reservations(frozenset({"a"})))
    kube.fail_next("PATCH", "configmaps", status, times=5 if status == 500 else 1)
    with pytest.raises(expected):
        await ledger.write(Reservations(frozenset({"a", "b"})))
    assert ledger.reservations.uids == {"a"}
    await ledger.write(Reservations(frozenset({"a", "b"})))


async def test_an_agent_that_is_not_the_leader_writes_nothing() -> None:
    def reject() -> None:
        raise NotLeaderError("no")

    kube = FakeKube()
    ledger = AdmissionLedger(KubeClient(kube, Retry(LoopClock())), "velero", check_leading=reject)
    with pytest.raises(NotLeaderError):
        await ledger.write(Reservations())
    assert kube.requests == []


async def test_the_largest_ledger_fits_into_a_config_map() -> None:
    kube = FakeKube()
    ledger = open_ledger(kube)
    await ledger.load()
    await ledger.write(Reservations(frozenset(f"{number:036d}" for number in range(20_000)), "n" * 63))
    assert len(kube.requests[-1].body or b"") < 1_000_000
