import json
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from core.errors import DataPathError, KopiaError, RepositoryError, StorageOutageError
from core.redact import Redactor
from datamover.kopia.client_config import CacheLimit, parse_cache_limit
from datamover.kopia.process import Kopia, KopiaAnswer, kopia_environment
from datamover.kopia.repository import NotInitializedError, Repository, RepositoryAddress
from datamover.kopia.snapshots import list_snapshots
from datamover.kopia.stalls import StallLimits
from datamover.kopia.storage_calls import Waits
from datamover.runtime.work_dir import CacheDir, open_work_dir
from datamover.storage.providers import FileStorage
from datamover.storage.s3 import AwsKeys, S3Storage
from tests.datamover.support.plainkopia import PASSWORD
from tests.datamover.support.repositories import configurations, opened, s3_storage
from tests.datamover.support.s3server import S3Server
from tests.support.sockets import free_port

pytestmark = pytest.mark.processes

_RECORDED = Path(__file__).parents[2] / "recordings/velero-1.18.2/kopia-repository-status.json"


async def test_a_new_repository_has_veleros_format_and_is_found_again(tmp_path: Path) -> None:
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


async def test_an_answer_of_kopia_without_an_id_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(FileStorage(tmp_path / "r")) as repository:
        monkeypatch.setattr(repository, "call", AsyncMock(return_value=KopiaAnswer("status", 0, b"{}", [])))
        with pytest.raises(KopiaError, match="no uniqueIDHex in kopia's output"):
            await repository.status()


async def test_connecting_creates_nothing(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    with (
        opened(FileStorage(tmp_path / "r")) as repository,
        pytest.raises(NotInitializedError, match="repository under test: no repository found"),
    ):
        await repository.connect()
    assert not list((tmp_path / "r").iterdir())


async def test_a_storage_with_other_contents_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "kopia.maintenance.f").write_text("x")
    with (
        opened(FileStorage(tmp_path / "r")) as repository,
        pytest.raises(RepositoryError, match="the storage is not empty"),
    ):
        await repository.ensure()


async def test_a_wrong_password_is_reported(repository: Path) -> None:
    with (
        opened(FileStorage(repository), "another password") as ours,
        pytest.raises(RepositoryError, match=r"^repository under test: the repository password does not match"),
    ):
        await ours.connect()


async def test_keys_stay_out_of_kopias_configuration(s3: S3Server) -> None:
    with opened(s3_storage(s3, s3.make_bucket("keys"))) as repository:
        await repository.ensure()
        written = repository._work_dir.config_file.read_text()
        assert repository._work_dir.config_file.stat().st_mode & 0o777 == 0o600
    assert s3.secret_key not in written
    assert s3.access_key not in written


@pytest.mark.parametrize(
    ("wrong", "cause"),
    [
        ({"secret_key": "wrong-secret-key"}, "the secret access key is not accepted"),
        ({"access_key": "wrong-access-key"}, "the access key does not exist"),
        ({"bucket": "no-such-bucket"}, "the bucket does not exist"),
    ],
    ids=["secret key", "access key", "bucket"],
)
async def test_the_cause_of_an_unusable_bucket_is_reported(s3: S3Server, wrong: dict[str, str], cause: str) -> None:
    with (
        opened(s3_storage(s3, s3.make_bucket("causes"), **wrong)) as repository,
        pytest.raises(RepositoryError, match=f"^repository under test: {cause}: [^\n]+$") as rejected,
    ):
        await repository.ensure()
    assert "wrong-secret-key" not in str(rejected.value)


@pytest.mark.parametrize("read_only", [True, False], ids=["to read", "to write"])
async def test_the_configuration_of_a_directory_equals_kopias(repository: Path, *, read_only: bool) -> None:
    ours, theirs = await configurations(FileStorage(repository), read_only=read_only)
    assert ours == theirs


async def test_the_configuration_of_a_bucket_equals_kopias(s3: S3Server) -> None:
    storage = s3_storage(s3, s3.make_bucket("config"))
    with opened(storage) as repository:
        await repository.ensure()
    ours, theirs = await configurations(storage, read_only=False)
    assert ours == theirs


async def test_a_failed_read_is_reported_like_a_failed_connect(repository: Path) -> None:
    with opened(FileStorage(repository), "another password") as ours:
        kopia = ours.kopia
        with pytest.raises(RepositoryError, match=r"^repository under test: the repository password does not match"):
            await ours.open(partial(list_snapshots, kopia), read_only=True)


async def test_a_read_that_fails_without_a_cause_in_the_repository_runs_again_connected(repository: Path) -> None:
    answers = iter([KopiaError("broken"), KopiaError("second")])

    async def read() -> None:
        raise next(answers)

    with opened(FileStorage(repository)) as ours:
        with pytest.raises(KopiaError, match="second"):
            await ours.open(read, read_only=True)
        assert await list_snapshots(ours.kopia) == []


@pytest.fixture
def silent_endpoint() -> Iterator[str]:
    """An address where the kernel accepts connections, and no process answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def _waits(seconds: float) -> Waits:
    return Waits(limits=StallLimits(timedelta(seconds=seconds)), probe_limit_seconds=seconds)


async def test_an_endpoint_that_never_answers_times_out(s3: S3Server, silent_endpoint: str) -> None:
    with (
        opened(s3_storage(s3, "any", url=silent_endpoint), waits=_waits(1)) as repository,
        pytest.raises(RepositoryError, match=r"^open repository under test: no progress for \ds: repository und"),
    ):
        await repository.connect()


async def test_a_probe_reports_whether_the_storage_answers(
    s3: S3Server, silent_endpoint: str, repository: Path, tmp_path: Path
) -> None:
    bucket = s3.make_bucket("asked")
    found = []
    for storage, seconds in (
        (FileStorage(repository), 10),
        (s3_storage(s3, bucket), 10),
        (s3_storage(s3, "no-such-bucket"), 10),
        (s3_storage(s3, bucket, url=f"http://127.0.0.1:{free_port()}"), 10),
        (s3_storage(s3, bucket, url=silent_endpoint), 1),
        (FileStorage(tmp_path / "gone" / "repository"), 10),
    ):
        with opened(storage, waits=_waits(seconds)) as probed:
            answer = await probed.probe()
            found.append((answer.error, answer.message.split(": ")[0:2]))
    assert found == [
        (DataPathError, ["the storage of repository under test answers"]),
        (DataPathError, ["the storage of repository under test answers"]),
        (RepositoryError, ["repository under test does not answer", "the bucket does not exist"]),
        (StorageOutageError, ["repository under test does not answer", "the endpoint cannot be reached"]),
        (StorageOutageError, ["repository under test does not answer", "timed out after 1 s"]),
        (RepositoryError, ["repository under test does not answer", "the directory does not exist or cannot be read"]),
    ]


async def test_a_custom_authority_is_passed_unchanged(s3: S3Server) -> None:
    storage = S3Storage("b", "p/", s3.url.replace("http", "https"), keys=AwsKeys("a", "b" * 8), ca_pem=b"no pem")
    with opened(storage) as repository, pytest.raises(RepositoryError, match="cannot parse provided CA"):
        await repository.connect()


@pytest.mark.parametrize(
    ("config", "soft_and_hard_mib"),
    [
        ({}, (3200, 4000, 800, 1000)),
        ({"cacheLimitMB": "100"}, (64, 80, 16, 20)),
        ({"cacheLimitMB": "much"}, (3200, 4000, 800, 1000)),
    ],
)
def test_the_cache_is_divided_and_swept_as_veleros(
    config: dict[str, str], soft_and_hard_mib: tuple[int, int, int, int]
) -> None:
    limit = parse_cache_limit(config)
    flags = ("content-cache-size", "content-cache-size-limit", "metadata-cache-size", "metadata-cache-size-limit")
    keys = ("maxCacheSize", "contentCacheSizeLimitBytes", "maxMetadataCacheSize", "metadataCacheSizeLimitBytes")
    assert limit.arguments == [f"--{flag}-mb={mib}" for flag, mib in zip(flags, soft_and_hard_mib, strict=True)]
    assert [limit.config[key] for key in keys] == [mib << 20 for mib in soft_and_hard_mib]


@pytest.mark.parametrize(("room", "total"), [(100, 100), (20_000, 10_000), (10_000, 10_000), (None, 10_000)])
def test_a_cache_keeps_to_the_smaller_limit_of_repository_and_volume(room: int | None, total: int) -> None:
    assert parse_cache_limit({"cacheLimitMB": "10000"}).at_most(room) == CacheLimit(total)


async def test_kopia_uses_the_configured_cache(repository: Path, tmp_path: Path) -> None:
    with open_work_dir(os.environ, CacheDir(str(tmp_path / "volume"))) as folder:
        access = FileStorage(repository).access(folder)
        environment = kopia_environment(os.environ, folder, {"KOPIA_PASSWORD": PASSWORD})
        address = RepositoryAddress("repository under test", FileStorage(repository), access)
        await Repository(Kopia(environment, Redactor()), address, folder, cache=CacheLimit(100)).connect()
        caching = json.loads(folder.config_file.read_text())["caching"]
    assert [caching[kind] >> 20 for kind in ("maxCacheSize", "contentCacheSizeLimitBytes")] == [64, 80]
    assert [caching[kind] >> 20 for kind in ("maxMetadataCacheSize", "metadataCacheSizeLimitBytes")] == [16, 20]
    assert (tmp_path / "volume" / "kopia-cache").is_dir()
