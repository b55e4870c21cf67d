"""Validations of backup storage locations, by a process beside the agent or by a pod; also for transfers that wait.

The process has the agent's own credentials file, so it suffices where keys give access to the storage. What depends on
the pod, such as the identity of the movers' account or a mounted volume, needs a pod like the movers'. Runs no kopia
itself, and writes no status.

A probe is a validation on demand, which `nodeagent.leader.repositories.locations` carries out. Its answer is kept in
memory alone: another leader probes again.
"""

import asyncio
import logging
import math
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Final

from core.aio import run_shielded
from core.clock import Clock, Deadline
from core.contract import LocationResult, parse_result
from core.errors import RepositoryError, ResultError, StorageOutageError
from core.kube.client import KubeClient
from core.kube.types import Manifest
from core.models.names import STORAGE_LOCATION_LABEL, label_value
from core.models.storage import BackupStorageLocation
from core.mover_specs import ValidateLocation
from exposer.model import Owner
from exposer.ownership import create_pod
from exposer.pods import build_validation_pod
from exposer.settings import ExposeSettings
from exposer.storage_access import access_of
from nodeagent.leader.repositories.init_pod import init_resources

__all__ = ["LocationProbes", "ValidationProcess", "Verdict", "start_validation_pod"]

_log = logging.getLogger(__name__)

_LIMIT: Final = timedelta(minutes=3)
"""The process ends by itself after about a minute, unless the API server does not answer."""

_STOP_TIMEOUT: Final = timedelta(seconds=5)
"""After SIGTERM it ends its own child, and itself within two seconds."""


@dataclass(frozen=True)
class Verdict:
    """What a validation found: why the location is unavailable; empty: it is available.

    `carried_out`: the storage was asked. Otherwise `cause` is why that was not possible.
    """

    cause: str = ""
    carried_out: bool = True


class ValidationProcess:
    """Validates locations by a child process, which reads the location and its Secret as a mover does."""

    def __init__(self, clock: Clock, environment: Mapping[str, str]) -> None:
        """Run it with `environment`, this process's own."""
        self._clock = clock
        self._environment = environment

    @property
    def usable(self) -> bool:
        """Whether this process is in a pod, with an account to read the location with."""
        return "KUBERNETES_SERVICE_HOST" in self._environment

    async def validate(self, name: str) -> Verdict | None:
        """Return the verdict about the location `name`; None if a pod has to find out.

        Cancellation ends the process.
        """
        if not self.usable:
            return None
        spec = ValidateLocation(
            backup_storage_location=name,
            log_level="error",
            termination_message_path="/dev/stdout",
            keys_only=True,
        )
        return _judge(name, *await self._run(spec.argv))

    async def _run(self, argv: list[str]) -> tuple[int | None, str]:
        """Return the exit code, None if it did not end in time, and the termination message."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "datamover",
            *argv,
            env=dict(self._environment),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            async with asyncio.timeout(_LIMIT.total_seconds()):
                output, _ = await process.communicate()
        except TimeoutError:
            return None, ""
        finally:
            if process.returncode is None:
                deadline = Deadline.after(self._clock, 2 * _STOP_TIMEOUT)
                await run_shielded(lambda: _stop(process), name="stop validation", deadline=deadline)
        return process.returncode, output.decode(errors="replace")


async def _stop(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(_STOP_TIMEOUT.total_seconds()):
            await process.wait()
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _judge(name: str, exit_code: int | None, message: str) -> Verdict | None:
    """Return what the end of the process means: only its error about a repository is one of the storage."""
    if exit_code in {RepositoryError.exit_code, StorageOutageError.exit_code} and message:
        return Verdict(message)
    if exit_code == 0:
        with suppress(ResultError):
            return None if parse_result(LocationResult, message).needs_pod else Verdict()
    ending = "did not end" if exit_code is None else f"exit code {exit_code}"
    _log.debug("BackupStorageLocation %s could not be validated by the agent: %s: %s", name, ending, message)
    return None


async def start_validation_pod(client: KubeClient, location: BackupStorageLocation, settings: ExposeSettings) -> None:
    """Create the pod that validates the location.

    Raises:
        AlreadyExistsError: the pod exists.
        KubeError: the API server rejected the request; InvalidError and ForbiddenError mean that
            it rejects this pod.
    """
    owner = Owner.of(location)
    pod = replace(settings.pod, resources=init_resources(settings.pod.resources))
    manifest: Manifest = build_validation_pod(owner, replace(settings, pod=pod), storage=access_of(location))
    manifest["metadata"]["labels"] |= {STORAGE_LOCATION_LABEL: label_value(location.name)}
    await create_pod(client, manifest)


_FRESH_SECONDS: Final = 30.0
"""How long an answer counts, and so the least time between two probes of one location."""

_LAST_SECONDS: Final = 120.0
"""How long a positive answer counts at most while the next probe is under way, which takes a minute if it fails."""


@dataclass
class _Probe:
    """The last answer about a location, when it came, and when it was last asked for; `wanted`: another one is due."""

    wanted: bool = False
    asked_at_seconds: float = -math.inf
    answered_at_seconds: float | None = None
    answers: bool = False


class LocationProbes:
    """The last answer about each location that transfers wait for."""

    def __init__(self, clock: Clock) -> None:
        """Measure on `clock`."""
        self._clock = clock
        self._probes: dict[str, _Probe] = {}
        self._request: Callable[[str], None] = lambda _: None
        self._on_answer: list[Callable[[], None]] = []

    def subscribe(self, on_answer: Callable[[], None]) -> None:
        """Have `on_answer` called after each probe."""
        self._on_answer.append(on_answer)

    def serve(self, request: Callable[[str], None]) -> None:
        """Have `request` called with the name of each location to probe, also of those that are wanted already."""
        self._request = request
        for name, probe in self._probes.items():
            if probe.wanted:
                request(name)

    def answers(self, name: str) -> bool:
        """Return whether the location has just answered; without a recent probe, request one.

        Until that ends, the last answer counts: what transfers wait for must not change with each probe. One that was
        given in an earlier outage does not: nothing has waited for the location meanwhile.
        """
        probe = self._probes.setdefault(name, _Probe())
        now, at_seconds = self._clock.monotonic(), probe.answered_at_seconds
        age_seconds = math.inf if at_seconds is None else now - at_seconds
        if min(age_seconds, now - probe.asked_at_seconds) >= _FRESH_SECONDS:
            probe.answers = False
        probe.asked_at_seconds = now
        if age_seconds >= _FRESH_SECONDS and not probe.wanted:
            probe.wanted = True
            self._request(name)
        return probe.answers and age_seconds < _LAST_SECONDS

    def is_wanted(self, name: str) -> bool:
        """Return whether a probe of the location is asked for."""
        return name in self._probes and self._probes[name].wanted

    def end(self, name: str, verdict: Verdict) -> None:
        """Record what a probe found; one that could not be carried out delays no transfer."""
        if not self.is_wanted(name):
            return
        probe = self._probes[name]
        if not verdict.carried_out:
            _log.warning("BackupStorageLocation %s cannot be probed, transfers do not wait: %s", name, verdict.cause)
        elif verdict.cause:
            _log.info("BackupStorageLocation %s does not answer, transfers wait: %s", name, verdict.cause)
        probe.wanted = False
        probe.answered_at_seconds = self._clock.monotonic()
        probe.answers = not verdict.cause or not verdict.carried_out
        for notify in self._on_answer:
            notify()
