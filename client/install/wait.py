"""The wait for an installation: DaemonSet rolled out, agents Ready, the location reachable; or why they are not."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from client.install.apply import Applied, ApplyResult
from client.install.options import place_of
from core.clock import Clock, Deadline
from core.errors import AgentError, ExposeError
from core.kube.client import KubeClient, Selection, select_labels
from core.kube.resources import BACKUP_STORAGE_LOCATIONS, DAEMON_SETS, EVENTS, PODS
from core.kube.types import DaemonSet, Metadata, Object, Pod
from core.models.storage import BackupStorageLocation
from core.models.units import format_duration, parse_duration
from exposer.causes import CauseFinder
from exposer.pod_status import is_ready

__all__ = ["WaitError", "WaitTools", "wait_installation"]

_POLL_SECONDS: Final = 1.0

_AVAILABLE: Final = "Available"


class WaitError(AgentError):
    """The agents did not come up, or the location is not reachable."""


@dataclass(frozen=True)
class WaitTools:
    """What is waited with.

    `on_progress` is called with what is missing whenever that changes, `on_note` with what the user should know.
    """

    client: KubeClient
    clock: Clock
    on_progress: Callable[[str], None]
    on_note: Callable[[str], None]


async def wait_installation(tools: WaitTools, applied: Sequence[Applied], timeout: timedelta) -> None:  # noqa: ASYNC109 - shown
    """Return once all agents of these objects are ready, and the location is reachable.

    Raises:
        WaitError: that was not so before the timeout, or cannot become so; the message has the cause.
        KubeError: the API server rejected a request.
    """
    deadline = Deadline.after(tools.clock, timeout)
    causes, shown = CauseFinder(tools.client, tools.clock), ""
    while missing := await _find_missing(tools, causes, applied):
        if missing != shown:
            tools.on_progress(missing)
            shown = missing
        if deadline.expired:
            raise WaitError(f"the agents did not come up within {format_duration(timeout)}: {missing}")
        await tools.clock.sleep(min(_POLL_SECONDS, max(deadline.remaining_seconds, 0.1)))


async def _find_missing(tools: WaitTools, causes: CauseFinder, applied: Sequence[Applied]) -> str:
    """Return what is not as it should be, with its cause; empty: nothing."""
    for one in applied:
        if one.stored["kind"] == DAEMON_SETS.kind and (missing := await _explain_rollout(tools, causes, one.stored)):
            return missing
    # The agents validate a location, so that they must be ready.
    renewed = any(one.result is not ApplyResult.UNCHANGED and one.stored["kind"] == "Secret" for one in applied)
    for one in applied:
        if one.stored["kind"] == BACKUP_STORAGE_LOCATIONS.kind:
            changed = renewed or one.result is not ApplyResult.UNCHANGED
            if missing := await _explain_location(tools, one.stored, changed=changed):
                return missing
    return ""


async def _explain_rollout(tools: WaitTools, causes: CauseFinder, stored: Object) -> str:
    """Return why the agents of a DaemonSet are not all ready; empty: they are.

    Raises:
        WaitError: it was deleted, or no node is eligible.
    """
    meta = stored["metadata"]
    current = await tools.client.read(DAEMON_SETS, meta["namespace"], meta["name"])
    if current is None:
        raise WaitError(f"{place_of(stored)} was deleted")
    status, desired = current.get("status") or {}, _desired(current)
    if status.get("observedGeneration", 0) < current["metadata"].get("generation", 1):
        return f"{place_of(stored)} is not observed yet"
    if desired == 0:
        raise WaitError(f"{place_of(stored)}: no node is eligible for its pods (nodeSelector, operating system)")
    ready = status.get("numberAvailable", 0)
    updated = status.get("updatedNumberScheduled", 0)
    if min(ready, updated) >= desired:
        return ""
    cause = await _find_cause(tools, causes, current)
    text = f"{place_of(stored)}: {min(ready, updated)} of {desired} agents are ready"
    return f"{text}: {cause}" if cause else text


def _desired(daemonset: DaemonSet) -> int:
    """Return how many nodes should have a pod, as far as the controller knows."""
    return (daemonset.get("status") or {}).get("desiredNumberScheduled", 0)


async def _find_cause(tools: WaitTools, causes: CauseFinder, daemonset: DaemonSet) -> str:
    """Return why a pod of the DaemonSet does not exist, start or become ready; empty: no cause yet."""
    meta = daemonset["metadata"]
    pods = await tools.client.list(
        Selection(PODS, meta["namespace"], select_labels(daemonset["spec"]["selector"]["matchLabels"]))
    )
    for pod in pods:
        if cause := await _explain_pod(tools, causes, pod):
            return cause
    if len(pods) < _desired(daemonset):
        return await _last_warning(tools, meta)
    return ""


async def _explain_pod(tools: WaitTools, causes: CauseFinder, pod: Pod) -> str:
    """Return why an agent is not ready; empty: it is, or is starting.

    Raises:
        WaitError: it can never start.
    """
    status, meta = pod.get("status") or {}, pod["metadata"]
    if is_ready(pod):
        return ""
    place = f"Pod {meta['namespace']}/{meta['name']}"
    for container in status.get("containerStatuses") or []:
        for state in (container.get("state") or {}, container.get("lastState") or {}):
            if ended := state.get("terminated"):
                lines = str(ended.get("message") or "").strip().splitlines()
                last = lines[-1].strip() if lines else ended.get("reason") or "no reason"
                return f"{place} ended with exit code {ended.get('exitCode')}: {last}"
    try:
        pending = await causes.explain(pod)
    except ExposeError as e:
        raise WaitError(str(e)) from e
    return pending.message if pending is not None else await _last_warning(tools, meta)


async def _last_warning(tools: WaitTools, meta: Metadata) -> str:
    """Return the last Warning about an object; empty: there is none."""
    selector = f"involvedObject.uid={meta['uid']}"
    events = await tools.client.list(Selection(EVENTS, meta["namespace"], field_selector=selector))
    warnings = [event for event in events if event.get("type") == "Warning"]
    if not warnings:
        return ""
    last = max(warnings, key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime") or ""))
    return f"{last.get('reason') or 'Unknown'}: {' '.join(str(last.get('message') or '').split())}"


async def _explain_location(tools: WaitTools, stored: Object, *, changed: bool) -> str:
    """Return why the location is not reachable; empty: it is, or it is not validated.

    After a change, only a validation counts that came after it.
    """
    meta = stored["metadata"]
    raw = await tools.client.read(BACKUP_STORAGE_LOCATIONS, meta["namespace"], meta["name"])
    if raw is None:
        raise WaitError(f"{place_of(stored)} was deleted")
    before, current = BackupStorageLocation.parse(stored), BackupStorageLocation.parse(raw)
    frequency = current.spec.validation_frequency
    if frequency is not None and parse_duration(frequency) <= timedelta():
        return ""
    status = current.status
    is_new = status.last_validation_time != before.status.last_validation_time
    if not status.phase or (changed and not is_new):
        return f"{place_of(stored)} is not validated yet"
    if status.phase == _AVAILABLE:
        return ""
    return f"{place_of(stored)} is {status.phase}: {status.message or 'no reason'}"
