"""From objects as the API server delivers them to records.

Nothing that tenants or other versions wrote is an error here: a transfer that cannot be read is a record that says so.
"""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final

import msgspec
from msgspec import field

from client.status import records
from core.errors import ConfigError, ContractError
from core.kube.errors import parse_json
from core.kube.types import ConfigObject, LeaseObject
from core.models import names as wire
from core.models.backups import Shrinkage, velero_backup_of
from core.models.base import ObjectMeta, Time, WireModel, format_time, parse_time
from core.models.phases import FINAL_PHASES, Attempts, Phase
from core.models.storage import BackupRepository, BackupStorageLocation, MaintenanceOutcome
from core.models.transfers import DataDownload, DataUpload, PodVolumeBackup, PodVolumeRestore, Transfer
from core.models.units import parse_count, parse_duration
from core.models.verification import Verification
from nodeagent.config.current import resolve_slots
from nodeagent.config.keys import LoadConcurrency
from nodeagent.config.parse import ParsedConfig, parse_config_map
from nodeagent.coverage.cluster import decode_object


class _EndedMarks(WireModel, gc=False):
    """Annotations, and labels of Velero's, of a transfer that has ended."""

    claim: str = field(default="", name=wire.PVC_NAME_ANNOTATION)
    shrunk: str = field(default="", name=wire.SHRUNK_ANNOTATION)
    backup: str = field(default="", name=wire.BACKUP_ANNOTATION)
    verification: str = field(default="", name=wire.VERIFICATION_ANNOTATION)
    velero_backup: str = field(default="", name=wire.VELERO_BACKUP_LABEL)
    claim_uid: str = field(default="", name=wire.PVC_UID_LABEL)


class _EndedMeta(WireModel, gc=False):
    name: str
    namespace: str = ""
    uid: str = ""
    creation_timestamp: str = ""
    annotations: _EndedMarks = field(default_factory=_EndedMarks)
    labels: _EndedMarks = field(default_factory=_EndedMarks)


class _EndedPod(WireModel, gc=False):
    namespace: str = ""
    name: str = ""


class _EndedSpec(WireModel, gc=False):
    """What is shown of the volume of a backup; volumes of restores are not shown."""

    datamover: str = ""
    source_namespace: str = ""
    source_pvc: str = field(default="", name="sourcePVC")
    pod: _EndedPod | None = None
    volume: str = ""
    backup_storage_location: str = ""
    operation_timeout: str = ""

    def __post_init__(self) -> None:
        """Reject what the model of a transfer rejects, and no definition does; msgspec converts the ValueError."""
        if self.operation_timeout:
            parse_duration(self.operation_timeout)


class _EndedProgress(WireModel, gc=False):
    total_bytes: int = 0


class _EndedStatus(WireModel, gc=False):
    phase: str = ""
    message: str = ""
    node: str = ""
    start_timestamp: Time | None = None
    completion_timestamp: Time | None = None
    progress: _EndedProgress = field(default_factory=_EndedProgress)


class _Ended(WireModel, gc=False):
    """The few fields that are shown of a transfer that has ended: most have, and others are decoded twice."""

    metadata: _EndedMeta
    spec: _EndedSpec
    status: _EndedStatus = field(default_factory=_EndedStatus)


_DECODER: Final = msgspec.json.Decoder(_Ended)


def decode_transfer(kind: records.TransferKind, text: msgspec.Raw) -> records.TransferRecord:
    """Return the record of a transfer in JSON; one that has ended has only what is shown of it."""
    try:
        one = _DECODER.decode(text)
        # A label of that length may be the short form of a longer name, which an owner reference has.
        if one.status.phase in FINAL_PHASES and len(one.metadata.labels.velero_backup) < wire.LABEL_VALUE_LIMIT:
            return _ended_record(kind, one)
        return _record(kind, msgspec.json.decode(text, type=kind.model))
    except (ValueError, RecursionError):
        # A field that is null, which counts as absent; or one that is invalid.
        raw = parse_json(bytes(text))
    return transfer_record(kind, raw if isinstance(raw, dict) else {})


def _ended_record(kind: records.TransferKind, one: _Ended) -> records.TransferRecord:
    meta, spec, status = one.metadata, one.spec, one.status
    queue, volume = ("", "") if kind.restores else (spec.source_namespace, spec.source_pvc)
    if spec.pod is not None and not kind.restores:
        queue, volume = spec.pod.namespace, f"{spec.pod.name}:{spec.volume}"
    return records.TransferRecord(
        kind=kind.name,
        namespace=meta.namespace,
        name=meta.name,
        uid=meta.uid,
        phase=Phase(status.phase),
        node=status.node,
        queue=queue,
        volume=volume,
        location=spec.backup_storage_location,
        claim=spec.source_pvc or meta.annotations.claim,
        claim_uid=meta.labels.claim_uid,
        created=meta.creation_timestamp,
        began=status.start_timestamp,
        completed=status.completion_timestamp,
        total_bytes=status.progress.total_bytes,
        message=status.message,
        datamover=spec.datamover,
        backup=meta.annotations.backup or meta.labels.velero_backup,
        verification=Verification.from_annotations({wire.VERIFICATION_ANNOTATION: meta.annotations.verification}),
        shrunk=Shrinkage.from_annotations({wire.SHRUNK_ANNOTATION: meta.annotations.shrunk}),
    )


def transfer_record(kind: records.TransferKind, raw: Mapping[str, Any]) -> records.TransferRecord:
    """Return the record of a transfer as JSON dict."""
    try:
        return _record(kind, kind.model.parse(raw))
    except ContractError as e:
        meta = raw.get("metadata")
        known = meta if isinstance(meta, dict) else {}
        namespace, name, uid = (str(known.get(key) or "") for key in ("namespace", "name", "uid"))
        return records.TransferRecord(kind=kind.name, namespace=namespace, name=name or "?", uid=uid, fault=str(e))


def _record(kind: records.TransferKind, cr: Transfer) -> records.TransferRecord:
    meta, status, phase = cr.metadata, cr.status, cr.phase
    # Most transfers have ended, and nothing is shown of their attempts.
    attempts = Attempts() if phase.final else cr.attempts
    queue, volume, datamover = _volume_of(cr)
    return records.TransferRecord(
        kind=kind.name,
        namespace=meta.namespace,
        name=meta.name,
        uid=meta.uid,
        phase=phase,
        # A pod's volume is backed up where the pod runs: that is known before.
        node=status.node or (cr.spec.node if isinstance(cr, PodVolumeBackup) else ""),
        queue=queue,
        volume=volume,
        location=cr.spec.backup_storage_location,
        created=format_time(meta.creation_timestamp) if meta.creation_timestamp else "",
        accepted=status.accepted_timestamp,
        began=(attempts.starts[-1] if attempts.starts else None) or cr.began_at,
        completed=status.completion_timestamp,
        bytes_done=status.progress.bytes_done,
        total_bytes=status.progress.total_bytes,
        reason="" if phase.final else cr.pending_reason or "",
        message=status.message or "",
        number=attempts.number,
        stage=attempts.stage if phase is Phase.IN_PROGRESS else None,
        canceling=cr.cancel_requested and not phase.final,
        datamover=datamover,
        backup=meta.annotations.get(wire.BACKUP_ANNOTATION) or velero_backup_of(meta),
        new_bytes=status.incremental_bytes,
        verification=Verification.from_annotations(meta.annotations),
        files=parse_count(meta.annotations.get(wire.FILES_ANNOTATION, "")),
        shrunk=Shrinkage.from_annotations(meta.annotations),
        claim=cr.source_claim or "",
        claim_uid=meta.labels.get(wire.PVC_UID_LABEL, ""),
    )


def _volume_of(cr: Transfer) -> tuple[str, str, str]:
    """Return the volume namespace, the volume in it, and `spec.datamover`."""
    match cr:
        case DataUpload():
            return cr.spec.source_namespace, cr.spec.source_pvc, cr.spec.datamover
        case DataDownload():
            return cr.spec.target_volume.namespace, cr.spec.target_volume.pvc, cr.spec.datamover
        case PodVolumeBackup() | PodVolumeRestore():
            return cr.spec.pod.namespace, f"{cr.spec.pod.name}:{cr.spec.volume}", ""
    return "", "", ""


class _Condition(WireModel):
    type: str
    status: str


class _Container(WireModel):
    restart_count: int = 0


class _PodSpec(WireModel):
    node_name: str = ""


class _PodStatus(WireModel):
    conditions: list[_Condition] = field(default_factory=list)
    container_statuses: list[_Container] = field(default_factory=list)


class _Pod(WireModel):
    """The few fields of a v1 Pod that are read here: there may be hundreds of agents."""

    metadata: ObjectMeta
    spec: _PodSpec = field(default_factory=_PodSpec)
    status: _PodStatus = field(default_factory=_PodStatus)


def decode_agent(text: msgspec.Raw) -> records.AgentRecord:
    """Return the record of an agent's pod in JSON; ContractError: it does not have the form of a Pod."""
    return _agent_record(decode_object(_Pod, text))


def agent_record(raw: object) -> records.AgentRecord:
    """Return the record of an agent's pod as JSON dict; ContractError: it does not have the form of a Pod."""
    return _agent_record(_Pod.from_wire(raw))


def _agent_record(pod: _Pod) -> records.AgentRecord:
    ready = any(one.type == "Ready" and one.status == "True" for one in pod.status.conditions)
    return records.AgentRecord(
        node=pod.spec.node_name,
        pod=pod.metadata.name,
        ready=ready and pod.metadata.deletion_timestamp is None,
        config=pod.metadata.annotations.get(wire.CONFIG_ANNOTATION, ""),
        restarts=sum(one.restart_count for one in pod.status.container_statuses),
    )


class _LeaseSpec(WireModel):
    holder_identity: str = ""
    lease_duration_seconds: int = 0
    renew_time: Time | None = None


class _Lease(WireModel):
    spec: _LeaseSpec = field(default_factory=_LeaseSpec)


_SLACK: Final = timedelta(seconds=5)
"""A Date header has whole seconds, and a renewal may be under way."""


def lease_record(raw: LeaseObject | None, changed_at: str | None = None) -> records.LeaseRecord:
    """Return the record of the leader's Lease; None: there is none.

    `changed_at` is when it was changed, by the API server's clock; None: not known, and the leader's clock counts.

    Raises:
        ContractError: it does not have the form of a Lease.
    """
    spec = _Lease.from_wire(raw or {}).spec
    renewed = spec.renew_time
    if renewed is None:
        return records.LeaseRecord(holder=spec.holder_identity)
    if changed_at:
        # The leader's clock may be off, and renewals by it count for other agents by their own clocks only.
        renewed = parse_time(changed_at)
    try:
        expires = renewed + timedelta(seconds=spec.lease_duration_seconds) + _SLACK
    except OverflowError as e:
        raise ContractError(f"leaseDurationSeconds: {spec.lease_duration_seconds} is out of range") from e
    return records.LeaseRecord(holder=spec.holder_identity, expires=expires)


def config_record(name: str | None, raw: ConfigObject | None) -> tuple[records.ConfigRecord, LoadConcurrency]:
    """Return the record of the agents' ConfigMap, None if it does not exist, and its `loadConcurrency`."""
    # Without a ConfigMap that is named, agents keep the configuration that they had.
    error = f"ConfigMap {name} does not exist" if raw is None and name else ""
    parsed = ParsedConfig()
    try:
        parsed = parse_config_map(raw) if raw is not None else parsed
    except ConfigError as e:
        error = str(e)
    concurrency, errors = parsed.config.load_concurrency, (error,) if error else tuple(map(str, parsed.errors))
    record = records.ConfigRecord(
        name=name or "",
        hash=parsed.digest or "",
        errors=errors,
        warnings=tuple(map(str, parsed.notes)),
        slots=concurrency.global_config,
        queue_length=concurrency.prepare_queue_length,
        restores_first=concurrency.restores_first,
        # Of a document that agents reject, it may be new.
        leave_out_namespaces=None if errors else tuple(parsed.config.own.leave_out_namespaces),
    )
    return record, concurrency


class _Node(WireModel):
    metadata: ObjectMeta


def slots_by_node(texts: list[msgspec.Raw], concurrency: LoadConcurrency) -> dict[str, int]:
    """Return the number of slots of each node in JSON, by its name.

    Raises:
        ContractError: one does not have the form of a Node.
    """
    nodes = [decode_object(_Node, text).metadata for text in texts]
    return {node.name: resolve_slots(node.labels, concurrency) for node in nodes}


def location_record(raw: Mapping[str, Any]) -> records.LocationRecord:
    """Return the record of a BackupStorageLocation; ContractError: it is invalid."""
    location = BackupStorageLocation.parse(raw)
    status = location.status
    return records.LocationRecord(
        name=location.name,
        phase=status.phase or "",
        message=status.message or "",
        validated=status.last_validation_time,
        read_only=location.read_only,
    )


def repository_record(raw: Mapping[str, Any]) -> records.RepositoryRecord:
    """Return the record of a BackupRepository; ContractError: it is invalid."""
    repository = BackupRepository.parse(raw)
    status, spec = repository.status, repository.spec
    last = status.recent_maintenance[-1] if status.recent_maintenance else None
    failed = last is not None and last.result is MaintenanceOutcome.FAILED
    return records.RepositoryRecord(
        name=repository.name,
        volume_namespace=spec.volume_namespace,
        location=spec.backup_storage_location,
        phase=str(repository.phase),
        message=status.message or "",
        maintained=status.last_maintenance_time,
        failed=(last.message or "no message") if failed and last is not None else "",
    )
