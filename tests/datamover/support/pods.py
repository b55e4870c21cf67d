"""A data mover in pod mode without a pod, with FakeKube and a real kopia."""

import base64
import json
import os
import shutil
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, Self

from core.clock import Clock, SystemClock
from core.contract import VolumeMode
from core.kube.client import KubeClient
from core.kube.resources import BACKUP_REPOSITORIES, BACKUP_STORAGE_LOCATIONS, BY_KIND, EVENTS, JOBS, SECRETS, Resource
from core.kube.transport import Retry
from core.models.base import format_time
from core.models.names import (
    ATTEMPTS_ANNOTATION,
    NODE_LABEL,
    OWNER_UID_LABEL,
    REPO_CREDENTIALS_KEY,
    REPO_CREDENTIALS_SECRET,
    REPO_NAME_LABEL,
)
from core.models.phases import Attempts
from core.models.transfer_settings import Compression
from core.mover_specs import InitRepository, MaintainRepository, ReportSnapshots
from datamover.arguments import LogOptions, PodOptions
from datamover.kinds import TRANSFER_KINDS
from datamover.pod.cluster import MOUNTS, PodContext
from datamover.pod.storage_commands import run_storage_command
from datamover.pod.transfer import PodTransfer
from datamover.runtime.resources import ResourceLimits
from datamover.runtime.signals import StopSignal
from tests.datamover.support.plainkopia import PASSWORD
from tests.datamover.support.s3server import S3Server
from tests.support.fakekube import FakeKube
from tests.support.objects import JsonDict, build_object
from tests.support.tasks import until

REPOSITORY: Final = "app-default-kopia"
TRANSFER: Final = "transfer-1"
JOB: Final = f"{REPOSITORY}-maintain-job-1"
FLAGS: Final = {kind.resource.kind: flag for flag, kind in TRANSFER_KINDS.items()}
CLOUD: Final = {"name": "cloud", "key": "key"}
"""The credential of a location, which names the Secret."""

_NAMESPACE: Final = "velero"
_POLL_SECONDS: Final = 0.02


def repository_manifest(volume_namespace: str, location: str) -> JsonDict:
    """Return a BackupRepository as Velero's server creates it, without status."""
    place = {"volumeNamespace": volume_namespace, "backupStorageLocation": location}
    labels = {"velero.io/volume-namespace": volume_namespace, "velero.io/storage-location": location}
    return build_object(
        BACKUP_REPOSITORIES,
        f"{volume_namespace}-{location}-kopia",
        _NAMESPACE,
        metadata={"labels": {**labels, "velero.io/repository-type": "kopia"}},
        spec={**place, "repositoryType": "kopia", "maintenanceFrequency": "1h0m0s"},
    )


@dataclass
class MoverPod:
    """The cluster that a data mover reads: a directory as location, the password, the repository."""

    kube: FakeKube
    folder: Path
    clock: Clock = field(default_factory=SystemClock)
    mounts: Path = MOUNTS
    limits: ResourceLimits = field(default_factory=lambda: ResourceLimits(2))
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ, repr=False)
    attempts: Attempts = field(default_factory=Attempts)
    annotations: Mapping[str, str] = field(default_factory=dict)
    cluster: str = ""
    compression: Compression = Compression.NONE
    client: KubeClient | None = None

    @classmethod
    def ready(cls, repository: Path, folder: Path, **more: Any) -> Self:
        """Return one whose BackupRepository is Ready; its repository is a copy of the given one."""
        pod = cls(FakeKube(), folder, **more)
        shutil.copytree(repository, pod.repository)
        pod.put_repository(phase="Ready")
        return pod

    def __post_init__(self) -> None:
        self.stop = StopSignal()
        self.put_location({"fspath": str(self.folder / "backups")}, provider="velero.io/fs")
        self.put_secret(REPO_CREDENTIALS_SECRET, REPO_CREDENTIALS_KEY, f" {PASSWORD}\n")

    def put_secret(self, name: str, key: str, value: str) -> None:
        data = {key: base64.b64encode(value.encode()).decode()}
        self.kube.put(build_object(SECRETS, name, _NAMESPACE, data=data))

    def put_location(self, config: dict[str, str], *, provider: str = "velero.io/aws", **spec: Any) -> None:
        storage = {"bucket": spec.pop("bucket", "bkt")}
        whole = {"provider": provider, "config": config, "objectStorage": storage, **spec}
        self.kube.put(build_object(BACKUP_STORAGE_LOCATIONS, "default", _NAMESPACE, spec=whole))

    def put_bucket(self, server: S3Server, bucket: str, *, url: str = "", **spec: Any) -> None:
        """Let the location be a bucket, with the keys of the server, which may be behind a proxy at `url`."""
        self.put_secret(CLOUD["name"], CLOUD["key"], server.credentials_file)
        config = {"s3Url": url or server.url, "region": "us-east-1"}
        self.put_location(config, bucket=bucket, credential=CLOUD, **spec)

    def put_repository(
        self, annotations: dict[str, str] | None = None, config: dict[str, str] | None = None, **status: Any
    ) -> None:
        manifest = repository_manifest("app", "default")
        manifest["metadata"]["annotations"] = annotations or {}
        manifest["spec"]["repositoryConfig"] = config or {}
        self.kube.put(manifest | {"status": status})

    def put_transfer(self, kind: str, phase: str = "InProgress", **spec: Any) -> None:
        """Create or replace the transfer `TRANSFER`; `spec` is merged into the minimal one of its kind."""
        attempts = {} if self.attempts == Attempts() else {ATTEMPTS_ANNOTATION: self.attempts.to_json()}
        meta = {
            "labels": {"velero.io/async-operation-id": "du-1", NODE_LABEL: "node-a"},
            "ownerReferences": [
                {"apiVersion": "velero.io/v1", "kind": "Restore", "name": "r", "uid": "uid-of-restore"}
            ],
            "annotations": {**self.annotations, **attempts},
            # Not by the clock of the fake: it is compared with times of files.
            "creationTimestamp": format_time(datetime.now(UTC)),
        }
        whole, status = {**_SPECS[kind], **spec}, {"phase": phase}
        self.kube.put(build_object(BY_KIND[kind], TRANSFER, _NAMESPACE, metadata=meta, spec=whole, status=status))

    @property
    def repository(self) -> Path:
        """The directory of the repository, unless the location is another one."""
        return self.folder / "backups" / "kopia" / "app"

    @property
    def context(self) -> PodContext:
        return PodContext(
            client=self.client or KubeClient(self.kube, Retry(self.clock, attempts=1)),
            clock=self.clock,
            namespace=_NAMESPACE,
            node="node-a",
            environment=self.environment,
            limits=self.limits,
            stop=self.stop,
            termination_file=self.folder / "termination-log",
            mounts=self.mounts,
        )

    async def run(self, flag: str, volume: Path, mode: VolumeMode = VolumeMode.FILESYSTEM, **more: Any) -> int:
        """Run the data mover of the transfer and return its exit code."""
        options = PodOptions(
            kind_flag=flag,
            name=TRANSFER,
            volume=volume,
            mode=mode,
            resource_timeout=timedelta(seconds=20),
            attempt=self.attempts.number,
            cluster=self.cluster,
            compression=self.compression,
            termination_file=self.context.termination_file,
            log=LogOptions("info"),
            **more,
        )
        return await PodTransfer(options, self.context).run()

    async def transfer(
        self, kind: str, volume: Path, mode: VolumeMode = VolumeMode.FILESYSTEM, **spec: Any
    ) -> dict[str, Any]:
        """Create or replace the transfer, run its data mover, which must succeed, and return the result."""
        self.put_transfer(kind, **spec)
        assert await self.run(FLAGS[kind], volume, mode) == 0, self.message
        return dict(self.result)

    def signal(self) -> None:
        """Let the signal arrive that ends a pod."""
        self.stop._take(signal.SIGTERM, None)

    async def create_repository(self) -> None:
        """Create the repository, or find it, and make its BackupRepository Ready."""
        self.put_repository()
        assert await self.init() == 0, self.message
        self.put_repository(phase="Ready")

    async def init(self) -> int:
        """Run `init-repository` and return its exit code."""
        return await run_storage_command(InitRepository(backup_repository=REPOSITORY), self.context)

    def put_job(self, name: str = JOB, *, released: bool = True, **status: Any) -> None:
        """Create or replace a maintenance Job of the repository; the leader has released it or not."""
        (repository,) = self.stored()
        labels = {OWNER_UID_LABEL: repository["metadata"]["uid"]} | ({REPO_NAME_LABEL: REPOSITORY} if released else {})
        self.kube.put(build_object(JOBS, name, _NAMESPACE, metadata={"labels": labels}, **status))

    async def maintain(self, **options: Any) -> int:
        """Run `maintain-repository` in the Job `JOB` and return its exit code."""
        spec = MaintainRepository(backup_repository=REPOSITORY, job=JOB, **{"verify_blobs": 100_000} | options)
        return await run_storage_command(spec, self.context)

    async def report(self) -> int:
        """Run `report-snapshots` and return its exit code."""
        return await run_storage_command(ReportSnapshots(backup_repository=REPOSITORY), self.context)

    @property
    def message(self) -> str:
        return (self.folder / "termination-log").read_text()

    @property
    def result(self) -> Any:
        return json.loads(self.message)

    def events(self) -> list[tuple[str, str]]:
        return [(event["reason"], event["message"]) for event in self.kube.objects(EVENTS)]

    def reasons(self) -> list[str]:
        """The reasons of the Events without progress, whose number depends on the machine."""
        return [reason for reason, _ in self.events() if reason != "Data-Path-Progress"]

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition is true."""
        await until(condition, seconds=150, every=_POLL_SECONDS)

    def stored(self, resource: Resource = BACKUP_REPOSITORIES) -> list[JsonDict]:
        return self.kube.objects(resource)


_DATA: Final = {"sourceNamespace": "app", "backupStorageLocation": "default", "operationTimeout": "10m0s"}
_POD_VOLUME: Final = {
    "pod": {"kind": "Pod", "name": "writer", "namespace": "app", "uid": "u"},
    "volume": "fs",
    "backupStorageLocation": "default",
    "repoIdentifier": "",
    "uploaderType": "kopia",
}
_SPECS: Final[dict[str, JsonDict]] = {
    "DataUpload": {**_DATA, "snapshotType": "CSI", "sourcePVC": "data"},
    "DataDownload": {**_DATA, "targetVolume": {"namespace": "app", "pvc": "data", "pv": ""}, "snapshotID": ""},
    "PodVolumeBackup": {**_POD_VOLUME, "node": "node-a"},
    "PodVolumeRestore": {**_POD_VOLUME, "snapshotID": "", "sourceNamespace": "app"},
}
