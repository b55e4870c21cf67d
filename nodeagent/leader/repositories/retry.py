"""When a backup repository that could not be opened is tried again.

Knows the last try at each, on what it depended, and who needs the repository since. Does not
know how a try is made (`nodeagent.leader.repositories.init_pod`), nor what is written about it
(`nodeagent.leader.repositories.controller`).
"""

import hashlib
import json
from dataclasses import dataclass
from typing import Final

from core.clock import Clock
from core.kube.client import KubeClient
from core.kube.resources import BACKUP_STORAGE_LOCATIONS, SECRETS
from core.models.base import JsonDict
from core.models.names import REPO_CREDENTIALS_SECRET
from core.models.storage import BackupRepository, BackupStorageLocation

__all__ = ["RepositoryRetries", "read_causes"]

_RETRY_SECONDS: Final = 300.0
_WANTED_AGAIN_SECONDS: Final = 15.0
"""A failure younger than this is still true for a load that needs the repository now."""

_LOOK_SECONDS: Final = 5.0
"""Between looks at what may have been mended: location, its Secret, the password."""

_LOOKS_A_SECOND: Final = 2.0
"""All failed repositories together: each look is half a dozen requests."""


@dataclass
class _Try:
    """The last try at one repository: on what it depended, and when it failed."""

    causes: str
    failed_at_seconds: float | None = None
    wanted: bool = False


class RepositoryRetries:
    """The last try at each repository, by uid. A restarted agent begins anew."""

    def __init__(self, clock: Clock) -> None:
        """Measure on `clock`."""
        self._clock = clock
        self._tries: dict[str, _Try] = {}

    @property
    def pause_seconds(self) -> float:
        """How long to wait before the next look at a repository that failed."""
        failed = sum(one.failed_at_seconds is not None for one in self._tries.values())
        return max(_LOOK_SECONDS, failed / _LOOKS_A_SECOND)

    def begin(self, uid: str, causes: str) -> None:
        """Note that a try begins, which depends on `causes`."""
        self._tries[uid] = _Try(causes)

    def fail(self, uid: str, causes: str) -> None:
        """Note that the last try failed; `causes` is for one that an earlier process began."""
        last = self._tries.setdefault(uid, _Try(causes))
        if last.failed_at_seconds is None:
            last.failed_at_seconds = self._clock.monotonic()
            last.wanted = False

    def want(self, uid: str) -> bool:
        """Note that a load needs the repository now; return whether that can change anything."""
        last = self._tries.get(uid)
        if last is None:
            return False
        last.wanted = True
        return True

    def forget(self, uid: str) -> None:
        """Drop what is remembered about that repository."""
        self._tries.pop(uid, None)

    def is_due(self, uid: str, causes: str) -> bool:
        """Whether a repository that is NotReady is to be tried again now, given `causes` as they are."""
        last = self._tries.get(uid)
        if last is None or last.failed_at_seconds is None or last.causes != causes:
            return True
        age_seconds = self._clock.monotonic() - last.failed_at_seconds
        return age_seconds >= (_WANTED_AGAIN_SECONDS if last.wanted else _RETRY_SECONDS)


async def read_causes(client: KubeClient, repository: BackupRepository) -> str:
    """Return a fingerprint of what decides whether the repository can be opened.

    Raises:
        ContractError: its location cannot be read.
        KubeError: the API server refused.
    """
    namespace = repository.metadata.namespace
    raw = await client.read(BACKUP_STORAGE_LOCATIONS, namespace, repository.spec.backup_storage_location)
    names = [REPO_CREDENTIALS_SECRET]
    spec: JsonDict = {}
    if raw is not None:
        location = BackupStorageLocation.parse(raw)
        # Its status changes with every validation, and means nothing here.
        spec = raw["spec"]
        if location.spec.credential is not None:
            names.append(location.spec.credential.name)
    secrets = [await client.read(SECRETS, namespace, name) for name in names]
    versions = [secret["metadata"]["resourceVersion"] if secret is not None else "" for secret in secrets]
    return hashlib.sha256(json.dumps([spec, versions], sort_keys=True).encode()).hexdigest()
