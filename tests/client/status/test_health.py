"""The rules of health: each has a scene that breaks it and nothing else; and the advice, with a section about it."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from client.status.health import FAILURES, SECTIONS, Health, Rule, advise, is_blocked, judge, worst
from client.status.parse import transfer_record
from client.status.records import TRANSFER_KINDS, copy_of
from core.kube.resources import DAEMON_SETS, LEASES
from core.models.names import BACKUP_ANNOTATION, PVC_NAME_ANNOTATION, SHRUNK_ANNOTATION, VERIFICATION_ANNOTATION
from core.models.reasons import PendingReason
from core.models.verification import Verification, VerificationOutcome
from tests.client.support.status_scene import StatusScene, transfer
from tests.nodeagent.support.hand_clock import NOON
from tests.nodeagent.support.maintenance_scene import repository_object


def _delete_agents(scene: StatusScene) -> None:
    """Take the label away by which agents are found."""
    for node in ("a", "b"):
        scene.put("Pod", f"agent-{node}", "v1")


def _put_repository(scene: StatusScene, **status: Any) -> None:
    scene.kube.put(repository_object("app-default-kopia", **status))


def _put_location(scene: StatusScene, **status: str) -> None:
    storage = {"provider": "aws", "objectStorage": {"bucket": "b"}}
    scene.put("BackupStorageLocation", "default", spec=storage, status=status)


def _put_transfer(scene: StatusScene, phase: str, **status: str) -> None:
    scene.kube.put(transfer("DataUpload", "x", phase, **status))


def _fail_list(scene: StatusScene) -> None:
    scene.kube.fail_next("GET", "/datauploads", 403)


def _put_backups(scene: StatusScene, shrunk: str, *newer: str, acknowledged: str = "") -> None:
    """Put a backup that is Shrunk, and newer ones of the same volume that are not."""
    known = f', "acknowledged": "{acknowledged}"' if acknowledged else ""
    for day, name in enumerate((shrunk, *newer), start=1):
        raw = transfer("DataUpload", name, "Completed")
        marks = {SHRUNK_ANNOTATION: f'{{"bytes": 1, "fullBytes": 100{known}}}'} if name == shrunk else {}
        marks |= {BACKUP_ANNOTATION: "night"}
        raw["metadata"] |= {"annotations": marks, "creationTimestamp": f"2026-11-2{day}T00:00:00Z"}
        scene.kube.put(raw)


def _put_damaged(scene: StatusScene) -> None:
    raw = transfer("DataUpload", "x", "Completed")
    found = Verification(at=NOON, outcome=VerificationOutcome.FAILED).to_json()
    scene.kube.put(raw | {"metadata": raw["metadata"] | {"annotations": {VERIFICATION_ANNOTATION: found}}})


_FAILED = {"completionTimestamp": "2026-11-21T11:00:00Z", "message": "disk full"}
_OVERDUE = {"app-default-kopia": {"hold": "window", "due": "2026-11-21T11:00:00Z", "overdue": True}}
_ERROR = {"queued": 0, "queue": [], "lastError": "409"}
_LACKS = {"message": "definition x lacks y", "warning": True}
_RUN = {"result": "Failed", "message": "no space"}

_SCENES: dict[Rule, tuple[Health, Callable[[StatusScene], object]]] = {
    Rule.NOT_READ: (Health.UNKNOWN, _fail_list),
    Rule.NO_AGENTS: (Health.UNHEALTHY, _delete_agents),
    Rule.AGENTS_NOT_READY: (Health.DEGRADED, lambda scene: scene.put_agent("b", ready=False)),
    Rule.NO_LEADER: (Health.UNHEALTHY, lambda scene: scene.put_lease(renewed="2026-11-21T11:59:00.000000Z")),
    Rule.CONFIG_REJECTED: (Health.DEGRADED, lambda scene: scene.put_config('{"loadConcurrency": 5}')),
    Rule.CONFIG_DIFFERS: (Health.DEGRADED, lambda scene: scene.put_agent("b", config="other")),
    Rule.ADMISSION_FAILS: (Health.UNHEALTHY, lambda scene: scene.answer(queue=_ERROR)),
    Rule.LOCATION_UNAVAILABLE: (Health.UNHEALTHY, lambda scene: _put_location(scene, phase="Unavailable")),
    Rule.LOCATION_NOT_VALIDATED: (Health.UNKNOWN, _put_location),
    Rule.REPOSITORY_NOT_READY: (Health.DEGRADED, lambda scene: _put_repository(scene, phase="NotReady")),
    Rule.FIELDS_DROPPED: (Health.DEGRADED, lambda scene: scene.answer(definitions=_LACKS)),
    Rule.MAINTENANCE_FAILED: (Health.DEGRADED, lambda scene: _put_repository(scene, recentMaintenance=[_RUN])),
    Rule.MAINTENANCE_OVERDUE: (Health.DEGRADED, lambda scene: scene.answer(maintenance=_OVERDUE)),
    Rule.TRANSFERS_BLOCKED: (Health.DEGRADED, lambda scene: _put_transfer(scene, "New", reason="Unschedulable")),
    Rule.TRANSFERS_UNREADABLE: (Health.DEGRADED, lambda scene: _put_transfer(scene, "Odd")),
    Rule.TRANSFERS_FAILED: (Health.DEGRADED, lambda scene: _put_transfer(scene, "Failed", **_FAILED)),
    Rule.BACKUPS_DAMAGED: (Health.DEGRADED, _put_damaged),
    Rule.BACKUPS_SHRUNK: (Health.DEGRADED, lambda scene: _put_backups(scene, "x")),
    Rule.RETENTION_FAILED: (Health.DEGRADED, lambda scene: scene.put_report(failure="clocks differ", waiting=9)),
    Rule.RETENTION_BACKLOG: (Health.DEGRADED, lambda scene: scene.put_report(waiting=10)),
    Rule.RETENTION_OLD_RULES: (Health.DEGRADED, lambda scene: scene.put_old_schedule("nightly")),
}


@pytest.fixture
def scene() -> StatusScene:
    return StatusScene()


async def test_a_cluster_without_faults_or_with_one_of_two_days_ago_is_healthy(scene: StatusScene) -> None:
    scene.put_transfers()
    scene.kube.put(transfer("DataUpload", "x", "Failed", completionTimestamp="2026-11-19T11:00:00Z"))
    assert judge(await scene.reader.read()) == []
    assert worst([]) is Health.HEALTHY


def test_every_rule_has_a_scene() -> None:
    assert set(_SCENES) == set(Rule)


@pytest.mark.parametrize("rule", _SCENES, ids=str)
async def test_each_rule_is_found_alone(scene: StatusScene, rule: Rule) -> None:
    scene.put_transfers()
    health, break_it = _SCENES[rule]
    break_it(scene)
    findings = judge(await scene.reader.read())
    assert [(finding.rule, finding.health) for finding in findings] == [(rule, health)]
    assert worst(findings) is health


async def test_a_volume_whose_newest_backup_is_damaged_is_not_protected(scene: StatusScene) -> None:
    _put_damaged(scene)
    (record,) = (await scene.reader.read()).transfers
    copy = copy_of(record)
    assert copy is not None
    assert (copy.complete, copy.failed) == (False, True)
    assert advise(record).startswith("start a new backup")


async def test_a_shrunk_backup_counts_until_a_newer_one_or_somebody_says_that_it_is_right(scene: StatusScene) -> None:
    _put_backups(scene, "x")
    (finding,) = judge(await scene.reader.read())
    assert finding.message == (
        "the newest backup of app/data, DataUpload velero/x, shrunk: the volume has 1 bytes, and had 100 bytes: "
        "if that is right, run nodeagent backup acknowledge night"
    )
    _put_backups(scene, "x", "y")
    assert judge(await scene.reader.read()) == []
    scene = StatusScene()
    _put_backups(scene, "x", acknowledged="2026-11-21T11:00:00Z")
    assert judge(await scene.reader.read()) == []


@pytest.mark.parametrize("found", [False, True], ids=["here", "found in a bucket"])
async def test_a_shrunk_backup_counts_until_a_newer_one_through_another_pod(scene: StatusScene, found: bool) -> None:
    """A Velero server creates those that it finds in a bucket long after they ended, in any order."""
    for day, pod in enumerate(("web-a", "web-b"), start=1):
        raw = transfer("PodVolumeBackup", pod, "Completed")
        shrunk = {SHRUNK_ANNOTATION: '{"bytes": 1, "fullBytes": 100}'} if day == 1 else {}
        marks = {PVC_NAME_ANNOTATION: "data"} | shrunk
        created = 9 - day if found else day
        raw["metadata"] |= {"annotations": marks, "creationTimestamp": f"2026-11-2{created}T00:00:00Z"}
        raw["status"]["completionTimestamp"] = f"2026-11-2{day}T01:00:00Z"
        raw["spec"]["pod"] |= {"name": pod}
        scene.kube.put(raw)
        messages = [finding.message for finding in judge(await scene.reader.read())]
        assert [one.split(",")[0] for one in messages] == ["the newest backup of app/data"][day - 1 :]


async def test_agents_that_have_no_pod_keep_a_cluster_from_being_healthy(scene: StatusScene) -> None:
    (daemonset,) = scene.kube.objects(DAEMON_SETS)
    scene.kube.put(daemonset | {"status": {"desiredNumberScheduled": 5, "numberReady": 2}})
    (finding,) = judge(await scene.reader.read())
    assert (finding.rule, finding.health) == (Rule.AGENTS_NOT_READY, Health.DEGRADED)
    assert finding.message == "3 of 5 agents are not ready, as their DaemonSet says"


@pytest.mark.parametrize(
    ("renewed", "stamped", "rules"),
    [
        ("2026-11-21T11:50:00.000000Z", "2026-11-21T11:59:55Z", []),
        ("2026-11-21T12:10:00.000000Z", "2026-11-21T11:58:00Z", [Rule.NO_LEADER]),
    ],
    ids=["a leader whose clock is behind", "ahead, and gone"],
)
async def test_the_api_server_s_clock_counts(scene: StatusScene, renewed: str, stamped: str, rules: list[Rule]) -> None:
    scene.put_lease(renewed)
    (lease,) = [one for one in scene.kube.objects(LEASES) if one["metadata"]["name"] == "node-agent-dispatcher"]
    managers = [{"manager": "agent", "time": "2026-11-20T00:00:00Z"}, {"manager": "agent", "time": stamped}]
    scene.kube.put(lease | {"metadata": lease["metadata"] | {"managedFields": managers}})
    assert [finding.rule for finding in judge(await scene.reader.read())] == rules


@pytest.mark.parametrize(
    "change",
    [
        {"holderIdentity": "", "renewTime": "2026-11-21T11:59:55.000000Z"},
        {"holderIdentity": "gone_1", "renewTime": "2026-11-21T11:59:55.000000Z"},
        {"holderIdentity": "a_1"},
    ],
    ids=["no holder", "no agent", "never renewed"],
)
async def test_without_a_leader_that_renews_it_is_unhealthy(scene: StatusScene, change: dict[str, str]) -> None:
    spec = {"leaseDurationSeconds": 15} | change
    scene.put("Lease", "node-agent-dispatcher", "coordination.k8s.io/v1", spec=spec)
    findings = judge(await scene.reader.read())
    assert [finding.rule for finding in findings] == [Rule.NO_LEADER]


@pytest.mark.parametrize(
    "path",
    [
        *(kind.resource.plural for kind in TRANSFER_KINDS),
        "backuprepositories",
        "backupstoragelocations",
        "pods",
        "leases",
        "daemonsets",
        "configmaps",
        "cronjobs",
    ],
)
@pytest.mark.parametrize("status", [403, 404, 500])
async def test_what_cannot_be_read_is_never_healthy(scene: StatusScene, path: str, status: int) -> None:
    scene.kube.fail_next("GET", f"/{path}", status, times=9, message=f"no {path}")
    findings = judge(await scene.reader.read())
    absent = status == 404 and path in {"leases", "daemonsets", "configmaps"}
    assert findings
    assert worst(findings) is not Health.HEALTHY
    assert absent or f"no {path}" in " ".join(finding.message for finding in findings)


async def test_the_worst_finding_comes_first(scene: StatusScene) -> None:
    scene.put_lease(holder="")
    scene.kube.put(transfer("DataUpload", "x", "Failed", **_FAILED))
    _fail_list(scene)
    found = [finding.health for finding in judge(await scene.reader.read())]
    assert found == [Health.UNHEALTHY, Health.UNKNOWN]
    scene.kube.fulfill()
    assert [f.health for f in judge(await scene.reader.read())] == [Health.UNHEALTHY, Health.DEGRADED]


@pytest.mark.parametrize("reason", PendingReason)
def test_a_reason_that_errors_have_is_blocked_and_one_of_the_queue_is_not(reason: PendingReason) -> None:
    record = transfer_record(TRANSFER_KINDS[0], transfer("DataUpload", "x", reason=str(reason)))
    usual = {"Queued", "NodeBusy", "WaitingForSlot", "SnapshotNotReady", "Resuming", "Interrupted", "Scheduling"}
    usual |= {"TargetClaimMissing"}  # a server creates the transfer first
    errors = {"Forbidden", "SnapshotError", "LocationMissing", "NoNodeAgent", "ImagePullBackOff", "StepFailed"}
    if reason in usual:
        assert not is_blocked(record)
    if reason in errors:
        assert is_blocked(record)


_PAGE = (Path(__file__).parents[3] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
_ANCHORS = {
    re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in re.findall(r"(?m)^#+ (.*)", _PAGE)
}
_SHORT = set(re.findall(r"(?m)^\| `(\w+)` \|", _PAGE.partition("## Short-lived reasons")[2].partition("\n## ")[0]))


def _advice(phase: str = "New", **more: str) -> str:
    return advise(transfer_record(TRANSFER_KINDS[0], transfer("DataUpload", "x", phase, **more)))


def _section(name: str) -> str:
    return _PAGE.partition(f"### {name}\n")[2].partition("\n#")[0]


@pytest.mark.parametrize("reason", SECTIONS, ids=str)
def test_a_pending_reason_leads_to_a_section(reason: str) -> None:
    assert SECTIONS[reason] in _ANCHORS
    assert f"docs/troubleshooting.md#{SECTIONS[reason]}" in _advice(reason=str(reason))


def test_each_reason_without_a_section_is_a_short_lived_one() -> None:
    assert set(map(str, PendingReason)) - set(map(str, SECTIONS)) <= _SHORT
    assert "short-lived-reasons" in _ANCHORS


@pytest.mark.parametrize(("words", "section"), FAILURES, ids=lambda value: value)
def test_the_section_about_a_failure_quotes_its_words(words: str, section: str) -> None:
    assert words in _section(section)
    assert _advice("Failed", message=f"x: {words} y").startswith("fix the cause, and create a new transfer")


@pytest.mark.parametrize(
    ("phase", "more", "advice"),
    [
        ("Completed", {}, "nothing: it is complete"),
        ("Canceled", {}, "create a new transfer: a canceled one does not continue"),
        ("Failed", {"message": "odd"}, "fix the cause, and create a new transfer: see docs/troubleshooting.md"),
        ("New", {}, "wait: the leader has not checked it yet"),
        ("InProgress", {}, "wait: it is under way"),
        ("Odd", {}, "correct the field that is named, or delete the transfer: see docs/troubleshooting.md#unreadable"),
    ],
)
def test_each_phase_has_advice(phase: str, more: dict[str, str], advice: str) -> None:
    assert _advice(phase, **more) == advice
