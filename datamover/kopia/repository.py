"""One kopia repository: connect, create, and what went wrong when it cannot be opened.

Knows when there is no repository, and when one answers. Does not know where the
storage came from, or what is done with the repository afterwards.
Source: kopia 0.23.1, cli/command_repository_*.go, repo/open.go.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from core.aio import run_apart
from core.errors import DataPathError, KopiaError, RepositoryError
from datamover.kopia.causes import NO_BUCKET, NO_CONNECTION, REFUSED, find_cause
from datamover.kopia.client_config import IDENTITY_FLAGS, CacheLimit, build_config
from datamover.kopia.process import Kopia, KopiaAnswer, KopiaSilentError
from datamover.runtime.work_dir import WorkFolder
from datamover.storage.providers import Reach, Storage

__all__ = ["NotInitializedError", "Reachability", "Repository", "RepositoryPlace"]


_T = TypeVar("_T")


_logger = logging.getLogger(__name__)


_CONNECT_SECONDS: Final = 30.0
"""Connecting takes a third of a second. So long it takes to tell of an address that swallows packets."""


_UNCONNECTED_SECONDS: Final = 10.0
"""What is read before connecting takes half a second; then it is time to tell what keeps it."""


_CREATE_SECONDS: Final = 120.0


_SECOND_LOOK: Final = "second-look"


_NEARBY: Final = "nearby"


_NEARBY_CONFIG: Final = "nearby.config"


_NO_REPOSITORY: Final = "repository not initialized"


_REFUSALS: Final = ("access denied", "accessdenied", "forbidden")


_NOT_INITIALIZED: Final = (_NO_REPOSITORY, "cannot access storage path: stat")
"""The second: a folder's repository whose folder is not there yet."""


class NotInitializedError(RepositoryError):
    """The storage can be reached and holds no repository."""


@dataclass(frozen=True)
class RepositoryPlace:
    """Where a repository lies, how kopia reaches it, and what messages call it."""

    description: str
    storage: Storage
    reach: Reach


@dataclass(frozen=True)
class Reachability:
    """Whether a repository answers, and what a message says of that."""

    answers: bool
    told: str


class Repository:
    """The repository at a place, through a kopia whose environment reaches it."""

    def __init__(
        self,
        kopia: Kopia,
        place: RepositoryPlace,
        folder: WorkFolder,
        *,
        cache: CacheLimit | None = None,
        connect_seconds: float = _CONNECT_SECONDS,
    ) -> None:
        self._kopia = kopia
        self._place = place
        self._folder = folder
        self._cache = cache or CacheLimit()
        self._connect_seconds = connect_seconds
        self._connected = False

    @property
    def kopia(self) -> Kopia:
        """The program, connected once `connect` or `open` has returned."""
        return self._kopia

    @property
    def description(self) -> str:
        """The repository, as messages name it."""
        return self._place.description

    async def connect(self, *, read_only: bool = False, cache_name: str = "", spent_seconds: float = 0.0) -> None:
        """Connect to the repository.

        Args:
            read_only: nothing will be written through this connection.
            cache_name: a cache of its own: nothing is taken from what another connection read.
            spent_seconds: of the time there is, what somebody has waited for the storage already.

        Raises:
            NotInitializedError: there is none.
            RepositoryError: it cannot be opened; the message tells the cause.
        """
        more = ["--readonly"] if read_only else []
        flags = [*more, *self._client_flags(cache_name)]
        answer = await self._call("connect", self._connect_seconds, flags, spent_seconds=spent_seconds)
        if any(answer.said(words) for words in _NOT_INITIALIZED):
            if missing := await self._look_for_bucket():
                raise RepositoryError(f"{self.description}: {missing}")
            raise NotInitializedError(f"{self.description}: no repository is there")
        self._check(answer)
        self._connected = True

    async def open(self, read: Callable[[], Coroutine[Any, Any, _T]], *, read_only: bool = False) -> _T:
        """Return what `read` returns, and leave the repository connected.

        Connecting costs as much as a read: most of both is the key that kopia derives from the
        password. So `read` comes first, with a configuration like the one that connecting
        writes. Where it fails, connecting finds the cause; if there is none, `read` runs again.
        A repository that is connected already is only read.

        Raises:
            NotInitializedError: there is no repository.
            RepositoryError: it cannot be opened; the message names the cause.
        """
        if self._connected:
            return await read()
        spent_seconds = 0.0
        if self._write_config(read_only=read_only):
            try:
                async with asyncio.timeout(_UNCONNECTED_SECONDS):
                    result = await run_apart(read, name="read-unconnected")
            except TimeoutError:
                spent_seconds = _UNCONNECTED_SECONDS
            except KopiaError as e:
                if (cause := find_cause(said := str(e).splitlines())) in NO_CONNECTION:
                    raise RepositoryError(": ".join([self.description, cause, said[-1]])) from e
                _logger.debug("%s: connecting is to tell why it cannot be read: %s", self.description, e)
            else:
                self._connected = True
                return result
        await self.connect(read_only=read_only, spent_seconds=spent_seconds)
        return await read()

    async def create(self) -> None:
        """Create the repository in an empty place, and connect to it.

        Raises:
            RepositoryError: the place is not empty, or cannot be written to.
        """
        self._place.storage.prepare_creation()
        self._check(await self._call("create", _CREATE_SECONDS, self._client_flags("")))

    async def ensure(self) -> str:
        """Connect to the repository, created if the place was empty, and return its unique ID.

        Creating is not atomic: a second creator makes unreadable what the first one wrote. So
        what was created is looked at once more, with nothing taken from this disk.

        Raises:
            RepositoryError: it can be neither opened nor created, or somebody else created
                one at the same moment.
        """
        try:
            await self.connect()
        except NotInitializedError:
            await self.create()
            created = await self.unique_id()
            await self.connect(cache_name=_SECOND_LOOK)
            found = await self.unique_id()
            if found != created:
                text = f"{self.description}: somebody else created it at the same moment; it is not used"
                raise RepositoryError(text) from None
            _logger.info("%s was created", self.description)
            return created
        return await self.unique_id()

    async def ask(self) -> Reachability:
        """Return whether the repository's storage answers just now; takes as long as connecting may.

        kopia looks for a repository where none is: so it needs no index and no password, whose
        key takes 64 MiB to make, and whoever is at work keeps its memory.
        """
        reach = self._place.storage.nearby().reach(self._folder)
        config = {"KOPIA_CONFIG_PATH": str(self._folder.path / _NEARBY_CONFIG)}
        arguments = ["repository", "connect", *reach.arguments, *self._client_flags(_NEARBY)]
        seconds = self._connect_seconds
        try:
            answer = await self._kopia.call(self.description, *arguments, seconds=seconds, more=config)
        except KopiaSilentError as e:
            told = [f"{self.description} does not answer", f"nothing within {seconds:.0f} s", *e.lines[-1:]]
            return Reachability(answers=False, told=": ".join(told))
        except DataPathError as e:
            return Reachability(answers=True, told=f"{self.description} cannot be asked: {e}")
        if answer.said(_NO_REPOSITORY) and (missing := await self._look_for_bucket()):
            return Reachability(answers=False, told=f"{self.description} does not answer: {missing}")
        # A refusal is an answer too: the credentials may be for the repository's own prefix alone.
        if any(answer.said(words) for words in (_NO_REPOSITORY, *_REFUSALS)):
            return Reachability(answers=True, told=f"the storage of {self.description} answers")
        told = [f"{self.description} does not answer", find_cause(answer.lines), *answer.lines[-1:]]
        return Reachability(answers=False, told=": ".join(filter(None, told)))

    async def _look_for_bucket(self) -> str:
        """Return what there is to tell of a bucket that is not there; empty: it is, or nobody may know."""
        place = self._place
        if not place.storage.look:
            return ""
        config = {"KOPIA_CONFIG_PATH": str(self._folder.path / _NEARBY_CONFIG)}
        flags = [*place.reach.arguments, *place.storage.look, *self._client_flags(_NEARBY)]
        try:
            answer = await self._kopia.call(
                self.description, "repository", "connect", *flags, seconds=self._connect_seconds, more=config
            )
        except DataPathError as e:
            _logger.debug("%s: whether the bucket is there is not known: %s", self.description, e)
            return ""
        cause = find_cause(answer.lines)
        return ": ".join([cause, *answer.lines[-1:]]) if cause == NO_BUCKET else ""

    async def unique_id(self) -> str:
        """Return what identifies the repository that this is connected to."""
        answer = await self._kopia.call(f"{self.description}: status", "repository", "status", "--json")
        unique_id = answer.check().document().get("uniqueIDHex")
        if not isinstance(unique_id, str) or not unique_id:
            raise answer.error("kopia told no uniqueIDHex")
        return unique_id

    def _write_config(self, *, read_only: bool) -> bool:
        """Write what `repository connect` would; False where that is not known."""
        storage = self._place.storage.config()
        if storage is None:
            return False
        config = build_config(storage, cache=self._folder.cache, limit=self._cache, read_only=read_only)
        self._folder.write(self._folder.config_file.name, json.dumps(config).encode())
        return True

    def _client_flags(self, cache_name: str) -> list[str]:
        cache = self._folder.cache / cache_name if cache_name else self._folder.cache
        return [*IDENTITY_FLAGS, "--no-check-for-updates", f"--cache-directory={cache}", *self._cache.arguments]

    async def _call(self, verb: str, seconds: float, flags: list[str], *, spent_seconds: float = 0.0) -> KopiaAnswer:
        arguments = ["repository", verb, *self._place.reach.arguments, *flags]
        try:
            return await self._kopia.call(self.description, *arguments, seconds=seconds - spent_seconds)
        except KopiaSilentError as e:
            # Where nobody gave keys, it may be the node's identity that does not answer.
            text = self._with_origin(f"{self.description}: the storage did not answer within {seconds:.0f} s")
            raise RepositoryError(": ".join([text, *e.lines[-1:]])) from e

    def _check(self, answer: KopiaAnswer) -> None:
        if answer.succeeded:
            return
        cause = find_cause(answer.lines)
        if not cause:
            raise RepositoryError(str(answer.error()))
        if cause == REFUSED:
            cause = self._with_origin(cause)
        # kopia says the same once more for each step that it was in; the last line has all of it.
        raise RepositoryError(": ".join([self.description, cause, *answer.lines[-1:]]))

    def _with_origin(self, told: str) -> str:
        origin = self._place.storage.credentials_origin
        return f"{told} ({origin})" if origin else told
