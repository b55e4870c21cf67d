"""A snapshot whose files are read in a pod, and their list: nothing is written, neither here nor in the repository."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

from core.errors import ConfigError
from core.models.job_output import JobOutput
from core.models.names import OBJECT_NAME
from core.mover_specs import FilesSpec, ListFiles
from core.snapshot_contract import ENTRY_LINE, FileListing, FileType
from datamover.kopia.long_lists import open_output
from datamover.kopia.repository import Repository
from datamover.kopia.snapshot_files import StoredEntry, find_entry, find_only_file, read_directory
from datamover.kopia.snapshots import Snapshot, read_snapshot
from datamover.pod.cluster import PodContext
from datamover.pod.reporting import Termination, build_success
from datamover.pod.repository_access import open_access
from datamover.runtime.work_dir import WorkDir

__all__ = ["OpenSnapshot", "list_files", "open_snapshot"]

_LISTED_BYTES: Final = 8 << 20
"""Of the lines of a list: kubelets keep 10 MiB of a log by default.

Source: Kubernetes v1.34, KubeletConfiguration, `containerLogMaxSize`."""


@dataclass(frozen=True)
class OpenSnapshot:
    """A snapshot in a repository to which kopia is connected, read-only."""

    repository: Repository
    snapshot: Snapshot
    work_dir: WorkDir

    async def find(self, source: FilesSpec) -> StoredEntry:
        """Return the entry at the path of the source; of a block device, the device.

        Raises:
            DataPathError: there is none.
        """
        make = partial(open_output, self.work_dir)
        if source.device:
            return await find_only_file(self.repository, self.snapshot, make)
        return await find_entry(self.repository, self.snapshot, source.path, make)


@asynccontextmanager
async def open_snapshot(source: FilesSpec, context: PodContext) -> AsyncIterator[OpenSnapshot]:
    """Connect to the repository, and yield the snapshot.

    Raises:
        ConfigError: an argument is invalid.
        AgentError: the repository cannot be opened, or does not have the snapshot.
    """
    namespace = source.volume_namespace
    if not OBJECT_NAME.fullmatch(namespace):
        raise ConfigError(f'--volume-namespace: not the name of a namespace: "{namespace}"')
    location = await context.reader.location(source.name)
    with open_access(context) as access:
        repository = await access.resolve_namespace(location, namespace)
        snapshot = await repository.open(partial(read_snapshot, repository, source.snapshot), read_only=True)
        yield OpenSnapshot(repository, snapshot, access.work_dir)


async def list_files(spec: ListFiles, context: PodContext) -> Termination:
    """Write a line for each entry of a directory of a snapshot, or for one file; return the FileListing.

    Raises:
        AgentError: the snapshot cannot be read, or has no such entry.
    """
    output, listed = JobOutput(), 0
    async with open_snapshot(spec, context) as opened:
        found = await opened.find(spec)
        entries = [found]
        if found.type is FileType.DIRECTORY:
            read = await read_directory(opened.repository, found, partial(open_output, opened.work_dir))
            entries = [one for one in read if one.name > spec.after]
        for one in entries[: spec.limit]:
            if output.size_bytes > _LISTED_BYTES:
                break
            output.write(ENTRY_LINE, one.describe())
            listed += 1
    return build_success(output.seal(FileListing(type=found.type, entries=len(entries), listed=listed)))
