"""The adapters of DataUploads and DataDownloads, with an exposer that answers as scripted."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from core.kube.client import KubeClient
from core.kube.resources import BACKUP_STORAGE_LOCATIONS, PERSISTENT_VOLUME_CLAIMS, SECRETS
from core.kube.transport import Request, Response
from core.models.base import JsonDict
from exposer.model import KeptVolume, Pending, Reader, RestoreRequest, SnapshotRequest
from exposer.settings import ExposeSettings
from exposer.template import AgentTemplate
from nodeagent.runtime.settings import Settings
from nodeagent.transfers.kinds.base import Admission, Kind
from nodeagent.transfers.kinds.csi_snapshot import DataDownloadKind, DataUploadKind
from tests.support.scripted import answer, rejection, scripted_client, stored

K = TypeVar("K")
SETTINGS = ExposeSettings(AgentTemplate(image="mover:1"))
LOCATION = stored(
    BACKUP_STORAGE_LOCATIONS,
    metadata={"name": "default"},
    spec={"provider": "aws", "objectStorage": {"bucket": "b"}, "credential": {"name": "cloud", "key": "k"}},
)
TRUSTING = {"provider": "aws", "objectStorage": {"bucket": "b", "caCertRef": {"name": "ca", "key": "k"}}}
LOCATION_PATH = "/apis/velero.io/v1/namespaces/velero/backupstoragelocations/default"
SECRET_PATH = "/api/v1/namespaces/velero/secrets/cloud"
CLAIM_PATH = "/api/v1/namespaces/app3/persistentvolumeclaims/data"
READY_WORLD: dict[str, JsonDict] = {
    LOCATION_PATH: LOCATION,
    SECRET_PATH: stored(SECRETS, data={"k": "eA=="}),
    CLAIM_PATH: stored(PERSISTENT_VOLUME_CLAIMS, spec={}),
}


def client(world: Mapping[str, JsonDict]) -> KubeClient:
    def script(request: Request) -> Response:
        found = world.get(request.path)
        return answer(found) if found is not None else rejection(404, "not found")

    return scripted_client(script)


@dataclass
class FakeExposer:
    """Answers as scripted, and records what it was asked for."""

    found: Pending | Exception | None = None
    dropped: list[KeptVolume] = field(default_factory=list)
    checked: list[Any] = field(default_factory=list)
    cleaned: int = 0

    async def check(self, request: SnapshotRequest | RestoreRequest, reader: Reader) -> Pending | None:
        self.checked.append(request)
        if isinstance(self.found, Exception):
            raise self.found
        return self.found

    async def confirm(self, request: SnapshotRequest | RestoreRequest) -> None:
        if isinstance(self.found, Exception):
            raise self.found

    async def clean_up(self, request: SnapshotRequest | RestoreRequest) -> Pending | None:
        self.checked.append(request)
        self.cleaned += 1
        return None

    async def drop_volume(self, request: RestoreRequest, kept: KeptVolume) -> Pending | None:
        self.dropped.append(kept)
        return None

    async def give_back(self, request: RestoreRequest) -> Pending | None:
        return None


def uploads(exposer: FakeExposer | None = None) -> DataUploadKind:
    return DataUploadKind(cast("Any", exposer or FakeExposer()), lambda: SETTINGS, Settings("").datamover_names)


def downloads(exposer: FakeExposer | None = None) -> DataDownloadKind:
    return DataDownloadKind(cast("Any", exposer or FakeExposer()), lambda: SETTINGS, Settings("").datamover_names)


async def admission(kind: Kind[Any], transfer: JsonDict, world: Mapping[str, JsonDict] = READY_WORLD) -> Admission:
    return await kind.check_admission(kind.parse(transfer), client(world))


def bare(kind: type[K]) -> K:
    """Return an adapter that parses and names, and has no exposer."""
    adapter: K = cast("Any", kind)(exposer=None, expose_settings=None, datamovers=frozenset())
    return adapter
