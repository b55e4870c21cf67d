"""All files of a storage location, with kopia as the client of its storage.

kopia reads any blob of a repository. So it gets a configuration whose storage is a path that holds no repository,
read-only, and the format of an empty repository, which kopia takes from its cache. Nothing is written to the location,
except to remove a file.
Source: kopia 0.23.1, repo/format/format_manager.go and format_blob_cache.go, repo/blob/readonly,
cli/command_blob_list.go and command_blob_show.go.
"""

import json
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import IO, Final

from core.models.base import JsonDict, WireModel
from datamover.kopia.client_config import IDENTITY_FLAGS, CacheLimit, build_config
from datamover.kopia.long_lists import open_output, read_elements
from datamover.kopia.process import Kopia, KopiaAnswer
from datamover.runtime.work_dir import WorkDir

__all__ = ["QUICK_FORMAT", "Blob", "LocationFiles"]

_FOLDER: Final = "location-files"
_CONFIG: Final = f"{_FOLDER}/repository.config"
_EMPTY: Final = {"KOPIA_PASSWORD": "empty"}
"""The password of the empty repository, which protects nothing."""

QUICK_FORMAT: Final = "--format-block-key-derivation-algorithm=pbkdf2-sha256-600000"
"""Each start of kopia derives the key from the password: this takes half the time of kopia's default, and no memory.

Source: kopia 0.23.1, cli/command_repository_create.go.
"""

_FORMAT: Final = ("kopia.repository", "kopia.blobcfg")

_CALL_SECONDS: Final = 600.0
"""Less than 15 minutes, for which kopia takes the format from the cache."""


class Blob(WireModel):
    """One element of `kopia blob list --json`; some storages list a folder alone, whose name ends in a slash."""

    id: str


class LocationFiles:
    """The files below a path of a storage that holds no repository."""

    def __init__(self, kopia: Kopia, work_dir: WorkDir, attempted: str) -> None:
        """Read by the credentials that `kopia` has, with files in `work_dir`; `attempted` is for errors."""
        self._kopia = kopia
        self._work_dir = work_dir
        self._attempted = attempted

    @property
    def _cache(self) -> Path:
        return self._work_dir.path / _FOLDER / "cache"

    async def prepare(self, storage: JsonDict, *, read_only: bool = True) -> None:
        """Write kopia's configuration for `storage`, as in the file of a client, and the format to its cache.

        Raises:
            KopiaError: the empty repository could not be created.
        """
        folder = self._work_dir.path / _FOLDER
        shutil.rmtree(folder, ignore_errors=True)
        self._cache.mkdir(mode=0o700, parents=True)
        empty = ["filesystem", f"--path={folder / 'empty'}", f"--cache-directory={folder / 'empty-cache'}"]
        (await self.call("repository", "create", *empty, QUICK_FORMAT, *IDENTITY_FLAGS)).check()
        for name in _FORMAT:
            shutil.copyfile(folder / "empty-cache" / name, self._cache / name)
        config = build_config(storage, cache=self._cache, limit=CacheLimit(), read_only=read_only)
        self._work_dir.write(_CONFIG, json.dumps(config).encode())

    async def list_folders(self) -> list[str]:
        """Return the names of the folders at the path, in alphabetical order.

        S3 lists them alone; of other storages all files are listed.

        Raises:
            DataPathError: the storage cannot be listed.
        """
        with open_output(self._work_dir) as file:
            parts = (name.partition("/") for name in await self._list(file))
            return sorted({name for name, slash, _ in parts if name and slash})

    async def remove_if_only(self, name: str) -> bool:
        """Remove the file if there is no other one; return whether it has been removed.

        Raises:
            DataPathError: the storage cannot be listed, or not be written to.
        """
        with open_output(self._work_dir) as file:
            if list(islice(await self._list(file), 2)) != [name]:
                return False
        # kopia would write a log to the storage, encrypted with the key of the empty repository.
        flags = ("--dangerous-commands=enabled", "--disable-repository-log")
        (await self.call("blob", "delete", name, *flags)).check()
        return True

    async def _list(self, file: IO[bytes]) -> Iterator[str]:
        """Return the names of all files, by way of the open file."""
        answer = await self.call("blob", "list", "--json", output_fd=file.fileno())
        return (blob.id for blob in read_elements(answer, file, Blob))

    async def call(self, *arguments: str, output_fd: int | None = None) -> KopiaAnswer:
        """Return kopia's answer."""
        attempted = f"{self._attempted}: {' '.join(arguments[:2])}"
        for file in self._cache.glob("kopia.*"):
            file.touch()
        more = _EMPTY | {"KOPIA_CONFIG_PATH": str(self._work_dir.path / _CONFIG)}
        return await self._kopia.call(attempted, *arguments, seconds=_CALL_SECONDS, more=more, output_fd=output_fd)
