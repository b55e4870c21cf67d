"""What a schedule keeps by count and calendar, and how its backups have it in an annotation. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Final

from core.errors import ConfigError
from core.models.units import format_duration
from nodeagent.config.windows import parse_time_zone

__all__ = ["UTC_ZONE", "KeepPolicy", "KeepRule", "format_keep", "parse_keep", "ttl_of_keep"]

UTC_ZONE: Final = "UTC"
_ZONE: Final = "zone"
_TTL: Final = "ttl"


class KeepRule(StrEnum):
    """What a count is about: the newest copies, or the newest copy of each period that has one."""

    LAST = "last"
    HOURLY = "hourly"
    DAILY = "daily"
    WEEKLY = "weekly"
    MONTHLY = "monthly"
    YEARLY = "yearly"

    @property
    def flag(self) -> str:
        """The option that sets its count."""
        return f"--keep-{self}"

    @property
    def help(self) -> str:
        """What the option says."""
        if self is KeepRule.LAST:
            return "how many of the newest backups stay"
        return f"of how many {_UNITS[self]} with a backup the newest one stays"


_UNITS: Final = {
    KeepRule.HOURLY: "hours",
    KeepRule.DAILY: "days",
    KeepRule.WEEKLY: "weeks",
    KeepRule.MONTHLY: "months",
    KeepRule.YEARLY: "years",
}


@dataclass(frozen=True)
class KeepPolicy:
    """How many copies of each volume stay, by rule; periods begin and end in an IANA time zone."""

    counts: Mapping[KeepRule, int]
    zone: str = UTC_ZONE

    @classmethod
    def of(cls, given: Mapping[KeepRule, int | None], zone: str) -> "KeepPolicy | None":
        """Return the policy with these counts, as options have them; None: none is given.

        Raises:
            ConfigError: a count or the time zone is invalid; the message names the flag.
        """
        counts = {rule: count for rule, count in given.items() if count is not None}
        for rule, count in counts.items():
            if count < 1:
                raise ConfigError(f"{rule.flag}: must be at least 1: {count}")
        if not counts:
            return None
        try:
            parse_time_zone(zone or UTC_ZONE)
        except ValueError as e:
            raise ConfigError(f"--time-zone: {e}") from e
        return cls(counts, zone or UTC_ZONE)

    @property
    def by_name(self) -> dict[str, int]:
        """The counts by the names of their rules, in one order."""
        return {str(rule): self.counts[rule] for rule in KeepRule if rule in self.counts}

    @property
    def argv(self) -> list[str]:
        """The words of a command line that set it."""
        words = [f"{KeepRule(name).flag}={count}" for name, count in self.by_name.items()]
        return words if self.zone == UTC_ZONE else [*words, f"--time-zone={self.zone}"]


def format_keep(policy: KeepPolicy, ttl: timedelta | None) -> str:
    """Return a policy and a time to live as BACKUP_KEEP_ANNOTATION has them."""
    words = {name: str(count) for name, count in policy.by_name.items()} | {_ZONE: policy.zone}
    if ttl is not None:
        words[_TTL] = format_duration(ttl)
    return ",".join(f"{key}={value}" for key, value in words.items())


def ttl_of_keep(text: str) -> str:
    """Return the time to live in BACKUP_KEEP_ANNOTATION, as written; empty: it has none."""
    return _parse_words(text).get(_TTL, "")


def parse_keep(text: str) -> KeepPolicy:
    """Return the policy in BACKUP_KEEP_ANNOTATION.

    Raises:
        ValueError: it is invalid, or of a version that knows more rules.
    """
    words = _parse_words(text)
    words.pop(_TTL, None)
    zone = words.pop(_ZONE, UTC_ZONE)
    try:
        policy = KeepPolicy.of({KeepRule(key): int(value) for key, value in words.items()}, zone)
    except ConfigError as e:
        raise ValueError(str(e)) from e
    if policy is None:
        raise ValueError("it has no count")
    return policy


def _parse_words(text: str) -> dict[str, str]:
    return dict(word.partition("=")[::2] for word in text.split(",") if word)
