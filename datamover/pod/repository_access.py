"""What the pod of a Job works on repositories with: its directory, its memory settings, its waits for a storage."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from core.models.storage import BackupRepository, BackupStorageLocation
from datamover.kopia.repository import Repository
from datamover.kopia.stalls import read_stall_limits
from datamover.kopia.storage_calls import WaitLog, WaitReporter, Waits
from datamover.pod.cluster import MoverTools, PodContext, RepositoryPlace, resolve_place, resolve_repository
from datamover.runtime.work_dir import WorkDir, open_work_dir

__all__ = ["RepositoryAccess", "open_access"]


@dataclass(frozen=True)
class RepositoryAccess:
    """What one repository is opened with; `context` has the environment for kopia."""

    context: PodContext
    tools: MoverTools

    @property
    def work_dir(self) -> WorkDir:
        """The directory that kopia's configuration and cache are in."""
        return self.tools.work_dir

    async def resolve(self, location: BackupStorageLocation, wanted: BackupRepository) -> Repository:
        """Return the kopia repository of the BackupRepository, not yet connected.

        Raises:
            RepositoryError: as of `resolve_repository`.
        """
        return await resolve_repository(self.context, location, wanted, self.tools)

    async def resolve_namespace(self, location: BackupStorageLocation, volume_namespace: str) -> Repository:
        """Return the kopia repository for the volumes of a namespace, not yet connected.

        Raises:
            RepositoryError: as of `resolve_place`.
        """
        place = RepositoryPlace(location, volume_namespace, f"repository of namespace {volume_namespace}")
        return await resolve_place(self.context, place, self.tools)


@contextmanager
def open_access(context: PodContext, reporter: WaitReporter | None = None) -> Iterator[RepositoryAccess]:
    """Yield what one repository is opened with; its directory is removed at the end.

    Each needs its own: kopia would find the format of another repository in its cache.

    Args:
        context: this process's pod.
        reporter: reports waits for a storage; None: the log has them.

    Raises:
        ConfigError: no directory is writable, or a limit in the environment is invalid.
    """
    with open_work_dir(context.environment) as work_dir:
        settings = context.limits.maintenance_settings(context.environment)
        environment = {**context.environment, **settings, "TMPDIR": str(work_dir.path)}
        waits = Waits(context.clock, read_stall_limits(environment), reporter or WaitLog())
        yield RepositoryAccess(replace(context, environment=environment), MoverTools(work_dir, waits))
