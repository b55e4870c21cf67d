"""A cancel, by the custom resource or by a signal, is honored within two seconds in every step."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import Mock

import pytest

from core.errors import AgentError, DataPathError, FencedError, StorageOutageError
from core.models.base import JsonDict
from datamover.data_path.backup import _Backup
from datamover.kopia.backup_process import MoverBackup
from datamover.kopia.progress import Meter
from datamover.pod.follower import TransferFollower
from datamover.pod.reporting import Reporter
from datamover.runtime.cancellation import Canceler
from tests.datamover.support.backup_movers import BACKUP_VERB, ONE_OPEN
from tests.datamover.support.plainkopia import PlainKopia
from tests.datamover.support.pods import FLAGS, MoverPod
from tests.datamover.support.unconfined import put_program

pytestmark = pytest.mark.processes

_SOURCE = "snapshot-data-upload-download/kopia/app/data"
_UNREADABLE = Path("/proc/sys/net/ipv4/route")
"""A directory whose file `flush` cannot be read: kopia keeps an incomplete snapshot of it."""


@dataclass(frozen=True)
class _Transfer:
    """A transfer in its pod; the file `started` exists once it has reached the step where it is held."""

    pod: MoverPod
    kind: str
    spec: dict[str, str]
    started: Path

    def put(self, phase: str = "InProgress", **more: bool) -> None:
        self.pod.put_transfer(self.kind, phase, **self.spec, **more)

    def cancel(self) -> None:
        self.put(cancel=True)

    def signal(self) -> None:
        self.pod.signal()

    async def ends_canceled(
        self, volume: Path, *, held: Callable[[], bool], end: Callable[["_Transfer"], None]
    ) -> None:
        """Run it, cancel it once `held` is true, and check how it ended."""
        pod = self.pod
        async with asyncio.TaskGroup() as group:
            running = group.create_task(pod.run(FLAGS[self.kind], volume))
            await pod.wait_for(held)
            assert not running.done()
            end(self)
            async with asyncio.timeout(2):
                await asyncio.shield(running)
        assert running.result() == 14
        assert pod.message.endswith("data path is canceled")


@pytest.fixture
def upload(pod: MoverPod, tmp_path: Path) -> _Transfer:
    return _Transfer(pod, "DataUpload", {}, tmp_path / "started")


@pytest.fixture
def download(pod: MoverPod, tree: Path, tmp_path: Path, plain_kopia: PlainKopia) -> _Transfer:
    snapshot_id = plain_kopia.snapshot(tree, "--pin=velero-pin", source=_SOURCE)
    return _Transfer(pod, "DataDownload", {"snapshotID": snapshot_id}, tmp_path / "started")


def _hold(transfer: _Transfer, program: str, arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let calls of a program whose arguments contain `arguments` start and never exit."""
    script = f'case " $* " in *" {arguments} "*) : >{transfer.started}; exec sleep 1000;; esac\nexec PROGRAM "$@"'
    path = put_program(transfer.started.parent, script, monkeypatch, program)
    if program == "sync":
        monkeypatch.setattr("datamover.runtime.child._SYNC", (str(path),))


_ENDS = pytest.mark.parametrize("end", [_Transfer.cancel, _Transfer.signal], ids=["spec.cancel", "SIGTERM"])


@_ENDS
@pytest.mark.parametrize(("phase", "repository"), [("Prepared", "Ready"), ("InProgress", "New")], ids=["start", "repo"])
async def test_cancel_while_waiting_for_the_start_or_for_the_repository(
    upload: _Transfer, tree: Path, end: Callable[[_Transfer], None], phase: str, repository: str
) -> None:
    pod = upload.pod
    pod.put_repository(phase=repository)
    upload.put(phase)

    def held() -> bool:
        waits = "Data-Path-Waiting" in pod.reasons()
        return waits if phase == "InProgress" else any("watch" in one.query for one in pod.kube.requests)

    await upload.ends_canceled(tree, held=held, end=end)
    assert bool(pod.events()) is (phase == "InProgress")


@pytest.mark.sample("policy set-spec.cancel", "snapshot delete-spec.cancel", "snapshot create-*")
@_ENDS
@pytest.mark.parametrize(
    "arguments",
    [BACKUP_VERB] if ONE_OPEN else ["policy show", "policy set", "snapshot list", "snapshot delete", BACKUP_VERB],
)
async def test_cancel_in_each_step_of_a_backup(
    upload: _Transfer,
    plain_kopia: PlainKopia,
    monkeypatch: pytest.MonkeyPatch,
    arguments: str,
    end: Callable[[_Transfer], None],
) -> None:
    """`snapshot delete` deletes the checkpoint of an earlier backup."""
    flags = (f"--override-source=default@default:{_SOURCE}", "--fail-fast")
    plain_kopia.run("snapshot", "create", str(_UNREADABLE), *flags, fails=True)
    _hold(upload, "kopia", arguments, monkeypatch)
    upload.put()
    await upload.ends_canceled(upload.pod.folder / "backups", held=upload.started.exists, end=end)
    assert all("incomplete" in one for one in plain_kopia.snapshots())
    assert upload.pod.reasons()[-2:] == ["Data-Path-Canceled", "Data-Path-Stopped"]


async def _leaves_no_snapshot(upload: _Transfer, tree: Path, kopia: PlainKopia) -> None:
    upload.put()
    assert await upload.pod.run("data-upload", tree) == 14
    assert kopia.snapshots() == []


@pytest.mark.skipif(not ONE_OPEN, reason="kopia's own command says at its end what it saved")
async def test_a_snapshot_that_was_saved_just_before_the_cancel_is_deleted(
    upload: _Transfer, tree: Path, plain_kopia: PlainKopia, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = MoverBackup._take_output

    def cancel_after_result(backup: MoverBackup, line: str) -> None:
        take(backup, line)
        if backup.result:
            upload.cancel()

    monkeypatch.setattr(MoverBackup, "_take_output", cancel_after_result)
    await _leaves_no_snapshot(upload, tree, plain_kopia)


@pytest.mark.skipif(not ONE_OPEN, reason="kopia's own command says at its end what it saved")
@pytest.mark.parametrize(("error", "left"), [(DataPathError, 0), (StorageOutageError, 1)], ids=["kopia", "storage"])
async def test_a_snapshot_that_was_saved_before_a_stall_is_deleted(
    upload: _Transfer,
    tree: Path,
    plain_kopia: PlainKopia,
    monkeypatch: pytest.MonkeyPatch,
    error: type[DataPathError],
    left: int,
) -> None:
    """After an outage of the storage another attempt follows, which deletes it."""
    carry_out = MoverBackup.carry_out

    async def stall(backup: MoverBackup, decision: JsonDict) -> None:
        await carry_out(backup, decision)
        raise error("no progress")

    monkeypatch.setattr(MoverBackup, "carry_out", stall)
    upload.put()
    assert await upload.pod.run("data-upload", tree) == error.exit_code
    assert len(plain_kopia.snapshots()) == left


async def test_a_snapshot_is_deleted_if_a_cancel_request_comes_before_the_end_of_its_backup(
    upload: _Transfer, tree: Path, plain_kopia: PlainKopia, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = _Backup._open_volume

    @asynccontextmanager
    async def close_late(backup: _Backup) -> AsyncIterator[tuple[tuple[int, int] | None, float]]:
        async with opened(backup) as found:
            yield found
        upload.cancel()
        await asyncio.Event().wait()

    monkeypatch.setattr(_Backup, "_open_volume", close_late)
    await _leaves_no_snapshot(upload, tree, plain_kopia)


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [(None, 0), (DataPathError("no watch"), 0), (FencedError("another attempt has begun"), FencedError.exit_code)],
    ids=["a cancel request", "a watch that ends", "another attempt"],
)
async def test_what_ends_a_transfer_after_its_backup_comes_too_late(
    upload: _Transfer,
    tree: Path,
    plain_kopia: PlainKopia,
    monkeypatch: pytest.MonkeyPatch,
    error: AgentError | None,
    exit_code: int,
) -> None:
    requested, ended, fail = asyncio.Event(), asyncio.Event(), Canceler.fail

    def note(canceler: Canceler, error: AgentError) -> None:
        fail(canceler, error)
        requested.set()

    async def end_late(_: Reporter, _meter: Meter) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            if error is not None:
                monkeypatch.setattr(TransferFollower, "take", Mock(side_effect=error))
            upload.cancel()
            await requested.wait()
            for _turn in range(10):
                await asyncio.sleep(0)
            ended.set()

    monkeypatch.setattr(Canceler, "fail", note)
    monkeypatch.setattr(Reporter, "follow", end_late)
    upload.put()
    assert await upload.pod.run("data-upload", tree) == exit_code
    await ended.wait()
    assert len(plain_kopia.snapshots()) == 1


@pytest.mark.sample("kopia-manifest show-spec.cancel", "kopia-*restore-SIGTERM", "sync-*-spec.cancel")
@_ENDS
@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        *([("kopia", "mover-restore")] if ONE_OPEN else [("kopia", "manifest show"), ("kopia", "restore")]),
        ("sync", "syncfs"),
    ],
)
async def test_cancel_in_each_step_of_a_restore(
    download: _Transfer, monkeypatch: pytest.MonkeyPatch, program: str, arguments: str, end: Callable[[_Transfer], None]
) -> None:
    _hold(download, program, arguments, monkeypatch)
    download.put()
    await download.ends_canceled(download.pod.folder / "target", held=download.started.exists, end=end)
    assert download.pod.reasons()[-2:] == ["Data-Path-Canceled", "Data-Path-Stopped"]
