"""What the last run of retention kept and why, as commands and the leader show it; which schedules have older rules.

The report is in the ConfigMap DELETIONS_CONFIGMAP, beside the record of what is being deleted. Pure.
"""

from collections.abc import Mapping
from typing import Any, Final

from msgspec import field

from core.errors import ContractError
from core.models.base import Int64, Time, WireModel, format_time
from core.models.names import RETENTION_IMAGE_ANNOTATION, SCHEDULE_COMMAND

__all__ = ["REPORT_KEY", "HeldBackup", "HeldRule", "RetentionReport", "deletes_by_old_rules", "read_report"]

REPORT_KEY: Final = "_report"
"""The key of the report in the ConfigMap; an entry's key is the name of a backup, which begins with no underscore."""

_BACKLOG: Final = 10
"""From so many waiting copies on, a person is to know: a steady schedule never has one."""

HeldRule = str
"""Why an expired backup was kept: a value of `client.backups.retention.Rule`."""


class HeldBackup(WireModel, omit_defaults=True):
    """An expired backup that was kept for one volume; `reason` is a sentence, `command` what lets go.

    `namespace` and `claim` are the volume, `created` when the backup was made, `bytes` the size of what the backup has.
    """

    backup: str
    rule: HeldRule
    reason: str
    namespace: str
    claim: str
    location: str
    created: Time | None = None
    bytes: Int64 = 0
    command: str = ""


class RetentionReport(WireModel, omit_defaults=True):
    """What one run of retention has left.

    `at` is when, by its witnesses of the time. `held` are the first expired backups that a rule keeps which may not end
    by itself, `held_count` how many there are. `waiting` is how many expired copies, of `waiting_backups`, wait for the
    limit of deletions, `waiting_why` why so many, `through` when they will be gone. `failure` is why nothing, or not
    all, could be judged or deleted; empty: it could. `schedule` is empty for a command.
    """

    at: Time
    schedule: str = ""
    deleted: Int64 = 0
    held: list[HeldBackup] = field(default_factory=list)
    held_count: Int64 = 0
    waiting: Int64 = 0
    waiting_backups: Int64 = 0
    waiting_why: str = ""
    through: Time | None = None
    failure: str = ""

    @property
    def backlog(self) -> str | None:
        """A message about the copies that wait: how many, why, until when, what deletes them; None: they are few."""
        if self.waiting < _BACKLOG:
            return None
        why = f" ({self.waiting_why})" if self.waiting_why else ""
        through = f"; the last one goes at about {format_time(self.through)}" if self.through is not None else ""
        message = f"{self.waiting} expired copies wait for the limit of deletions{why}{through}"
        return f"{message}; to delete them at once: nodeagent backup delete --expired --at-most {self.waiting_backups}"


def read_report(data: Mapping[str, str] | None) -> RetentionReport | None:
    """Return the report in `data` of the ConfigMap; None: there is none, or it is invalid."""
    try:
        return RetentionReport.from_json((data or {})[REPORT_KEY])
    except (KeyError, ContractError):
        return None


def deletes_by_old_rules(cron_job: Mapping[str, Any]) -> bool:
    """Return whether a batch/v1 CronJob is a schedule of ours that deletes, with an image whose rules may be older.

    A CronJob keeps the image of the day when it was made, and so its rules.
    """
    template = ((cron_job.get("spec") or {}).get("jobTemplate") or {}).get("spec") or {}
    containers = ((template.get("template") or {}).get("spec") or {}).get("containers") or [{}]
    words = [str(word) for word in containers[0].get("args") or []]
    if words[:1] != [SCHEDULE_COMMAND] or not any(word.startswith(("--ttl", "--keep-")) for word in words):
        return False
    annotations = cron_job["metadata"].get("annotations") or {}
    # A webhook may have added the digest of the tag.
    known, image = annotations.get(RETENTION_IMAGE_ANNOTATION) or "", containers[0].get("image") or ""
    return not known or known.partition("@")[0] != image.partition("@")[0]
