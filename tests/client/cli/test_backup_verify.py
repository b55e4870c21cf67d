"""`nodeagent backup verify`: output, errors, exit codes and completion; the Jobs are those of a fake cluster."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import pytest

from client.cli import backup as backup_commands
from client.collections.models import BackupVolume
from client.session import Session
from client.verifications.report import VerificationReport, VerifiedVolume, describe_volume
from client.verifications.verify import VerificationRequest
from core.models.verification import VerifiedSnapshot
from tests.client.support.commands import SceneShell, assert_document, open_scene
from tests.client.support.restore_scene import FILES, RestoreScene
from tests.client.support.verification_scene import failed, passed
from tests.nodeagent.support.hand_clock import NOON, HandClock
from tests.support.golden import assert_golden_text


@dataclass
class _Shell(SceneShell[RestoreScene]):
    """Runs commands against the scene; `results` by the IDs of snapshots, else they pass."""

    results: dict[str, VerifiedSnapshot] = field(default_factory=dict)
    asked: list[tuple[list[str], VerificationRequest]] = field(default_factory=list)

    async def verify(
        self, tools: Session, volumes: Sequence[BackupVolume], request: VerificationRequest
    ) -> list[VerifiedVolume]:
        self.asked.append(([one.claim for one in volumes], request))
        tools.on_progress("Pod velero/x is running")
        found = [self.results.get(one.snapshot_id) or passed(one.snapshot_id) for one in volumes]
        return [
            describe_volume(one, result, restored=request.restore, at=NOON if result.outcome else None)
            for one, result in zip(volumes, found, strict=True)
        ]


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> _Shell:
    opened = open_scene(RestoreScene(HandClock()), capsys, monkeypatch, "backup", "verify")
    shell = _Shell(capsys, opened.begin, scene=opened.scene)
    monkeypatch.setattr(backup_commands, "verify_volumes", shell.verify)
    return shell


def test_volumes_that_pass_are_a_table_and_exit_code_0(shell: _Shell) -> None:
    done = shell.run("night")
    assert done.code == 0
    assert_golden_text("cli/backup-verify", done.out)
    assert done.err == "preparing the verification of night\nPod velero/x is running\n"
    assert shell.asked == [(["data", "files"], VerificationRequest(100.0, restore=False, timeout=timedelta(hours=6)))]


def test_a_failure_is_named_and_exit_code_1(shell: _Shell) -> None:
    shell.results = {"s1": failed("s1"), "s2": VerifiedSnapshot(id="s2", faults=["no\x1b[2J bucket"], fault_count=1)}
    done = shell.run("night", "-o", "wide")
    assert done.code == 1
    assert_golden_text("cli/backup-verify-failed", done.out)
    assert done.err.splitlines()[-1] == (
        "error: backup night: PVC app/data is failed: sub/first: object 1 is backed by missing blob p1; "
        "and at least 1 more, and 1 more"
    )
    assert "\x1b" not in done.out + done.err


def test_programs_get_a_document_of_the_schema(shell: _Shell) -> None:
    shell.results["s2"] = failed("s2")
    done = shell.run("night", "-o", "json")
    assert done.code == 1
    assert_document("backup-verify", VerificationReport, done.out)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"volumes": "3"}, "Incomplete: not verified: 1 volumes that have no transfer"),
        ({"phase": "Failed"}, "PartiallyFailed: not verified: DataUpload night-files of PVC db/files is Failed"),
    ],
    ids=["missing", "failed"],
)
def test_a_volume_that_is_not_in_the_bucket_is_exit_code_1(change: dict[str, str], why: str, shell: _Shell) -> None:
    shell.scene.put_upload(FILES, "s2", **change)
    done = shell.run("night")
    assert (done.code, done.err.splitlines()[-1]) == (1, f"error: backup night is {why}")
    assert shell.run("night", "--pvc", "app/data").code == 0


def test_options_choose_volumes_share_and_way(shell: _Shell) -> None:
    assert shell.run("night", "--pvc", "app/data", "--percent", "12.5", "--timeout", "1h").code == 0
    done = shell.run("night", "--pvc", "files", "-n", "db", "--restore")
    assert "restored" in done.out
    assert shell.asked == [
        (["data"], VerificationRequest(12.5, restore=False, timeout=timedelta(hours=1))),
        (["files"], VerificationRequest(100.0, restore=True, timeout=timedelta(hours=6))),
    ]
