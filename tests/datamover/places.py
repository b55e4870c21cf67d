"""Repositories in places that a test names, as a mover opens them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from datamover.credentials import AwsKeys
from datamover.kopia import Kopia, kopia_environment
from datamover.repository import Repository, RepositoryPlace
from datamover.scrub import Scrubber
from datamover.storage import S3Storage, Storage
from datamover.workfolder import open_work_folder
from tests.datamover.plainkopia import PASSWORD
from tests.datamover.s3server import S3Server

__all__ = ["opened", "s3_storage"]


@contextmanager
def opened(storage: Storage, password: str = PASSWORD, seconds: float = 30) -> Iterator[Repository]:
    with open_work_folder(os.environ) as folder:
        reach = storage.reach(folder)
        environment = kopia_environment(os.environ, folder, {**reach.environment, "KOPIA_PASSWORD": password})
        kopia = Kopia(environment, Scrubber([password, *reach.secrets({})]))
        place = RepositoryPlace("repository under test", storage, reach)
        yield Repository(kopia, place, folder, connect_seconds=seconds)


def s3_storage(server: S3Server, name: str, **other: str) -> S3Storage:
    keys = AwsKeys(other.get("access_key", server.access_key), other.get("secret_key", server.secret_key))
    return S3Storage(other.get("bucket", name), "p/kopia/app/", other.get("url", server.url), "us-east-1", keys)
