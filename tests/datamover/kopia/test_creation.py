"""Creations of one repository at once, and creations that something ended: the next one can read it."""

import asyncio
import errno
import os
import shutil
import threading
from collections.abc import Awaitable, Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from core.clock import SystemClock
from core.errors import DataPathError, RepositoryError
from core.models.storage import BlockHash
from datamover.kopia import creation
from datamover.kopia.creation import create_apart
from datamover.kopia.process import KopiaTimeoutError
from datamover.kopia.repository import Repository
from datamover.kopia.snapshots import list_snapshots
from datamover.kopia.stalls import Reachability, StallLimits
from datamover.kopia.storage_calls import Waits
from datamover.storage.providers import FileStorage, Storage
from datamover.storage.s3 import S3Storage
from tests.datamover.conftest import build_local_mover
from tests.datamover.support.repositories import opened, s3_storage
from tests.datamover.support.s3proxy import Fault, S3Proxy
from tests.support.tasks import until

pytestmark = pytest.mark.processes


class _Settling(SystemClock):
    """Waits until other creators have uploaded theirs, too, instead of for the seconds that this takes at most."""

    def __init__(self, others: asyncio.Barrier) -> None:
        self._others = others

    async def sleep(self, seconds: float) -> None:
        if not seconds:
            await self._others.wait()
        else:
            await super().sleep(seconds)


def _bucket(proxy: S3Proxy, name: str) -> S3Storage:
    return s3_storage(proxy.server, proxy.server.make_bucket(name), url=proxy.url)


async def _check_readable(storage: Storage, *, created: bool) -> None:
    with opened(storage) as repository:
        await repository.ensure()
        assert repository.created is created
    with opened(storage) as repository:
        assert await repository.open(partial(list_snapshots, repository.kopia), read_only=True) == []


_INDEX = "xn0_2ef6d6f0ce50581a97a678748daa23e9-s4ed3cdaf1bae264a147-c1"
"""An index blob, which kopia reads before it lists any."""


@pytest.mark.sample("3 once")
@pytest.mark.parametrize(("number", "times"), [(3, 1), (4, 4)], ids=["3 once", "4 again and again"])
async def test_first_backups_at_once_all_succeed(tmp_path: Path, number: int, times: int) -> None:
    """As many processes, each with its own source, and no repository yet."""
    sources = [tmp_path / f"source-{one}" for one in range(number)]
    for source in sources:
        source.mkdir()
        (source / "file").write_text(source.name)
    for attempt in range(times):
        movers = [build_local_mover(str(tmp_path / f"repository-{attempt}")) for _ in sources]
        await asyncio.gather(*(mover.back_up(source, "", None) for mover, source in zip(movers, sources, strict=True)))
        assert len(await movers[0].list()) == number


@pytest.mark.sample("", ".shards kopia.repository.f*", "kopia.blobcfg.f")
@pytest.mark.parametrize(
    "left",
    [
        *([], [".shards.tmp.0123"], [".shards"], [".shards", "kopia.repository.f.tmp.0123"]),
        [".shards", "kopia.repository.f"],
        # What kopia's own creation leaves.
        *(["kopia.blobcfg.f"], [".shards", "kopia.blobcfg.f"]),
    ],
    ids=" ".join,
)
async def test_an_interrupted_creation_is_completed(repository: Path, tmp_path: Path, left: list[str]) -> None:
    (directory := tmp_path / "left").mkdir()
    for name in left:
        shutil.copy(repository / name.partition(".tmp")[0], directory / name)
    await _check_readable(FileStorage(directory), created="kopia.repository.f" not in left)


async def test_a_directory_without_links_gets_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", fail)
    await _check_readable(FileStorage(tmp_path / "r"), created=True)
    assert not list((tmp_path / "r").glob("*.tmp.*"))


@pytest.mark.sample("kopia.repository", "x")
@pytest.mark.parametrize("written", ["kopia.repository", "s", "q", "x"])
async def test_a_creation_that_ends_after_any_object_leaves_a_readable_repository(proxy: S3Proxy, written: str) -> None:
    storage = _bucket(proxy, f"ended-{written.replace('.', '-')}")
    proxy.armed = (f"PUT /{storage.bucket}/p/kopia/app/{written}", Fault.SILENCE)
    with opened(storage) as repository:
        creating = asyncio.create_task(repository.ensure(), name="creation")
        await until(lambda: proxy.fault is not None, seconds=60)
        creating.cancel()
        await asyncio.wait({creating})
    proxy.recover()
    await _check_readable(storage, created=False)


async def test_creators_of_which_each_found_an_empty_storage_agree(proxy: S3Proxy) -> None:
    storage, settled = _bucket(proxy, "agree"), asyncio.Barrier(2)
    proxy.stored_bytes = proxy.hold_bytes = 1
    first, second = (opened(storage, waits=Waits(_Settling(settled))) for _ in range(2))
    with first as one, second as two:
        creating = asyncio.gather(one.ensure(), two.ensure())
        await until(lambda: sum("PUT " in one and "kopia.repository" in one for one in proxy.requests) > 1, seconds=60)
        proxy.hold_bytes = 0
        assert len(set(await creating)) == 1
        assert one.created is not two.created
    await _check_readable(storage, created=False)


async def test_an_upload_that_is_longer_than_waits_is_ended(proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(creation, "_UPLOAD_SECONDS", 0.3)
    storage, proxy.stored_bytes, proxy.hold_bytes = _bucket(proxy, "slow"), 1, 1
    with opened(storage) as repository:
        new = await create_apart(repository.kopia, repository.work_dir, "create")
        with pytest.raises(KopiaTimeoutError):
            await new.upload(repository.kopia, storage.access(repository.work_dir).arguments, "upload")
    assert proxy.holding


async def test_a_creator_that_is_late_uses_the_repository_that_is_there(proxy: S3Proxy) -> None:
    storage = _bucket(proxy, "late")
    with opened(storage) as late, opened(storage) as fast:
        new = await create_apart(late.kopia, late.work_dir, "create")
        assert await late._is_empty()
        created = await fast.ensure()
        assert not await late._put(new)
        await late._upload(new)
        assert await late.ensure() == created
        assert not late.created


async def test_what_kopias_own_creation_leaves_in_a_bucket_is_replaced(proxy: S3Proxy) -> None:
    storage = _bucket(proxy, "remains")
    proxy.server.put(storage.bucket, "p/kopia/app/kopia.blobcfg", b"encrypted")
    await _check_readable(storage, created=True)
    assert not (proxy.server.folder / storage.bucket / "p/kopia/app/kopia.blobcfg").exists()


@pytest.mark.parametrize("objects", [["p0123"], ["kopia.blobcfg", "p0123"], [_INDEX]], ids=" ".join)
async def test_a_storage_with_objects_and_no_repository_is_not_changed(proxy: S3Proxy, objects: list[str]) -> None:
    storage = _bucket(proxy, "objects")
    for name in objects:
        proxy.server.put(storage.bucket, f"p/kopia/app/{name}", bytes(64))
    with opened(storage) as repository, pytest.raises(RepositoryError, match="the storage is not empty"):
        await repository.ensure()
    assert not any(line.startswith(("PUT ", "DELETE ", "POST ")) for line in proxy.requests)


@pytest.mark.sample("None-*", "BLAKE3-256-BLAKE3-256")
@pytest.mark.parametrize(
    ("given", "stored"), [(None, "BLAKE2B-256-128"), *((one, str(one)) for one in BlockHash)], ids=str
)
async def test_a_new_repository_keeps_the_chosen_hash(tmp_path: Path, given: BlockHash | None, stored: str) -> None:
    storage = FileStorage(tmp_path / "repository")
    with opened(storage) as repository:
        created = await repository.ensure(given)
    with opened(storage) as repository:
        assert await repository.ensure(BlockHash.HMAC_SHA256_128) == created
        answer = await repository.call("status", "repository", "status", "--json")
        assert answer.document()["contentFormat"]["hash"] == stored


@pytest.mark.parametrize(
    ("step", "work"),
    [
        ("storage.providers.FileStorage.prepare_creation", Repository.ensure),
        ("kopia.creation.NewRepository.install", Repository.ensure),
        ("kopia.creation.find_repository", Repository.check_empty),
    ],
    ids=["preparation", "creation", "check"],
)
async def test_a_directory_that_does_not_answer_ends_a_creation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, work: Callable[[Repository], Awaitable[object]]
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(f"datamover.{step}", lambda *_: answers.wait(20))
    monkeypatch.setattr(Repository, "probe", AsyncMock(return_value=Reachability(reachable=False, message="silent")))
    waits = Waits(limits=StallLimits(timeout=timedelta(seconds=1)))
    try:
        error = pytest.raises(DataPathError, match="repository under test: no progress for 1s: silent")
        with opened(FileStorage(tmp_path / "r"), waits=waits) as repository, error:
            await work(repository)
    finally:
        answers.set()
