"""Connecting, creating and probing a repository, and errors while a transfer opens it: their cause, and no secret."""

import asyncio
import base64
import json
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from core.contract import VolumeMode
from core.errors import DataPathError, KopiaError, RepositoryError, StorageOutageError
from core.models.names import REPOSITORY_ID_ANNOTATION
from core.redact import Redactor
from datamover.data_path.backup import back_up
from datamover.data_path.snapshot_runs import BackupParameters
from datamover.kopia import storage_calls
from datamover.kopia.client_config import CacheLimit, parse_cache_limit
from datamover.kopia.process import Kopia, KopiaAnswer, kopia_environment
from datamover.kopia.repository import NotInitializedError, Repository, RepositoryAddress
from datamover.kopia.snapshots import list_snapshots
from datamover.kopia.stalls import StallLimits
from datamover.kopia.storage_calls import Waits
from datamover.runtime.child import ChildExit, run_child
from datamover.runtime.work_dir import open_work_dir
from datamover.storage.providers import FileStorage
from tests.datamover.support.data_paths import backup_data_path
from tests.datamover.support.mounts import mounted
from tests.datamover.support.plainkopia import IDENTITY, PASSWORD, PORTABLE, PlainKopia
from tests.datamover.support.pods import CLOUD, MoverPod
from tests.datamover.support.repositories import configurations, opened, s3_storage
from tests.datamover.support.s3server import S3Server
from tests.support.sockets import free_port
from tests.support.tasks import interrupt
from tests.support.tools import tool

pytestmark = pytest.mark.processes

_NAME = "repository under test"
_RECORDED = Path(__file__).parents[2] / "recordings/velero-1.18.2/kopia-repository-status.json"


async def test_a_new_repository_has_veleros_format_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = FileStorage(tmp_path / "r")
    with opened(storage) as repository:
        created = await repository.ensure()
        answer = await repository.kopia.call("status", "repository", "status", "--json")
    with opened(storage) as again:
        assert await again.ensure() == created
    recorded, written = json.loads(_RECORDED.read_text()), answer.document()
    for part in ("contentFormat", "objectFormat", "blobRetention"):
        assert written[part] == recorded[part]
    assert written["clientOptions"]["username"] == written["clientOptions"]["hostname"] == "default"
    with opened(storage) as again:
        monkeypatch.setattr(again, "call", AsyncMock(return_value=KopiaAnswer("status", 0, b"{}", [])))
        with pytest.raises(KopiaError, match="no uniqueIDHex in kopia's output"):
            await again.status()


async def test_connecting_creates_nothing_and_other_contents_are_not_changed(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    with opened(FileStorage(tmp_path / "r")) as ours:
        with pytest.raises(NotInitializedError, match=f"{_NAME}: no reposit"):
            await ours.connect()
        assert not list((tmp_path / "r").iterdir())
        (tmp_path / "r" / "kopia.maintenance.f").write_text("x")
        with pytest.raises(RepositoryError, match="the storage is not empty"):
            await ours.ensure()


@pytest.mark.parametrize(
    ("wrong", "cause"),
    [
        ({"secret_key": "wrong-secret-key"}, "the secret access key is not accepted"),
        ({"access_key": "wrong-access-key"}, "the access key does not exist"),
        ({"bucket": "no-such-bucket"}, "the bucket does not exist"),
    ],
)
async def test_the_cause_of_an_unusable_bucket_is_reported(s3: S3Server, wrong: dict[str, str], cause: str) -> None:
    storage, error = s3_storage(s3, s3.make_bucket("causes"), **wrong), f"^{_NAME}: {cause}: [^\n]+$"
    with opened(storage) as repository, pytest.raises(RepositoryError, match=error) as rejected:
        await repository.ensure()
    assert "wrong-secret-key" not in str(rejected.value)


@pytest.mark.parametrize("read_only", [True, False], ids=["to read", "to write"])
async def test_the_configuration_of_a_directory_equals_kopias(repository: Path, *, read_only: bool) -> None:
    ours, theirs = await configurations(FileStorage(repository), read_only=read_only)
    assert ours == theirs


async def test_the_configuration_of_a_bucket_equals_kopias_and_has_no_keys(s3: S3Server) -> None:
    storage = s3_storage(s3, s3.make_bucket("config"))
    with opened(storage) as repository:
        await repository.ensure()
        assert repository.work_dir.config_file.stat().st_mode & 0o777 == 0o600
    ours, theirs = await configurations(storage, read_only=False)
    assert ours == theirs
    assert not {s3.access_key, s3.secret_key} & set(theirs["storage"]["config"].values())


async def test_a_read_that_fails_without_a_cause_in_the_repository_runs_again_connected(repository: Path) -> None:
    answers = iter([KopiaError("broken"), KopiaError("second")])

    async def read() -> None:
        raise next(answers)

    with opened(FileStorage(repository)) as ours:
        with pytest.raises(KopiaError, match="second"):
            await ours.open(read, read_only=True)
        assert await list_snapshots(ours.kopia) == []


@pytest.fixture
def silent_endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An address where the kernel accepts connections, and no process answers; probes take as long as stalls."""
    monkeypatch.setattr(storage_calls, "_LEAST_PROBE_SECONDS", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


async def test_an_endpoint_that_never_answers_times_out(s3: S3Server, silent_endpoint: str) -> None:
    waits = Waits(limits=StallLimits(timedelta(seconds=1)))
    storage, error = s3_storage(s3, "any", url=silent_endpoint), rf"^open {_NAME}: no progress for \ds: {_NAME}"
    with opened(storage, waits=waits) as repository, pytest.raises(RepositoryError, match=error):
        await repository.connect()


async def test_a_probe_reports_an_answer(s3: S3Server, silent_endpoint: str, repository: Path, tmp_path: Path) -> None:
    bucket, closed = s3.make_bucket("asked"), f"http://127.0.0.1:{free_port()}"
    answers, silent = f"the storage of {_NAME} answers", f"{_NAME} does not answer: "
    directory, gone = "the directory does not exist or cannot be read", FileStorage(tmp_path / "gone" / "repository")
    for storage, seconds, error, message in (
        (FileStorage(repository), 10, DataPathError, answers),
        (s3_storage(s3, bucket), 10, DataPathError, answers),
        (s3_storage(s3, "no-such-bucket"), 10, RepositoryError, f"{silent}the bucket does not exist: "),
        (s3_storage(s3, bucket, url=closed), 10, StorageOutageError, f"{silent}the endpoint cannot be reached: "),
        (s3_storage(s3, bucket, url=silent_endpoint), 1, StorageOutageError, f"{silent}timed out after 1 s"),
        (gone, 10, RepositoryError, f"{silent}{directory}: "),
    ):
        with opened(storage, waits=Waits(limits=StallLimits(timedelta(seconds=seconds)))) as probed:
            found = await probed.probe()
        assert (found.error, found.message[: len(message)]) == (error, message)


@pytest.mark.parametrize(
    ("config", "soft_and_hard_mib"),
    [
        ({}, (3200, 4000, 800, 1000)),
        ({"cacheLimitMB": "100"}, (64, 80, 16, 20)),
        ({"cacheLimitMB": "much"}, (3200, 4000, 800, 1000)),
        # With 0 as the soft limit of data, or more than 63 bits of bytes, kopia crashes, or rejects its configuration.
        ({"cacheLimitMB": "1"}, (1, 2, 0, 0)),
        ({"cacheLimitMB": f"{10**15}"}, (5629499534212, 7036874417766, 1407374883552, 1759218604441)),
    ],
)
def test_the_cache_is_veleros(config: dict[str, str], soft_and_hard_mib: tuple[int, int, int, int]) -> None:
    limit = parse_cache_limit(config)
    flags = ("content-cache-size", "content-cache-size-limit", "metadata-cache-size", "metadata-cache-size-limit")
    keys = ("maxCacheSize", "contentCacheSizeLimitBytes", "maxMetadataCacheSize", "metadataCacheSizeLimitBytes")
    assert limit.arguments == [f"--{flag}-mb={mib}" for flag, mib in zip(flags, soft_and_hard_mib, strict=True)]
    assert [limit.config[key] for key in keys] == [mib << 20 for mib in soft_and_hard_mib]
    # It keeps to the smaller limit of repository and volume.
    for room, total in ((100, 100), (20_000, 10_000), (10_000, 10_000), (None, 10_000)):
        assert parse_cache_limit({"cacheLimitMB": "10000"}).at_most(room) == CacheLimit(total)


async def test_kopia_uses_the_configured_cache(repository: Path, tmp_path: Path) -> None:
    storage = FileStorage(repository)
    with open_work_dir(os.environ, cache_volume=str(tmp_path / "volume")) as folder:
        environment = kopia_environment(os.environ, folder, {"KOPIA_PASSWORD": PASSWORD})
        address = RepositoryAddress(_NAME, storage)
        await Repository(Kopia(environment, Redactor()), address, folder, cache=CacheLimit(100)).connect()
        caching = json.loads(folder.config_file.read_text())["caching"]
    assert caching.items() >= CacheLimit(100).config.items()
    assert (tmp_path / "volume" / "kopia-cache").is_dir()


_FLAGS = {"DataUpload": ("data-upload", {}), "DataDownload": ("data-download", {"snapshotID": "0" * 32})}


def _empty_folder(pod: MoverPod, _server: S3Server) -> None:
    shutil.rmtree(pod.repository)


def _wrong_password(pod: MoverPod, _server: S3Server) -> None:
    pod.put_secret("velero-repo-credentials", "repository-password", "quite another one")


def _damaged(pod: MoverPod, _server: S3Server) -> None:
    file = pod.repository / "kopia.repository.f"
    file.write_bytes(bytes(file.stat().st_size))


def _wrong_key(pod: MoverPod, server: S3Server) -> None:
    pod.put_bucket(server, server.make_bucket("opening"))
    wrong = server.credentials_file.replace(server.secret_key, "not-the-secret-key")
    pod.put_secret(CLOUD["name"], CLOUD["key"], wrong)


@pytest.mark.parametrize(
    ("wrong", "message_part"),
    [
        (_wrong_password, "the repository password does not match"),
        (_empty_folder, "no repository found"),
        (_damaged, "damaged"),
        (_wrong_key, "the secret access key is not accepted"),
    ],
)
async def test_the_cause_of_an_unusable_repository_is_reported(
    pod: MoverPod, s3: S3Server, tree: Path, wrong: Callable[[MoverPod, S3Server], None], message_part: str
) -> None:
    wrong(pod, s3)
    for kind in _FLAGS:
        await _check_failure(pod, tree, kind, message_part)


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
    folder, recorded = pod.repository, "0" * 64
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


async def test_a_backup_runs_one_kopia_at_a_time(repository: Path, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


async def test_a_cancel_during_an_error_of_a_read_is_kept(repository: Path) -> None:
    started = asyncio.Event()

    async def fail_when_canceled() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            raise KopiaError("broken off")

    with opened(FileStorage(repository)) as ours:
        await interrupt(ours.open(fail_when_canceled, read_only=True), started.wait())


@pytest.mark.cause("cache-full")
async def test_a_full_cache_is_reported(kopia: PlainKopia, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "portable"
    repository.mkdir()
    kopia.run("repository", "create", "filesystem", f"--path={repository}", PORTABLE, *IDENTITY)
    fill: list[str | Path] = [tool("kopia", "index-blobs"), tmp_path / "plain.config", "200"]
    subprocess.run(fill, env={"HOME": str(tmp_path), "KOPIA_PASSWORD": PASSWORD}, check=True)
    with mounted(tmp_path / "small", "size=600k") as scratch:
        monkeypatch.setenv("VELERO_SCRATCH_DIR", str(scratch))
        error = f"^{_NAME}: the volume of kopia's cache is full: "
        with opened(FileStorage(repository)) as ours, pytest.raises(RepositoryError, match=error):
            await ours.open(partial(list_snapshots, ours), read_only=True)
