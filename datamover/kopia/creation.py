"""The creation of a kopia repository beside other creators, any of them may be killed at any time.

kopia's own creation writes `kopia.blobcfg`, then `kopia.repository`, both encrypted with a key of a new unique ID. Two
at once overwrite each other's objects, and one that is killed in between leaves a storage in which kopia neither opens
nor creates a repository. So kopia creates it in the work directory, and `kopia.repository` alone goes to the storage:
one object is there or not. Without the other one kopia uses the defaults, which are all that it contains.
Source: kopia 0.23.1, repo/format/format_manager.go, cli/command_repository_create.go, cli/command_repository_sync.go.
"""

import base64
import json
import os
import secrets
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from core.errors import ConfigError, RepositoryError
from core.models.storage import BlockHash
from datamover.kopia.client_config import IDENTITY, CacheLimit, build_config
from datamover.kopia.location_files import QUICK_FORMAT
from datamover.kopia.process import Kopia, KopiaAnswer
from datamover.runtime.work_dir import WorkDir, attempting

_FOLDER: Final = "new-repository"
_BLOB: Final = ".f"
"""The suffix of each blob in a directory. Source: kopia 0.23.1, repo/blob/sharded/sharded.go."""

_SHARDS: Final = ".shards"
FORMAT: Final = "kopia.repository"
_FORMAT: Final = f"{FORMAT}{_BLOB}"
STORAGE_CONFIG: Final = "kopia.blobcfg"
_STORAGE_CONFIG: Final = f"{STORAGE_CONFIG}{_BLOB}"

_UPLOAD: Final = "Synchronizing repositories"
"""kopia's line before it looks whether the storage has a repository, and writes its own if it has none."""

_UPLOAD_SECONDS: Final = 3.0
"""For these two requests; then kopia is killed."""

SETTLE_SECONDS: Final = 4.0
"""After an upload. Who found no repository before it has uploaded theirs by then, or was killed: the last one stays."""

OTHER_REPOSITORY: Final = "destination repository contains incompatible data"
"""kopia's error if the storage has a repository already."""

ONLY_CHECK: Final = ("--create-only", QUICK_FORMAT, "--retention-mode=GOVERNANCE")
"""Flags of a creation that fails before it writes, after it has listed the storage: the mode has no period."""

CHECKED: Final = "retention mode and period must be provided"
"""kopia's error then, if the storage has no objects."""

NOT_EMPTY: Final = "found existing data in storage location"
"""kopia's error if it has some."""

OWN_MAINTENANCE: Final = ("maintenance", "set", f"--owner={IDENTITY}")
"""What kopia's own creation sets, apart from defaults; a first backup does it, too, if this one is interrupted."""


@dataclass(frozen=True)
class NewRepository:
    """A repository without contents, in a folder of the work directory."""

    folder: Path
    unique_id: str

    def install(self, directory: Path) -> bool:
        """Make it the repository of a directory that has none; return False if another one may still replace it.

        Raises:
            RepositoryError: there is no repository, but its files.
            ConfigError: the directory cannot be written to.
        """
        with attempting(f"create a repository in {directory}", ConfigError):
            if find_repository(directory):
                return True
            # A creation of kopia's own was interrupted: the key of what it left is lost.
            (directory / _STORAGE_CONFIG).unlink(missing_ok=True)
            # First, since kopia writes its own where it finds none, for another arrangement of the folders.
            return _publish(self.folder / _SHARDS, directory) & _publish(self.folder / _FORMAT, directory)

    async def upload(self, kopia: Kopia, storage_arguments: list[str], attempted: str) -> KopiaAnswer:
        """Make it the repository of a storage that has none; fail if it has another.

        Raises:
            KopiaTimeoutError: the storage did not answer in time; it may have a repository now.
        """
        config = {"KOPIA_CONFIG_PATH": str(self.folder.with_suffix(".config"))}
        arguments = ("repository", "sync-to", *storage_arguments, "--no-update")
        return await kopia.call(attempted, *arguments, more=config, hurry=(_UPLOAD, _UPLOAD_SECONDS))


async def create_apart(
    kopia: Kopia, work_dir: WorkDir, attempted: str, block_hash: BlockHash | None = None
) -> NewRepository:
    """Create a repository with kopia's defaults, but `block_hash`, in the work directory; raises KopiaError."""
    folder = work_dir.path / _FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    more = () if block_hash is None else (f"--block-hash={block_hash}",)
    arguments = ("repository", "create", "filesystem", f"--path={folder}", "--create-only")
    (await kopia.call(attempted, *arguments, *more)).check()
    (folder / _STORAGE_CONFIG).unlink()
    storage = {"type": "filesystem", "config": {"path": str(folder)}}
    config = build_config(storage, cache=work_dir.path / f"{_FOLDER}-cache", limit=CacheLimit(), read_only=True)
    work_dir.write(f"{_FOLDER}.config", json.dumps(config).encode())
    return NewRepository(folder, _read_id(folder / _FORMAT))


def read_cached_id(cache: Path) -> str | None:
    """Return the unique ID of the repository that kopia has opened with this cache; None: it has opened none.

    Source: kopia 0.23.1, repo/format/format_blob_cache.go.
    """
    # kopia keeps a damaged one, too, and says itself what is wrong with it.
    with suppress(FileNotFoundError, ValueError, LookupError, TypeError):
        return _read_id(cache / FORMAT)
    return None


def _read_id(file: Path) -> str:
    return base64.b64decode(json.loads(file.read_bytes())["uniqueID"]).hex()


def has_repository(directory: Path) -> bool:
    """Return whether a directory has a repository; True if that cannot be found out."""
    try:
        (directory / _FORMAT).stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        pass
    return True


def find_repository(directory: Path) -> bool:
    """Return whether a directory has a repository; False: it has nothing of one.

    Raises:
        RepositoryError: there is none, but its files.
        OSError: the directory cannot be read.
    """
    walk = os.walk(directory, onerror=_fail)
    found = {name for _, _, names in walk for name in names if name.endswith(_BLOB)}
    if _FORMAT in found or (directory / _FORMAT).exists():
        return True
    if found - {_STORAGE_CONFIG}:
        raise RepositoryError(f"{directory}: there is no repository, and the storage is not empty: no {_FORMAT}")
    return False


def _fail(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _publish(source: Path, directory: Path) -> bool:
    """Copy a file to a directory, unless that has one of its name; return False if another may have been replaced."""
    target = directory / source.name
    # kopia's name for a file that is being written, which it ignores.
    part = target.with_name(f"{target.name}.tmp.{secrets.token_hex(8)}")
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(source.read_bytes())
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(part, target)
    except FileExistsError:
        return True
    except OSError:
        # The file system has no links, such as vfat, and so no way to create a file as a whole unless it exists.
        if not target.exists():
            part.rename(target)
        return False
    finally:
        part.unlink(missing_ok=True)
    return True
