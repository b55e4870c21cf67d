"""What a maintenance pod checks before kopia runs, and how its failure is reported. There is no kopia here."""

import asyncio
from pathlib import Path
from typing import Final

import pytest

from core.contract import TERMINATION_MESSAGE_LIMIT_BYTES, shorten_message
from core.errors import AgentError, CanceledError, KopiaError
from core.kube.resources import BACKUP_REPOSITORIES, BACKUP_STORAGE_LOCATIONS, JOBS
from core.models.names import REPO_NAME_LABEL
from core.redact import Redactor
from datamover.pod.maintenance import build_maintenance_failure
from tests.datamover.support.pods import JOB, REPOSITORY, MoverPod
from tests.support.clock import LoopClock
from tests.support.fakekube import FakeKube

pytestmark = pytest.mark.looptime

_ERROR: Final = "Repo maintenance error: "


@pytest.fixture
def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MoverPod:
    """A pod whose location is read-only, and whose Job is not released."""
    monkeypatch.setenv("PATH", str(tmp_path))
    clock = LoopClock()
    pod = MoverPod(FakeKube(clock), tmp_path, clock)
    pod.put_location({}, accessMode="ReadOnly")
    pod.put_repository(phase="Ready")
    pod.put_job(released=False)
    return pod


@pytest.mark.parametrize(
    ("event", "seconds", "cause"),
    [
        ("release", 590, "BackupStorageLocation default is read-only"),
        ("deletion", 5, f"Job velero/{JOB} does not exist"),
        ("signal", 5, "the data mover was stopped by SIGTERM"),
        ("", 600, f"Job velero/{JOB} has no label {REPO_NAME_LABEL} after 10m0s: no leader released it"),
    ],
)
async def test_the_release_is_awaited(pod: MoverPod, looptime: float, event: str, seconds: int, cause: str) -> None:
    """What the next check finds after the Job is released: its location is read-only."""
    async with asyncio.TaskGroup() as group:
        running = group.create_task(pod.maintain())
        await asyncio.sleep(min(seconds, 590))
        assert not running.done()
        if event == "release":
            pod.put_job()
        elif event == "deletion":
            await pod.context.client.delete(JOBS, "velero", JOB)
        elif event == "signal":
            pod.signal()
    assert (running.result(), pod.message) == (1, f"{_ERROR}{cause}")
    assert seconds <= looptime < seconds + 1


async def test_what_must_not_be_maintained_is_named(pod: MoverPod) -> None:
    pod.put_job()
    pod.put_location({})
    (location,) = pod.stored(BACKUP_STORAGE_LOCATIONS)
    pod.kube.put(location | {"status": {"phase": "Unavailable", "message": "the bucket does not exist"}})
    assert await pod.maintain() == 1
    assert pod.message == f"{_ERROR}BackupStorageLocation default is unavailable: the bucket does not exist"
    await pod.context.client.delete(BACKUP_REPOSITORIES, "velero", REPOSITORY)
    assert await pod.maintain() == 1
    assert pod.message == f"{_ERROR}BackupRepository velero/{REPOSITORY} does not exist"
    meta = {"namespace": "velero", "name": "velero"}
    pod.kube.put({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": meta, "spec": {"replicas": 0}})
    assert await pod.maintain() == 1
    assert pod.message == f"{_ERROR}a Velero server is in namespace velero: it does the maintenance"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (KopiaError("cause\nline 1\nline 2"), f"line 1\nline 2\n{_ERROR}cause"),
        (AgentError(""), _ERROR),
        (CanceledError("stopped: data path is canceled"), f"{_ERROR}stopped"),
        (ValueError("a-secret is wrong"), f"{_ERROR}unexpected ValueError: *** is wrong"),
    ],
    ids=["lines", "empty", "canceled", "defect"],
)
async def test_a_failure_ends_in_its_cause_which_keeps_its_beginning(error: Exception, message: str) -> None:
    termination = build_maintenance_failure(error, Redactor(["a-secret"]))
    assert (termination.message, termination.exit_code) == (message, 1)
    long = AgentError("\n".join(["c" * 10_000, *["l" * 1000] * 12]))
    message = shorten_message(build_maintenance_failure(long, Redactor()).message)
    assert len(message.encode()) <= TERMINATION_MESSAGE_LIMIT_BYTES
    assert message.rpartition("\n")[2] == f"{_ERROR}{'c' * 1000}"
