"""The state of each PVC from its backups and plans, what is read of plans, and what is written of their history."""

import asyncio
import base64
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from core.kube.resources import CONFIG_MAPS, CRON_JOBS, PERSISTENT_VOLUME_CLAIMS, SCHEDULES, Resource
from core.models.backups import REPORT_KEY, RetentionReport
from core.models.base import JsonDict
from core.models.names import (
    BACKUP_INTERVAL_ANNOTATION,
    DELETIONS_CONFIGMAP,
    SCHEDULE_LABEL,
    VERIFICATION_INTERVAL_ANNOTATION,
)
from core.models.phases import Phase
from core.models.verification import Verification, VerificationOutcome
from nodeagent.coverage.history import VolumeHistory
from nodeagent.leader.election import NotLeaderError
from nodeagent.leader.index import Entry, VolumeCopy
from nodeagent.leader.volumes.states import (
    Claim,
    HistoryKeeper,
    Plan,
    PlanReader,
    Plans,
    Remembered,
    VolumeState,
    build_states,
)
from tests.nodeagent.support.clusters import build_cluster
from tests.nodeagent.support.dispatching import entry
from tests.support.clock import NOON, LoopClock
from tests.support.fakekube import FakeKube

pytestmark = pytest.mark.looptime

DAY, HOUR = timedelta(days=1), timedelta(hours=1)
WEEK = timedelta(days=7)
BEGIN = datetime(2026, 11, 1, tzinfo=UTC)
NOW = BEGIN + 20 * DAY
CLAIM = ("app", "data")


def backup(day: int, *, claim: str = "data", bytes_: int = 10, schedule: str = "", verified: str = "") -> Entry:
    """A completed backup of so many days after BEGIN; `verified` is an outcome, found on the next day."""
    verification = Verification(at=BEGIN + (day + 1) * DAY, outcome=VerificationOutcome(verified)) if verified else None
    return entry(f"b{day}", copy=VolumeCopy(claim, BEGIN + day * DAY, bytes_, schedule, verification))


def failed(day: int, *, schedule: str = "") -> Entry:
    """A failed backup of so many days after BEGIN."""
    copy = VolumeCopy("data", BEGIN + day * DAY, 0, schedule, None, complete=False)
    return entry(f"f{day}", copy=copy)


def plans(claim: Plan | None = None, **schedules: Plan) -> Plans:
    return Plans(NOW, {CLAIM: Claim(BEGIN, claim or Plan())}, schedules)


def state(entries: list[Entry], known: Plans) -> VolumeState:
    (found,) = build_states(entries, known)
    return found


def day(number: float) -> float:
    return (BEGIN + number * DAY).timestamp()


def test_the_newest_backup_counts_in_whatever_order_they_come() -> None:
    for order in ([1, 3, 2], [3, 2, 1]):
        found = state([backup(number, bytes_=number) for number in order], plans())
        assert (found.namespace, found.claim, found.backup_at, found.bytes) == ("app", "data", day(3), 3)
        assert found.backup_interval is None
        assert found.backup_due_at is None


def test_what_was_completed_within_a_day_is_summed() -> None:
    def done(hours: float, new_bytes: int | None) -> Entry:
        completed = NOW - hours * HOUR
        copy = VolumeCopy("data", completed, 5, "", None, completed=completed, new_bytes=new_bytes, seconds=60.0)
        return entry(f"b{hours}", copy=copy)

    found = state([done(25, 7), done(23, 3), done(2, None), done(-0.1, 4), failed(19)], plans())
    assert (found.day_new_bytes, found.day_seconds) == (7, 180.0)
    gap = state([done(25, 7)], plans())
    assert (gap.day_new_bytes, gap.day_seconds) == (None, None)


def test_a_volume_is_shrunk_while_its_newest_backup_is() -> None:
    shrunk = entry("b2", copy=VolumeCopy("data", BEGIN + 2 * DAY, 1, "", None, shrunk=True))
    assert state([backup(1), shrunk], plans()).shrunk is True
    assert state([backup(1), shrunk, backup(3)], plans()).shrunk is None


@pytest.mark.parametrize(
    ("known", "interval"),
    [
        pytest.param(plans(Plan(WEEK)), WEEK, id="of the PVC"),
        pytest.param(plans(Plan(WEEK), nightly=Plan(DAY)), DAY, id="of the schedule first"),
        pytest.param(plans(Plan(WEEK), nightly=Plan(None)), WEEK, id="of a schedule that has none"),
        pytest.param(plans(weekly=Plan(WEEK)), None, id="of another schedule"),
    ],
)
def test_a_backup_is_due_one_interval_after_the_last_one(known: Plans, interval: timedelta | None) -> None:
    found = state([backup(2, schedule="nightly")], known)
    assert found.backup_interval == (interval and interval.total_seconds())
    assert found.backup_due_at == (interval and day(2) + interval.total_seconds())


def test_the_shortest_interval_counts_of_the_schedules_that_still_exist() -> None:
    known = plans(weekly=Plan(WEEK, DAY), nightly=Plan(DAY, WEEK))
    entries = [backup(1, schedule="nightly"), backup(2, schedule="weekly"), backup(3, schedule="deleted")]
    found = state(entries, known)
    assert (found.backup_interval, found.verification_interval) == (DAY.total_seconds(), DAY.total_seconds())
    assert found.backup_due_at == day(4)


def test_the_first_backup_is_due_one_interval_after_the_creation_of_the_pvc() -> None:
    found = state([], plans(Plan(DAY)))
    assert (found.backup_at, found.backup_interval, found.backup_due_at) == (None, DAY.total_seconds(), day(1))


def test_backups_of_a_deleted_pvc_of_the_same_name_say_only_which_schedule_there_is() -> None:
    known = Plans(NOW, {CLAIM: Claim(BEGIN + 2 * DAY, Plan(WEEK))}, {"nightly": Plan(DAY)})
    damaged = Verification(at=BEGIN + DAY, outcome=VerificationOutcome.FAILED)
    shrunk = entry("b1", copy=VolumeCopy("data", BEGIN + DAY, 10, "nightly", damaged, shrunk=True))
    assert state([shrunk], known) == VolumeState(*CLAIM, backup_interval=DAY.total_seconds(), backup_due_at=day(3))
    assert state([shrunk, backup(2)], known).backup_due_at == day(3)


def test_backups_of_another_cluster_do_not_count() -> None:
    known = Plans(NOW, {CLAIM: Claim(BEGIN, Plan(WEEK), "here")}, {})
    own, other = (
        entry(uid, copy=VolumeCopy("data", BEGIN + at * DAY, 10, None, None, claim_uid=uid))
        for at, uid in ((2, "here"), (3, "elsewhere"))
    )
    assert state([other], known).backup_at is None
    assert state([own, other], known).backup_at == day(2)


def test_without_a_complete_backup_or_an_interval_there_is_no_state() -> None:
    unmanaged = entry("other", managed=False, copy=backup(1).copy)
    assert build_states([unmanaged, entry("running"), failed(2)], plans(Plan(None, WEEK))) == []


def test_a_deleted_pvc_has_no_state_and_a_younger_one_than_the_list_has() -> None:
    gone, young = backup(1, claim="gone"), backup(21, claim="young")
    assert [found.claim for found in build_states([gone, young], plans())] == ["young"]
    unknown = Plans(NOW, None)
    assert {found.claim for found in build_states([gone, young], unknown)} == {"gone", "young"}


@pytest.mark.parametrize("outcomes", [("failed", "passed"), ("passed", "failed")])
def test_the_last_verification_counts_of_whichever_backup(outcomes: tuple[str, str]) -> None:
    entries = [*(backup(number, verified=outcome) for number, outcome in enumerate(outcomes, 1)), backup(3)]
    for order in (entries, entries[::-1]):
        found = state(order, plans(Plan(None, WEEK)))
        assert (found.backup_at, found.verified_at, found.verified_ok) == (day(3), day(3), outcomes[1] == "passed")
        assert (found.verification_interval, found.verification_due_at) == (WEEK.total_seconds(), day(10))


def test_of_copies_that_were_verified_at_once_a_damaged_one_counts() -> None:
    right, wrong = (
        entry(outcome, copy=VolumeCopy("data", BEGIN, 10, "", Verification(at=NOW, outcome=outcome)))
        for outcome in (VerificationOutcome.PASSED, VerificationOutcome.FAILED)
    )
    assert {state(order, plans()).verified_ok for order in ([right, wrong, right], [wrong, right])} == {False}


@pytest.mark.parametrize(("claim", "interval"), [(WEEK, WEEK), (3 * WEEK, 2 * WEEK), (None, 2 * WEEK)])
def test_the_leaders_period_counts_unless_another_is_shorter(claim: timedelta | None, interval: timedelta) -> None:
    known = replace(plans(Plan(None, claim)), verification=2 * WEEK)
    found = state([backup(3, verified="passed")], known)
    assert (found.verification_interval, found.verification_due_at) == (
        interval.total_seconds(),
        day(4 + interval.days),
    )


def test_the_first_verification_is_due_one_interval_after_the_first_complete_backup() -> None:
    found = state([backup(3), backup(5), failed(1)], plans(Plan(None, WEEK)))
    assert (found.verified_at, found.verified_ok, found.verification_due_at) == (None, None, day(10))


def test_backups_that_expire_sooner_than_they_are_verified_do_not_put_the_verification_off() -> None:
    memory: dict[tuple[str, str], Remembered] = {}
    known = plans(Plan(None, WEEK))
    build_states([backup(3), backup(4)], known, memory)
    (found,) = build_states([backup(12)], known, memory)
    assert found.verification_due_at == day(10)
    build_states([backup(12, verified="passed")], known, memory)
    (found,) = build_states([backup(15)], known, memory)
    assert (found.verified_ok, found.verification_due_at) == (True, day(20))


def test_nothing_is_remembered_of_a_deleted_pvc() -> None:
    memory: dict[tuple[str, str], Remembered] = {}
    build_states([backup(3)], plans(), memory)
    build_states([], Plans(NOW, {}), memory)
    assert memory == {}
    build_states([backup(3, verified="passed")], plans(), memory)
    build_states([backup(3)], Plans(NOW, {CLAIM: Claim(BEGIN + 4 * DAY, Plan(WEEK))}), memory)
    assert memory == {}


def test_a_volume_whose_scheduled_backups_all_failed_has_a_due_backup() -> None:
    known = plans(nightly=Plan(DAY, WEEK))
    found = state([failed(5, schedule="nightly"), failed(6, schedule="nightly")], known)
    assert (found.backup_at, found.bytes, found.verification_due_at) == (None, None, None)
    assert (found.backup_interval, found.backup_due_at) == (DAY.total_seconds(), day(1))
    found = state([failed(5, schedule="nightly")], Plans(NOW, None, {"nightly": Plan(DAY)}))
    assert found.backup_due_at == day(6)
    found = state([backup(2, schedule="nightly"), failed(3, schedule="nightly")], known)
    assert (found.backup_at, found.backup_due_at) == (day(2), day(3))


READ_AT = datetime(2026, 11, 21, 12, tzinfo=UTC)


def an_object(resource: Resource, name: str, spec: JsonDict, **meta: object) -> JsonDict:
    namespace = "app" if resource is PERSISTENT_VOLUME_CLAIMS else "velero"
    return {
        "apiVersion": resource.api_version,
        "kind": resource.kind,
        "metadata": {"name": name, "namespace": namespace, "creationTimestamp": "2026-11-01T00:00:00Z"} | meta,
        "spec": spec,
    }


def deletions(report: str) -> JsonDict:
    meta = {"name": DELETIONS_CONFIGMAP, "namespace": "velero"}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": {REPORT_KEY: report}}


def reader(kube: FakeKube) -> PlanReader:
    return PlanReader(kube.client, "velero", lambda: READ_AT)


async def test_annotations_of_pvcs_are_read_and_invalid_ones_ignored() -> None:
    kube = FakeKube()
    asked = {BACKUP_INTERVAL_ANNOTATION: "24h", VERIFICATION_INTERVAL_ANNOTATION: "168h"}
    kube.put(an_object(PERSISTENT_VOLUME_CLAIMS, "data", {}, annotations=asked))
    kube.put(an_object(PERSISTENT_VOLUME_CLAIMS, "plain", {}))
    for number, text in enumerate(("daily", "0s", "-1h")):
        kube.put(
            an_object(PERSISTENT_VOLUME_CLAIMS, f"odd-{number}", {}, annotations={BACKUP_INTERVAL_ANNOTATION: text})
        )
    plans = await reader(kube).read()
    assert plans.read_at == READ_AT
    assert plans.claims is not None
    assert plans.claims["app", "data"].plan == Plan(DAY, 7 * DAY)
    others = {key: claim.plan for key, claim in plans.claims.items() if key != ("app", "data")}
    assert others == {("app", name): Plan() for name in ("plain", "odd-0", "odd-1", "odd-2")}


async def test_schedules_and_labeled_cron_jobs_have_plans_unless_they_are_paused() -> None:
    kube = FakeKube()
    verify = {VERIFICATION_INTERVAL_ANNOTATION: "48h"}
    kube.put(an_object(SCHEDULES, "nightly", {"schedule": "0 2 * * *"}, annotations=verify))
    kube.put(an_object(SCHEDULES, "paused", {"schedule": "0 2 * * *", "paused": True}))
    kube.put(an_object(SCHEDULES, "odd", {"schedule": "whenever"}))
    ours, zone = {SCHEDULE_LABEL: "hourly"}, {"timeZone": "Europe/Berlin"}
    kube.put(an_object(CRON_JOBS, "a", {"schedule": "0 * * * *"} | zone, labels=ours))
    kube.put(an_object(CRON_JOBS, "b", {"schedule": "@daily", "suspend": True}, labels={SCHEDULE_LABEL: "suspended"}))
    kube.put(an_object(CRON_JOBS, "c", {"schedule": "@daily"}))
    plans = await reader(kube).read()
    assert plans.schedules == {"nightly": Plan(DAY, 2 * DAY), "odd": Plan(), "hourly": Plan(HOUR)}


async def test_objects_without_the_form_of_their_kind_are_left_out() -> None:
    kube = FakeKube()
    kube.put(an_object(PERSISTENT_VOLUME_CLAIMS, "young", {}, creationTimestamp="yesterday"))
    kube.put(an_object(PERSISTENT_VOLUME_CLAIMS, "odd", {}, annotations={BACKUP_INTERVAL_ANNOTATION: 24}))
    kube.put(an_object(SCHEDULES, "odd", {"schedule": 24}))
    kube.put(an_object(CRON_JOBS, "odd", {"schedule": "@daily", "suspend": "no"}, labels={SCHEDULE_LABEL: "odd"}))
    plans = await reader(kube).read()
    assert (plans.claims, plans.schedules) == ({}, {})
    kube.put(deletions("no report"))
    assert (await reader(kube).read()).report is None


async def test_without_permission_nothing_is_known_and_after_an_error_what_was_read_last() -> None:
    kube = FakeKube()
    kube.put(an_object(PERSISTENT_VOLUME_CLAIMS, "data", {}))
    kube.put(an_object(SCHEDULES, "nightly", {"schedule": "0 2 * * *"}))
    kube.put(deletions(RetentionReport(at=READ_AT).to_json()))
    plans = reader(kube)
    first = await plans.read()
    assert first.report == RetentionReport(at=READ_AT)
    for status, kept in ((500, True), (403, False)):
        for path in ("/persistentvolumeclaims", "/schedules", "/configmaps"):
            kube.fail_next("GET", path, status, times=20)
        found = await plans.read()
        kube.fulfill()
        known = (found.claims, dict(found.schedules), found.report)
        assert known == ((first.claims, first.schedules, first.report) if kept else (None, {}, None))


def ended(name: str, days: int = 0, *, complete: bool = True) -> Entry:
    """A backup that ended so many days before NOON."""
    at = NOON - days * DAY
    return entry(
        name, phase=Phase.COMPLETED, copy=VolumeCopy("data", at, 100, "", None, complete, completed=at, new_bytes=1)
    )


@asynccontextmanager
async def keeping(kube: FakeKube, *entries: Entry, lost: Sequence[str] = ()) -> AsyncIterator[HistoryKeeper]:
    """Run a leader that finds the entries; with `lost`, it has lost the Lease when it is to write."""

    def check() -> None:
        if lost:
            raise NotLeaderError(lost[0])

    cluster = build_cluster(kube.client, LoopClock(), check_leading=check)
    keeper = HistoryKeeper(cluster, "velero", entries=lambda: entries)
    task = asyncio.create_task(keeper.run(), name="keeper")
    try:
        yield keeper
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def history_of(kube: FakeKube) -> VolumeHistory:
    """Return what all leaders have written until NOON."""
    stored = (one["binaryData"]["days"] for one in kube.objects(CONFIG_MAPS) if "binaryData" in one)
    return VolumeHistory(map(base64.b64decode, stored), NOON.toordinal())


def counted(kube: FakeKube) -> list[float]:
    """Return how many backups each day with some has, the oldest first: each had one new byte."""
    return [one.new_bytes for one in history_of(kube).of(("app", "data")) if one.new_bytes is not None]


async def test_what_ended_before_and_what_ends_later_is_counted_once_by_all_leaders() -> None:
    kube = FakeKube()
    first = [ended("a"), ended("b", 1), ended("c", 40), ended("older", 100), ended("failed", complete=False)]
    async with keeping(kube, *first) as keeper:
        await asyncio.sleep(1)
        assert counted(kube) == [1, 1, 1]
        keeper.observe(ended("d"))
        # It was deleted before the history is written.
        keeper.observe(ended("d"))
        await asyncio.sleep(61)
        assert counted(kube) == [1, 1, 2]
        sent = len(kube.requests)
        for one in (ended("a"), ended("d"), ended("c", 40)):
            keeper.observe(one)
        await asyncio.sleep(600)
        assert len(kube.requests) == sent
    async with keeping(kube, ended("a"), ended("d"), ended("e")):
        await asyncio.sleep(1)
    assert counted(kube) == [1, 1, 3]


async def test_without_permission_nothing_is_lost_and_a_warning_says_why(caplog: pytest.LogCaptureFixture) -> None:
    kube = FakeKube()
    kube.fail_next("POST", "/configmaps", 403, message="no", times=3)
    async with keeping(kube, ended("a")) as keeper:
        await asyncio.sleep(30)
        keeper.observe(ended("b"))
        await asyncio.sleep(3600)
        assert counted(kube) == [2]
    warnings = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert [text.partition(":")[0] for text in warnings] == ["cannot write the history of backups, will retry"]


async def test_a_write_of_another_leader_is_merged_and_a_leader_without_the_lease_writes_nothing() -> None:
    kube = FakeKube()
    async with keeping(kube, ended("a")):
        await asyncio.sleep(1)
    kube.fail_next("PATCH", "/configmaps", 409)
    async with keeping(kube, ended("b")):
        await asyncio.sleep(1)
        assert counted(kube) == [1]
        await asyncio.sleep(120)
    assert counted(kube) == [2]
    async with keeping(kube, ended("c"), lost=["gone"]):
        await asyncio.sleep(600)
    assert counted(kube) == [2]
