"""Errors while a transfer opens its repository: the cause as from connecting, and no secret."""

import asyncio
import base64
import json
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from core.contract import VolumeMode
from core.errors import KopiaError, RepositoryError
from core.models.names import REPOSITORY_ID_ANNOTATION
from datamover.data_path.backup import BackupParameters, back_up
from datamover.kopia.snapshots import list_snapshots
from datamover.runtime.child import ChildExit, run_child
from datamover.storage.providers import FileStorage
from tests.datamover.support.backup_movers import BACKUP_VERB, ONE_OPEN, RESTORE_VERB
from tests.datamover.support.data_paths import backup_data_path
from tests.datamover.support.mounts import mounted
from tests.datamover.support.plainkopia import IDENTITY, PASSWORD, PORTABLE, PlainKopia
from tests.datamover.support.pods import MoverPod
from tests.datamover.support.processes import running_kopia
from tests.datamover.support.repositories import opened
from tests.datamover.support.s3server import S3Server, run_s3_server
from tests.support.fakekube import FakeKube
from tests.support.tools import tool
from tests.testbed.pki import Authority

pytestmark = pytest.mark.processes

_FLAGS = {"DataUpload": ("data-upload", {}), "DataDownload": ("data-download", {"snapshotID": "0" * 32})}
_READS = {
    "DataUpload": BACKUP_VERB if ONE_OPEN else "snapshot list",
    "DataDownload": RESTORE_VERB if ONE_OPEN else "manifest show",
}
_CLOUD = {"name": "cloud", "key": "key"}


@pytest.fixture
def pod(tmp_path: Path, _new_repository: Path) -> MoverPod:
    shutil.copytree(_new_repository, tmp_path / "backups" / "kopia" / "app")
    pod = MoverPod(FakeKube(), tmp_path)
    pod.put_repository(phase="Ready")
    return pod


@pytest.fixture(scope="module")
def tls_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A server with an untrusted certificate."""
    pair = Authority(tmp_path_factory.mktemp("pki") / "authority").issue("s3", user="s3", addresses=("IP:127.0.0.1",))
    with run_s3_server(tmp_path_factory.mktemp("secure"), pair) as server:
        yield server


def _bucket(pod: MoverPod, server: S3Server, *, url: str = "", bucket: str = "", secret: str = "") -> None:
    """Set the pod's location to a bucket of the server, or to the given faults."""
    bucket = bucket or server.make_bucket("opening")
    pod.put_location({"s3Url": url or server.url, "region": "us-east-1"}, bucket=bucket, credential=_CLOUD)
    credentials = server.credentials_file
    pod.put_secret("cloud", "key", credentials.replace(server.secret_key, secret) if secret else credentials)


def _empty_folder(pod: MoverPod, _server: S3Server) -> None:
    shutil.rmtree(pod.folder / "backups" / "kopia" / "app")


def _wrong_password(pod: MoverPod, _server: S3Server) -> None:
    pod.put_secret("velero-repo-credentials", "repository-password", "quite another one")


def _damaged(pod: MoverPod, _server: S3Server) -> None:
    file = pod.folder / "backups" / "kopia" / "app" / "kopia.repository.f"
    file.write_bytes(bytes(file.stat().st_size))


@pytest.mark.parametrize(
    ("wrong", "message_part"),
    [
        (_wrong_password, "the repository password does not match"),
        (_empty_folder, "no repository found"),
        (_damaged, "damaged"),
        (_bucket, "no repository found"),
        (partial(_bucket, secret="not-the-secret-key"), "the secret access key is not accepted"),
        (partial(_bucket, bucket="no-such-bucket"), "the bucket does not exist"),
    ],
    ids=["password", "no folder", "damaged", "empty bucket", "secret key", "no bucket"],
)
async def test_the_cause_of_an_unusable_repository_is_reported(
    pod: MoverPod, s3: S3Server, tree: Path, wrong: Callable[[MoverPod, S3Server], None], message_part: str
) -> None:
    wrong(pod, s3)
    for kind in _FLAGS:
        await _check_failure(pod, tree, kind, message_part)


async def test_an_untrusted_certificate_fails_a_transfer(pod: MoverPod, tls_server: S3Server, tree: Path) -> None:
    _bucket(pod, tls_server)
    await _check_failure(pod, tree, "DataDownload", "the endpoint's certificate is not trusted")


async def _check_failure(pod: MoverPod, tree: Path, kind: str, message_part: str) -> None:
    flag, spec = _FLAGS[kind]
    pod.put_transfer(kind, **spec)
    assert await pod.run(flag, tree) == 12
    first = pod.message.splitlines()[0]
    assert first.startswith("backup repository app-default-kopia (")
    assert message_part in first
    # kopia itself may try for longer than the first report of an opening takes.
    assert not [message for _, message in pod.events() if "does not answer" in message]
    for secret in (PASSWORD, "quite another one", "not-the-secret-key"):
        assert secret not in f"{pod.message}{pod.events()}"


async def test_nothing_is_written_to_another_repository_than_the_recorded_one(pod: MoverPod, tree: Path) -> None:
    """As of a creator that was late, in a storage where the last one of them counts."""
    folder, recorded = pod.folder / "backups" / "kopia" / "app", "0" * 64
    found = base64.b64decode(json.loads((folder / "kopia.repository.f").read_bytes())["uniqueID"]).hex()
    before = sorted(folder.rglob("*"))
    pod.put_repository({REPOSITORY_ID_ANNOTATION: recorded}, phase="Ready")
    await _check_failure(pod, tree, "DataUpload", f"the storage has the repository {found}, and {recorded} is recorded")
    assert sorted(folder.rglob("*")) == before
    # A snapshot of the other one is not in it.
    pod.put_transfer("DataDownload", snapshotID="0" * 32)
    assert await pod.run("data-download", tree) != 0
    assert "it is not in the repository" in pod.message
    pod.put_repository({REPOSITORY_ID_ANNOTATION: found}, phase="Ready")
    pod.put_transfer("DataUpload")
    assert await pod.run("data-upload", tree) == 0


async def test_a_backup_opens_its_repository_with_one_kopia_at_a_time(
    repository: Path, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, most = 0, 0

    async def count(*arguments: Any) -> ChildExit:
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            return await run_child(*arguments)
        finally:
            running -= 1

    monkeypatch.setattr("datamover.kopia.process.run_child", count)
    request = BackupParameters(tree, VolumeMode.FILESYSTEM, "some/volume", parallel=2)
    with opened(FileStorage(repository)) as ours:
        backup = await back_up(ours, request, backup_data_path())
        assert [one.snapshot_id for one in await list_snapshots(ours.kopia)] == [backup.snapshot_id]
    assert most == 1


async def test_a_cancel_during_errors_of_a_read_is_kept(repository: Path) -> None:
    """Of two calls, one fails while both are canceled."""
    started = asyncio.Event()

    async def fail_when_canceled() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            raise KopiaError("broken off")

    async def read() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(fail_when_canceled(), name="failing")
        except ExceptionGroup as e:
            raise e.exceptions[0] from None

    with opened(FileStorage(repository)) as ours:
        running = asyncio.create_task(ours.open(read, read_only=True), name="opening")
        await started.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running


@pytest.mark.cause("cache-full")
async def test_a_cache_volume_that_is_full_is_reported(
    kopia: PlainKopia, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "portable"
    repository.mkdir()
    kopia.run("repository", "create", "filesystem", f"--path={repository}", PORTABLE, *IDENTITY)
    fill: list[str | Path] = [tool("kopia", "index-blobs"), tmp_path / "plain.config", "200"]
    subprocess.run(fill, env={"HOME": str(tmp_path), "KOPIA_PASSWORD": PASSWORD}, check=True)
    with mounted(tmp_path / "small", "size=600k") as scratch:
        monkeypatch.setenv("VELERO_SCRATCH_DIR", str(scratch))
        with (
            opened(FileStorage(repository)) as ours,
            pytest.raises(RepositoryError, match=r"^repository under test: the volume of kopia's cache is full: "),
        ):
            await ours.open(partial(list_snapshots, ours), read_only=True)


@dataclass(frozen=True)
class _HeldTransfer:
    """A transfer whose storage does not answer: it hangs in kopia's call `verb`."""

    pod: MoverPod
    kind: str
    verb: str

    def cancel(self) -> None:
        self.pod.put_transfer(self.kind, cancel=True, **_FLAGS[self.kind][1])

    def signal(self) -> None:
        self.pod.stop._take(signal.SIGTERM, None)


@pytest.fixture(params=_FLAGS)
def held(request: pytest.FixtureRequest, pod: MoverPod, s3: S3Server) -> Iterator[_HeldTransfer]:
    kind = request.param
    # The kernel accepts connections here, and no process answers.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        _bucket(pod, s3, url=f"http://127.0.0.1:{silent.getsockname()[1]}")
        pod.put_transfer(kind, **_FLAGS[kind][1])
        yield _HeldTransfer(pod, kind, _READS[kind])


@pytest.mark.parametrize("end", [_HeldTransfer.cancel, _HeldTransfer.signal], ids=["spec.cancel", "SIGTERM"])
async def test_a_transfer_is_canceled_while_it_opens_its_repository(
    held: _HeldTransfer, tree: Path, end: Callable[[_HeldTransfer], None]
) -> None:
    pod = held.pod
    async with asyncio.TaskGroup() as group:
        running = group.create_task(pod.run(_FLAGS[held.kind][0], tree))
        await pod.wait_for(lambda: bool(running_kopia(held.verb)))
        end(held)
        async with asyncio.timeout(2):
            await asyncio.shield(running)
    assert running.result() == 14
    assert pod.message.endswith("data path is canceled")
    assert pod.reasons()[-2:] == ["Data-Path-Canceled", "Data-Path-Stopped"]
