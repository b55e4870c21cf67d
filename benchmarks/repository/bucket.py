"""One repository in a bucket: how it is created, opened as before a backup, and maintained by the pod of a Job.

Knows the mover's own ways to do that, and the storage. Does not know when anything is done.
"""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Final

from benchmarks.processes import BenchmarkError
from benchmarks.repository.backups import Backups, run_backups
from benchmarks.repository.clock import SimulatedClock
from core.contract import MaintenanceResult, parse_result
from core.models.storage import MaintenanceEntry
from core.redact import Redactor
from datamover.kopia.process import Kopia, kopia_environment
from datamover.kopia.repository import Repository, RepositoryAddress
from datamover.kopia.snapshots import list_source
from datamover.runtime.resources import ResourceLimits
from datamover.runtime.work_dir import WorkDir, open_work_dir
from datamover.storage.aws import AwsKeys
from datamover.storage.s3 import S3Storage
from tests.datamover.support.plainkopia import PASSWORD
from tests.datamover.support.pods import MoverPod
from tests.datamover.support.s3proxy import S3Proxy
from tests.support.fakekube import FakeKube

__all__ = ["Bucket"]

_PREFIX: Final = "kopia/app/"
"""Of the volumes of the namespace `app`, in a location without a prefix."""

_REGION: Final = "us-east-1"
_CPUS: Final = 2
_IDENTITY: Final = "default@default"


@dataclass(frozen=True)
class _Job:
    """A Job of the repository, and the files and programs of its pod: it can be sent to a process of its own."""

    folder: Path
    url: str
    bucket: str
    credentials: str = field(repr=False)
    kopia: Path
    ahead: timedelta
    limit_bytes: int = 0
    history: Sequence[MaintenanceEntry] = ()

    async def maintain(self) -> str:
        """Run the maintenance that is due, and return the termination message.

        Raises:
            BenchmarkError: it failed.
        """
        pod = self._pod()
        return _check(pod, await pod.maintain())

    async def initialize(self) -> None:
        """Create the repository.

        Raises:
            BenchmarkError: it failed.
        """
        pod = self._pod()
        _check(pod, await pod.init())

    def _pod(self) -> MoverPod:
        """Return the Job's pod, which the leader has released."""
        clock = SimulatedClock(self.ahead)
        limits = ResourceLimits(_CPUS, self.limit_bytes or None)
        environment = _environment(self.folder, self.kopia)
        pod = MoverPod(FakeKube(clock), self.folder, clock, limits=limits, environment=environment)
        config = {"s3Url": self.url, "region": _REGION}
        pod.put_location(config, bucket=self.bucket, credential={"name": "keys", "key": "cloud"})
        pod.put_secret("keys", "cloud", self.credentials)
        pod.put_repository(phase="Ready", recentMaintenance=[entry.to_wire() for entry in self.history])
        pod.put_job()
        return pod


def _environment(folder: Path, kopia: Path) -> dict[str, str]:
    return {**os.environ, "PATH": f"{kopia}:{os.environ['PATH']}", "VELERO_SCRATCH_DIR": str(folder)}


def _check(pod: MoverPod, code: int) -> str:
    if code:
        raise BenchmarkError(f"a pod of the repository failed: {pod.message}")
    return pod.message


def _maintain_apart(job: _Job) -> str:
    """Run the Job's pod as the only work of this process: the peak of its children is kopia's in this run."""
    return asyncio.run(job.maintain())


@dataclass(frozen=True)
class _Opened:
    """The repository as a data mover has it: its own directory, and kopia's environment."""

    repository: Repository
    work_dir: WorkDir
    environment: Mapping[str, str] = field(repr=False)


@dataclass(frozen=True)
class Bucket:
    """A repository behind a proxy; `kopia` is the folder of the program that creates and maintains it."""

    name: str
    folder: Path
    proxy: S3Proxy
    clock: SimulatedClock
    kopia: Path

    async def initialize(self, kopia: Path) -> None:
        """Create the bucket, and the repository in it by the kopia in that folder.

        Raises:
            BenchmarkError: it failed.
        """
        self.proxy.server.make_bucket(self.name)
        await self._job(kopia=kopia).initialize()

    async def maintain(
        self, history: Sequence[MaintenanceEntry], *, limit_bytes: int = 0, apart: bool = False
    ) -> MaintenanceResult:
        """Let the pod of a Job do what is due, and return its result.

        Args:
            history: of the BackupRepository.
            limit_bytes: the memory limit of the pod.
            apart: run the pod in a process of its own, so that the result has the peak of this run.

        Raises:
            BenchmarkError: it failed.
        """
        job = self._job(limit_bytes=limit_bytes, history=history)
        if not apart:
            return parse_result(MaintenanceResult, await job.maintain())
        loop = asyncio.get_running_loop()
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            return parse_result(MaintenanceResult, await loop.run_in_executor(pool, _maintain_apart, job))

    async def measure_opening(self, source: str, kopia: Path) -> float:
        """Open the repository with empty caches, and list the snapshots of a volume, as each backup does first.

        Returns:
            Seconds until the snapshots are listed.

        Raises:
            BenchmarkError: the volume has no snapshot.
        """
        with self._opened(kopia) as opened:
            repository = opened.repository
            began = time.monotonic()
            found = (await repository.open(lambda: list_source(repository, f"{_IDENTITY}:{source}"))).latest
            seconds = time.monotonic() - began
        if found is None:
            raise BenchmarkError(f"{source} has no snapshot")
        return seconds

    @asynccontextmanager
    async def backups(self) -> AsyncIterator[Backups]:
        """Yield what writes and deletes snapshots of the repository, past proxy and server: its requests are many."""
        with self._opened(self.kopia) as opened:
            await opened.repository.connect()
            config = json.loads(opened.work_dir.config_file.read_text())
            config["storage"] = {"type": "directory", "config": {"path": str(self._blobs)}}
            # After each index blob kopia lists its cache.
            config["caching"] = {}
            past = opened.work_dir.write("past.config", json.dumps(config).encode())
            async with run_backups(past, self.clock, opened.environment) as backups:
                yield backups

    @property
    def size_bytes(self) -> int:
        """The bytes of all blobs."""
        return sum(blob.stat().st_size for blob in self._blobs.iterdir())

    @property
    def index_blobs(self) -> int:
        """How many blobs of indexes the bucket has, also those that are no longer read.

        Source: kopia 0.23.1, internal/epoch/epoch_manager.go.
        """
        return sum(blob.name.startswith("x") for blob in self._blobs.iterdir())

    @property
    def _blobs(self) -> Path:
        return self.proxy.server.folder / self.name / _PREFIX

    def _job(self, kopia: Path | None = None, **more: object) -> _Job:
        server = self.proxy.server
        where = (self.folder, self.proxy.url, self.name, server.credentials_file, kopia or self.kopia, self.clock.ahead)
        return _Job(*where, **more)  # type: ignore[arg-type]

    @contextmanager
    def _opened(self, kopia: Path) -> Iterator[_Opened]:
        """Yield the repository with empty caches, not connected."""
        server = self.proxy.server
        keys = AwsKeys(server.access_key, server.secret_key)
        storage = S3Storage(self.name, _PREFIX, self.proxy.url, _REGION, keys)
        environment = _environment(self.folder, kopia)
        with open_work_dir(environment) as folder:
            access = storage.access(folder)
            environment = kopia_environment(environment, folder, {**access.environment, "KOPIA_PASSWORD": PASSWORD})
            address = RepositoryAddress(f"repository {self.name}", storage, access)
            program = Kopia(environment, Redactor([PASSWORD, *access.secrets({})]))
            yield _Opened(Repository(program, address, folder), folder, environment)
