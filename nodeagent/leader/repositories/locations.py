"""The controller of BackupStorageLocations, and their validation by a process beside the agent or by a pod.

The controller writes what a Velero server writes after a validation, and nothing else. Where a server does that, it
validates only what transfers wait for, and writes nothing.

The process has the agent's own credentials file, so it suffices where keys give access to the storage. What depends on
the pod, such as the identity of the movers' account or a mounted volume, needs a pod like the movers'.

A probe is a validation on demand. Its answer is kept in memory alone: another leader probes again.
Source: Velero v1.18, pkg/controller/backup_storage_location_controller.go, internal/storage/storagelocation.go.
"""

import asyncio
import logging
import math
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from datetime import timedelta
from typing import Final

from core.aio import run_shielded
from core.clock import Clock, Deadline
from core.contract import LocationResult, parse_result
from core.errors import ContractError, ExposeError, RepositoryError, ResultError, StorageOutageError
from core.kube.client import Selection
from core.kube.errors import ForbiddenError, InvalidError
from core.kube.resources import BACKUP_STORAGE_LOCATIONS, PODS
from core.kube.types import Pod, UncheckedObject
from core.kube.velero_server import VeleroServerCheck
from core.logs import fields
from core.models.base import JsonDict, format_time
from core.models.names import STORAGE_LOCATION_LABEL, label_value
from core.models.storage import BackupStorageLocation
from core.models.units import parse_duration
from core.mover_specs import ValidateLocation
from core.redact import redact
from exposer.model import Owner
from exposer.ownership import create_pod, delete_object
from exposer.pods import build_validation_pod, validation_pod_name
from exposer.settings import StorageAccess, is_in_directory
from nodeagent.leader.context import Cluster
from nodeagent.leader.repositories.init_pod import InitPods, InitState
from nodeagent.metrics import LOCATION_AVAILABLE
from nodeagent.runtime.informer import Informer
from nodeagent.runtime.settings import RepositoryControllerMode
from nodeagent.runtime.workqueue import ObjectSteps, Requeue, WorkQueue, run_restarting

_log = logging.getLogger(__name__)

_LIMIT: Final = timedelta(minutes=3)
"""The process ends by itself after about a minute, unless the API server does not answer."""

_STOP_TIMEOUT: Final = timedelta(seconds=5)
"""After SIGTERM it ends its own child, and itself within two seconds."""


@dataclass(frozen=True)
class Verdict:
    """Why the location is unavailable, None: it is not; or, unless `carried_out`, why the storage was not asked."""

    cause: str | None = None
    carried_out: bool = True


class ValidationProcess:
    """Validates locations by a child process, which reads the location and its Secret as a mover does."""

    def __init__(self, clock: Clock, environment: Mapping[str, str]) -> None:
        self._clock = clock
        self._environment = environment

    async def validate(self, name: str) -> Verdict | None:
        """Return the verdict about the location `name`; None: a pod has to find out. Cancellation ends the process."""
        if "KUBERNETES_SERVICE_HOST" not in self._environment:
            # This process is not in a pod, with an account to read the location with.
            return None
        spec = ValidateLocation(
            backup_storage_location=name, log_level="error", termination_message_path="/dev/stdout", keys_only=True
        )
        # The agent may have no other process, or no memory for one.
        with suppress(OSError):
            return _judge(name, *await self._run(spec.argv))
        return None

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
    """The last answer about each location that transfers wait for; `on_answer` is called after each probe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._probes: dict[str, _Probe] = {}
        self._request: Callable[[str], None] = lambda _: None
        self.on_answer: Callable[[], None] = lambda: None

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
        self.on_answer()


_DEFAULT_SECONDS: Final = 60.0
_SHORTEST_SECONDS: Final = 10.0
"""A Velero server looks for locations that are due this often."""

_POD_SECONDS: Final = 600.0
"""Between two pods for one location, unless its spec has changed."""

_WORKING_SECONDS: Final = 5.0
_SERVER_SECONDS: Final = 60.0

_POD_LIMIT: Final = timedelta(minutes=3)
"""A mover ends within about a minute, but one that waits for a file system cannot."""

_WORKERS: Final = 2
"""Each runs a Python process and kopia, about 120 MiB, in the agent's memory limit."""
_MESSAGE_LIMIT: Final = 500
"""Characters of a cause: the first line has the reason, and storages answer with whole documents."""


@dataclass
class _Known:
    """What this process knows of a location: the spec that was validated, when, and its pods.

    `pod_at_seconds` is when the last pod was started; `pod_spec` the spec that it is for, until it has ended. The
    process has found that the validation of `needs_pod`, a spec, needs a pod.
    """

    uid: str
    spec: JsonDict | None = None
    at_seconds: float = 0.0
    pod_at_seconds: float | None = None
    pod_spec: JsonDict | None = None
    needs_pod: JsonDict | None = None


@dataclass(eq=False)
class LocationController:
    """Validates BackupStorageLocations while this agent is the leader; with a Velero server only on demand.

    Those in the namespace of `server`, by `pods` of this controller alone; only on demand, too, if `mode`, the
    repository controller's, is OFF. `validate` returns the verdict about a location by its name, or None if a pod has
    to find out; `probes` is what transfers wait for.
    """

    cluster: Cluster
    pods: InitPods
    _: KW_ONLY
    server: VeleroServerCheck
    mode: RepositoryControllerMode
    validate: Callable[[str], Awaitable[Verdict | None]]
    probes: LocationProbes
    _known: dict[str, _Known] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._namespace, self._off = self.server.namespace, self.mode is RepositoryControllerMode.OFF
        # When a location that is left to a server is looked at again.
        self._after_server = None if self._off else Requeue(_SERVER_SECONDS)
        kind, failed = BACKUP_STORAGE_LOCATIONS.kind, "validating the location failed"
        self._steps = ObjectSteps(_log, kind=kind, namespace=self._namespace, failed=failed)

    async def run(self) -> None:
        """Control the locations until canceled."""
        await run_restarting(self._run_once, self.cluster.clock, name="location controller")

    async def _run_once(self) -> None:
        """Control the locations until canceled, or until the first list is rejected."""
        cluster = self.cluster
        # Nothing of an earlier term counts: another leader may have validated since.
        self._known.clear()
        queue: WorkQueue[str] = WorkQueue(cluster.clock, name="locations", workers=_WORKERS)
        selection = Selection(BACKUP_STORAGE_LOCATIONS, self._namespace)
        locations = Informer(cluster.client, selection, clock=cluster.clock, trim=_name_of, on_change=queue.add)
        async with asyncio.TaskGroup() as group:
            if not self._off:
                group.create_task(locations.run(), name="locations")
            self.probes.serve(queue.add)
            await queue.run(lambda name: self._steps.take(name, self._read_and_reconcile(name)))

    async def _read_and_reconcile(self, name: str) -> Requeue | None:
        raw = await self.cluster.client.read(BACKUP_STORAGE_LOCATIONS, self._namespace, name)
        if raw is None or raw["metadata"].get("deletionTimestamp"):
            # Its pod is deleted with it.
            self._forget(name)
            # The next mover of each transfer fails with the reason.
            self.probes.end(name, Verdict("it does not exist", carried_out=False))
            return None
        try:
            location = BackupStorageLocation.parse(raw)
        except ContractError as e:
            self.probes.end(name, Verdict(str(e), carried_out=False))
            raise
        return await self._reconcile(raw, location)

    def _forget(self, name: str) -> None:
        self._known.pop(name, None)
        self.pods.forget(name)
        self.cluster.metrics.forget(LOCATION_AVAILABLE, backup_location_name=name)

    async def _reconcile(self, raw: UncheckedObject, location: BackupStorageLocation) -> Requeue | None:
        wanted = self.probes.is_wanted(location.name)
        if not wanted and await self._leave_to_server(location):
            return self._after_server
        known = self._known.get(location.name)
        if known is None or known.uid != location.uid:
            known = self._known[location.name] = _Known(location.uid)
        spec: JsonDict = raw["spec"]
        if known.pod_spec is None and not wanted:
            if location.status.phase:
                self.cluster.metrics.set(LOCATION_AVAILABLE, location.available, location.name)
            again = self._when_due(location, spec, known)
            if again is None or again.after_seconds > 0:
                return again
        self.cluster.check_leading()
        found = await self._validate(location, spec, known)
        if isinstance(found, Requeue):
            return found
        self.probes.end(location.name, found)
        # A server may also have been installed meanwhile.
        if await self._leave_to_server(location, fresh=True):
            return self._after_server
        await self._write(location, found)
        # What a pod found is about the spec that it was started for.
        known.spec, known.at_seconds = known.pod_spec or spec, self.cluster.clock.monotonic()
        known.needs_pod = None
        if known.pod_spec is not None:
            known.pod_spec = None
            await self._delete_pod(location)
        return self._when_due(location, spec, known)

    def _when_due(self, location: BackupStorageLocation, spec: JsonDict, known: _Known) -> Requeue | None:
        """Return when the location is to be validated; None: not again, unless its spec changes."""
        frequency = _frequency_seconds(location)
        if known.spec is None:
            # As in Velero, a frequency of 0 allows the first validation.
            return None if not frequency and location.status.last_validation_time is not None else Requeue(0.0)
        if known.spec != spec:
            return Requeue(0.0)
        if not frequency:
            return None
        now = self.cluster.clock.monotonic()
        seconds = known.at_seconds + max(frequency, _SHORTEST_SECONDS) - now
        if known.pod_at_seconds is not None:
            seconds = max(seconds, known.pod_at_seconds + _POD_SECONDS - now)
        return Requeue(max(0.0, seconds))

    async def _validate(self, location: BackupStorageLocation, spec: JsonDict, known: _Known) -> Verdict | Requeue:
        if known.pod_spec is None and known.needs_pod != spec:
            verdict = None if is_in_directory(location) else await self.validate(location.name)
            if verdict is not None:
                known.pod_at_seconds = None
                return verdict
            known.needs_pod = spec
        found = await self._read_pod(location)
        if found is not None:
            return await self._follow(location, found, known, spec)
        self.pods.forget(location.name)
        settings = self.pods.settings()
        known.pod_spec, known.pod_at_seconds = spec, self.cluster.clock.monotonic()
        self.cluster.check_leading()
        try:
            pod = build_validation_pod(Owner.of(location), settings, storage=StorageAccess.of(location))
            pod["metadata"]["labels"] |= {STORAGE_LOCATION_LABEL: label_value(location.name)}
            await create_pod(self.cluster.client, pod)
        except (ForbiddenError, InvalidError, ExposeError) as e:
            # Its movers would be rejected too.
            return Verdict(str(e), carried_out=False)
        return Requeue(_WORKING_SECONDS)

    async def _follow(
        self, location: BackupStorageLocation, pod: Pod, known: _Known, spec: JsonDict
    ) -> Verdict | Requeue:
        report = await self.pods.inspect(location, pod, model=LocationResult)
        if report.state is InitState.TERMINATING and report.pending is not None:
            # Its node may be lost, and it only reads.
            await delete_object(self.cluster.client, PODS, pod, forced=True)
        if known.pod_spec is None:
            if pod["metadata"].get("deletionTimestamp"):
                # It was for an earlier validation.
                return Requeue(_WORKING_SECONDS)
            # An earlier leader started it.
            known.pod_spec, known.pod_at_seconds = spec, self.cluster.clock.monotonic()
        if report.state is InitState.SUCCEEDED:
            return Verdict()
        if report.state is InitState.FAILED:
            return Verdict(report.message, carried_out=report.by_mover)
        if report.state is InitState.WORKING and report.age >= _POD_LIMIT:
            meta = pod["metadata"]
            if report.pending is not None:
                return Verdict(report.pending.message, carried_out=False)
            return Verdict(f"pod {meta['namespace']}/{meta['name']} did not end: the storage may not answer")
        return Requeue(_WORKING_SECONDS)

    async def _write(self, location: BackupStorageLocation, verdict: Verdict) -> None:
        """Write the status, and nothing that a Velero server does not write after a validation."""
        phase, message = "Available", None
        if verdict.cause is not None:
            phase = "Unavailable"
            message = f'BackupStorageLocation "{location.name}" is unavailable: {_shorten(verdict.cause)}'
        validated = format_time(self.cluster.clock.now())
        change = {"status": {"phase": phase, "message": message, "lastValidationTime": validated}}
        self.cluster.check_leading()
        await self.cluster.client.patch_if_unchanged(BACKUP_STORAGE_LOCATIONS, location.metadata, change)
        self.cluster.metrics.set(LOCATION_AVAILABLE, message is None, location.name)
        if phase != location.status.phase:
            level = logging.WARNING if message else logging.INFO
            log_fields = fields(kind=BACKUP_STORAGE_LOCATIONS.kind, namespace=self._namespace, name=location.name)
            text = message or f'BackupStorageLocation "{location.name}" is available'
            _log.log(level, "%s", text, extra=log_fields)

    async def _leave_to_server(self, location: BackupStorageLocation, *, fresh: bool = False) -> bool:
        """If it is not for this process to write the status, remove what it has of the location and return True."""
        if not self._off and not await self.server.finds(fresh=fresh):
            return False
        known = self._known.get(location.name)
        if known is not None and known.pod_spec is not None:
            await self._delete_pod(location)
        self._forget(location.name)
        return True

    async def _read_pod(self, location: BackupStorageLocation) -> Pod | None:
        return await self.cluster.client.read(PODS, self._namespace, validation_pod_name(Owner.of(location)))

    async def _delete_pod(self, location: BackupStorageLocation) -> None:
        pod = await self._read_pod(location)
        if pod is not None:
            await self.pods.delete(location, pod)


def _name_of(raw: UncheckedObject) -> str:
    return str(raw["metadata"]["name"])


def _frequency_seconds(location: BackupStorageLocation) -> float:
    """Return how often the location is validated, 0: once; an invalid or negative value counts as none."""
    text = location.spec.validation_frequency
    try:
        seconds = parse_duration(text).total_seconds() if text else _DEFAULT_SECONDS
    except ValueError:
        return _DEFAULT_SECONDS
    return seconds if seconds >= 0 else _DEFAULT_SECONDS


def _shorten(cause: str) -> str:
    """Return a cause as one short line without secrets."""
    lines = [line.strip() for line in redact(cause).splitlines() if line.strip()]
    text = " ".join("; ".join(lines).split())
    return text if len(text) <= _MESSAGE_LIMIT else text[: _MESSAGE_LIMIT - 1] + "…"
