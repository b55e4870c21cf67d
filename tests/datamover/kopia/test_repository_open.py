"""What keeps a load from reading its repository is told as connecting tells it, and shows no secret."""

import asyncio
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from core.contract import VolumeMode
from core.errors import KopiaError
from datamover.data_path.backup import BackupParameters, back_up
from datamover.kopia.snapshots import list_snapshots
from datamover.storage.providers import FileStorage
from tests.datamover.support.data_paths import uploading
from tests.datamover.support.places import opened
from tests.datamover.support.plainkopia import PASSWORD
from tests.datamover.support.pods import MoverPod
from tests.datamover.support.processes import running_kopia
from tests.datamover.support.s3server import S3Server, free_port, run_s3_server
from tests.support.fakekube import FakeKube
from tests.testbed.pki import Authority

_FLAGS = {"DataUpload": ("data-upload", {}), "DataDownload": ("data-download", {"snapshotID": "0" * 32})}
_READS = {"DataUpload": "policy show", "DataDownload": "manifest show"}
_CLOUD = {"name": "cloud", "key": "key"}


@pytest.fixture
def pod(tmp_path: Path, _new_repository: Path) -> MoverPod:
    shutil.copytree(_new_repository, tmp_path / "backups" / "kopia" / "app")
    pod = MoverPod(FakeKube(), tmp_path)
    pod.put_repository(phase="Ready")
    return pod


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A server whose certificate nobody vouches for."""
    pair = Authority(tmp_path_factory.mktemp("pki") / "authority").issue("s3", user="s3", addresses=("IP:127.0.0.1",))
    with run_s3_server(tmp_path_factory.mktemp("secure"), pair) as server:
        yield server


def _bucket(pod: MoverPod, server: S3Server, *, url: str = "", bucket: str = "", secret: str = "") -> None:
    """Let the pod's location be a bucket of the server, or what is wrong instead."""
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
    ("wrong", "said"),
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
async def test_what_keeps_a_load_from_its_repository_is_told(
    pod: MoverPod, s3: S3Server, tree: Path, wrong: Callable[[MoverPod, S3Server], None], said: str
) -> None:
    wrong(pod, s3)
    for kind in _FLAGS:
        await _refused(pod, tree, kind, said)


async def test_an_endpoint_that_refuses_fails_a_load(pod: MoverPod, s3: S3Server, tree: Path) -> None:
    _bucket(pod, s3, url=f"http://127.0.0.1:{free_port()}")
    await _refused(pod, tree, "DataUpload", "the endpoint cannot be reached")


async def test_a_certificate_that_nobody_vouches_for_fails_a_load(pod: MoverPod, secure: S3Server, tree: Path) -> None:
    _bucket(pod, secure)
    await _refused(pod, tree, "DataDownload", "the endpoint's certificate is not trusted")


async def _refused(pod: MoverPod, tree: Path, kind: str, said: str) -> None:
    flag, spec = _FLAGS[kind]
    pod.put_transfer(kind, **spec)
    assert await pod.run(flag, tree) == 12
    first = pod.message.splitlines()[0]
    assert first.startswith("backup repository app-default-kopia (")
    assert said in first
    for secret in (PASSWORD, "quite another one", "not-the-secret-key"):
        assert secret not in f"{pod.message}{pod.events()}"


def _request(tree: Path, *, low_memory: bool = False) -> BackupParameters:
    return BackupParameters(tree, VolumeMode.FILESYSTEM, "some/volume", parallel=2, low_memory=low_memory)


@pytest.mark.parametrize("low_memory", [True, False], ids=["one kopia at a time", "two"])
async def test_a_backup_opens_its_repository_whether_or_not_memory_is_short(
    repository: Path, tree: Path, low_memory: bool
) -> None:
    with opened(FileStorage(repository)) as ours:
        backup = await back_up(ours, _request(tree, low_memory=low_memory), uploading())
        assert [one.snapshot_id for one in await list_snapshots(ours.kopia)] == [backup.snapshot_id]


async def test_a_reading_that_takes_longer_than_it_may_is_done_again_connected(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datamover.kopia.repository._UNCONNECTED_SECONDS", 0.05)
    taken = []

    async def read() -> str:
        taken.append("")
        if len(taken) == 1:
            await asyncio.Event().wait()
        return "read"

    with opened(FileStorage(repository)) as ours:
        assert await ours.open(read, read_only=True) == "read"
        assert await list_snapshots(ours.kopia) == []


async def test_a_cancel_that_comes_with_errors_of_the_reading_is_not_forgotten(repository: Path) -> None:
    """Both of two calls break off, and one of them by an error."""
    begun = asyncio.Event()

    async def fail_when_canceled() -> None:
        begun.set()
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
        await begun.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running


@dataclass(frozen=True)
class _Held:
    """A load whose storage does not answer: it stands still in kopia's call `verb`."""

    pod: MoverPod
    kind: str
    verb: str

    def cancel(self) -> None:
        self.pod.put_transfer(self.kind, cancel=True, **_FLAGS[self.kind][1])

    def signal(self) -> None:
        self.pod.stop._take(signal.SIGTERM, None)


@pytest.fixture(params=[(kind, connects) for kind in _FLAGS for connects in (False, True)], ids=str)
def held(
    request: pytest.FixtureRequest, pod: MoverPod, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> Iterator[_Held]:
    kind, connects = request.param
    if connects:
        monkeypatch.setattr("datamover.kopia.repository._UNCONNECTED_SECONDS", 0.05)
    # The kernel takes connections here, and nobody answers.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        _bucket(pod, s3, url=f"http://127.0.0.1:{silent.getsockname()[1]}")
        pod.put_transfer(kind, **_FLAGS[kind][1])
        yield _Held(pod, kind, "repository connect" if connects else _READS[kind])


@pytest.mark.parametrize("end", [_Held.cancel, _Held.signal], ids=["spec.cancel", "SIGTERM"])
async def test_a_load_is_canceled_while_it_opens_its_repository(
    held: _Held, tree: Path, end: Callable[[_Held], None]
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
