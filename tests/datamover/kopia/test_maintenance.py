"""What kopia recorded of its maintenance, in documents of kopia 0.23.1: what is due, what succeeded, whose it was."""

import fcntl
import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from core.contract import MaintenanceMode
from core.errors import ContractError
from datamover.kopia.causes import find_maintenance_cause
from datamover.kopia.maintenance import (
    Maintenance,
    MaintenanceError,
    MaintenanceInfo,
    Span,
    decide_mode,
    find_foreign_run,
    find_missing_evidence,
    is_full_unfinished,
    parse_full_interval,
)
from datamover.kopia.repository import Repository
from tests.datamover.support.plainkopia import PlainKopia

_RECORDED = Path(__file__).parents[2] / "recordings/kopia-0.23.1"
_NONE, _QUICK, _FULL = MaintenanceMode.NONE, MaintenanceMode.QUICK, MaintenanceMode.FULL

_DAY = timedelta(days=1)
_QUICK_BEGAN = datetime(2026, 11, 23, 1, 43, 17, 958602, UTC)
_FULL_BEGAN = datetime(2026, 11, 23, 1, 43, 18, 248414, UTC)
"""When the runs of the documents began."""

_SOON = _FULL_BEGAN + timedelta(minutes=10)
_KILLED = "2026-11-23T01:50:00.123456789Z"
"""When a run began that recorded nothing, in the changes below."""


def _document(name: str) -> dict[str, Any]:
    return dict(json.loads((_RECORDED / f"maintenance-info-{name}.json").read_text()))


def _info(name: str, **changes: Mapping[str, Any]) -> MaintenanceInfo:
    """Return the document with changed fields of its parts."""
    document = _document(name)
    return MaintenanceInfo.from_wire(document | {part: {**document[part], **new} for part, new in changes.items()})


def _of_next_year(name: str = "full") -> MaintenanceInfo:
    return MaintenanceInfo.from_wire(json.loads(json.dumps(_document(name)).replace("2026-11-2", "2027-11-2")))


def _begun_at(moment: str, *, full: bool) -> dict[str, Any]:
    """Return the changed schedule after a run that began then."""
    began = datetime.fromisoformat(f"{moment[:19]}Z")
    rest = moment[19:]
    due = {"nextQuickMaintenance": f"{(began + timedelta(hours=1)).isoformat()[:19]}{rest}"}
    return due | ({"nextFullMaintenance": f"{(began + _DAY).isoformat()[:19]}{rest}"} if full else {})


def _without(*tasks: str) -> dict[str, Any]:
    return {"runs": {task: runs for task, runs in _document("full")["schedule"]["runs"].items() if task not in tasks}}


_KILLED_FULL = _begun_at(_KILLED, full=True)
_KILLED_QUICK = _begun_at(_KILLED, full=False)
_AHEAD = _begun_at("2026-11-23T03:50:00Z", full=True)
_DISABLED = {"enabled": False}
_NOTHING_DUE = "nothing is due: full maintenance is disabled, quick maintenance is disabled"
_DECISIONS = {
    "never": (_info("never"), _SOON, _FULL, "full maintenance never ran"),
    "never, full is disabled": (_info("never", full=_DISABLED), _SOON, _QUICK, "never ran"),
    "after a quick run": (_info("quick"), _SOON, _FULL, "full maintenance never ran"),
    "after a full": (_info("full"), _SOON, _NONE, "full maintenance is due at 2026-11-24T01:43:18Z"),
    "quick is due": (_info("full"), _FULL_BEGAN + timedelta(hours=1), _QUICK, "due since"),
    "both are due": (_info("full"), _FULL_BEGAN + _DAY, _FULL, "due since"),
    "due, but disabled": (_info("full", full=_DISABLED), _FULL_BEGAN + _DAY, _QUICK, "due since"),
    "both are disabled": (_info("full", full=_DISABLED, quick=_DISABLED), _FULL_BEGAN + _DAY, _NONE, _NOTHING_DUE),
    "a full run failed": (_info("failed"), _SOON, _FULL, "the last full maintenance did not finish"),
    "a killed full": (_info("full", schedule=_KILLED_FULL), _SOON, _FULL, "did not finish"),
    "a killed full, disabled": (_info("full", schedule=_KILLED_FULL, full=_DISABLED), _SOON, _QUICK, "the last quick"),
    "a killed quick": (_info("full", schedule=_KILLED_QUICK), _SOON, _QUICK, "did not finish"),
    "by a clock that was ahead": (_of_next_year(), _SOON, _FULL, "due at 2027-11-24T01:43:18Z, by a clock that was "),
    "refused for a clock that was ahead": (_info("full", schedule=_AHEAD), _SOON, _FULL, "did not finish"),
}


@pytest.mark.parametrize(("info", "now", "mode", "reason"), _DECISIONS.values(), ids=_DECISIONS)
def test_the_mode_is_what_is_due(info: MaintenanceInfo, now: datetime, mode: MaintenanceMode, reason: str) -> None:
    decision = decide_mode(info, now, epochs=True)
    assert decision.mode is mode
    assert reason in decision.reason


@pytest.mark.parametrize(
    ("info", "unfinished"),
    [
        (_info("never"), False),
        (_info("full"), False),
        (_info("full", schedule=_KILLED_QUICK), False),
        (_info("full", schedule=_KILLED_FULL), True),
        (_info("failed"), True),
    ],
)
def test_a_full_run_without_its_last_task_is_unfinished(info: MaintenanceInfo, *, unfinished: bool) -> None:
    assert is_full_unfinished(info) is unfinished


@pytest.mark.parametrize(("epochs", "mode"), [(True, _QUICK), (False, _NONE)])
def test_a_quick_run_of_an_old_format_ends_with_the_logs(*, epochs: bool, mode: MaintenanceMode) -> None:
    info = _info("full", schedule=_without("advance-epoch"))
    assert decide_mode(info, _SOON, epochs=epochs).mode is mode


@pytest.mark.parametrize("next_full", [None, "0001-01-01T00:00:00Z"])
def test_a_schedule_of_nulls_is_that_of_a_repository_without_runs(next_full: str | None) -> None:
    document = {"owner": "default@default", "full": {"enabled": True, "interval": 1}, "quick": None}
    schedule = {"nextFullMaintenance": next_full, "nextQuickMaintenance": None, "runs": None}
    info = MaintenanceInfo.from_wire(document | {"schedule": schedule})
    assert (info.next_full, info.next_quick, info.schedule.runs) == (None, None, {})
    with pytest.raises(ContractError, match="schedule"):
        MaintenanceInfo.from_wire({"schedule": []})
    assert parse_full_interval({"fullMaintenanceInterval": "lazy"}) is None


_NO_COLLECTION, _NO_END = (_info("full", schedule=_without(task)) for task in ("snapshot-gc", "cleanup-logs"))
_SUCCESSES = {
    "full": (_info("full"), _FULL, _FULL_BEGAN, None),
    "a full run is one of the epochs too": (_info("full"), _QUICK, _FULL_BEGAN, None),
    "quick": (_info("quick"), _QUICK, _QUICK_BEGAN, None),
    "quick, not full": (_info("quick"), _FULL, _QUICK_BEGAN, "without a success of snapshot-gc, cleanup-logs"),
    "without collection": (_NO_COLLECTION, _FULL, _FULL_BEGAN, "snapshot-gc"),
    "without an end": (_NO_END, _FULL, _FULL_BEGAN, "cleanup-logs"),
    "nothing new": (_info("full"), _FULL, _SOON, "snapshot-gc, cleanup-logs"),
    "an error": (_info("failed"), _QUICK, _FULL_BEGAN, "compact-single-epoch: maintenance verify contents"),
    "a success of the future": (_of_next_year(), _QUICK, _FULL_BEGAN, "without a success of advance-epoch"),
    "an error of the future": (_of_next_year("failed"), _QUICK, _FULL_BEGAN, "without a success of advance-epoch"),
}


@pytest.mark.parametrize(("info", "mode", "began", "missing"), _SUCCESSES.values(), ids=_SUCCESSES)
def test_a_success_is_recorded(
    info: MaintenanceInfo, mode: MaintenanceMode, began: datetime, missing: str | None
) -> None:
    found = find_missing_evidence(info, mode, began, _SOON, epochs=True)
    assert found is missing is None or (found and missing and missing in found)


def _around(moment: datetime, minutes: int = 5) -> Span:
    return Span(moment - timedelta(minutes=minutes), moment + timedelta(minutes=minutes))


_OLD = _FULL_BEGAN - _DAY
_LATE = _FULL_BEGAN + 2 * _DAY


_RUNS: dict[str, tuple[str, list[Span], bool]] = {
    "no run": ("never", [], False),
    "runs, and no Job is known": ("full", [], True),
    "all within a Job": ("full", [_around(_FULL_BEGAN)], False),
    "after a Job": ("full", [_around(_OLD)], True),
    "before the oldest Job": ("full", [_around(_SOON)], False),
    "between two Jobs": ("full", [_around(_OLD), _around(_SOON)], True),
    "in the second Job": ("full", [_around(_OLD), _around(_FULL_BEGAN)], False),
}


@pytest.mark.parametrize(("name", "known", "foreign"), _RUNS.values(), ids=_RUNS)
def test_a_run_is_foreign_outside_of_the_jobs_of_this_cluster(name: str, known: list[Span], *, foreign: bool) -> None:
    found = find_foreign_run(_info(name), known, _LATE)
    assert found == (datetime(2026, 11, 23, 1, 43, 18, 286284, UTC) if foreign else None)
    # A failed run is foreign too, and one of the future holds nothing until then.
    last = datetime(2026, 11, 23, 1, 43, 19, 647345, UTC)
    assert find_foreign_run(_info("failed"), [Span(_OLD, last - timedelta(milliseconds=1))], _LATE) == last
    assert find_foreign_run(_of_next_year(), [], _LATE) is None


@pytest.mark.parametrize(
    ("hours", "known", "foreign"), [(1, [], True), (7, [], False), (1, [Span(_OLD, _LATE)], False)]
)
def test_a_run_that_has_recorded_nothing_yet_is_foreign(hours: int, known: list[Span], *, foreign: bool) -> None:
    began = _LATE - timedelta(hours=hours)
    due = (began + timedelta(hours=24)).isoformat()
    schedule = {"nextFullMaintenance": due, "runs": None}
    document = {"owner": "a@b", "full": {"enabled": True, "interval": 24 * 3600 * 10**9}, "schedule": schedule}
    found = find_foreign_run(MaintenanceInfo.from_wire(document), known, _LATE)
    assert found == (began if foreign else None)


_SKEW = (
    "error checking for clock skew: clock skew detected: local clock is out of sync with repository timestamp by more "
    "than allowed 5m0s (local: 2026-11-23 01:00:00 +0000 UTC repository: 2026-11-23 02:00:00 +0000 UTC "
    "skew: 1h0m0s). Refusing to run maintenance."
)
_PACKS = [f'missingPack {{"packID":"p{n}","numberOfReferencedContents":300}}' for n in range(5)]


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        ([_SKEW], "clock skew: the clocks of node and storage differ by 1h0m0s"),
        (["maintenance must be run by designated user: a@b"], "not the owner: maintenance belongs to a@b"),
        ([*_PACKS[:1], "the repository is corrupted"], "blob not found: p0"),
        ([*_PACKS, "the repository is corrupted"], "blob not found: p0, p1, p2 and 2 more"),
        (["x", "snapshot GC failure: failed to get blob with ID q1-s2: BLOB not found"], "blob not found: q1-s2"),
        (["dial tcp: connection refused"], "the endpoint cannot be reached: dial tcp: connection refused"),
        (["something else"], None),
    ],
)
def test_the_cause_of_a_failure_is_one_line(lines: list[str], cause: str | None) -> None:
    assert find_maintenance_cause(lines) == cause


@pytest.fixture
async def maintenance(mover_repository: Repository) -> Maintenance:
    await mover_repository.connect()
    return Maintenance(mover_repository)


@pytest.mark.processes
async def test_a_lock_of_another_kopia_is_no_success(maintenance: Maintenance, mover_repository: Repository) -> None:
    """kopia says nothing then, and exits with code 0."""
    lock = mover_repository.work_dir.config_file.with_suffix(".config.mlock")
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(MaintenanceError, match=r"^locked: another kopia of this pod holds the maintenance lock$"):
            await maintenance.run(MaintenanceMode.FULL, epochs=True)
    assert (await maintenance.read_info()).schedule.runs == {}
    await maintenance.run(MaintenanceMode.FULL, epochs=True)


@pytest.mark.processes
async def test_contents_are_counted(maintenance: Maintenance, kopia: PlainKopia, tree: Path, repository: Path) -> None:
    assert await maintenance.count_contents() == 1
    kopia.run("snapshot", "create", str(tree))
    files = [file for file in repository.rglob("*.f") if file.is_file()]
    assert await maintenance.measure_bucket() == (len(files), sum(file.stat().st_size for file in files))
    assert await maintenance.count_contents() > 20
    assert await maintenance.count_index_blobs() == 2
