"""A mover, and a storage whose sockets are counted, at an address that kopia uses a proxy for.

Knows locations, buckets and limits. Does not know what is measured.
"""

import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Final

from benchmarks.bandwidth.counters import SocketCounters, sampled
from benchmarks.cluster import BUCKET, RUN, Cluster, leave_service_account, run_cluster
from benchmarks.disks import Disks, memory_at
from benchmarks.programs import Mover
from benchmarks.resume.movers import ResumedMover
from benchmarks.resume.relay import run_relay
from benchmarks.stages import Stages
from benchmarks.tree import TreeShape, make_tree
from core.models.bandwidth import BandwidthLimits
from core.models.names import BANDWIDTH_ANNOTATION
from tests.datamover.support.s3server import S3Server, run_s3_server
from tests.testbed.pki import Authority

__all__ = ["BandwidthBed", "open_bed"]

_HOST: Final = "storage.example.com"
"""A name of this machine: Go uses no proxy for `localhost` and addresses of the loopback interface."""

_HOSTS: Final = Path("/etc/hosts")


@dataclass
class BandwidthBed:
    """A mover, its repository in the bucket of `s3`, and the counted line to it."""

    stages: Stages
    cluster: Cluster
    mover: Mover
    disks: Disks
    folder: Path
    s3: S3Server
    counters: SocketCounters
    counted_url: str

    @property
    def one_transfer(self) -> ResumedMover:
        """A transfer that may be stopped in the middle."""
        return ResumedMover(self.cluster, self.mover, self.disks, {})

    def use_bucket(self, *, counted: bool) -> None:
        """Let movers reach a bucket with the empty repository, by the counted line or without one."""
        self.s3.make_bucket(BUCKET)
        shutil.copytree(self._template, self.s3.folder / BUCKET, dirs_exist_ok=True)
        self.use_line(counted=counted)

    def use_line(self, *, counted: bool) -> None:
        """Let movers reach the bucket as it is."""
        url = self.counted_url if counted else self.s3.url
        self.cluster.put_location(replace(self.s3, url=url.replace("127.0.0.1", _HOST)))

    async def use_directory(self) -> Path:
        """Let movers use an empty repository in a directory in memory, and return that."""
        directory = self.folder / "s3" / "directory"
        directory.mkdir()
        self.limit(None)
        self.cluster.objects.put_location({"fspath": str(directory)}, provider="velero.io/fs")
        await self.mover.init()
        return directory

    def limit(self, limits: BandwidthLimits | None) -> None:
        """Let transfers that are written from now on have limits; None: they have no annotation."""
        annotations = {} if limits is None else {BANDWIDTH_ANNOTATION: limits.to_json()}
        self.cluster.objects.annotations = annotations

    async def prepare(self) -> None:
        """Make an empty repository to copy, and let the mover run once: that compiles it."""
        with self.stages.stage("preparing"):
            self.s3.make_bucket(BUCKET)
            self.use_line(counted=False)
            await self.mover.init()
            shutil.copytree(self.s3.folder / BUCKET, self._template)
            self.limit(BandwidthLimits())
            await self.mover.back_up(make_tree(self.folder / "first", TreeShape(1, 1_000_000, 10, 1_000)))

    @property
    def _template(self) -> Path:
        return self.folder / "template"


@asynccontextmanager
async def open_bed(folder: Path, stages: Stages) -> AsyncIterator[BandwidthBed]:
    """Serve a cluster and a bucket in memory, and yield the bed, prepared."""
    authority = Authority(folder / "pki")
    (folder / "cluster").mkdir()
    counters = SocketCounters()
    with memory_at(RUN), memory_at(folder / "s3") as buckets, run_s3_server(buckets) as s3, _named(folder):
        leave_service_account(authority)
        async with (
            run_cluster(folder / "cluster", authority) as cluster,
            run_relay(s3.url, during=counters.counting) as url,
            sampled(counters.sample),
        ):
            disks = Disks(folder, stages)
            mover = Mover(cluster, folder, disks, count(1))
            bed = BandwidthBed(stages, cluster, mover, disks, folder, s3, counters, url)
            await bed.prepare()
            yield bed


@contextmanager
def _named(folder: Path) -> Iterator[None]:
    """Let this machine have the storage's name, in this mount namespace."""
    hosts = folder / "hosts"
    hosts.write_text(f"{_HOSTS.read_text()}\n127.0.0.1 {_HOST}\n")
    subprocess.run(["mount", "--bind", hosts, _HOSTS], check=True, capture_output=True)  # noqa: S603, S607
    try:
        yield
    finally:
        subprocess.run(["umount", _HOSTS], check=True, capture_output=True)  # noqa: S603, S607
