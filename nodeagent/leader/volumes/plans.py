"""How often PVCs are to be backed up: from annotations of PVCs, Schedules of a Velero server, and labeled CronJobs.

And what retention has reported beside these CronJobs.
"""

import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final, TypeVar

from msgspec import field

from core.errors import ContractError
from core.kube.client import KubeClient, Selection
from core.kube.errors import ForbiddenError, KubeError, NotFoundError
from core.kube.resources import CONFIG_MAPS, CRON_JOBS, PERSISTENT_VOLUME_CLAIMS, SCHEDULES
from core.kube.types import UncheckedObject
from core.logs import fields
from core.models.backups import RetentionReport, read_report
from core.models.base import ObjectMeta, WireModel
from core.models.names import (
    BACKUP_INTERVAL_ANNOTATION,
    DELETIONS_CONFIGMAP,
    SCHEDULE_LABEL,
    VERIFICATION_INTERVAL_ANNOTATION,
)
from core.models.units import parse_duration
from nodeagent.config.windows import parse_interval
from nodeagent.leader.volumes.states import Claim, ClaimKey, Plan, Plans

__all__ = ["PlanReader"]

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

_INTERVALS: Final = (BACKUP_INTERVAL_ANNOTATION, VERIFICATION_INTERVAL_ANNOTATION)


class _Spec(WireModel):
    """What is read of the spec of a Schedule (`paused`) or CronJob (`suspend`)."""

    schedule: str = ""
    time_zone: str = ""
    suspend: bool = False
    paused: bool = False


class _Planned(WireModel):
    """A PVC, Schedule or CronJob."""

    metadata: ObjectMeta
    spec: _Spec = field(default_factory=_Spec)

    @property
    def annotated(self) -> Plan:
        """What its annotations ask for; an invalid interval counts as absent."""
        texts = (self.metadata.annotations.get(key, "") for key in _INTERVALS)
        return Plan(*map(_parse_positive, texts))


class PlanReader:
    """Reads how often there are to be backups."""

    def __init__(self, client: KubeClient, namespace: str, now: Callable[[], datetime]) -> None:
        """Read PVCs of all namespaces, and the rest in `namespace`; `now` returns the time."""
        self._client = client
        self._namespace = namespace
        self._now = now
        self._intervals: dict[tuple[str, str], timedelta | None] = {}
        self._claims: Mapping[ClaimKey, Claim] | None = None
        self._cron_jobs: Sequence[UncheckedObject] | None = None
        self._schedules: Mapping[str, Plan] | None = None
        self._report: RetentionReport | None = None

    async def read(self) -> Plans:
        """Return the plans; those that may not be read are left out, others that cannot be are as last read."""
        read_at = self._now()
        self._claims = await _attempt(self._read_claims, self._claims)
        self._cron_jobs = await _attempt(self._read_cron_jobs, self._cron_jobs)
        self._schedules = await _attempt(self._read_schedules, self._schedules)
        self._report = await _attempt(self._read_report, self._report)
        cron_jobs = self._cron_jobs or ()
        labeled = {
            one.metadata.labels.get(SCHEDULE_LABEL, ""): self._plan_of(one)
            for one in _parse_all(cron_jobs)
            if not one.spec.suspend
        }
        return Plans(read_at, self._claims, {**(self._schedules or {}), **labeled}, self._report, cron_jobs)

    async def _read_claims(self) -> Mapping[ClaimKey, Claim]:
        claims = {}
        async for page in self._client.pages(Selection(PERSISTENT_VOLUME_CLAIMS)):
            for one in _parse_all({"metadata": raw["metadata"]} for raw in page.items):
                meta = one.metadata
                if meta.creation_timestamp is not None:
                    claims[meta.namespace, meta.name] = Claim(meta.creation_timestamp, one.annotated)
        return claims

    async def _read_cron_jobs(self) -> Sequence[UncheckedObject]:
        return await self._client.list(Selection(CRON_JOBS, self._namespace, label_selector=SCHEDULE_LABEL))

    async def _read_schedules(self) -> Mapping[str, Plan]:
        return {
            one.metadata.name: self._plan_of(one)
            for one in _parse_all(await self._client.list(Selection(SCHEDULES, self._namespace)))
            if not one.spec.paused
        }

    async def _read_report(self) -> RetentionReport | None:
        stored = await self._client.get(CONFIG_MAPS, self._namespace, DELETIONS_CONFIGMAP)
        return read_report(stored.get("data"))

    def _plan_of(self, one: _Planned) -> Plan:
        """Return the plan of a Schedule or CronJob, whose times are computed once."""
        key = (one.spec.schedule, one.spec.time_zone)
        if key not in self._intervals:
            try:
                self._intervals[key] = parse_interval(*key, self._now())
            except ValueError as e:
                self._intervals[key] = None
                name = one.metadata.name
                _log.warning(
                    "schedule cannot be read, the metrics have no interval for it: %s", e, extra=fields(name=name)
                )
        return Plan(self._intervals[key], one.annotated.verification)


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


def _parse_all(objects: Iterable[Mapping[str, Any]]) -> Iterator[_Planned]:
    """Yield the models of `objects`, without those that do not have the form of their kind."""
    for raw in objects:
        try:
            yield _Planned.from_wire(raw)
        except ContractError as e:
            _log.debug("object left out of the metrics of volumes: %s", e)


def _parse_positive(text: str) -> timedelta | None:
    try:
        duration = parse_duration(text)
    except ValueError:
        return None
    return duration if duration > timedelta() else None
