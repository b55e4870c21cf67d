"""Files of a backup without a restore: which volume a user means, and the list of a directory in its snapshot."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from msgspec import field

from client.backups.view import Backup, BackupVolume
from client.mover_jobs import JobSubject, JobTools, plan_job, read_location, run_job
from core.contract import parse_result
from core.errors import AgentError, ConfigError
from core.file_contract import ENTRY_LINE, FileEntry, FileListing, FileType
from core.models.base import JsonDict, WireModel
from core.models.phases import Phase
from core.models.storage import RepositoryKey
from core.spelling import guess
from exposer.maintenance_job import FileRequest, build_file_job
from exposer.model import Owner

__all__ = ["FileList", "FilePlace", "FilesError", "build_job", "find_place", "list_files"]

_BLOCK: Final = "Block"


class FilesError(AgentError):
    """A file of a backup cannot be found, or cannot be copied."""


@dataclass(frozen=True)
class FilePlace:
    """A path in a volume of a backup; empty: the whole volume. There is none in a block `device`."""

    volume: BackupVolume
    path: str = ""
    device: bool = False

    @property
    def shown(self) -> str:
        """It as a user writes it."""
        claim = f"{self.volume.namespace}/{self.volume.claim}"
        return f"{claim}/{self.path}" if self.path else claim


class FileList(WireModel):
    """A directory in a volume of a backup, or one file: its entries, by name, and notes about what is not shown.

    `type` is that of what was asked for. `more` is how many entries follow the last one that is shown.
    """

    place: str
    type: FileType
    entries: list[FileEntry] = field(default_factory=list)
    more: int = 0
    notes: list[str] = field(default_factory=list)


def find_place(backup: Backup, text: str) -> FilePlace:
    """Return what `NAMESPACE/PVC/PATH` or `PVC/PATH` means in a backup; the first form wins.

    Raises:
        ConfigError: the text is not UTF-8.
        FilesError: there is no such volume, several have that name, it is not in the bucket, or it is a device and has
            no paths.
    """
    _check_text(text)
    first, _, rest = text.strip("/").partition("/")
    second, _, path = rest.partition("/")
    by_name = {(one.namespace, one.claim): one for one in backup.volumes}
    if (volume := by_name.get((first, second))) is None:
        path = rest
        named = [one for one in backup.volumes if one.claim == first]
        if len(named) > 1:
            forms = " or ".join(f"{one.namespace}/{one.claim}" for one in named)
            raise FilesError(f"backup {backup.name} has several PVCs {first}: name one as {forms}")
        if not named:
            raise _missing(backup, first, f"{first}/{second}" if second else first)
        (volume,) = named
    if volume.phase is not Phase.COMPLETED or not volume.snapshot_id:
        cause = f": {volume.message}" if volume.message else ""
        raise FilesError(f"{volume.kind} {volume.transfer} of PVC {first} is {volume.phase}{cause}: it has no files")
    device = volume.saved is not None and volume.saved.volume_mode == _BLOCK
    if device and path:
        raise FilesError(f"PVC {volume.namespace}/{volume.claim} is a block volume: it has no files, only its device")
    return FilePlace(volume, path, device)


def _check_text(text: str) -> None:
    """Check that the bytes of an argument are UTF-8: Python has half of a surrogate pair for each that is not.

    Raises:
        ConfigError: they are not.
    """
    shown = text.encode(errors="backslashreplace").decode()
    if shown != text:
        raise ConfigError(f'"{shown}" is not UTF-8: kopia keeps U+FFFD for each byte that is not, so name it with that')


def _missing(backup: Backup, claim: str, name: str) -> FilesError:
    claims, names = [one.claim for one in backup.volumes], [f"{one.namespace}/{one.claim}" for one in backup.volumes]
    hint = guess(name, names) or guess(claim, claims)
    known = f" ({hint})" if hint else f": nodeagent backup ls {backup.name} lists its volumes"
    return FilesError(f"backup {backup.name} has no PVC {claim}{known}")


async def build_job(tools: JobTools, place: FilePlace, *, limit: int = 0, after: str = "") -> JsonDict:
    """Return the manifest of the Job that lists the place, up to `limit` entries; 0: that sends it.

    Raises:
        NotFoundError: the location of the backup does not exist.
        ConfigError: no agent is installed, its configuration cannot be read, or `after` is not UTF-8.
        KubeError: the API server rejected a request.
    """
    _check_text(after)
    volume = place.volume
    location = await read_location(tools.client, tools.namespace, volume.location)
    subject = JobSubject(Owner.of(location), "files", RepositoryKey(volume.namespace, volume.location))
    request = FileRequest(
        volume.namespace, volume.snapshot_id, place.path, device=place.device, limit=limit, after=after
    )
    return build_file_job(*await plan_job(tools, subject, location), request)


async def list_files(
    tools: JobTools,
    place: FilePlace,
    *,
    limit: int,
    after: str = "",
    timeout: timedelta,  # noqa: ASYNC109 - of the Job
) -> FileList:
    """Return the entries of a directory, at most `limit`, of names after `after`; or the file at the place.

    Raises:
        NotFoundError: the location of the backup does not exist.
        ConfigError: no agent is installed, its configuration cannot be read, or `after` is not UTF-8.
        JobError: the Job failed, such as for a path that does not exist, or did not end in time.
        KubeError: the API server rejected a request.
    """
    answer = await run_job(tools, await build_job(tools, place, limit=limit, after=after), "list", timeout)
    found = parse_result(FileListing, answer.message)
    entries = ENTRY_LINE.find(answer.log)
    notes = _explain(found, entries)
    return FileList(
        place=place.shown, type=found.type, entries=entries, more=max(0, found.entries - len(entries)), notes=notes
    )


def _explain(found: FileListing, entries: Sequence[FileEntry]) -> list[str]:
    notes = []
    if len(entries) < found.listed:
        notes.append(f"the log of the pod has only {len(entries)} of {found.listed} entries")
    if (more := found.entries - len(entries)) > 0:
        notes.append(f"{more} more entries are not shown: --after continues behind the last name, --limit shows more")
    return notes
