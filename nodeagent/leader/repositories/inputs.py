"""What decides whether the repositories of a location can be opened, and when that is tried again."""

import asyncio
import hashlib
import json
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from core.clock import Clock
from core.errors import AgentError
from core.kube.client import KubeClient, Selection
from core.kube.resources import BACKUP_STORAGE_LOCATIONS, SECRETS
from core.kube.types import UncheckedObject
from core.models.base import JsonDict
from core.models.names import REPO_CREDENTIALS_SECRET
from core.models.storage import BackupStorageLocation
from nodeagent.runtime.informer import Informer

_log = logging.getLogger(__name__)

_POLL_SECONDS: Final = 60.0
"""Between two reads of the Secrets of a location: the agent may get Secrets, but not watch them."""

_RELEVANT: Final = ("provider", "config", "objectStorage", "credential", "accessMode")
"""What of a location's spec decides whether its repositories can be opened."""


class _Read(NamedTuple):
    inputs: str
    at_seconds: float


class LocationInputs:
    """The inputs of each location that was asked for, as a hash; a change of one is reported."""

    def __init__(self, client: KubeClient, clock: Clock, namespace: str, on_change: Callable[[str], None]) -> None:
        """Read in `namespace`; call `on_change` with the name of a location whose inputs may have changed."""
        self._client = client
        self._clock = clock
        self._namespace = namespace
        self._on_change = on_change
        self._known: dict[str, _Read] = {}
        self._reading = asyncio.Lock()
        self._seen: dict[str, JsonDict] = {}

    async def of(self, location: str, *, within_seconds: float = math.inf) -> str:
        """Return the hash of the location's inputs; its Secrets were read `within_seconds`, and within a minute."""
        # Many repositories of one location ask at the same time.
        async with self._reading:
            last, at_seconds = self._known.get(location), self._clock.monotonic()
            if last is not None and at_seconds - last.at_seconds < within_seconds:
                return last.inputs
            current = await read_inputs(self._client, self._namespace, location)
            # Otherwise the location has changed meanwhile.
            if self._known.get(location) is last:
                self._known[location] = _Read(current, at_seconds)
                if last is not None and last.inputs != current:
                    self._on_change(location)
            return current

    async def run(self) -> None:
        """Follow the locations until canceled; ExceptionGroup: with a KubeError if the first list was rejected."""

        def observe(location: JsonDict) -> None:
            self._observe(location["name"], locations.get(self._namespace, location["name"]))

        selection = Selection(BACKUP_STORAGE_LOCATIONS, self._namespace)
        locations = Informer(self._client, selection, clock=self._clock, trim=_trim, on_change=observe)
        async with asyncio.TaskGroup() as group:
            group.create_task(locations.run(), name="locations of repositories")
            while True:
                await self._clock.sleep(_POLL_SECONDS)
                await self._poll()

    def _observe(self, name: str, current: JsonDict | None) -> None:
        """Report a location whose UID or relevant spec is new, or that was deleted; validations change its status."""
        if self._seen.get(name) == current:
            return
        if current is None:
            del self._seen[name]
        else:
            self._seen[name] = current
        self._known.pop(name, None)
        self._on_change(name)

    async def _poll(self) -> None:
        for name in list(self._known):
            try:
                await self.of(name, within_seconds=0)
            except AgentError as e:
                _log.debug("could not read what BackupStorageLocation %s depends on, will retry: %s", name, e)


def _trim(raw: UncheckedObject) -> JsonDict:
    spec, meta = raw.get("spec"), raw["metadata"]
    if isinstance(spec, dict):
        spec = {key: spec.get(key) for key in _RELEVANT}
    return {"name": meta["name"], "uid": meta["uid"], "spec": spec}


async def read_inputs(client: KubeClient, namespace: str, location: str) -> str:
    """Return a hash of what the repositories of the location depend on: the location, its Secrets, the password.

    A location that was deleted has inputs, too, and so has one that was created again. ContractError: it is invalid.
    """
    raw = await client.read(BACKUP_STORAGE_LOCATIONS, namespace, location)
    names = [REPO_CREDENTIALS_SECRET]
    if raw is not None:
        spec = BackupStorageLocation.parse(raw).spec
        if spec.credential is not None:
            names.append(spec.credential.name)
        if (authority := spec.object_storage.ca_cert_ref) is not None:
            names.append(authority.name)
    secrets = [await client.read(SECRETS, namespace, name) for name in names]
    versions = [secret["metadata"]["resourceVersion"] if secret is not None else "" for secret in secrets]
    inputs = [None if raw is None else _trim(raw), versions]
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


_RETRY_SECONDS: Final = 300.0
_REQUESTED_RETRY_SECONDS: Final = 15.0
"""A transfer that needs the repository now causes a retry of failures older than this."""

CHECK_SECONDS: Final = 5.0
"""Between checks of what may have been fixed: location, its Secret, the password."""

_CHECKS_PER_SECOND: Final = 2.0
"""For all failed repositories together: each check reads the repository and its init pod."""


@dataclass
class _Attempt:
    """The last attempt for one repository: what it depended on, when it failed, and the last `cause` reported."""

    inputs: str
    cause: str | None = None
    failed_at_seconds: float | None = None
    requested: bool = False


class RepositoryRetries:
    """The last attempt for each repository, by uid; not kept over a restart."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._attempts: dict[str, _Attempt] = {}

    @property
    def pause_seconds(self) -> float:
        """The pause before the next check of a failed repository."""
        failed = sum(one.failed_at_seconds is not None for one in self._attempts.values())
        return max(CHECK_SECONDS, failed / _CHECKS_PER_SECOND)

    def begin(self, uid: str, inputs: str) -> None:
        """Record the start of an attempt that depends on `inputs`."""
        earlier = self._attempts.get(uid)
        self._attempts[uid] = _Attempt(inputs, earlier.cause if earlier else None)

    def explain(self, uid: str, message: str) -> str:
        """Return `message` about an attempt that the storage did not answer, after the last cause that is known."""
        last = self._attempts.get(uid)
        return f"{last.cause}; next attempt: {message}" if last and last.cause else message

    def fail(self, uid: str, inputs: str, *, cause: str | None = None) -> None:
        """Record that the last attempt failed; `inputs` is used if an earlier process started it.

        `cause` is what the storage or kopia reported; None: the attempt did not get so far.
        """
        last = self._attempts.setdefault(uid, _Attempt(inputs))
        last.cause = cause or last.cause
        if last.failed_at_seconds is None:
            last.failed_at_seconds = self._clock.monotonic()
            last.requested = False

    def request(self, uid: str) -> bool:
        """Record that a transfer needs the repository now; return whether a retry may follow."""
        last = self._attempts.get(uid)
        if last is None:
            return False
        last.requested = True
        return True

    def forget(self, uid: str) -> None:
        """Drop the record of the repository."""
        self._attempts.pop(uid, None)

    def is_due(self, uid: str, inputs: str) -> bool:
        """Return whether a NotReady repository is to be retried now, given its current `inputs`."""
        last = self._attempts.get(uid)
        if last is None or last.failed_at_seconds is None or last.inputs != inputs:
            return True
        age_seconds = self._clock.monotonic() - last.failed_at_seconds
        return age_seconds >= (_REQUESTED_RETRY_SECONDS if last.requested else _RETRY_SECONDS)
