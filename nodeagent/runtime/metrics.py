"""The agent's Prometheus metrics: Velero's names, so that dashboards keep working, and our own.

The caller of a method decides when something is counted. No type of the metrics library leaks.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from core.models.phases import FINAL_PHASES, Phase
from core.models.retention import RetentionReport
from core.models.transfers import DataDownload, DataUpload, PodVolumeBackup, PodVolumeRestore
from core.snapshot_contract import SnapshotTotal
from nodeagent.runtime.volume_metrics import RetentionMetrics, VolumeMetrics, VolumeState

__all__ = ["METRICS_CONTENT_TYPE", "Metrics"]

METRICS_CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
"""Source: Prometheus, text exposition format 0.0.4."""

_KINDS: Final = tuple(kind.kind_name for kind in (DataUpload, DataDownload, PodVolumeBackup, PodVolumeRestore))
_VELERO_NAMES: Final = {"DataUpload": "data_upload", "DataDownload": "data_download"}
_RESULTS: Final = {Phase.COMPLETED: "success", Phase.FAILED: "failure", Phase.CANCELED: "cancel"}

_MINUTES: Final = (1, 5, 10, 15, 30, 60, 120, 180, 240)
_LONG_BUCKETS: Final = tuple(minutes * 60.0 for minutes in _MINUTES)

_OPERATIONS: Final = 100
"""PodVolumeBackups with series of their own: more than one node completes between many scrapes."""

_WAIT_BUCKETS: Final = (1.0, 5.0, 15.0, *_LONG_BUCKETS)


class _MaintenanceMetrics:
    """The metrics of repository maintenance: Velero's three names, and our own."""

    def __init__(self, registry: CollectorRegistry) -> None:
        by_name = ["node", "repository_name"]
        velero, ours = "velero_repo_maintenance", "nodeagent_maintenance"
        self.succeeded = Counter(f"{velero}_success", "Maintenance Jobs that succeeded", by_name, registry=registry)
        self.failed = Counter(f"{velero}_failure", "Maintenance Jobs that failed", by_name, registry=registry)
        text = "Time from the creation of a maintenance Job to its success, in seconds"
        self.duration = Histogram(f"{velero}_duration_seconds", text, by_name, buckets=_LONG_BUCKETS, registry=registry)
        text = "When the last maintenance of a repository succeeded, in seconds since 1970, by mode"
        self.last_success = Gauge(f"{ours}_last_success_seconds", text, [*by_name, "mode"], registry=registry)
        text = "Maintenance that was held, by reason: once for each repository, reason and maintenanceFrequency"
        self.skipped = Counter(f"{ours}_skipped", text, ["node", "reason"], registry=registry)
        text = "Maintenance Jobs that ended at once because another cluster maintains the repository"
        self.foreign = Counter(f"{ours}_foreign", text, by_name, registry=registry)
        text = "1 if a full maintenance of a repository has begun and none has finished since"
        self.incomplete = Gauge(f"{ours}_incomplete_full", text, by_name, registry=registry)
        text = "1 if something has held the maintenance of a repository since it was due three full intervals ago"
        self.overdue = Gauge(f"{ours}_overdue", text, by_name, registry=registry)
        text = "Index blobs of a repository after its last maintenance"
        self.index_blobs = Gauge("nodeagent_repository_index_blobs", text, by_name, registry=registry)
        text = "Contents of a repository after its last maintenance"
        self.contents = Gauge("nodeagent_repository_contents", text, by_name, registry=registry)

        text = "Snapshots of a repository that nothing refers to, as last reported; absent if that is not known"
        self.orphans = Gauge("nodeagent_repository_orphan_snapshots", text, by_name, registry=registry)
        text = "Size of the files in these snapshots; other snapshots may share them"
        self.orphan_bytes = Gauge("nodeagent_repository_orphan_snapshot_bytes", text, by_name, registry=registry)

    def forget(self, labels: dict[str, str]) -> None:
        """Remove the gauges with these labels."""
        for gauge in (
            self.last_success,
            self.incomplete,
            self.overdue,
            self.index_blobs,
            self.contents,
            self.orphans,
            self.orphan_bytes,
        ):
            gauge.remove_by_labels(labels)


class _FlowMetrics:
    """The metrics of transfers on their way: how long each part took, and what became of the bytes."""

    def __init__(self, registry: CollectorRegistry) -> None:
        by_kind = ["node", "kind"]
        text = "Transfers that reached a final phase, by kind and phase; all kinds"
        self.finished = Counter("nodeagent_transfers_finished", text, [*by_kind, "phase"], registry=registry)
        text = "Time from the creation of a transfer to its acceptance by the leader, in seconds"
        self.queued = self._histogram("queue", text, registry)
        text = "Time from the acceptance of a transfer to Prepared, when its mover pod runs, in seconds"
        self.exposed = self._histogram("expose", text, registry)
        text = "Restores whose target refused files (missing), or only owners, modes or times (unset)"
        self.refused = Counter("nodeagent_refused_restores", text, [*by_kind, "result"], registry=registry)
        text = "Bytes that backups read and hashed; files that have not changed are not read"
        self.hashed = Counter("nodeagent_hashed_bytes", text, by_kind, registry=registry)
        text = "Bytes of these that the repository had already; the others are sent"
        self.deduplicated = Counter("nodeagent_deduplicated_bytes", text, by_kind, registry=registry)
        text = "Size of the others after compression"
        self.stored = Counter("nodeagent_stored_bytes", text, by_kind, registry=registry)
        text = "When a running transfer last moved or sent bytes, in seconds since 1970, by the node's clock"
        self.progress = Gauge("nodeagent_last_progress_seconds", text, [*by_kind, "uid"], registry=registry)
        text = "Bytes per second that all data movers of the node may use now by perNode, by direction; 0: no limit"
        self.bandwidth = Gauge(
            "nodeagent_bandwidth_limit_bytes_per_second", text, ["node", "direction"], registry=registry
        )
        text = "Transfers in no final phase that have a pending reason, by kind and reason"
        self.pending = Gauge("nodeagent_pending", text, [*by_kind, "reason"], registry=registry)

    @staticmethod
    def _histogram(name: str, text: str, registry: CollectorRegistry) -> Histogram:
        full_name = f"nodeagent_{name}_seconds"
        return Histogram(full_name, text, ["node", "kind"], buckets=_WAIT_BUCKETS, registry=registry)


class _RetryMetrics:
    """The metrics of interrupted transfers."""

    def __init__(self, registry: CollectorRegistry) -> None:
        by_kind = ["node", "kind"]
        text = "Interruptions of transfers that were followed by another attempt, by cause"
        self.retries = Counter("nodeagent_retries", text, [*by_kind, "cause"], registry=registry)
        text = "Time from an interruption to the start of the next attempt's data path, in seconds"
        self.lost = Counter("nodeagent_retry_lost_seconds", text, by_kind, registry=registry)
        text = "Bytes that later attempts sent before they had read as much as an earlier attempt of the same transfer"
        self.resent = Counter("nodeagent_retry_resent_bytes", text, by_kind, registry=registry)


class Metrics:
    """The metrics of one agent, in a registry of their own.

    `kind` is a transfer's kind, such as `DataUpload`.
    """

    def __init__(self, node: str) -> None:
        """Register the metrics of the agent of `node`."""
        self._node = node
        self._registry = CollectorRegistry()
        self._bare_counters: list[str] = []
        # One more series for each counter, which Velero does not have.
        disable_created_metrics()  # type: ignore[no-untyped-call] # the library has no types
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self._registry)
        self._finished = {
            (kind, phase): self._velero_counter(f"{name}_{result}", f"Number of {kind}s of this node in phase {phase}")
            for kind, name in _VELERO_NAMES.items()
            for phase, result in _RESULTS.items()
        }
        self._moved = self._counter("moved_bytes", "Bytes read from or written to volumes", "kind")
        self._sent = self._counter("sent_bytes", "Bytes sent to the bucket", "kind")
        self._rate = self._gauge("rate_bytes_per_second", "Current rate of a running transfer", "kind", "uid")
        self._queue = self._gauge("queue_length", "Transfers in no final phase, by kind and state", "kind", "state")
        self._position = self._gauge("queue_position", "Admission queue position of the next transfers", "kind", "name")
        self._queued: set[tuple[str, str]] = set()
        self._slots = self._gauge("slots", "Slots of this node for transfers InProgress: used and total", "state")
        self._config_valid = self._gauge("config_valid", "1 if the current document is active exactly as written")
        self._config_info = self._gauge("config_info", "Hash of the active configuration", "hash")
        self._priority_class = self._gauge("priority_class_usable", "0 if mover pods lack the configured class")
        self._requests = self._counter(
            "api_requests", "Requests to the API server by verb and HTTP status (0: no answer)", "verb", "status"
        )
        self._skew = self._gauge("clock_skew_seconds", "Node's wall clock minus the API server's, in seconds")
        self._passed_over = self._gauge(
            "node_passed_over", "1 for each node that the leader passes over", "passed_over"
        )
        self._shown_passed_over: AbstractSet[str] = frozenset()
        self._skipped = self._counter(
            "skipped_objects", "Objects that could not be read, by kind; the log names each", "kind"
        )
        self._leader = self._gauge("dispatcher", "1 if this agent is the leader and runs the dispatcher")
        self._repository = self._gauge("repository_ready", "1 if the backup repository is ready", "repository_name")
        self._location = self._velero_location()
        self._maintenance = _MaintenanceMetrics(self._registry)
        self._retry = _RetryMetrics(self._registry)
        self._flow = _FlowMetrics(self._registry)
        for kind in _KINDS:
            # From 0 on, an increase is seen.
            self._flow.queued.labels(node, kind)
            for phase in FINAL_PHASES:
                self._flow.finished.labels(node, kind, str(phase))
        self._pending: AbstractSet[tuple[str, str]] = frozenset()
        self._volumes = VolumeMetrics(node, self._registry)
        self._retention = RetentionMetrics(node, self._registry)
        self._wait = self._wait_times()
        self._enqueued = self._bare_counter("enqueue_count", "Number of PodVolumeBackups assigned to this node")
        self._dequeued = self._bare_counter("dequeue_count", "Number of PodVolumeBackups of this node in a final phase")
        self._latency, self._last_latency = self._velero_latency()
        self._operations: dict[tuple[str, str, str, str], None] = {}
        self._config_hash = ""

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"nodeagent_{name}", text, ["node", *labels], registry=self._registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"nodeagent_{name}", text, ["node", *labels], registry=self._registry)

    def _velero_counter(self, name: str, text: str) -> Counter:
        """Return a counter with Velero's name, present with value 0 from the start."""
        counter = Counter(f"podVolume_{name}", text, ["node"], registry=self._registry)
        counter.labels(self._node)
        return counter

    def _velero_location(self) -> Gauge:
        return Gauge(
            "velero_backup_location_status_gauge",
            "1 if the backup storage location is available, 0 if not; without a Velero server only",
            ["node", "backup_location_name"],
            registry=self._registry,
        )

    def _wait_times(self) -> Histogram:
        return Histogram(
            "nodeagent_wait_seconds",
            "Time from the creation of a transfer to the start of its data path, in seconds",
            ["node", "kind"],
            buckets=_WAIT_BUCKETS,
            registry=self._registry,
        )

    def _velero_latency(self) -> tuple[Histogram, Gauge]:
        labels = ["node", "operation", "backupName", "pod_volume_backup"]
        name, text = "podVolume_pod_volume_operation_latency_seconds", "Duration of a PodVolumeBackup's data path"
        latency = Histogram(name, text, labels, buckets=_LONG_BUCKETS, registry=self._registry)
        return latency, Gauge(f"{name}_gauge", text, labels, registry=self._registry)

    def _bare_counter(self, name: str, text: str) -> Gauge:
        """Return a gauge that `render` declares as a counter: the library appends `_total` to the names of counters."""
        full_name = f"podVolume_pod_volume_backup_{name}"
        gauge = Gauge(full_name, text, ["node"], registry=self._registry)
        self._bare_counters.append(full_name)
        gauge.labels(self._node)
        return gauge

    def transfer_finished(self, kind: str, phase: Phase) -> None:
        """Count a transfer that reached a final phase; Velero counts DataUploads and DataDownloads only."""
        self._flow.finished.labels(self._node, kind, str(phase)).inc()
        if counter := self._finished.get((kind, phase)):
            counter.labels(self._node).inc()

    def restore_refused(self, kind: str, result: str) -> None:
        """Count a restore whose target did not take everything; `result` is `missing` or `unset`."""
        self._flow.refused.labels(self._node, kind, result).inc()

    def bytes_moved(self, kind: str, delta: int) -> None:
        """Add bytes read from or written to a volume."""
        self._moved.labels(self._node, kind).inc(max(0, delta))

    def bytes_sent(self, kind: str, delta: int) -> None:
        """Add bytes sent to the bucket."""
        self._sent.labels(self._node, kind).inc(max(0, delta))

    def bytes_hashed(self, kind: str, delta: int, *, deduplicated: int, stored: int) -> None:
        """Add bytes that a backup read, those of them that the repository had already, and the others compressed."""
        self._flow.hashed.labels(self._node, kind).inc(max(0, delta))
        self._flow.deduplicated.labels(self._node, kind).inc(max(0, deduplicated))
        self._flow.stored.labels(self._node, kind).inc(max(0, stored))

    def retried(self, kind: str, cause: str) -> None:
        """Count an interruption that another attempt follows; `cause` is an `InterruptionCause`."""
        self._retry.retries.labels(self._node, kind, cause).inc()

    def retry_lost(self, kind: str, seconds: float) -> None:
        """Add the time between an interruption and the start of the next attempt's data path."""
        self._retry.lost.labels(self._node, kind).inc(max(0.0, seconds))

    def resent(self, kind: str, delta: int) -> None:
        """Add bytes that an attempt sent while it had read less than an earlier attempt of the same transfer had.

        What of it that one had sent already is not known: kopia finds and omits what its index has.
        """
        self._retry.resent.labels(self._node, kind).inc(max(0, delta))

    def bandwidth(self, direction: str, bytes_per_second: int) -> None:
        """Record what all data movers of the node may use in a direction; 0: there is no limit."""
        self._flow.bandwidth.labels(self._node, direction).set(bytes_per_second)

    def rate(self, kind: str, uid: str, bytes_per_second: float) -> None:
        """Set the current rate of the transfer `uid`."""
        self._rate.labels(self._node, kind, uid).set(bytes_per_second)

    def progressed(self, kind: str, uid: str, at: float) -> None:
        """Set when the transfer `uid` started to run or last moved bytes, in seconds since 1970."""
        self._flow.progress.labels(self._node, kind, uid).set(at)

    def remove_rate(self, kind: str, uid: str) -> None:
        """Remove the rate of the transfer `uid`, and its last progress."""
        labels = {"node": self._node, "kind": kind, "uid": uid}
        self._rate.remove_by_labels(labels)
        self._flow.progress.remove_by_labels(labels)

    def queue_length(self, kind: str, state: str, n: int) -> None:
        """Set the number of transfers of a kind in a state."""
        self._queue.labels(self._node, kind, state).set(n)

    def queue_positions(self, positions: Mapping[tuple[str, str], int]) -> None:
        """Set the queue positions of these transfers, by kind and name, and remove all others."""
        for kind, name in self._queued - positions.keys():
            self._position.remove(self._node, kind, name)
        for (kind, name), position in positions.items():
            self._position.labels(self._node, kind, name).set(position)
        self._queued = set(positions)

    def pending_by_reason(self, counts: Mapping[tuple[str, str], int]) -> None:
        """Set the number of pending transfers by kind and reason, and remove all others."""
        for kind, reason in self._pending - counts.keys():
            self._flow.pending.remove(self._node, kind, reason)
        for (kind, reason), n in counts.items():
            self._flow.pending.labels(self._node, kind, reason).set(n)
        self._pending = frozenset(counts)

    def accepted(self, kind: str, seconds: float) -> None:
        """Record the time from creation to acceptance."""
        self._flow.queued.labels(self._node, kind).observe(max(0.0, seconds))

    def exposed(self, kind: str, seconds: float) -> None:
        """Record the time from acceptance to Prepared."""
        self._flow.exposed.labels(self._node, kind).observe(max(0.0, seconds))

    def volumes(self, states: Sequence[VolumeState]) -> None:
        """Show the backups of these volumes, and of no others."""
        self._volumes.show(states)

    def retention(self, report: RetentionReport | None, old_schedules: Sequence[str]) -> None:
        """Show what retention reported, None if nothing, and the schedules that delete by older rules."""
        self._retention.show(report, old_schedules)

    def waited(self, kind: str, seconds: float) -> None:
        """Record the time from creation to the start of the data path."""
        self._wait.labels(self._node, kind).observe(max(0.0, seconds))

    def slots(self, used: int, total: int) -> None:
        """Set the used and total slots of this node."""
        self._slots.labels(self._node, "used").set(used)
        self._slots.labels(self._node, "total").set(total)

    def config_valid(self, ok: bool) -> None:  # noqa: FBT001 - the one thing this hook is about
        """Set whether the configuration is valid and active."""
        self._config_valid.labels(self._node).set(ok)

    def config_hash(self, text: str) -> None:
        """Set the hash of the active configuration, and remove the previous one."""
        if self._config_hash and self._config_hash != text:
            self._config_info.remove(self._node, self._config_hash)
        self._config_hash = text
        self._config_info.labels(self._node, text).set(1)

    def priority_class_usable(self, ok: bool) -> None:  # noqa: FBT001 - as above
        """Set whether data movers get the configured priority class, if any."""
        self._priority_class.labels(self._node).set(ok)

    def request(self, verb: str, status: int) -> None:
        """Count a request to the API server; status 0 means no answer."""
        self._requests.labels(self._node, verb, str(status)).inc()

    def clock_skew(self, seconds: float) -> None:
        """Set how far the wall clock of this node is ahead of the API server's."""
        self._skew.labels(self._node).set(seconds)

    def nodes_passed_over(self, labels: AbstractSet[str]) -> None:
        """Set the nodes, by node label, that the leader passes over, and remove all others."""
        for label in self._shown_passed_over - labels:
            self._passed_over.remove(self._node, label)
        for label in labels:
            self._passed_over.labels(self._node, label).set(1)
        self._shown_passed_over = labels

    def object_skipped(self, kind: str) -> None:
        """Count an object of the API server that could not be read or handled."""
        self._skipped.labels(self._node, kind).inc()

    def leader(self, is_leader: bool) -> None:  # noqa: FBT001 - the one thing this hook is about
        """Set whether this agent is the leader."""
        self._leader.labels(self._node).set(is_leader)

    def repository(self, name: str, ok: bool) -> None:  # noqa: FBT001 - as above
        """Set whether a backup repository is ready."""
        self._repository.labels(self._node, name).set(ok)

    def remove_repository(self, name: str) -> None:
        """Remove the series of a backup repository that was deleted."""
        self._repository.remove_by_labels({"node": self._node, "repository_name": name})

    def remove_repositories(self) -> None:
        """Remove the series of all backup repositories: this agent does not control them any more."""
        self._repository.remove_by_labels({"node": self._node})
        self._maintenance.forget({"node": self._node})

    def maintenance_known(self, name: str) -> None:
        """Show that no maintenance of a repository has ended, unless one has: from there an increase is seen."""
        self._maintenance.succeeded.labels(self._node, name)
        self._maintenance.failed.labels(self._node, name)

    def maintenance_succeeded(self, name: str, seconds: float) -> None:
        """Count a maintenance Job that succeeded, from its creation to its completion."""
        self._maintenance.succeeded.labels(self._node, name).inc()
        self._maintenance.duration.labels(self._node, name).observe(seconds)

    def maintenance_failed(self, name: str) -> None:
        """Count a maintenance that failed."""
        self._maintenance.failed.labels(self._node, name).inc()

    def maintenance_foreign(self, name: str) -> None:
        """Count a maintenance that was held because another cluster or a person maintains the repository."""
        self._maintenance.foreign.labels(self._node, name).inc()

    def maintenance_skipped(self, reason: str) -> None:
        """Count a maintenance that was held."""
        self._maintenance.skipped.labels(self._node, reason).inc()

    def maintained(self, name: str, mode: str, at: float) -> None:
        """Set when the last maintenance in that mode succeeded, in seconds since 1970."""
        self._maintenance.last_success.labels(self._node, name, mode).set(at)

    def maintenance_incomplete(self, name: str, incomplete: bool) -> None:  # noqa: FBT001 - the value of the gauge
        """Set whether a full maintenance has begun and none has finished since."""
        self._maintenance.incomplete.labels(self._node, name).set(incomplete)

    def maintenance_overdue(self, name: str, overdue: bool) -> None:  # noqa: FBT001 - the value of the gauge
        """Set whether something has held a maintenance for three full intervals."""
        self._maintenance.overdue.labels(self._node, name).set(overdue)

    def repository_size(self, name: str, index_blobs: int, contents: int) -> None:
        """Set the size of a repository's index."""
        self._maintenance.index_blobs.labels(self._node, name).set(index_blobs)
        self._maintenance.contents.labels(self._node, name).set(contents)

    def orphan_snapshots(self, name: str, total: SnapshotTotal | None) -> None:
        """Set what a repository's last snapshot report found unreferenced; None: it is not known."""
        labels = {"node": self._node, "repository_name": name}
        if total is None:
            self._maintenance.orphans.remove_by_labels(labels)
            self._maintenance.orphan_bytes.remove_by_labels(labels)
            return
        self._maintenance.orphans.labels(**labels).set(total.count)
        self._maintenance.orphan_bytes.labels(**labels).set(total.bytes)

    def remove_maintenance(self, name: str) -> None:
        """Remove the gauges of a backup repository that was deleted."""
        self._maintenance.forget({"node": self._node, "repository_name": name})

    def location(self, name: str, ok: bool) -> None:  # noqa: FBT001 - as above
        """Set whether a backup storage location is available."""
        self._location.labels(self._node, name).set(ok)

    def remove_location(self, name: str) -> None:
        """Remove the series of a backup storage location that was deleted."""
        self._location.remove_by_labels({"node": self._node, "backup_location_name": name})

    def remove_locations(self) -> None:
        """Remove the series of all backup storage locations: this agent does not validate them any more."""
        self._location.remove_by_labels({"node": self._node})

    def pod_volume_backup_enqueued(self) -> None:
        """Count a PodVolumeBackup assigned to this node."""
        self._enqueued.labels(self._node).inc()

    def pod_volume_backup_dequeued(self) -> None:
        """Count a PodVolumeBackup of this node in a final phase."""
        self._dequeued.labels(self._node).inc()

    def pod_volume_operation(self, operation: str, backup: str, *, name: str, seconds: float) -> None:
        """Record the duration of the data path of the PodVolumeBackup `name`; only the latest keep series."""
        labels = (self._node, operation, backup, name)
        self._latency.labels(*labels).observe(seconds)
        self._last_latency.labels(*labels).set(seconds)
        # Velero keeps them all; here the oldest go, since each has a dozen series.
        self._operations[labels] = None
        if len(self._operations) > _OPERATIONS:
            oldest = next(iter(self._operations))
            del self._operations[oldest]
            self._latency.remove(*oldest)
            self._last_latency.remove(*oldest)

    def render(self) -> bytes:
        """Return everything in the text exposition format."""
        text = generate_latest(self._registry)
        for name in self._bare_counters:
            text = text.replace(f"# TYPE {name} gauge\n".encode(), f"# TYPE {name} counter\n".encode())
        return text
