"""One kopia repository: connecting, creating and probing it, and the cause if it cannot be opened.

Source: kopia 0.23.1, cli/command_repository_*.go, repo/open.go.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from core.aio import run_apart
from core.errors import DataPathError, KopiaError, RepositoryError
from core.models.names import REPOSITORY_ID_ANNOTATION
from core.models.storage import BlockHash
from core.models.transfer_settings import BandwidthLimits
from core.redact import Redactor
from datamover.kopia import creation
from datamover.kopia.causes import ACCESS_DENIED, CACHE_FULL, DAMAGED, NO_BUCKET, NOT_TRUSTED, find_cause, find_outage
from datamover.kopia.client_config import IDENTITY_FLAGS, CacheLimit, build_config, build_throttle
from datamover.kopia.location_files import LocationFiles
from datamover.kopia.process import Kopia, KopiaAnswer, KopiaTimeoutError, kopia_environment
from datamover.kopia.progress import Direction, Meter
from datamover.kopia.stalls import Reachability, Watchdog
from datamover.kopia.storage_calls import DENIALS_OF_IDENTITIES, NoAnswerError, RequestTime, StorageCalls, Waits
from datamover.runtime.cancellation import call_in_thread
from datamover.runtime.work_dir import WorkDir
from datamover.storage.providers import FileStorage, KopiaAccess, Storage

_logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_PACKS_PER_FETCH: Final = 4
"""While one is fetched, those before it are read, beside what large files leave in the cache."""

_PROBE_CACHE: Final = "probe"
_PROBE_CONFIG: Final = "probe.config"
_NO_REPOSITORY: Final = "repository not initialized"
_NOT_OPENED: Final = "failed to open repository"
_CERTAIN: Final = frozenset({CACHE_FULL, NOT_TRUSTED})
"""Causes for which connecting would find no other: it would fail as late, or empty the cache before."""

_DENIALS: Final = ("access denied", "accessdenied", "forbidden")


class NotInitializedError(RepositoryError):
    """The storage is reachable and holds no repository."""


@dataclass(frozen=True)
class RepositoryAddress:
    """The storage of a repository, its name in messages, and the limits that kopia obeys.

    `unique_id` is the ID that the repository must have; None: any.
    """

    description: str
    storage: Storage
    throttle: BandwidthLimits | None = None
    unique_id: str | None = None


def build_kopia(
    storage: Storage, work_dir: WorkDir, environment: Mapping[str, str], password: str, redactor: Redactor
) -> Kopia:
    """Return kopia with access to a storage; `redactor` learns the secrets."""
    access = storage.access(work_dir)
    redactor.add(password, *access.secrets(environment))
    own = {**access.environment, "KOPIA_PASSWORD": password}
    return Kopia(kopia_environment(environment, work_dir, own), redactor)


class RepositoryStatus(NamedTuple):
    """The unique ID of a repository, and whether its indexes are in epochs, as in each format since 2."""

    unique_id: str
    epochs: bool


class Repository:
    """The repository at an address, and the kopia whose environment gives access to it.

    `kopia` is connected once `connect` or `open` has returned; `work_dir` has its configuration and temporary files.
    `watchdog` inspects, reports and ends a kopia that stalls. `created`: `ensure` has created the repository.
    """

    def __init__(
        self,
        kopia: Kopia,
        address: RepositoryAddress,
        work_dir: WorkDir,
        *,
        cache: CacheLimit | None = None,
        waits: Waits | None = None,
    ) -> None:
        self.kopia = kopia
        self._address = address
        self.work_dir = work_dir
        self._cache = cache or CacheLimit()
        self._waits = waits or Waits()
        # Once: writing its files again could fail later, in a scratch volume that is full then.
        self._access = address.storage.access(work_dir)
        self._probe_access = address.storage.for_probe().access(work_dir)
        check = address.storage.for_bucket_check()
        self._check_access = None if check is None else check.access(work_dir)
        self.watchdog = Watchdog(self._waits.clock, self._waits.reporter.warn, self.probe, self._waits.limits)
        self._calls = StorageCalls(kopia, address.description, work_dir.cache, waits=self._waits, probe=self.probe)
        self._calls.doubted_denials = DENIALS_OF_IDENTITIES if address.storage.needs_pod else 0
        self._request_time = RequestTime(work_dir.path)
        self._connected = False
        self.created = False

    @property
    def description(self) -> str:
        """The name of the repository in messages."""
        return self._address.description

    @property
    def data_cache(self) -> Path:
        """Where kopia caches contents of files; it may be missing.

        Source: kopia 0.23.1, repo/content/committed_read_manager.go.
        """
        return self.work_dir.cache / "contents"

    @property
    def request_seconds(self) -> float:
        """How long a request to the storage took in the first calls; 0: none was made, or it is not known."""
        return self._request_time.seconds

    def restore_flags(self, packs: int, more_bytes: int = 0) -> list[str]:
        """Return the flags of `restore` that only `mover-restore` has, if it runs.

        It fetches so many packs as a whole at a time, if they fit into the cache, and may use so much more memory.
        """
        if self.kopia.server is None:
            return []
        own = {"packs": min(packs, self._cache.packs // _PACKS_PER_FETCH), "more-memory-mib": more_bytes >> 20}
        return [f"--{name}={number}" for name, number in own.items() if number]

    async def call(self, attempted: str, *arguments: str, output_fd: int | None = None) -> KopiaAnswer:
        """Return kopia's answer, however long the storage takes or does not answer, up to the stall timeout.

        `attempted` is the operation and its object, for errors; `output_fd`, an open file, gets the output, instead of
        the answer.

        Raises:
            StorageOutageError: the storage did not answer for the stall timeout.
            RepositoryError: the storage has another repository than it must have.
            DataPathError: kopia stalled, although the storage answers.
        """
        with self._request_time.measuring() as flags:
            answer = await self._calls.call(attempted, *arguments, *flags, output_fd=output_fd)
            self._request_time.take(answer.counters)
        if self._address.unique_id is not None and (found := creation.read_cached_id(self.work_dir.cache)):
            self.check_id(found)
        return answer

    async def start(self, meter: Meter, work: Callable[[], Coroutine[Any, Any, KopiaAnswer]]) -> KopiaAnswer:
        """Return the answer of `work`, a kopia that has opened the repository and runs on; otherwise as `call`."""
        return (await self._calls.repeat(partial(self._calls.open_once, meter, work))).check()

    def check_id(self, found: str) -> None:
        """Check the unique ID of the repository that was opened. Raises RepositoryError if it must have another one."""
        wanted = self._address.unique_id
        if wanted is not None and found != wanted:
            raise RepositoryError(
                f"{self.description}: the storage has the repository {found}, and {wanted} is recorded, so nothing is "
                f"written to it; if it is the right one, remove the annotation {REPOSITORY_ID_ANNOTATION}"
            )

    async def run(self, data_path: Callable[[], Coroutine[Any, Any, KopiaAnswer]]) -> KopiaAnswer:
        """Return what `data_path` returns; repeat it if kopia cannot open the repository; raises StorageOutageError."""

        async def attempt() -> KopiaAnswer:
            answer = await data_path()
            if answer.mentions(_NOT_OPENED):
                self._calls.check_outage(answer)
            return answer

        return await self._calls.repeat(attempt)

    async def call_guarded(self, attempted: str, *arguments: str, more: Mapping[str, str] | None = None) -> KopiaAnswer:
        """Return the answer of a call, however long it takes, unless it stalls; `more` are additional variables."""
        meter = Meter(self._waits.clock, Direction.RESTORE)
        flagged = (meter.counter_argument, *arguments)
        call = partial(self.kopia.call, attempted, *flagged, seconds=None, more=more)
        return await self.watchdog.guard(attempted, meter, call)

    async def guard(self, attempted: str, work: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Return what `work` returns, a step of a kopia that runs on, unless it stalls; raises as `Watchdog.guard`."""
        return await self._calls.watchdog.guard(attempted, Meter(self._waits.clock, Direction.RESTORE), work)

    async def connect(self, *, read_only: bool = False) -> None:
        """Connect to the repository; `read_only`: nothing will be written.

        Raises:
            NotInitializedError: there is no repository.
            RepositoryError: it cannot be opened; the message names the cause.
            KopiaCrashError: kopia was killed, or crashed.
        """
        await self._check_directory()
        more = ["--readonly"] if read_only else []
        answer = await self._calls.call(self.description, *self._arguments("connect"), *more, *self._flags())
        if answer.mentions(_NO_REPOSITORY):
            if missing := await self._check_bucket():
                raise RepositoryError(f"{self.description}: {missing}")
            raise NotInitializedError(f"{self.description}: no repository found")
        self._check(answer)
        self._throttle()
        self._connected = True

    async def _check_directory(self) -> None:
        """Check that a directory has a repository: kopia would write to it, and disturb one that is being created."""
        storage = self._address.storage
        if not isinstance(storage, FileStorage):
            return
        # A file system may not answer: kopia reports that.
        with suppress(TimeoutError):
            async with asyncio.timeout(self._waits.probe_seconds):
                if not await call_in_thread(partial(creation.has_repository, storage.path), name="directory"):
                    raise NotInitializedError(f"{self.description}: no repository found")

    async def open(self, read: Callable[[], Coroutine[Any, Any, _T]], *, read_only: bool = False) -> _T:
        """Return what `read` returns, and leave the repository connected; it raises what `connect` does.

        Connecting costs as much as a read: most of both is the key that kopia derives from the password. So `read`
        comes first, with a configuration like the one that connecting writes. Where it fails, connecting finds the
        cause; if there is none, `read` runs again.
        """
        if self._connected:
            return await read()
        await self._check_directory()
        if self._write_config(read_only=read_only):
            try:
                result = await run_apart(read, name="read-unconnected")
            except KopiaError as e:
                if (cause := find_cause(lines := str(e).splitlines())) in _CERTAIN:
                    raise RepositoryError(": ".join([self.description, cause, lines[-1]])) from e
                _logger.debug("%s: read failed, connecting to find the cause: %s", self.description, e)
            else:
                self._connected = True
                return result
        await self.connect(read_only=read_only)
        return await read()

    async def ensure(self, block_hash: BlockHash | None = None) -> str:
        """Connect to the repository, or create it, with `block_hash`, in an empty storage; return its unique ID.

        Raises RepositoryError if it can be neither opened nor created.
        """
        try:
            await self.connect()
        except NotInitializedError:
            return await self._create(block_hash)
        return (await self.status()).unique_id

    async def _create(self, block_hash: BlockHash | None) -> str:
        """Create a repository, connect to the one that the storage has then, and return its unique ID."""
        new = await creation.create_apart(self.kopia, self.work_dir, self.description, block_hash)
        if not await self._put(new):
            await self._waits.clock.sleep(creation.SETTLE_SECONDS)
        await self.connect()
        found = (await self.status()).unique_id
        if found != new.unique_id:
            _logger.info("another process created %s at the same time", self.description)
            return found
        (await self.call(f"{self.description}: own its maintenance", *creation.OWN_MAINTENANCE)).check()
        _logger.info("created %s", self.description)
        self.created = True
        return found

    async def _in_directory(self, work: Callable[[], _T]) -> _T:
        """Return what `work` returns in a thread, which is abandoned if the directory does not answer, as `guard`."""
        return await self.guard(self.description, partial(call_in_thread, work, name="directory"))

    async def _put(self, new: creation.NewRepository) -> bool:
        """Put a repository into a storage that has none; return False if another process's may replace it."""
        storage = self._address.storage
        if isinstance(storage, FileStorage):
            return await self._in_directory(lambda: new.install(storage.prepare_creation()))
        if await self._is_empty():
            await self._calls.repeat(partial(self._upload, new))
        return False

    async def _is_empty(self) -> bool:
        """Return whether the storage has no objects; False if it has a repository by now."""
        answer = await self._calls.call(self.description, *self._arguments("create"), *creation.ONLY_CHECK)
        if answer.mentions(creation.CHECKED):
            return True
        try:
            await self.connect()
        except NotInitializedError:
            if answer.mentions(creation.NOT_EMPTY) and await self._remove_remains():
                return True
            self._check(answer)
            raise
        return False

    async def check_empty(self) -> None:
        """Check that a storage without a repository has nothing of a lost one; raises RepositoryError if it may."""
        storage = self._address.storage
        if isinstance(storage, FileStorage):
            if await self._in_directory(lambda: creation.find_repository(storage.path)):
                raise RepositoryError(f"{self.description}: another process has just created it")
            return
        answer = await self._calls.call(self.description, *self._arguments("create"), *creation.ONLY_CHECK)
        if not answer.mentions(creation.CHECKED):
            self._check(answer)

    async def check_listing(self) -> None:
        """Check that the storage, which has the repository, also lists it; raises RepositoryError.

        kopia takes any page that answers a request in its place, and is XML, for an empty list.
        Source: minio-go 7.2.0, listObjectsV2Query in api-list.go.
        """
        arguments = ("blob", "list", f"--prefix={creation.FORMAT}", "--json")
        answer = (await self.call(f"{self.description}: list the storage", *arguments)).check()
        if not answer.json():
            raise RepositoryError(f"{self.description}: the storage does not list {creation.FORMAT}, which it has")

    async def _remove_remains(self) -> bool:
        """Remove what kopia's own creation leaves if it is interrupted; return whether that was all."""
        config = self._address.storage.config()
        if config is None:
            return False
        files = LocationFiles(self.kopia, self.work_dir, self.description)
        await files.prepare(config, read_only=False)
        try:
            return await files.remove_if_only(creation.STORAGE_CONFIG)
        except KopiaError as e:
            # The index of a lost repository is read only with its key.
            if find_cause(str(e).splitlines()) not in DAMAGED:
                raise
            return False

    async def _upload(self, new: creation.NewRepository) -> None:
        try:
            answer = await new.upload(self.kopia, self._access.arguments, self.description)
        except KopiaTimeoutError as e:
            raise NoAnswerError("the storage is slow", str(e)) from e
        self._calls.check_outage(answer)
        # As of another process that was faster.
        if not answer.mentions(creation.OTHER_REPOSITORY):
            self._check(answer)

    async def probe(self) -> Reachability:
        """Return whether the repository's storage answers, within half a minute, or is at another address."""
        found = await self._probe()
        if found.outage and (change := await self._waits.find_change()):
            return replace(found, message=f"{change}: {found.message}", moved=True)
        return found

    async def _probe(self) -> Reachability:
        """Return whether the storage answers.

        kopia connects to a path without a repository: so it needs no index and no password, whose
        key takes 64 MiB to derive, and the running data path keeps its memory.
        """
        try:
            answer = await self._connect_apart(self._probe_access)
        except KopiaTimeoutError as e:
            # Without keys, it may be the node's identity service that does not answer.
            silent = self._with_origin(f"{self.description} does not answer")
            parts = [silent, f"timed out after {self._waits.probe_seconds:.0f} s", *e.lines[-1:]]
            return Reachability(reachable=False, message=": ".join(parts), outage=True)
        except DataPathError as e:
            return Reachability(reachable=True, message=f"cannot probe {self.description}: {e}")
        if answer.mentions(_NO_REPOSITORY) and (missing := await self._check_bucket()):
            return Reachability(reachable=False, message=f"{self.description} does not answer: {missing}")
        # A denial is an answer too: the credentials may be for the repository's own prefix alone.
        if any(answer.mentions(text) for text in (_NO_REPOSITORY, *_DENIALS)):
            return Reachability(reachable=True, message=f"the storage of {self.description} answers")
        cause = find_cause(answer.lines)
        parts = [f"{self.description} does not answer", *([cause] if cause else []), *answer.lines[-1:]]
        return Reachability(reachable=False, message=": ".join(parts), outage=bool(find_outage(answer.lines)))

    async def _check_bucket(self) -> str | None:
        """Return the error if the bucket does not exist; None if it does, or access to it is denied."""
        if self._check_access is None:
            return None
        try:
            answer = await self._connect_apart(self._check_access)
        except DataPathError as e:
            _logger.debug("%s: cannot check whether the bucket exists: %s", self.description, e)
            return None
        cause = find_cause(answer.lines)
        return ": ".join([cause, *answer.lines[-1:]]) if cause == NO_BUCKET else None

    async def _connect_apart(self, access: KopiaAccess) -> KopiaAnswer:
        """Return kopia's answer to connecting in this way; the connection of the repository stays as it is."""
        config = {"KOPIA_CONFIG_PATH": str(self.work_dir.path / _PROBE_CONFIG)}
        arguments = ("repository", "connect", *access.arguments, *self._flags(_PROBE_CACHE))
        return await self.kopia.call(self.description, *arguments, seconds=self._waits.probe_seconds, more=config)

    async def status(self) -> RepositoryStatus:
        """Return what kopia reports about the connected repository."""
        answer = await self.call(f"{self.description}: status", "repository", "status", "--json")
        document = answer.check().document()
        unique_id = document.get("uniqueIDHex")
        if not isinstance(unique_id, str) or not unique_id:
            raise answer.error("no uniqueIDHex in kopia's output")
        # kopia omits the parameters in an old format.
        parameters = (document.get("contentFormat") or {}).get("epochParameters") or {}
        return RepositoryStatus(unique_id, bool(parameters.get("Enabled")))

    def _write_config(self, *, read_only: bool) -> bool:
        """Write the configuration that `repository connect` would; return False if it is unknown for the storage."""
        storage = self._address.storage.config()
        if storage is None:
            return False
        config = build_config(storage, cache=self.work_dir.cache, limit=self._cache, read_only=read_only)
        self.work_dir.write(self.work_dir.config_file.name, json.dumps(config).encode())
        self._throttle()
        return True

    def _throttle(self) -> None:
        """Add the limits to the configuration, which kopia reads when it starts."""
        if (limits := self._address.throttle) is not None:
            config = json.loads(self.work_dir.config_file.read_bytes())
            config |= build_throttle(limits)
            self.work_dir.write(self.work_dir.config_file.name, json.dumps(config).encode())

    def _arguments(self, verb: str) -> list[str]:
        return ["repository", verb, *self._access.arguments]

    def _flags(self, cache_name: str = "") -> list[str]:
        cache = self.work_dir.cache / cache_name
        return [*IDENTITY_FLAGS, "--no-check-for-updates", f"--cache-directory={cache}", *self._cache.arguments]

    def _check(self, answer: KopiaAnswer) -> None:
        if answer.succeeded:
            return
        if answer.crashed:
            raise answer.error()
        cause = find_cause(answer.lines)
        if not cause:
            raise RepositoryError(str(answer.error()))
        if cause == ACCESS_DENIED:
            cause = self._with_origin(cause)
        # kopia repeats the error for each of its steps; the last line is complete.
        raise RepositoryError(": ".join([self.description, cause, *answer.lines[-1:]]))

    def _with_origin(self, text: str) -> str:
        origin = self._address.storage.credentials_origin
        return f"{text} ({origin})" if origin else text
