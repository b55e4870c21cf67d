"""Repositories in given storages, as a data mover opens them."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager

from core.redact import Redactor
from datamover.kopia.repository import Repository, RepositoryAddress, build_kopia
from datamover.kopia.storage_calls import Waits
from datamover.runtime.work_dir import open_work_dir
from datamover.storage.providers import Storage
from datamover.storage.s3 import AwsKeys, S3Storage
from tests.datamover.support.plainkopia import PASSWORD
from tests.datamover.support.s3server import S3Server
from tests.support.objects import JsonDict


@contextmanager
def opened(
    storage: Storage, password: str = PASSWORD, *, waits: Waits | None = None, unique_id: str | None = None
) -> Iterator[Repository]:
    with open_work_dir(os.environ) as folder:
        kopia = build_kopia(storage, folder, os.environ, password, Redactor())
        address = RepositoryAddress("repository under test", storage, unique_id=unique_id)
        yield Repository(kopia, address, folder, waits=waits)


def s3_storage(server: S3Server, name: str, **other: str) -> S3Storage:
    keys = AwsKeys(other.get("access_key", server.access_key), other.get("secret_key", server.secret_key))
    return S3Storage(other.get("bucket", name), "p/kopia/app/", other.get("url", server.url), "us-east-1", keys)


async def configurations(storage: Storage, *, read_only: bool) -> tuple[JsonDict, JsonDict]:
    """Return the configuration that is written without connecting, and kopia's own, both without defaults."""

    async def read() -> JsonDict:
        config: JsonDict = json.loads(repository.work_dir.config_file.read_text())
        return config

    with opened(storage) as repository:
        ours = await repository.open(read, read_only=read_only)
        await repository.connect(read_only=read_only)
        theirs = await read()
        # kopia writes a cache directory next to its configuration as a relative path.
        theirs["caching"]["cacheDirectory"] = str(repository.work_dir.path / theirs["caching"]["cacheDirectory"])
        return _without_zeros(ours), _without_zeros(theirs)


def _without_zeros(config: JsonDict) -> JsonDict:
    """Remove the defaults that kopia writes."""
    return {
        key: _without_zeros(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key != "description" and value not in ("", None, "0s")
    }
