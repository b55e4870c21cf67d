"""`nodeagent status`: what it prints, its errors and its exit codes."""

import json
import re
from datetime import timedelta

import pytest

from client.cli import status as status_module
from client.cli.output import OutputFormat
from client.cli.status import summarize
from client.status.records import ClusterSnapshot, Unread, UnreadPart
from client.status.view import StatusView
from core.models.backups import HeldBackup
from tests.client.support.commands import Shell, assert_document
from tests.client.support.status_scene import StatusScene, transfer
from tests.nodeagent.support.hand_clock import NOON
from tests.nodeagent.support.maintenance_scene import repository_object
from tests.support.clock import LoopClock
from tests.support.golden import assert_golden_text


def _break(scene: StatusScene) -> None:
    """Break many things, with names and messages that try to move the cursor."""
    scene.put_agent("b", ready=False)
    scene.put_agent("c", config="0ther")
    scene.put_lease(renewed="2026-11-21T11:00:00.000000Z")
    failed = {"completionTimestamp": "2026-11-21T11:30:00Z", "message": "disk full\x1b[2J\nno\u202e"}
    scene.kube.put(transfer("PodVolumeRestore", "failed", "Failed", **failed))
    long = "0/3 nodes are available: " + "3 Insufficient cpu, " * 9
    scene.kube.put(transfer("DataUpload", "blocked", "Accepted", reason="Unschedulable", message=long, node="a"))
    scene.kube.put(repository_object("db-default-kopia", phase="NotReady", message="wrong password\x07"))
    for number in range(20):
        scene.kube.put(transfer("PodVolumeBackup", f"more-{number:02}", reason="NodeBusy", message="busy"))
    why = "the newest transfer of app/data did not complete: its newest three copies stay\x1b[2J"
    claim = {"namespace": "app", "claim": "data", "location": "default", "created": "2026-10-12T12:00:00Z"}
    held = {"backup": "nightly-1", "rule": "failing-volume", "reason": why, "bytes": 3 * 2**30, **claim}
    one = HeldBackup.from_json(json.dumps(held | {"command": "nodeagent backup delete nightly-1"}))
    through = NOON + timedelta(days=4)
    scene.put_report(held=[one], held_count=1, waiting=25, waiting_why="ttl shortened", through=through, failure="409")
    scene.put_old_schedule("nightly")
    scene.put_old_schedule("weekly")


def test_a_cluster_with_faults(scene: StatusScene, shell: Shell) -> None:
    _break(scene)
    done = shell.run("status")
    assert (done.code, done.err) == (0, "")
    assert_golden_text("cli/status-faults", done.out)
    wide = shell.run("status", "-o", "wide").out
    assert_golden_text("cli/status-faults-wide", wide)
    assert wide.replace("\n", "").isprintable()


def test_programs_get_a_document_of_the_schema(scene: StatusScene, shell: Shell) -> None:
    _break(scene)
    assert_document("status", StatusView, shell.run("status", "-o", "json").out)


def test_without_the_permission_to_ask_the_leader_its_errors_are_not_known(scene: StatusScene, shell: Shell) -> None:
    scene.hush()
    done = shell.run("status")
    assert done.code == 0
    assert done.out.startswith("UNKNOWN: ")
    assert "unknown: whether admission fails is not known: " in done.out
    assert re.search(r"(?m)^Queue: +3 queued, computed here", done.out)
    assert re.fullmatch(r"note: the leader did not answer, so positions .* get /status of Pod .*403.*\n", done.err)


@pytest.mark.parametrize("words", [[], ["-w"], ["--wait-idle"]], ids=["once", "watch", "wait"])
def test_without_a_cluster_one_line_says_so(scene: StatusScene, shell: Shell, words: list[str]) -> None:
    scene.kube.fail_next("GET", "/", "lost", times=99)
    done = shell.run("status", *words)
    assert (done.code, done.out) == (2, "")
    assert "error: the cluster cannot be reached: GET /" in done.err


class TestWaiting:
    """`--wait-idle` and `--watch`, with short pauses."""

    @pytest.fixture(autouse=True)
    def _clock(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(status_module, "SystemClock", LoopClock)
        monkeypatch.setattr(status_module, "_REDRAW_SECONDS", 0.01)
        monkeypatch.setattr(status_module, "_QUIET_SECONDS", 0.01)

    def test_an_idle_cluster_ends_at_once(self, scene: StatusScene, shell: Shell) -> None:
        for kind in ("DataUpload", "PodVolumeBackup"):
            for name in ("moving", "ready", "first", "second", "third"):
                scene.kube.put(transfer(kind, name, "Completed"))
        done = shell.run("status", "--wait-idle", "-o", "json")
        assert done.code == 0
        assert json.loads(done.out)["transfers"] == []

    def test_it_ends_with_the_last_transfer(
        self, scene: StatusScene, shell: Shell, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        shown = list[str]()

        def finish(view: StatusView) -> str:
            shown.append(view.health)
            if len(shown) == 2:
                left = [(row.kind, row.name) for row in view.transfers] + [(row.kind, row.name) for row in view.pending]
                for kind, name in left:
                    scene.kube.put(transfer(kind, name, "Completed"))
            return summarize(view)

        monkeypatch.setattr(status_module, "summarize", finish)
        done = shell.run("status", "--wait-idle")
        assert done.code == 0
        assert len(shown) >= 2
        assert "6 Completed" in done.out
        assert done.err.startswith("waiting until no transfer is left\nhealthy: 2 of 2 agents ready; transfers: 3 New")

    def test_a_cluster_that_is_not_idle_or_not_known_to_be_is_an_error(self, scene: StatusScene, shell: Shell) -> None:
        done = shell.run("status", "-w", "--wait-idle", "--timeout", "50ms")
        states = "3 New, 1 Prepared, 1 InProgress, 1 Completed"
        assert (done.code, done.out) == (1, f"healthy: 2 of 2 agents ready; transfers: {states}\n")
        assert re.search(r"(?m)^error: not idle within 0s: \w+ velero/\w+ and 4 more$", done.err)
        scene.kube.put(transfer("DataUpload", "odd", "Odd"))
        assert (
            "so it is not known whether any is left: DataUpload velero/odd: " in shell.run("status", "--wait-idle").err
        )
        scene.kube.fail_next("GET", "/datauploads", 403, times=99)
        done = shell.run("status", "--wait-idle")
        assert (done.code, done.out) == (1, "")
        assert "error: transfers cannot be read, so it is not known whether any is left: list DataUpload" in done.err


def test_a_list_that_is_rejected_is_an_error_beside_a_watch_that_is_opened_again() -> None:
    unread = (Unread(UnreadPart.TRANSFERS, "closed", passing=True), Unread(UnreadPart.TRANSFERS, "forbidden"))
    options = status_module._Options(OutputFormat.TABLE, watch=False, wait_idle=True, timeout=None)
    with pytest.raises(status_module.NotIdleError, match=r"is left: forbidden$"):
        status_module._is_done(ClusterSnapshot("velero", NOON, unread=unread), options, None)
