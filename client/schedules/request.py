"""A schedule as the user asked for it, and the command line of its pods. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

from client.backups.manifests import check_pairs
from client.backups.methods import Method
from client.backups.plan import Choice, ClaimName
from core.errors import ConfigError
from core.models.base import JsonDict
from core.models.names import OBJECT_NAME, SCHEDULE_COMMAND, label_value
from core.models.units import format_duration
from nodeagent.config.windows import Window, longest_pause, parse_schedule, parse_time_zone

__all__ = ["ScheduleRequest", "ScheduleTimes", "words_of"]

_NAME_CHARACTERS: Final = 48
"""A CronJob's name has at most 52, and the names of its backups have 15 more. Source: Kubernetes v1.34, CronJob."""

_ZONE_PREFIX: Final = re.compile(r"(CRON_)?TZ=")


@dataclass(frozen=True)
class ScheduleTimes:
    """When a schedule runs: a cron expression, and an IANA time zone, empty: that of the cluster's controllers, UTC."""

    schedule: str
    time_zone: str = ""
    suspend: bool = False

    def check(self) -> None:
        """Check both, as a CronJob has them.

        Raises:
            ConfigError: one is invalid; the message names the flag.
        """
        if _ZONE_PREFIX.match(self.schedule):
            raise ConfigError(f'--schedule: "{self.schedule}" has a time zone: set --time-zone')
        try:
            parse_schedule(self.schedule)
        except ValueError as e:
            raise ConfigError(f'--schedule: "{self.schedule}" is no cron expression such as "0 2 * * *": {e}') from e
        try:
            parse_time_zone(self.time_zone or "UTC")
        except ValueError as e:
            raise ConfigError(f"--time-zone: {e}") from e

    def next_after(self, moment: datetime) -> datetime | None:
        """Return when it runs next after `moment`; None: never, or it is invalid."""
        try:
            zone = parse_time_zone(self.time_zone or "UTC")
            return Window(parse_schedule(self.schedule), zone, timedelta()).start_after(moment)
        except ValueError:
            return None

    def longest_pause(self, moment: datetime) -> timedelta:
        """Return the longest time between two runs, of those in the weeks after `moment`."""
        return longest_pause(parse_schedule(self.schedule), parse_time_zone(self.time_zone or "UTC"), moment)


@dataclass(frozen=True)
class ScheduleRequest:
    """What a schedule backs up and keeps.

    `namespace` is that of the agents; `selector_namespace` and `selector` choose PVCs where `claims` is empty. A `ttl`
    of None: backups are kept, and no backup is deleted.
    """

    name: str
    namespace: str
    claims: tuple[ClaimName, ...] = ()
    selector_namespace: str = ""
    selector: str = ""
    method: Method = Method.AUTO
    location: str = ""
    ttl: timedelta | None = None
    verify: bool = False
    ignore_velero_server: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)

    def check(self) -> None:
        """Check the name, and the labels and annotations of the transfers.

        Raises:
            ConfigError: no CronJob can have the name, or a key is reserved.
        """
        check_pairs(self.labels, self.annotations)
        if not OBJECT_NAME.fullmatch(self.name) or len(self.name) > _NAME_CHARACTERS:
            allowed = f'up to {_NAME_CHARACTERS} lowercase letters, digits, "-" and "."'
            raise ConfigError(f'"{self.name}" is no name of a schedule: {allowed}')

    @property
    def label(self) -> str:
        """The value of SCHEDULE_LABEL on its objects."""
        return label_value(self.name)

    @property
    def choice(self) -> Choice:
        """The PVCs that it backs up."""
        return Choice(
            claims=self.claims,
            namespace=self.selector_namespace,
            selector=self.selector,
            method=self.method,
            ignore_velero_server=self.ignore_velero_server,
        )

    @property
    def claim_namespaces(self) -> list[str]:
        """The namespaces of its PVCs."""
        return sorted({claim.namespace for claim in self.claims} or {self.selector_namespace})

    @property
    def shown_claims(self) -> str:
        """Its PVCs, as text."""
        if self.claims:
            return ", ".join(map(str, self.claims))
        return f"{self.selector_namespace}: {self.selector or 'all'}"

    @property
    def argv(self) -> list[str]:
        """The words of the command line of its pods, after the program."""
        words = [SCHEDULE_COMMAND, self.name, f"--agent-namespace={self.namespace}"]
        words += [f"--pvc={claim}" for claim in self.claims]
        if not self.claims:
            words += [f"--namespace={self.selector_namespace}", f"--selector={self.selector}"]
        words.append(f"--method={self.method}")
        if self.location:
            words.append(f"--storage-location={self.location}")
        if self.ttl is not None:
            words.append(f"--ttl={format_duration(self.ttl)}")
        if self.verify:
            words.append("--verify")
        if self.ignore_velero_server:
            words.append("--ignore-velero-server")
        for flag, pairs in (("--labels", self.labels), ("--annotations", self.annotations)):
            if pairs:
                words.append(f"{flag}={','.join(f'{key}={value}' for key, value in pairs.items())}")
        return words


def words_of(cron_job: JsonDict) -> list[str]:
    """Return the words after the program of a batch/v1 CronJob; none: it is not a schedule of ours."""
    template = ((cron_job.get("spec") or {}).get("jobTemplate") or {}).get("spec") or {}
    containers = ((template.get("template") or {}).get("spec") or {}).get("containers") or [{}]
    words = [str(word) for word in containers[0].get("args") or []]
    return words if words[:1] == [SCHEDULE_COMMAND] else []
