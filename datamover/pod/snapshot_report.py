"""The snapshot report of one repository in a pod: each kopia snapshot that nothing refers to, with the reason.

Reads the repository, the cluster, and the bucket if a verdict depends on it; in this order, so that what is stored
meanwhile counts as a reference. Changes nothing. Does not know the rules (`datamover.kopia.references`).
Source: kopia 0.23.1, cli/command_snapshot_list.go and command_snapshot_delete.go.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import IO, Final

from core.errors import DataPathError
from core.models.base import format_time
from core.models.job_output import JobOutput
from core.mover_specs import ReportSnapshots
from core.snapshot_contract import REPORTED_LINE, ReportedSnapshot, SnapshotReport, SnapshotTotal, SnapshotVerdict
from datamover.kopia.backup_files import BackupFiles
from datamover.kopia.long_lists import open_output, read_elements
from datamover.kopia.process import KopiaAnswer
from datamover.kopia.references import Judgment, ListedSnapshot, References, judge, needs_bucket
from datamover.kopia.repository import Repository
from datamover.pod.cluster import PodContext
from datamover.pod.references import read_cluster_references
from datamover.pod.reporting import Termination, build_success
from datamover.pod.repository_access import open_access
from datamover.runtime.work_dir import WorkDir

__all__ = ["SnapshotReporter", "report_snapshots"]

_logger = logging.getLogger(__name__)

_REASON_LIMIT: Final = 500


async def report_snapshots(spec: ReportSnapshots, context: PodContext) -> Termination:
    """Report the snapshots of the repository of a BackupRepository, and return the SnapshotReport.

    Raises:
        AgentError: its snapshots could not be listed.
    """
    reader = context.reader
    wanted = await reader.repository(spec.name)
    location = await reader.location(wanted.spec.backup_storage_location)
    with open_access(context) as access:
        repository = await access.resolve(location, wanted)
        reporter = SnapshotReporter(access.context, repository, access.work_dir, wanted.spec.volume_namespace)
        return build_success(reporter.output.seal(await reporter.run()))


@dataclass(frozen=True)
class SnapshotReporter:
    """Reports the snapshots of a repository, for the volumes of one namespace, to `output`.

    `work_dir` has the configuration with which kopia is connected to the repository.
    """

    context: PodContext
    repository: Repository
    work_dir: WorkDir
    volume_namespace: str
    output: JobOutput = field(default_factory=JobOutput)

    async def run(self) -> SnapshotReport:
        """Write a line for each snapshot that is not referenced, and return the totals.

        Raises:
            DataPathError: the snapshots could not be listed.
        """
        context = self.context
        with open_output(self.work_dir) as file:
            answer = await self.repository.open(lambda: self._list(file), read_only=True)
            references = await read_cluster_references(context.patient_client, context.namespace)
            doubtful = (one for one in self._read(answer, file) if needs_bucket(one, references))
            wanted = frozenset(name for one in doubtful for name in (one.id, one.backup_uid) if name)
            bucket_read = False
            if wanted:
                bucket_read, references = await self._read_bucket(wanted, references)
            now = context.clock.now()
            totals = self._write((one, judge(one, references, now)) for one in self._read(answer, file))
        unread = references.unread if wanted else ""
        return SnapshotReport(**totals, bucket_read=bucket_read, unread=unread)

    async def _list(self, file: IO[bytes]) -> KopiaAnswer:
        attempted = f"{self.repository.description}: list snapshots"
        arguments = ("snapshot", "list", "--all", "--incomplete", "--json")
        return (await self.repository.call(attempted, *arguments, output_fd=file.fileno())).check()

    @staticmethod
    def _read(answer: KopiaAnswer, file: IO[bytes]) -> Iterator[ListedSnapshot]:
        return read_elements(answer, file, ListedSnapshot)

    async def _read_bucket(self, wanted: frozenset[str], references: References) -> tuple[bool, References]:
        """Return whether all files were read, and the references, the bucket's too, or why there are none."""
        files = BackupFiles(self.repository.kopia, self.work_dir, self.volume_namespace)
        try:
            return True, replace(references, in_bucket=await files.find_named(wanted))
        except DataPathError as e:
            lines = str(e).splitlines()
            text = ": ".join(dict.fromkeys((lines[0], lines[-1])))
            _logger.warning("cannot read the files of all backups: %s", text)
            unread = "; ".join(filter(None, (references.unread, f"cannot read the files of all backups: {text}")))
            return False, replace(references, unread=unread)

    def _write(self, judged: Iterable[tuple[ListedSnapshot, Judgment]]) -> dict[str, SnapshotTotal]:
        """Write the lines, and return the total of each verdict."""
        counts: Counter[SnapshotVerdict] = Counter()
        sizes: Counter[SnapshotVerdict] = Counter()
        for snapshot, (verdict, reason) in judged:
            counts[verdict] += 1
            sizes[verdict] += snapshot.size_bytes
            if verdict is not SnapshotVerdict.REFERENCED:
                self.output.write(REPORTED_LINE, _describe(snapshot, verdict, reason))
        return {str(verdict): SnapshotTotal(count=counts[verdict], bytes=sizes[verdict]) for verdict in counts}


def _describe(snapshot: ListedSnapshot, verdict: SnapshotVerdict, reason: str) -> ReportedSnapshot:
    return ReportedSnapshot(
        id=snapshot.id,
        verdict=verdict,
        reason=reason[:_REASON_LIMIT],
        source=snapshot.shown_source,
        start=format_time(snapshot.start_time),
        bytes=snapshot.size_bytes,
        command=f"kopia snapshot delete {snapshot.id} --delete" if verdict is SnapshotVerdict.UNREFERENCED else "",
    )
