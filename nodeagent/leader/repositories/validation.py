"""One validation of a backup storage location: by a process beside the agent, or by a pod.

The process has the agent's own credentials file, so it suffices where keys give access to the storage. What depends on
the pod, such as the identity of the movers' account or a mounted volume, needs a pod like the movers'. Runs no kopia
itself, and writes no status.
"""

import asyncio
import logging
import sys
from collections.abc import Mapping
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

__all__ = ["ValidationProcess", "Verdict", "start_validation_pod"]

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
