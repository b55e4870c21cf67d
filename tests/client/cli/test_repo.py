"""`nodeagent repo`: what it prints, its errors and its exit codes."""

import json
import re

import pytest
from msgspec.structs import replace

from client.cli.output import Printer
from client.cli.repo import print_report
from client.repositories import SnapshotList
from core.models.base import JsonDict
from core.snapshot_contract import ReportedSnapshot, SnapshotReport, SnapshotTotal, SnapshotVerdict
from nodeagent.runtime import connection
from tests.client.support.commands import SceneShell, open_scene
from tests.client.support.user_scene import NAME, RECORD, UserScene
from tests.support.fakekube import FakeKube
from tests.support.golden import assert_golden, assert_golden_text

_Shell = SceneShell[UserScene]


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> _Shell:
    return open_scene(UserScene(), capsys, monkeypatch, "repo")


def _fill(scene: UserScene) -> None:
    """Add what makes a page long: history, a pending Job, Events, and a name that tries to move the cursor."""
    times = {"startTimestamp": "2026-11-21T09:59:00Z", "completeTimestamp": "2026-11-21T10:00:30Z"}
    failed = {"result": "Failed", "startTimestamp": "2026-11-21T08:00:00Z", "message": "disk full\x1b[2J\nno"}
    history = [failed, {"result": "Succeeded"} | times]
    orphans = {"reportedAt": "2026-11-20T10:00:00Z", "orphans": {"count": 2, "bytes": 2**20}}
    raw = scene.put_repository(RECORD | orphans, recentMaintenance=history)
    restored = {"at": "2026-11-19T12:00:00Z", "claim": "logs", "outcome": "passed", "tried": "data"}
    restored |= {"job": "2026-11-21T10:00:00Z", "message": "no room\x1b[2J"}
    verified = {
        "at": "2026-11-21T11:30:00Z",
        "outcome": "failed",
        "shares": {str(share): "2026-11-20T12:00:00Z" for share in range(16)},
        "job": "2026-11-21T11:00:00Z",
        "damaged": ["PVC app/data: damaged: backup b2: db/wal: invalid checksum; still right: backup b1"],
        "message": "the storage does not answer\x1b[2J",
        "restoreTests": restored,
    }
    raw["metadata"]["annotations"]["nodeagent.io/verification"] = json.dumps(verified)
    scene.kube.put(raw)
    scene.answer({NAME: {"hold": "job-unfinished", "due": "", "overdue": False}})
    labels = {"velero.io/repo-name": NAME, "nodeagent.io/owner-uid": raw["metadata"]["uid"]}
    scene.put("Job", "job-1", "batch/v1", labels=labels, spec={}, status={"active": 1})
    waiting = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
    status = {"phase": "Pending", "conditions": [waiting]}
    scene.put("Pod", "job-1-x", "v1", labels={"job-name": "job-1"}, status=status)
    event: JsonDict = {"type": "Warning", "reason": "MaintenanceFailed", "message": "\x1b]0;x\x07", "count": 2}
    event |= {"involvedObject": {"uid": raw["metadata"]["uid"]}, "lastTimestamp": "2026-11-21T11:00:00Z"}
    scene.put("Event", "e", "v1", **event)


def test_get_prints_a_row_for_each_repository(shell: _Shell) -> None:
    scene = shell.scene
    scene.put_repository({}, name="db-default-kopia", phase="NotReady", message="no\x1b[2J", lastMaintenanceTime=None)
    for name in ("held", "late", "now", "retry"):
        scene.put_repository(name=f"{name}-default-kopia")
    due = "2026-11-21T09:00:00Z"
    rows = [("app", "not-due", "2026-11-22T11:00:00Z"), ("db", "job-unfinished", ""), ("held", "foreign", "")]
    rows += [("late", "window", due), ("now", "", due), ("retry", "back-off", "2026-11-21T12:05:00Z")]
    answers = {f"{name}-default-kopia": {"hold": hold, "due": at} for name, hold, at in rows}
    scene.answer({name: one | {"overdue": one["hold"] == "window"} for name, one in answers.items()})
    done = shell.run("get")
    assert (done.code, done.err) == (0, "")
    assert_golden_text("cli/repo-get", done.out)
    assert_golden_text("cli/repo-get-wide", shell.run("get", "-o", "wide").out)


def test_describe_prints_everything(shell: _Shell) -> None:
    _fill(shell.scene)
    done = shell.run("describe", NAME)
    assert (done.code, done.err) == (0, "")
    assert_golden_text("cli/repo-describe", done.out)
    assert done.out.replace("\n", "").isprintable()


def test_programs_get_documents(shell: _Shell) -> None:
    _fill(shell.scene)
    found = json.loads(shell.run("get", "-o", "json").out)
    assert_golden("cli/repo-get", found)
    details = shell.run("describe", NAME, "-o", "json").out
    assert_golden("cli/repo-describe", json.loads(details))
    assert details.isascii()


@pytest.mark.parametrize(
    ("hold", "due", "sentence"),
    [
        ("not-due", "2026-11-21T13:00:00Z", "quick run due 2026-11-21T13:00:00Z (in 60m): it is maintained"),
        ("window", "2026-11-21T10:00:00Z", "none now: no window is open; due since 2026-11-21T10:00:00Z (2h ago)"),
        ("off", "", "none now: maintenance is switched off (serve --repo-maintenance=off)"),
        ("", "2026-11-21T12:00:00Z", "quick run is due: the leader is about to start its Job"),
    ],
)
def test_the_next_maintenance_is_a_sentence(shell: _Shell, hold: str, due: str, sentence: str) -> None:
    shell.scene.answer({NAME: {"hold": hold, "due": due, "overdue": False}})
    assert re.findall(r"(?m)^Next maintenance: +(.*)$", shell.run("describe", NAME).out) == [sentence]


def test_without_the_leader_a_note_says_why_and_the_time_is_the_earliest(shell: _Shell) -> None:
    shell.scene.hush()
    done = shell.run("describe", NAME)
    assert done.code == 0
    assert "quick run due 2026-11-21T13:00:00Z (in 60m), at the earliest: it is maintained" in done.out
    assert re.fullmatch(
        r"note: the leader did not answer, so the next maintenance is computed here: .*403.*\n", done.err
    )


def test_the_namespace_is_not_the_one_of_the_kubeconfig(shell: _Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    async def load(*names: object) -> tuple[FakeKube, str]:
        asked.append(names)
        return shell.scene.kube, "app"

    monkeypatch.setattr(connection, "load_transport", load)
    assert NAME in shell.run("get", "--kubeconfig=k", "--kubecontext=c").out
    assert asked == [("k", "c")]


def test_a_malformed_object_is_a_note(shell: _Shell) -> None:
    meta = {"name": "odd\x1b[2J", "namespace": "velero", "uid": "u", "resourceVersion": "1"}
    body = {"metadata": {}, "items": [{"metadata": meta, "spec": 5}]}
    shell.scene.kube.fail_next("GET", "/backuprepositories", json.dumps(body).encode())
    done = shell.run("get")
    assert (done.code, done.out) == (0, "")
    assert r"note: object skipped: malformed BackupRepository velero/odd\x1b[2J" in done.err


def test_report_prints_snapshots_totals_and_commands(capsys: pytest.CaptureFixture[str]) -> None:
    unreferenced, referenced = SnapshotTotal(count=1, bytes=2**20), SnapshotTotal(count=3, bytes=2**30)
    command, source = "kopia snapshot delete k1", "default@default:a\x1b[2J"
    one = ReportedSnapshot(id="k1", verdict=SnapshotVerdict.UNREFERENCED, reason="no Backup", source=source)
    one = replace(one, start="2026-01-01T00:00:00Z", bytes=2**20, command=command)
    other = ReportedSnapshot(id="k2", verdict=SnapshotVerdict.UNKNOWN, reason="no tags")
    totals = SnapshotReport(unreferenced=unreferenced, referenced=referenced)
    found = SnapshotList(repository=NAME, totals=totals, snapshots=[one, other], notes=[])
    print_report(Printer(), found)
    assert_golden_text("cli/repo-report", capsys.readouterr().out)
    print_report(Printer(), found, wide=True)
    assert_golden_text("cli/repo-report-wide", capsys.readouterr().out)


def test_connect_command_reads_secrets_in_the_cluster_that_was_named(shell: _Shell) -> None:
    done = shell.run("connect-command", NAME, "-n", "velero", "--kubecontext", "blue", "--kubeconfig", "/my config")
    assert done.code == 0, done.err
    assert "kubectl --context=blue '--kubeconfig=/my config' get secret velero-repo-credentials" in done.out
