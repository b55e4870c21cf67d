"""The judgment about a cluster: every rule, the worst of what they find, and what to do next about a transfer.

Pure. What could not be read is a finding of its own, so that unknown never looks healthy. Only what a person is shown
depends on the words of a message.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from enum import StrEnum
from operator import itemgetter
from typing import Final

from client.leader_page import node_of_holder
from client.status.records import ClusterSnapshot, TransferRecord, UnreadPart
from core.models.base import WireModel
from core.models.names import NO_CONFIG
from core.models.phases import AttemptStage, Phase
from core.models.reasons import PendingReason
from core.models.storage import RepositoryPhase
from nodeagent.runtime.own_pod import shown

RECENT: Final = timedelta(hours=24)
"""How long a transfer that failed is shown, and keeps the cluster from being healthy."""


class Health(StrEnum):
    """How a cluster is, from best to worst."""

    HEALTHY = "healthy"
    UNKNOWN = "unknown"
    DEGRADED = "degraded"
    UNHEALTHY = "unhealthy"


_ORDER: Final = tuple(Health)


class Rule(StrEnum):
    """What makes a cluster anything but healthy."""

    NOT_READ = "not-read"
    NO_AGENTS = "no-agents"
    AGENTS_NOT_READY = "agents-not-ready"
    NO_LEADER = "no-leader"
    CONFIG_REJECTED = "configuration-rejected"
    CONFIG_DIFFERS = "configuration-differs"
    ADMISSION_FAILS = "admission-fails"
    LOCATION_UNAVAILABLE = "location-unavailable"
    LOCATION_NOT_VALIDATED = "location-not-validated"
    REPOSITORY_NOT_READY = "repository-not-ready"
    FIELDS_DROPPED = "fields-dropped"
    MAINTENANCE_FAILED = "maintenance-failed"
    MAINTENANCE_OVERDUE = "maintenance-overdue"
    TRANSFERS_BLOCKED = "transfers-blocked"
    TRANSFERS_UNREADABLE = "transfers-unreadable"
    TRANSFERS_FAILED = "transfers-failed"
    BACKUPS_DAMAGED = "backups-damaged"
    BACKUPS_SHRUNK = "backups-shrunk"
    RETENTION_FAILED = "retention-failed"
    RETENTION_BACKLOG = "retention-backlog"
    RETENTION_OLD_RULES = "retention-old-rules"


class Finding(WireModel):
    """One reason; `see` is the part of the documentation that helps, empty if there is none."""

    health: Health
    rule: Rule
    message: str
    see: str = ""


_USUAL: Final = frozenset(
    {
        "",
        PendingReason.BINDING,
        PendingReason.CLAIM_UNBOUND,
        PendingReason.CLEANING_UP,
        PendingReason.CONTAINER_CREATING,
        PendingReason.COPY_IN_USE,
        PendingReason.DATA_MOVER_WAITING,
        PendingReason.DETACHING,
        PendingReason.FENCING,
        PendingReason.INTERRUPTED,
        PendingReason.MOVER_LOST,
        PendingReason.NAME_TAKEN,
        PendingReason.NODE_BUSY,
        PendingReason.NOT_TAKEN_OVER,
        PendingReason.QUEUED,
        PendingReason.RESUMING,
        PendingReason.SCHEDULING,
        PendingReason.SNAPSHOT_HANDOVER,
        PendingReason.SNAPSHOT_NOT_READY,
        PendingReason.TARGET_CLAIM_ABSENT,
        PendingReason.TARGET_CLAIM_MISSING,
        PendingReason.TARGET_CLAIM_UNCONSUMED,
        PendingReason.WAITING_FOR_SLOT,
        PendingReason.WORKLOAD_ABSENT,
        PendingReason.WORKLOAD_NOT_WAITING,
    }
)
"""Pending reasons that occur in healthy transfers; all others, Kubernetes' own among them, may need action."""


def is_blocked(transfer: TransferRecord) -> bool:
    """Return whether a transfer is pending for a cause that may need action."""
    return transfer.active and transfer.reason not in _USUAL


def is_managed(snapshot: ClusterSnapshot, transfer: TransferRecord) -> bool:
    """Return whether the transfer is meant for the agents of the namespace; if their flags are not known, it may be."""
    return snapshot.settings is None or transfer.datamover in snapshot.settings.datamover_names


def failed_recently(snapshot: ClusterSnapshot, transfer: TransferRecord) -> bool:
    """Return whether the transfer failed within the last day."""
    if transfer.phase is not Phase.FAILED:
        return False
    return transfer.completed is None or transfer.completed > snapshot.at - RECENT


def judge(snapshot: ClusterSnapshot) -> list[Finding]:
    """Return all findings, the worst first; none: the cluster is healthy."""
    found = [finding for rule in _RULES for finding in rule(snapshot)]
    return sorted(found, key=lambda finding: _ORDER.index(finding.health), reverse=True)


def worst(findings: list[Finding]) -> Health:
    """Return the health that the findings leave."""
    return max((finding.health for finding in findings), key=_ORDER.index, default=Health.HEALTHY)


_PARTS: Final = tuple(UnreadPart)


def _not_read(snapshot: ClusterSnapshot) -> Iterator[Finding]:
    for one in sorted(snapshot.unread, key=lambda one: _PARTS.index(one.part)):
        message = f"{one.part} not read: {one.why}"
        if one.part is UnreadPart.PAGE:
            # Without a leader nothing is admitted, and another rule says so.
            if not snapshot.agents or any(_no_leader(snapshot)):
                continue
            message = f"whether admission fails is not known: {message}"
        yield Finding(health=Health.UNKNOWN, rule=Rule.NOT_READ, message=message)


def _no_agents(snapshot: ClusterSnapshot) -> Iterator[Finding]:
    if not snapshot.agents and not snapshot.is_unread(UnreadPart.AGENTS):
        message = f"there are no agents in namespace {snapshot.namespace}"
        yield Finding(health=Health.UNHEALTHY, rule=Rule.NO_AGENTS, message=message, see="docs/install.md")


def _agents_not_ready(snapshot: ClusterSnapshot) -> Iterator[Finding]:
    nodes = [agent.node or agent.pod for agent in snapshot.agents if not agent.ready]
    if nodes:
        message = f"{len(nodes)} of {len(snapshot.agents)} agents are not ready: {shown(nodes)}"
    elif (missing := snapshot.wanted_agents - snapshot.ready_agents) > 0:
        # Such as pods that are not created: admission or a quota rejects them.
        message = f"{missing} of {snapshot.wanted_agents} agents are not ready, as their DaemonSet says"
    else:
        return
    yield _degraded(Rule.AGENTS_NOT_READY, message, "troubleshooting.md#agent-unavailable")


def _no_leader(snapshot: ClusterSnapshot) -> Iterator[Finding]:
    lease, message = snapshot.lease, ""
    if snapshot.is_unread(UnreadPart.LEASE) or not snapshot.agents:
        return
    nodes = {agent.node for agent in snapshot.agents if agent.ready}
    if not lease.holder:
        message = "there is no leader: no transfer is admitted"
    elif lease.expires is None or lease.expires < (lease.seen or snapshot.at):
        message = f"the leader {lease.holder} has not renewed its Lease in time: no transfer is admitted"
    elif node_of_holder(lease.holder) not in nodes:
        message = f"the leader {lease.holder} has no ready agent"
    if message:
        yield Finding(health=Health.UNHEALTHY, rule=Rule.NO_LEADER, message=message)


def _config_rejected(snapshot: ClusterSnapshot) -> Iterator[Finding]:
    config, page = snapshot.config, snapshot.page
    reasons = config.errors or (page.config.rejected if page else ())
    if reasons:
        message = f"ConfigMap {config.name} is rejected, the one before stays active: {'; '.join(reasons)}"
        yield _degraded(Rule.CONFIG_REJECTED, message, "configuration.md")


def _config_differs(snapshot: ClusterSnapshot) -> Iterator[Finding]:
    config = snapshot.config
    if config.errors or snapshot.is_unread(UnreadPart.CONFIG):
        return
    wanted = config.hash or NO_CONFIG
    nodes = [agent.node for agent in snapshot.agents if agent.ready and agent.config not in {"", wanted}]
    if nodes:
        message = f"{len(nodes)} of {len(snapshot.agents)} agents use another configuration: {shown(nodes)}"
        yield _degraded(Rule.CONFIG_DIFFERS, message, "configuration.md")


def _admission_fails(snapshot: ClusterSnapshot) -> Iterator[Finding]:
    if snapshot.page is not None and snapshot.page.queue.last_error:
        message = f"the leader cannot admit transfers: {snapshot.page.queue.last_error}"
        yield Finding(health=Health.UNHEALTHY, rule=Rule.ADMISSION_FAILS, message=message)


def _fields_dropped(snapshot: ClusterSnapshot) -> Iterator[Finding]:
    if snapshot.page is not None and snapshot.page.definitions.warning:
        see = "troubleshooting.md#fields-of-custom-resources-are-dropped"
        yield _degraded(Rule.FIELDS_DROPPED, snapshot.page.definitions.message, see)


def _locations(snapshot: ClusterSnapshot) -> Iterator[Finding]:
    for one in snapshot.locations:
        if not one.phase:
            message = f"BackupStorageLocation {one.name} was not validated: whether it can be reached is not known"
            yield Finding(health=Health.UNKNOWN, rule=Rule.LOCATION_NOT_VALIDATED, message=message)
        elif one.phase != "Available":
            message = f"BackupStorageLocation {one.name} is {one.phase}: {one.message or 'no message'}"
            see = "docs/troubleshooting.md#the-backup-repository-cannot-be-used"
            yield Finding(health=Health.UNHEALTHY, rule=Rule.LOCATION_UNAVAILABLE, message=message, see=see)


def _repositories(snapshot: ClusterSnapshot) -> Iterator[Finding]:
    decisions = snapshot.page.maintenance if snapshot.page else {}
    for one in snapshot.repositories:
        if one.phase == RepositoryPhase.NOT_READY:
            message = f"BackupRepository {one.name} is not ready: {one.message or 'no message'}"
            yield _degraded(Rule.REPOSITORY_NOT_READY, message, "troubleshooting.md#repository-not-ready")
        if one.failed:
            message = f"the last maintenance of BackupRepository {one.name} failed: {one.failed}"
            yield _degraded(Rule.MAINTENANCE_FAILED, message, "repositories.md")
        said = decisions.get(one.name)
        if said is not None and said.overdue:
            message = f"maintenance of BackupRepository {one.name} is overdue: {said.hold or 'it is about to start'}"
            yield _degraded(Rule.MAINTENANCE_OVERDUE, message, "repositories.md")


def _blocked(snapshot: ClusterSnapshot) -> Iterator[Finding]:
    blocked = [one for one in snapshot.transfers if is_blocked(one) and is_managed(snapshot, one)]
    for reason, number in Counter(one.reason for one in blocked).most_common():
        first = next(one for one in blocked if one.reason == reason)
        others = f" and {number - 1} more" if number > 1 else ""
        message = f"{first.shown}{others}: {reason}: {first.message or 'no message'}"
        yield _degraded(Rule.TRANSFERS_BLOCKED, message, "troubleshooting.md")


def _unreadable(snapshot: ClusterSnapshot) -> Iterator[Finding]:
    faulty = [one for one in snapshot.transfers if one.fault]
    if faulty:
        message = f"{len(faulty)} transfers cannot be read, such as {faulty[0].shown}: {faulty[0].fault}"
        yield _degraded(Rule.TRANSFERS_UNREADABLE, message, "troubleshooting.md#unreadable")


def _failed(snapshot: ClusterSnapshot) -> Iterator[Finding]:
    failed = [one for one in snapshot.transfers if failed_recently(snapshot, one) and is_managed(snapshot, one)]
    if failed:
        last = max(failed, key=lambda one: one.completed or snapshot.at)
        how_many, which = ("1 transfer", ":") if len(failed) == 1 else (f"{len(failed)} transfers", ", the last one is")
        message = f"{how_many} failed within a day{which} {last.shown}: {last.message}"
        yield _degraded(Rule.TRANSFERS_FAILED, message, "troubleshooting.md")


def _newest(snapshot: ClusterSnapshot) -> Iterator[Finding]:
    """Yield what is wrong with the newest backups of volumes."""
    newest: dict[tuple[str, str, str], TransferRecord] = {}
    complete = [one for one in snapshot.transfers if one.is_backup and one.phase is Phase.COMPLETED]
    dated = [(made, one) for one in complete if is_managed(snapshot, one) and (made := one.made) is not None]
    for _, one in sorted(dated, key=itemgetter(0)):
        # Each pod that mounts a PVC, one after the other, has another name.
        newest[one.queue, one.claim or one.volume, one.location] = one
    for (namespace, volume, _), one in newest.items():
        if one.damaged:
            message = f"the newest backup of {namespace}/{volume}, {one.shown}, failed its verification"
            yield _degraded(Rule.BACKUPS_DAMAGED, message, "alerts.md#nodeagentverificationfailed")
        if one.shrunk is not None and one.shrunk.acknowledged is None:
            todo = f": if that is right, run nodeagent backup acknowledge {one.backup}" if one.backup else ""
            message = f"the newest backup of {namespace}/{volume}, {one.shown}, {one.shrunk.text}{todo}"
            yield _degraded(Rule.BACKUPS_SHRUNK, message, "alerts.md#nodeagentbackupshrunk")


def _retention(snapshot: ClusterSnapshot) -> Iterator[Finding]:
    report, old = snapshot.retention, snapshot.old_schedules
    if report is not None and report.failure:
        message = f"the last deletion of expired backups failed: {report.failure}"
        yield _degraded(Rule.RETENTION_FAILED, message, "")
    if report is not None and report.backlog is not None:
        yield _degraded(Rule.RETENTION_BACKLOG, report.backlog, "alerts.md#nodeagentretentionbacklog")
    if old:
        message = f"schedules delete by the rules of an older version: {', '.join(old)}: run nodeagent schedule renew"
        yield _degraded(Rule.RETENTION_OLD_RULES, message, "alerts.md#nodeagentretentionoldrules")


def _degraded(rule: Rule, message: str, see: str) -> Finding:
    return Finding(health=Health.DEGRADED, rule=rule, message=message, see=f"docs/{see}" if see else "")


_RULES: Final[tuple[Callable[[ClusterSnapshot], Iterator[Finding]], ...]] = (
    _no_agents,
    _no_leader,
    _admission_fails,
    _locations,
    _agents_not_ready,
    _config_rejected,
    _config_differs,
    _fields_dropped,
    _repositories,
    _blocked,
    _unreadable,
    _failed,
    _newest,
    _retention,
    _not_read,
)


_PAGE: Final = "docs/troubleshooting.md"

_SHORT_LIVED: Final = (
    PendingReason.BINDING,
    PendingReason.CLEANING_UP,
    PendingReason.DETACHING,
    PendingReason.SCHEDULING,
    PendingReason.SNAPSHOT_HANDOVER,
    PendingReason.SNAPSHOT_IN_GROUP,
    PendingReason.STEP_FAILED,
    PendingReason.TARGET_CLAIM_ABSENT,
)

SECTIONS: Final = {
    **{str(reason): reason.name.lower().replace("_", "-") for reason in PendingReason if reason not in _SHORT_LIVED},
    PendingReason.API_SERVER_ERROR: "webhook-unreachable",
    PendingReason.CLAIM_UNBOUND: "provisioner-silent",
    PendingReason.CONTAINER_CREATING: "image-being-pulled",
    PendingReason.DATA_MOVER_WAITING: "repository-not-ready",
    PendingReason.FENCING: "between-two-attempts",
    PendingReason.FORBIDDEN: "permission-missing",
    PendingReason.IMAGE_PULL_BACK_OFF: "image-pull",
    PendingReason.INTERRUPTED: "between-two-attempts",
    PendingReason.MOVER_LOST: "mover-lost-before",
    PendingReason.NAME_TAKEN: "name-shared",
    PendingReason.NOT_TAKEN_OVER: "mover-not-taken-over",
    PendingReason.QUEUED: "queue-full",
    PendingReason.QUOTA_EXCEEDED: "quota",
    PendingReason.REJECTED: "kubelet-rejection",
    PendingReason.RESUMING: "between-two-attempts",
    PendingReason.SNAPSHOT_NOT_READY: "snapshot-unfinished",
    PendingReason.WORKLOAD_ABSENT: "workload-not-waiting",
    "CreateContainerConfigError": "secret-not-in-environment",
    "FailedAttachVolume": "volume-not-attached",
    "FailedCreatePodSandBox": "pod-network",
    "FailedMapVolume": "volume-not-attached",
    "FailedMount": "secret-not-mounted",
    "ProvisioningFailed": "provisioning-failed",
    "Unschedulable": "the-mover-pod-is-not-scheduled",
}
"""Sections about pending reasons: most of ours have one of their own name; all others have `short-lived-reasons`."""

FAILURES: Final = (
    ("OOMKilled", "out-of-memory"),
    ("probably out of memory", "out-of-memory"),
    ("the repository password does not match", "password-wrong"),
    ("the secret access key is not accepted", "credentials-wrong"),
    ("the bucket does not exist", "bucket-missing"),
    ("the node's clock differs too much", "clock-rejected"),
    ("the volume of kopia's cache is full", "cache-full"),
    ("it is not in the repository", "snapshot-not-in-repository"),
    ("the storage is busy", "storage-busy"),
    ("the storage is unavailable", "storage-busy"),
    ("the endpoint cannot be reached", "storage-unreachable"),
    ("the endpoint's host name cannot be resolved", "storage-unreachable"),
    ("cannot confine kopia", "not-confined"),
    ("StartError", "start-error"),
    ("data mover pod ended", "mover-lost"),
    ("it is already bound to PersistentVolume", "target-claim-bound"),
    (" needs a volume of volumeMode Block, which is refused", "data-mover-unsupported"),
    ("to restore into by block is of no CSI driver", "existing-volume-unusable"),
    ("to restore into is mounted as", "existing-volume-unusable"),
    ("a restore by block needs its name", "existing-volume-unusable"),
    ("mounted or used otherwise on this node", "device-in-use"),
    ("unknown restore type", "restore-type-unsupported"),
    ("must be true or false", "restore-type-unsupported"),
    ("to restore into belongs to PVC", "existing-volume-unusable"),
    ("to restore into is bound to PVC", "existing-volume-unusable"),
    ("to restore into has volumeMode", "existing-volume-unusable"),
    ("restic is not supported", "restic"),
    ("not prepared within", "not-prepared-in-time"),
    ("not completed within", "completion-too-long"),
    ("is not in the kubelet's directories", "volume-directory"),
    ("is not Ready for", "node-not-ready"),
)
"""Words of a message of a failed transfer, and the section that quotes them; the first that is found counts."""


def advise(transfer: TransferRecord) -> str:
    """Return what to do next about a transfer."""
    if transfer.fault:
        return f"correct the field that is named, or delete the transfer: see {_PAGE}#unreadable"
    match transfer.phase:
        case Phase.COMPLETED if transfer.damaged:
            return "start a new backup: its verification failed, see docs/alerts.md#nodeagentverificationfailed"
        case Phase.COMPLETED if transfer.shrunk is not None and transfer.shrunk.acknowledged is None:
            return "look at its volume, which has far less than before: see docs/alerts.md#nodeagentbackupshrunk"
        case Phase.COMPLETED:
            return "nothing: it is complete"
        case Phase.CANCELED:
            return "create a new transfer: a canceled one does not continue"
        case Phase.FAILED:
            section = next((section for words, section in FAILURES if words in transfer.message), "")
            where = f"{_PAGE}#{section}" if section else _PAGE
            return f"fix the cause, and create a new transfer: see {where}"
    if transfer.canceling:
        return "wait: it is being canceled"
    if transfer.reason:
        section = SECTIONS.get(transfer.reason, "short-lived-reasons")
        todo = "fix the cause, and it continues" if is_blocked(transfer) else "wait, it continues by itself"
        more = "; docs/retries.md has the limits" if transfer.stage not in {None, AttemptStage.RUNNING} else ""
        return f"{todo}: see {_PAGE}#{section}{more}"
    return "wait: the leader has not checked it yet" if transfer.phase is Phase.NEW else "wait: it is under way"
