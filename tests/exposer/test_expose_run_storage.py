"""What the movers of a location need of their agent's pod."""

from typing import Any

import pytest

from core.clock import SystemClock
from core.kube.client import KubeClient
from core.kube.transport import Retry
from core.models.base import JsonDict
from exposer.expose_run import read_storage_access
from exposer.settings import StorageAccess
from tests.support.fakekube import FakeKube

SECRET = {"name": "own", "key": "cloud"}
NOTHING = StorageAccess()


def location(provider: str = "velero.io/aws", **spec: Any) -> JsonDict:
    return {
        "apiVersion": "velero.io/v1",
        "kind": "BackupStorageLocation",
        "metadata": {"namespace": "velero", "name": "default"},
        "spec": {"provider": provider, "objectStorage": {"bucket": "b"}, **spec},
    }


async def read(*objects: JsonDict) -> StorageAccess:
    kube = FakeKube()
    for obj in objects:
        kube.put(obj)
    client = KubeClient(kube, Retry(SystemClock()))
    return await read_storage_access(client, "velero", "default")


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (location(), StorageAccess(inherits_credentials=True)),
        (location(config={"credentialsFile": "/credentials/other"}), StorageAccess(inherits_credentials=True)),
        (location(credential=SECRET), NOTHING),
        (location("velero.io/fs", config={"fspath": "/backups"}), StorageAccess(directory="/backups")),
        (location("fs", config={"fspath": "/backups"}), StorageAccess(directory="/backups")),
        (
            location("fs", config={"fspath": "/backups"}, accessMode="ReadOnly"),
            StorageAccess(directory="/backups", read_only=True),
        ),
        (location("velero.io/fs"), NOTHING),
        (location(config={"fspath": "/backups"}, credential=SECRET), NOTHING),
        (location(credential="text"), NOTHING),
    ],
    ids=["agent's", "a file", "own", "directory", "short provider", "read-only", "no path", "unused path", "invalid"],
)
async def test_a_location_needs(found: JsonDict, expected: StorageAccess) -> None:
    assert await read(found) == expected


async def test_a_missing_location_gives_access_to_nothing() -> None:
    assert await read() == NOTHING
