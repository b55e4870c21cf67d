"""What the movers of a location need of their agent's pod."""

from typing import Any

import pytest

from core.kube.resources import BACKUP_STORAGE_LOCATIONS
from exposer.expose_run import ExposeRun
from exposer.model import Owner
from exposer.settings import StorageAccess
from tests.exposer.support.world import no_guard
from tests.support.objects import JsonDict
from tests.support.scripted import answer, rejection, scripted_client, stored

SECRET = {"name": "own", "key": "cloud"}
NOTHING = StorageAccess()


def location(provider: str = "velero.io/aws", **spec: Any) -> JsonDict:
    return stored(BACKUP_STORAGE_LOCATIONS, spec={"provider": provider, "objectStorage": {"bucket": "b"}, **spec})


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
        (None, NOTHING),
    ],
    ids=[
        "agent's",
        "a file",
        "own",
        "directory",
        "short provider",
        "read-only",
        "no path",
        "unused path",
        "invalid",
        "missing",
    ],
)
async def test_a_location_needs(found: JsonDict, expected: StorageAccess) -> None:
    client = scripted_client(lambda _: answer(found) if found else rejection(404, "not found"))
    run = ExposeRun(client, Owner("velero.io/v1", "PodVolumeBackup", "velero", "pvb", "uid"), no_guard)
    assert await run.read_storage_access("default") == expected
