"""A schedule as the user asked for it, in the command line of its pods; and why each of its copies stays, or goes."""

import argparse
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

import msgspec

from client.backups.copies import UTC_ZONE, Copy, KeepPolicy, KeepRule
from client.backups.delete import DeletionWish, plan_deletion
from client.backups.manifests import DataMover, Method, check_pairs, parse_pairs
from client.backups.plan import Choice
from client.backups.retention import DeletionError, KeepReason, RetentionDecision, limit_deletions
from client.session import Session
from core.errors import ConfigError, Translated
from core.kube.types import UncheckedObject
from core.models.backups import schedule_words
from core.models.base import Int64, Time, WireModel
from core.models.names import OBJECT_NAME, SCHEDULE_COMMAND, SCHEDULE_LABEL, label_value
from core.models.units import format_duration, parse_positive_duration
from nodeagent.config.windows import Window, longest_pause, parse_schedule, parse_time_zone
from nodeagent.runtime.connection import ClusterAccess
from nodeagent.runtime.settings import DEFAULT_NAMESPACE, CommandParser, add_kubeconfig

_ABOUT: Final = """\
Runs a schedule once: backs its PVCs up, waits for the end, and deletes expired backups. Pods of
`nodeagent schedule create` run it."""

_EXAMPLES: Final = """\
examples:
  kubectl -n velero create job night-now --from=cronjob/night
        run a schedule now
  nodeagent schedule run night --dry-run
        show what it would back up and delete

exit codes:
  0  every volume is in the bucket, and what is expired is deleted
  1  something of it failed; the message names it
  2  invalid command line, or the cluster is not reachable
"""

_NAME_CHARACTERS: Final = 48
"""A CronJob's name has at most 52, and the names of its backups have 15 more. Source: Kubernetes v1.34, CronJob."""

_ZONE_PREFIX: Final = re.compile(r"(CRON_)?TZ=")


@dataclass(frozen=True)
class ScheduleTimes:
    """When a schedule runs: a cron expression, and an IANA time zone; None: the cluster controllers' own, UTC."""

    schedule: str
    time_zone: str | None = None
    suspend: bool = False

    def check(self) -> None:
        """Check both, as a CronJob has them; ConfigError: one is invalid; the message names the flag."""
        if _ZONE_PREFIX.match(self.schedule):
            raise ConfigError(f'--schedule: "{self.schedule}" has a time zone: set --time-zone')
        with Translated(
            ValueError, ConfigError, f'--schedule: "{self.schedule}" is no cron expression such as "0 2 * * *"'
        ):
            parse_schedule(self.schedule)
        with Translated(ValueError, ConfigError, "--time-zone"):
            parse_time_zone(self.time_zone or "UTC")

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

    `namespace` is where the agents run. `ttl` is how long each backup is kept in any case, `keep` which ones are kept
    besides. Without both, no backup is deleted.
    """

    name: str
    namespace: str
    choice: Choice
    location: str = ""
    ttl: timedelta | None = None
    keep: KeepPolicy | None = None
    verify: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)

    def check(self) -> None:
        """Check name, labels and annotations; ConfigError: no CronJob, or no transfer of its backups, can have one."""
        check_pairs(self.labels, self.annotations)
        if not OBJECT_NAME.fullmatch(self.name) or len(self.name) > _NAME_CHARACTERS:
            allowed = f'up to {_NAME_CHARACTERS} lowercase letters, digits, "-" and "."'
            raise ConfigError(f'"{self.name}" is no name of a schedule: {allowed}')

    @property
    def label(self) -> str:
        """The value of SCHEDULE_LABEL on its objects."""
        return label_value(self.name)

    @property
    def own_labels(self) -> dict[str, str]:
        """The labels of its objects."""
        return {SCHEDULE_LABEL: self.label}

    @property
    def deletes(self) -> bool:
        """Whether its runs delete backups that are expired."""
        return self.ttl is not None or self.keep is not None

    @property
    def claim_namespaces(self) -> list[str]:
        """The namespaces of its PVCs."""
        return sorted({claim.namespace for claim in self.choice.claims} or {self.choice.namespace})

    @property
    def shown_claims(self) -> str:
        """Its PVCs, as text."""
        if self.choice.claims:
            return ", ".join(map(str, self.choice.claims))
        return f"{self.choice.namespace}: {self.choice.selector or 'all'}"

    @property
    def argv(self) -> list[str]:
        """The words of the command line of its pods, after the program: what `parse_run` reads."""
        choice = self.choice
        words = [SCHEDULE_COMMAND, self.name, f"--agent-namespace={self.namespace}"]
        words += [f"--pvc={claim}" for claim in choice.claims]
        if not choice.claims:
            words += [f"--namespace={choice.namespace}", f"--selector={choice.selector}"]
        words.append(f"--method={choice.method}")
        if choice.data_mover is not None:
            words.append(f"--data-mover={choice.data_mover}")
        if self.location:
            words.append(f"--storage-location={self.location}")
        if self.ttl is not None:
            words.append(f"--ttl={format_duration(self.ttl)}")
        if self.keep is not None:
            words += self.keep.argv
        if self.verify:
            words.append("--verify")
        if choice.ignore_velero_server:
            words.append("--ignore-velero-server")
        for flag, pairs in (("--labels", self.labels), ("--annotations", self.annotations)):
            if pairs:
                words.append(f"{flag}={','.join(f'{key}={value}' for key, value in pairs.items())}")
        return words


def parse_run(words: Sequence[str]) -> tuple[ScheduleRequest, ClusterAccess]:
    """Return the schedule and the cluster that the words after `run-schedule` name; ConfigError: they are invalid."""
    given = _parser().parse_args(list(words))
    request = ScheduleRequest(
        name=given.name,
        namespace=given.agent_namespace,
        choice=Choice.parse(
            given.pvc,
            given.namespace,
            given.selector,
            method=given.method,
            data_mover=given.data_mover,
            ignore_velero_server=given.ignore_velero_server,
        ),
        location=given.storage_location,
        ttl=_parse_ttl(given.ttl),
        keep=KeepPolicy.of({rule: getattr(given, f"keep_{rule}") for rule in KeepRule}, given.time_zone),
        verify=given.verify,
        labels=parse_pairs("--labels", given.labels),
        annotations=parse_pairs("--annotations", given.annotations),
    )
    return request, ClusterAccess(given.kubeconfig or None, given.kubecontext or None, given.agent_namespace)


def _parser() -> argparse.ArgumentParser:
    # Not of click: the pods of a schedule have the agents' image, without the extra `cli`.
    parser = CommandParser(
        prog=f"nodeagent {SCHEDULE_COMMAND}",
        description=_ABOUT,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("name", metavar="NAME", help="name of the schedule; the names of its backups begin with it")
    parser.add_argument("--pvc", metavar="NAMESPACE/NAME", action="append", default=[], help="PVC; may be repeated")
    parser.add_argument("--namespace", "-n", metavar="NAME", default="", help="namespace of the PVCs, for --selector")
    parser.add_argument("--selector", "-l", metavar="LABELS", default=None, help="PVCs with these labels")
    for flag, kind, default in (("--method", Method, str(Method.AUTO)), ("--data-mover", DataMover, None)):
        parser.add_argument(flag, choices=[str(one) for one in kind], default=default, help="as of backup create")
    parser.add_argument("--storage-location", metavar="NAME", default="", help="BackupStorageLocation")
    parser.add_argument("--ttl", metavar="DURATION", default="", help="when its backups expire (default: never)")
    for rule in KeepRule:
        parser.add_argument(rule.flag, metavar="NUMBER", type=int, default=None, help=rule.help)
    parser.add_argument("--time-zone", metavar="NAME", default="", help="IANA time zone of --keep-... (default: UTC)")
    parser.add_argument("--verify", action="store_true", help="read each backup back from the bucket")
    parser.add_argument("--labels", metavar="KEY=VALUE,...", default="", help="labels of the transfers")
    parser.add_argument("--annotations", metavar="KEY=VALUE,...", default="", help="annotations of the transfers")
    parser.add_argument("--ignore-velero-server", action="store_true", help="as of backup create")
    default = os.environ.get("VELERO_NAMESPACE") or DEFAULT_NAMESPACE
    parser.add_argument("--agent-namespace", metavar="NAME", default=default, help="namespace of the agents")
    add_kubeconfig(parser.add_argument_group("cluster"))
    return parser


def _parse_ttl(text: str) -> timedelta | None:
    with Translated(ValueError, ConfigError, "--ttl"):
        return parse_positive_duration(text) if text else None


def read_cron_job(cron_job: UncheckedObject) -> ScheduleRequest:
    """Return the schedule of a batch/v1 CronJob; ConfigError: the command line of its pods cannot be read."""
    meta = cron_job["metadata"]
    with Translated(ConfigError, ConfigError, f"CronJob {meta['namespace']}/{meta['name']} cannot be read"):
        return parse_run(schedule_words(cron_job)[1:])[0]


class ExplainedCopy(WireModel):
    """One volume of a backup: it stays for all of `reasons`, or goes; `rules` are the names of those that keep it."""

    backup: str
    namespace: str
    claim: str
    location: str
    transfer: str
    created: Time | None
    bytes: Int64
    stays: bool
    rules: list[str]
    reasons: list[str]


class RetentionExplanation(WireModel):
    """What a schedule keeps, and its copies by volume, the newest first.

    An empty `ttl`: it has none. `keep` has the counts by their rules, whose periods are of `time_zone`.
    """

    schedule: str
    ttl: str
    keep: dict[str, int]
    time_zone: str
    copies: list[ExplainedCopy] = msgspec.field(default_factory=list)


async def explain_retention(tools: Session, request: ScheduleRequest) -> RetentionExplanation:
    """Return what would become of the copies of a schedule, as far as is known without Jobs that read the snapshots.

    Raises:
        DeletionError: nothing may be deleted here, or what would be needed to decide is not known.
    """
    plan = await plan_deletion(tools, DeletionWish(policies={request.label: request.keep}))
    if plan.now is None:
        raise DeletionError("the time is not known")
    existing = {copy.uid for one in plan.judgments for copy in one.copies}
    judged = limit_deletions(plan.judgments, plan.record.find_gone(existing, plan.now), plan.now)
    copies = [(copy, one) for one in judged for copy in one.copies if copy.schedule == request.label]
    copies.sort(key=lambda one: one[0].age_key, reverse=True)
    copies.sort(key=lambda one: one[0].series)
    return RetentionExplanation(
        schedule=request.name,
        ttl=format_duration(request.ttl) if request.ttl is not None else "",
        keep=request.keep.by_name if request.keep else {},
        time_zone=request.keep.zone if request.keep else UTC_ZONE,
        copies=[_explain(copy, one) for copy, one in copies],
    )


def _explain(copy: Copy, decision: RetentionDecision) -> ExplainedCopy:
    holds = list(_find_holds(copy, decision))
    return ExplainedCopy.like(
        copy,
        transfer=f"{copy.kind}/{copy.transfer}",
        stays=bool(holds),
        rules=list(dict.fromkeys(str(hold.rule) for hold in holds)),
        reasons=[hold.text for hold in holds] or ["no rule keeps it"],
    )


def _find_holds(copy: Copy, decision: RetentionDecision) -> Iterator[KeepReason]:
    """Yield what keeps the copy itself; else, what keeps another one of its backup."""
    own = [hold for hold in decision.holds if hold.uid in {copy.uid, None}]
    yield from own
    for hold in decision.holds[:1] if not own else ():
        other = next(one for one in decision.copies if one.uid == hold.uid)
        yield KeepReason(hold.rule, f"it goes only with {other.shown_volume}: {hold.text}", hold.uid)
