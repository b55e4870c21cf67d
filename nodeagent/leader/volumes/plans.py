"""How often PVCs are to be backed up: from annotations of PVCs, Schedules of a Velero server, and labeled CronJobs."""

import logging
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime, timedelta
from typing import Final, TypeVar

from core.kube.client import KubeClient, Selection
from core.kube.errors import ForbiddenError, KubeError, NotFoundError
from core.kube.resources import CRON_JOBS, PERSISTENT_VOLUME_CLAIMS, SCHEDULES
from core.models.base import JsonDict, parse_time
from core.models.names import BACKUP_INTERVAL_ANNOTATION, SCHEDULE_LABEL, VERIFICATION_INTERVAL_ANNOTATION
from core.models.units import parse_duration
from nodeagent.config.windows import longest_pause, parse_schedule, parse_time_zone
from nodeagent.leader.volumes.states import Claim, ClaimKey, Plan, Plans

__all__ = ["PlanReader", "parse_interval"]

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

_EVERY: Final = "@every "
_ZONE_KEYS: Final = ("CRON_TZ=", "TZ=")
"""What may precede a schedule of Velero. Source: robfig/cron v3.0.1, ParseStandard."""


def parse_interval(schedule: str, zone: str, now: datetime) -> timedelta:
    """Return the longest pause between two starts of `schedule` in the next weeks.

    Args:
        schedule: as a CronJob or a Schedule of Velero has it: also `@every 6h`, or with `CRON_TZ=`.
        zone: the name of its time zone; empty: UTC.
        now: from when on.

    Raises:
        ValueError: it is invalid.
    """
    first, _, rest = schedule.strip().partition(" ")
    for key in _ZONE_KEYS:
        if first.startswith(key):
            schedule, zone = rest, first.removeprefix(key)
    if schedule.startswith(_EVERY):
        return parse_duration(schedule.removeprefix(_EVERY))
    return longest_pause(parse_schedule(schedule.strip()), parse_time_zone(zone or "UTC"), now)


class PlanReader:
    """Reads how often there are to be backups."""

    def __init__(self, client: KubeClient, namespace: str, now: Callable[[], datetime]) -> None:
        """Read PVCs of all namespaces, and the Schedules and CronJobs of `namespace`; `now` returns the time."""
        self._client = client
        self._namespace = namespace
        self._now = now
        self._intervals: dict[tuple[str, str], timedelta | None] = {}
        self._claims: Mapping[ClaimKey, Claim] | None = None
        self._cron_jobs: Mapping[str, Plan] | None = None
        self._schedules: Mapping[str, Plan] | None = None

    async def read(self) -> Plans:
        """Return the plans; those that may not be read are left out, others that cannot be are as last read."""
        read_at = self._now()
        self._claims = await _attempt(self._read_claims, self._claims)
        self._cron_jobs = await _attempt(self._read_cron_jobs, self._cron_jobs)
        self._schedules = await _attempt(self._read_schedules, self._schedules)
        return Plans(read_at, self._claims, {**(self._schedules or {}), **(self._cron_jobs or {})})

    async def _read_claims(self) -> Mapping[ClaimKey, Claim]:
        claims = {}
        async for page in self._client.pages(Selection(PERSISTENT_VOLUME_CLAIMS)):
            for raw in page.items:
                meta = raw["metadata"]
                created = parse_time(meta["creationTimestamp"])
                claims[meta["namespace"], meta["name"]] = Claim(created, _annotated(raw))
        return claims

    async def _read_cron_jobs(self) -> Mapping[str, Plan]:
        selection = Selection(CRON_JOBS, self._namespace, label_selector=SCHEDULE_LABEL)
        return {
            str(raw["metadata"]["labels"][SCHEDULE_LABEL]): self._plan_of(raw, raw["spec"].get("timeZone") or "")
            for raw in await self._client.list(selection)
            if not raw["spec"].get("suspend")
        }

    async def _read_schedules(self) -> Mapping[str, Plan]:
        return {
            str(raw["metadata"]["name"]): self._plan_of(raw, "")
            for raw in await self._client.list(Selection(SCHEDULES, self._namespace))
            if not (raw.get("spec") or {}).get("paused")
        }

    def _plan_of(self, raw: JsonDict, zone: str) -> Plan:
        """Return the plan of a Schedule or CronJob, whose times are computed once."""
        schedule = (raw.get("spec") or {}).get("schedule")
        key = (schedule if isinstance(schedule, str) else "", zone)
        if key not in self._intervals:
            try:
                self._intervals[key] = parse_interval(*key, self._now())
            except ValueError as e:
                self._intervals[key] = None
                meta = raw["metadata"]
                _log.warning("schedule of %s cannot be read, no interval is known: %s", meta["name"], e)
        return Plan(self._intervals[key], _annotated(raw).verification)


async def _attempt(read: Callable[[], Awaitable[_T]], last: _T | None) -> _T | None:
    """Return what `read` returns; None without the permission or the resource, `last` after any other error."""
    try:
        return await read()
    except (ForbiddenError, NotFoundError) as e:
        _log.debug("not read for the metrics of volumes: %s", e)
        return None
    except KubeError as e:
        _log.info("cannot read for the metrics of volumes, will retry: %s", e)
        return last


def _annotated(raw: JsonDict) -> Plan:
    """Return what the annotations of an object ask for; an invalid interval counts as absent."""
    annotations = raw["metadata"].get("annotations") or {}
    return Plan(
        _duration(annotations.get(BACKUP_INTERVAL_ANNOTATION)),
        _duration(annotations.get(VERIFICATION_INTERVAL_ANNOTATION)),
    )


def _duration(text: object) -> timedelta | None:
    try:
        duration = parse_duration(text) if isinstance(text, str) else timedelta()
    except ValueError:
        return None
    return duration if duration > timedelta() else None
