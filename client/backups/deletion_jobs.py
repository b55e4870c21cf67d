"""The Jobs that check or delete the snapshots of deleted backups in one location, and what they say."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

from client.backups.deletion_record import Located
from client.mover_jobs import JobAnswer, JobSubject, JobTools, plan_job, read_location, run_job
from core.contract import parse_result
from core.models.storage import RepositoryKey
from core.snapshot_contract import CHECKED_LINE, DELETED_LINE, CopyToCheck, DeletedSnapshot, SnapshotDeletion
from exposer.maintenance_job import build_deletion_job
from exposer.model import Owner

__all__ = ["LocationJobs"]

_TIMEOUT: Final = timedelta(hours=1)

_AT_ONCE: Final = 1000
"""Transfers of one Job: some 100 KiB of its command line."""


@dataclass
class LocationJobs:
    """The Jobs of one location, and what they found. `cluster` is the cluster in the tags of its snapshots.

    `unread` has why some snapshots were not looked for, by the namespace of their repository; empty: of any. `faults`
    are of the copies that were checked, `ended` is the time by the clock of the last pod.
    """

    jobs: JobTools
    location: str
    cluster: str
    found: list[DeletedSnapshot] = field(default_factory=list)
    unread: dict[str, str] = field(default_factory=dict)
    faults: dict[CopyToCheck, str] = field(default_factory=dict)
    ended: datetime | None = None

    async def run(self, transfers: Iterable[Located], checks: Mapping[str, CopyToCheck] | None) -> None:
        """Run them for the transfers that are in the location.

        Args:
            transfers: those whose snapshots are to be found.
            checks: only to check, also these copies, by the UIDs of the transfers that need them; None: to delete.

        Raises:
            AgentError: a Job cannot run, or failed.
        """
        jobs = self.jobs
        location = await read_location(jobs.client, jobs.namespace, self.location)
        subject = JobSubject(Owner.of(location), "delete", RepositoryKey("", self.location))
        here = sorted(one for where, one in transfers if where == self.location)
        more = [f"--cluster={self.cluster}", *(["--dry-run"] if checks is not None else [])]
        for first in range(0, len(here), _AT_ONCE):
            some = here[first : first + _AT_ONCE]
            options = [f"--transfer={one}" for one in some]
            needed = {checks[one.uid] for one in some if one.uid in checks} if checks is not None else set()
            options += [f"--check={one}" for one in sorted(needed)]
            run, expose = await plan_job(jobs, subject, location)
            manifest = build_deletion_job(run, expose, [*options, *more])
            self._read(await run_job(jobs, manifest, "deletion", _TIMEOUT))

    def _read(self, answer: JobAnswer) -> None:
        totals = parse_result(SnapshotDeletion, answer.message)
        for missed in totals.unread:
            key = missed.volume_namespace if totals.unread_count == len(totals.unread) else ""
            self.unread[key] = f"the repository of namespace {missed.volume_namespace}: {missed.message}"
        lines, checked = DELETED_LINE.find(answer.log), CHECKED_LINE.find(answer.log)
        expected = totals.deleted + totals.kept + totals.checked
        if len(lines) + len(checked) < expected:
            shown = len(lines) + len(checked)
            self.unread[""] = f"the log of the pod has only {shown} of {expected} snapshots"
        self.found += lines
        self.faults |= {CopyToCheck(one.volume_namespace, one.snapshot_id): one.fault for one in checked}
        self.ended = totals.now
