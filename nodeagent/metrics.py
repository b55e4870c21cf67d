"""The metrics of an agent: a table of them, and the registry that keeps their values.

Every metric also has the label `node`. What has a kind counts transfers, such as `DataUpload`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

import prometheus_client

from core.models.phases import FINAL_PHASES, Phase
from core.models.transfers import KIND_NAMES

_LONG_BUCKETS: Final = tuple(minutes * 60.0 for minutes in (1, 5, 10, 15, 30, 60, 120, 180, 240))
_WAIT_BUCKETS: Final = (1.0, 5.0, 15.0, *_LONG_BUCKETS)

_OPERATIONS: Final = 100
"""PodVolumeBackups with series of their own: more than one node completes between many scrapes."""

MAX_VOLUMES: Final = 2000
"""PVCs with series of their own, at most eleven for each: a scrape stays below 4 MiB."""

MAX_NAMED_VOLUMES: Final = 50
"""PVCs that the alert about volumes that are not protected names."""

_KINDS: Final = tuple((name,) for name in KIND_NAMES)
_ENDS: Final = tuple((*kind, str(phase)) for kind, phase in product(_KINDS, FINAL_PHASES))
_ALONE: Final = ((),)
"""The series of a metric without further labels."""


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: without the `_total` of a counter.
        text: its help.
        labels: names of its labels besides `node`.
        start: label values of the series that exist from the start, with 0: from there, an increase is seen.
        at_most: number of series; the oldest goes when there is one more. None: as many as are set.
    """

    name: str
    text: str
    labels: tuple[str, ...] = ()
    start: tuple[tuple[str, ...], ...] = ()
    at_most: int | None = None


@dataclass(frozen=True)
class Counter(Metric):
    """A number that only grows; `bare`: its name has no `_total`."""

    bare: bool = False


@dataclass(frozen=True)
class Gauge(Metric):
    """A number that is set."""


@dataclass(frozen=True)
class Histogram(Metric):
    """Durations in seconds, counted by their size."""

    buckets: tuple[float, ...] = _LONG_BUCKETS


_BY_KIND: Final = ("kind",)
_BY_REPOSITORY: Final = ("repository_name",)
_BY_CLAIM: Final = ("volume_namespace", "claim")

VELERO_ENDS: Final = {
    (kind, phase): Counter(
        f"podVolume_{name}_{result}", f"Number of {kind}s of this node in phase {phase}", start=_ALONE
    )
    for kind, name in (("DataUpload", "data_upload"), ("DataDownload", "data_download"))
    for phase, result in ((Phase.COMPLETED, "success"), (Phase.FAILED, "failure"), (Phase.CANCELED, "cancel"))
}
"""Velero's counters of ended transfers; it counts no pod volume transfers."""

# The agent, its transfers, and the queue.
MOVED_BYTES: Final = Counter("nodeagent_moved_bytes", "Bytes read from or written to volumes", _BY_KIND)
SENT_BYTES: Final = Counter("nodeagent_sent_bytes", "Bytes sent to the bucket", _BY_KIND)
RATE: Final = Gauge("nodeagent_rate_bytes_per_second", "Current rate of a running transfer", ("kind", "uid"))
QUEUE_LENGTH: Final = Gauge(
    "nodeagent_queue_length", "Transfers in no final phase, by kind and state", ("kind", "state")
)
QUEUE_POSITION: Final = Gauge(
    "nodeagent_queue_position", "Admission queue position of the next transfers", ("kind", "name")
)
SLOTS: Final = Gauge("nodeagent_slots", "Slots of this node for transfers InProgress: used and total", ("state",))
CONFIG_VALID: Final = Gauge("nodeagent_config_valid", "1 if the current document is active exactly as written")
CONFIG_INFO: Final = Gauge("nodeagent_config_info", "Hash of the active configuration", ("hash",))
PRIORITY_CLASS_USABLE: Final = Gauge("nodeagent_priority_class_usable", "0 if mover pods lack the configured class")
API_REQUESTS: Final = Counter(
    "nodeagent_api_requests", "Requests to the API server by verb and HTTP status (0: no answer)", ("verb", "status")
)
CLOCK_SKEW: Final = Gauge("nodeagent_clock_skew_seconds", "Node's wall clock minus the API server's, in seconds")
NODE_PASSED_OVER: Final = Gauge(
    "nodeagent_node_passed_over", "1 for each node that the leader passes over", ("passed_over",)
)
SKIPPED_OBJECTS: Final = Counter(
    "nodeagent_skipped_objects", "Objects that could not be read, by kind; the log names each", _BY_KIND
)
LEADER: Final = Gauge("nodeagent_dispatcher", "1 if this agent is the leader and runs the dispatcher")
REPOSITORY_READY: Final = Gauge("nodeagent_repository_ready", "1 if the backup repository is ready", _BY_REPOSITORY)
LOCATION_AVAILABLE: Final = Gauge(
    "velero_backup_location_status_gauge",
    "1 if the backup storage location is available, 0 if not; without a Velero server only",
    ("backup_location_name",),
)

# Maintenance of repositories.
MAINTENANCE_SUCCESS: Final = Counter(
    "velero_repo_maintenance_success", "Maintenance Jobs that succeeded", _BY_REPOSITORY
)
MAINTENANCE_FAILURE: Final = Counter("velero_repo_maintenance_failure", "Maintenance Jobs that failed", _BY_REPOSITORY)
MAINTENANCE_DURATION: Final = Histogram(
    "velero_repo_maintenance_duration_seconds",
    "Time from the creation of a maintenance Job to its success, in seconds",
    _BY_REPOSITORY,
)
MAINTENANCE_LAST_SUCCESS: Final = Gauge(
    "nodeagent_maintenance_last_success_seconds",
    "When the last maintenance of a repository succeeded, in seconds since 1970, by mode",
    (*_BY_REPOSITORY, "mode"),
)
MAINTENANCE_SKIPPED: Final = Counter(
    "nodeagent_maintenance_skipped",
    "Maintenance that was held, by reason: once for each repository, reason and maintenanceFrequency",
    ("reason",),
)
MAINTENANCE_FOREIGN: Final = Counter(
    "nodeagent_maintenance_foreign",
    "Maintenance Jobs that ended at once because another cluster maintains the repository",
    _BY_REPOSITORY,
)
MAINTENANCE_INCOMPLETE: Final = Gauge(
    "nodeagent_maintenance_incomplete_full",
    "1 if a full maintenance of a repository has begun and none has finished since",
    _BY_REPOSITORY,
)
MAINTENANCE_OVERDUE: Final = Gauge(
    "nodeagent_maintenance_overdue",
    "1 if something has held the maintenance of a repository since it was due three full intervals ago",
    _BY_REPOSITORY,
)
INDEX_BLOBS: Final = Gauge(
    "nodeagent_repository_index_blobs", "Index blobs of a repository after its last maintenance", _BY_REPOSITORY
)
CONTENTS: Final = Gauge(
    "nodeagent_repository_contents", "Contents of a repository after its last maintenance", _BY_REPOSITORY
)
ORPHAN_SNAPSHOTS: Final = Gauge(
    "nodeagent_repository_orphan_snapshots",
    "Snapshots of a repository that nothing refers to, as last reported; absent if that is not known",
    _BY_REPOSITORY,
)
ORPHAN_SNAPSHOT_BYTES: Final = Gauge(
    "nodeagent_repository_orphan_snapshot_bytes",
    "Size of the files in these snapshots; other snapshots may share them",
    _BY_REPOSITORY,
)
MAINTENANCE_GAUGES: Final = (
    MAINTENANCE_LAST_SUCCESS,
    MAINTENANCE_INCOMPLETE,
    MAINTENANCE_OVERDUE,
    INDEX_BLOBS,
    CONTENTS,
    ORPHAN_SNAPSHOTS,
    ORPHAN_SNAPSHOT_BYTES,
)
"""What ends with a repository, and with the term of a leader; counters stay."""

# Interrupted transfers.
RETRIES: Final = Counter(
    "nodeagent_retries", "Interruptions of transfers that were followed by another attempt, by cause", ("kind", "cause")
)
RETRY_LOST_SECONDS: Final = Counter(
    "nodeagent_retry_lost_seconds",
    "Time from an interruption to the start of the next attempt's data path, in seconds",
    _BY_KIND,
)
RETRY_RESENT_BYTES: Final = Counter(
    "nodeagent_retry_resent_bytes",
    "Bytes that later attempts sent before they had read as much as an earlier attempt of the same transfer",
    _BY_KIND,
)
"""Bytes that the earlier attempt had sent cannot be told apart: kopia finds and omits what its index has."""

# How long each part of a transfer took, and what became of its bytes.
TRANSFERS_FINISHED: Final = Counter(
    "nodeagent_transfers_finished",
    "Transfers that reached a final phase, by kind and phase; all kinds",
    ("kind", "phase"),
    start=_ENDS,
)
QUEUE_SECONDS: Final = Histogram(
    "nodeagent_queue_seconds",
    "Time from the creation of a transfer to its acceptance by the leader, in seconds",
    _BY_KIND,
    start=_KINDS,
    buckets=_WAIT_BUCKETS,
)
EXPOSE_SECONDS: Final = Histogram(
    "nodeagent_expose_seconds",
    "Time from the acceptance of a transfer to Prepared, when its mover pod runs, in seconds",
    _BY_KIND,
    buckets=_WAIT_BUCKETS,
)
REFUSED_RESTORES: Final = Counter(
    "nodeagent_refused_restores",
    "Restores whose target refused files (missing), or only owners, modes or times (unset)",
    ("kind", "result"),
)
HASHED_BYTES: Final = Counter(
    "nodeagent_hashed_bytes", "Bytes that backups read and hashed; files that have not changed are not read", _BY_KIND
)
DEDUPLICATED_BYTES: Final = Counter(
    "nodeagent_deduplicated_bytes", "Bytes of these that the repository had already; the others are sent", _BY_KIND
)
STORED_BYTES: Final = Counter("nodeagent_stored_bytes", "Size of the others after compression", _BY_KIND)
LAST_PROGRESS: Final = Gauge(
    "nodeagent_last_progress_seconds",
    "When a running transfer last moved or sent bytes, in seconds since 1970, by the node's clock",
    ("kind", "uid"),
)
BANDWIDTH_LIMIT: Final = Gauge(
    "nodeagent_bandwidth_limit_bytes_per_second",
    "Bytes per second that all data movers of the node may use now by perNode, by direction; 0: no limit",
    ("direction",),
)
PENDING: Final = Gauge(
    "nodeagent_pending",
    "Transfers in no final phase that have a pending reason, by kind, state and reason",
    ("kind", "state", "reason"),
)

VOLUME_GAUGES: Final = {
    "backup_at": Gauge(
        "nodeagent_volume_last_backup_timestamp_seconds",
        "When the newest completed backup of a PVC was created, in seconds since 1970",
        _BY_CLAIM,
    ),
    "bytes": Gauge(
        "nodeagent_volume_last_backup_bytes", "Size of the files in the newest completed backup of a PVC", _BY_CLAIM
    ),
    "day_new_bytes": Gauge(
        "nodeagent_volume_day_new_bytes",
        "New data in the backups of a PVC that were completed within a day, in bytes before compression",
        _BY_CLAIM,
    ),
    "day_seconds": Gauge(
        "nodeagent_volume_day_backup_seconds", "Time that these backups took together, in seconds", _BY_CLAIM
    ),
    "shrunk": Gauge(
        "nodeagent_volume_shrunk",
        "1 if the newest completed backup of a PVC is Shrunk, until that is acknowledged; else absent",
        _BY_CLAIM,
    ),
    "backup_interval": Gauge(
        "nodeagent_volume_backup_interval_seconds", "How often a PVC is to be backed up, where that is known", _BY_CLAIM
    ),
    "backup_due_at": Gauge(
        "nodeagent_volume_backup_due_timestamp_seconds",
        "When a PVC is to have its next backup: one interval after the last complete one, or after its creation",
        _BY_CLAIM,
    ),
    "verified_at": Gauge(
        "nodeagent_volume_last_verification_timestamp_seconds",
        "When the last verification of a backup of a PVC ended, in seconds since 1970",
        _BY_CLAIM,
    ),
    "verified_ok": Gauge(
        "nodeagent_volume_last_verification_ok", "1 if that verification passed, 0 if it failed", _BY_CLAIM
    ),
    "verification_interval": Gauge(
        "nodeagent_volume_verification_interval_seconds",
        "How often a backup of a PVC is to be verified, where that is known",
        _BY_CLAIM,
    ),
    "verification_due_at": Gauge(
        "nodeagent_volume_verification_due_timestamp_seconds",
        "When a backup of a PVC is to be verified next: one interval after the last time, or after its first backup",
        _BY_CLAIM,
    ),
}
"""By the field of `VolumeState` that each shows. They outlive transfers and pods, so that no label names one."""
VOLUMES_OMITTED: Final = Gauge(
    "nodeagent_volumes_omitted",
    f"Volumes with a backup or an interval that have no series, because {MAX_VOLUMES} others have",
)
VOLUMES: Final = Gauge(
    "nodeagent_volumes",
    "Bound PVCs by namespace and state, as `nodeagent volumes` lists them",
    ("volume_namespace", "state"),
)
VOLUME_NOT_PROTECTED: Final = Gauge(
    "nodeagent_volume_not_protected",
    f"1 for each of the first {MAX_NAMED_VOLUMES} PVCs that are not protected, in namespaces that are chosen for it",
    (*_BY_CLAIM, "state"),
)
RETENTION_HELD_BYTES: Final = Gauge(
    "nodeagent_retention_held_bytes",
    "Size of the files in expired backups of a PVC that a rule of retention keeps; backup is the oldest",
    (*_BY_CLAIM, "rule", "backup", "created"),
)
RETENTION_WAITING: Final = Gauge(
    "nodeagent_retention_waiting_copies", "Expired copies of volumes that wait for the limit of deletions", ("why",)
)
RETENTION_WAITING_UNTIL: Final = Gauge(
    "nodeagent_retention_waiting_until_timestamp_seconds",
    "When the last of the expired copies that wait now will be deleted",
)
RETENTION_OLD_RULES: Final = Gauge(
    "nodeagent_retention_old_rules",
    "1 for each schedule that deletes expired backups by the rules of an older version",
    ("schedule",),
)

# The start of transfers, and Velero's metrics of PodVolumeBackups.
WAIT_SECONDS: Final = Histogram(
    "nodeagent_wait_seconds",
    "Time from the creation of a transfer to the start of its data path, in seconds",
    _BY_KIND,
    buckets=_WAIT_BUCKETS,
)
POD_VOLUME_BACKUPS_STARTED: Final = Counter(
    "podVolume_pod_volume_backup_enqueue_count",
    "Number of PodVolumeBackups assigned to this node",
    start=_ALONE,
    bare=True,
)
POD_VOLUME_BACKUPS_ENDED: Final = Counter(
    "podVolume_pod_volume_backup_dequeue_count",
    "Number of PodVolumeBackups of this node in phase Completed",
    start=_ALONE,
    bare=True,
)
POD_VOLUME_SECONDS: Final = Histogram(
    "podVolume_pod_volume_operation_latency_seconds",
    "Duration of a PodVolumeBackup's data path",
    ("operation", "backupName", "pod_volume_backup"),
    at_most=_OPERATIONS,
)
"""Velero keeps them all; here the oldest go, since each has a dozen series."""
POD_VOLUME_LAST_SECONDS: Final = Gauge(
    "podVolume_pod_volume_operation_latency_seconds_gauge",
    POD_VOLUME_SECONDS.text,
    POD_VOLUME_SECONDS.labels,
    at_most=_OPERATIONS,
)

METRICS: Final = tuple(
    metric
    for value in list(globals().values())
    for metric in (value.values() if isinstance(value, dict) else (value,))
    if isinstance(metric, Metric)
)
"""All of the above, in this order."""

METRICS_CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
"""Source: Prometheus, text exposition format 0.0.4."""


class Metrics:
    """The values of all metrics of the agent of `node`.

    `labels` are the values of the labels that the table names, in that order.
    """

    def __init__(self, node: str) -> None:
        self._node = node
        self._registry = prometheus_client.CollectorRegistry()
        # One more series for each counter, which Velero does not have.
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call] # the library has no types
        prometheus_client.ProcessCollector(registry=self._registry)
        prometheus_client.PlatformCollector(registry=self._registry)
        prometheus_client.GCCollector(registry=self._registry)
        self._newest: dict[Metric, dict[tuple[str, ...], None]] = {}
        self._collectors = {metric: self._register(metric) for metric in METRICS}
        for metric in METRICS:
            for labels in metric.start:
                self._series(metric, labels)

    def _register(self, metric: Metric) -> Any:  # noqa: ANN401 - of the library, one of three classes
        options: dict[str, Any] = {"labelnames": ["node", *metric.labels], "registry": self._registry}
        if isinstance(metric, Histogram):
            return prometheus_client.Histogram(metric.name, metric.text, buckets=metric.buckets, **options)
        if isinstance(metric, Counter) and not metric.bare:
            return prometheus_client.Counter(metric.name, metric.text, **options)
        return prometheus_client.Gauge(metric.name, metric.text, **options)

    def inc(self, counter: Counter, *labels: str, by: float = 1) -> None:
        """Add to a counter, which never decreases; 0 makes its series exist."""
        self._series(counter, labels).inc(max(0, by))

    def set(self, gauge: Gauge, value: float, *labels: str) -> None:
        """Set one series of a gauge."""
        self._series(gauge, labels).set(value)

    def observe(self, histogram: Histogram, seconds: float, *labels: str) -> None:
        """Count a duration; less than 0, by clocks that differ, is 0."""
        self._series(histogram, labels).observe(max(0.0, seconds))

    def show(self, gauge: Gauge, values: Mapping[tuple[str, ...], float]) -> None:
        """Set these series of a gauge, by their labels, and remove all others."""
        self._collectors[gauge].clear()
        for labels, value in values.items():
            self.set(gauge, value, *labels)

    def forget(self, *gauges: Gauge, **labels: str) -> None:
        """Remove the series with these labels; there may be none."""
        for gauge in gauges:
            self._collectors[gauge].remove_by_labels({"node": self._node, **labels})

    def _series(self, metric: Metric, labels: tuple[str, ...]) -> Any:  # noqa: ANN401 - as above
        if metric.at_most is not None:
            newest = self._newest.setdefault(metric, {})
            newest[labels] = None
            if len(newest) > metric.at_most:
                oldest = next(iter(newest))
                del newest[oldest]
                self._collectors[metric].remove(self._node, *oldest)
        return self._collectors[metric].labels(self._node, *labels)

    def render(self) -> bytes:
        """Return everything in the text exposition format."""
        text = prometheus_client.generate_latest(self._registry)
        for metric in METRICS:
            if isinstance(metric, Counter) and metric.bare:
                # The library appends `_total` to the name of whatever it declares as a counter.
                gauge, counter = f"# TYPE {metric.name} gauge\n", f"# TYPE {metric.name} counter\n"
                text = text.replace(gauge.encode(), counter.encode())
        return text
