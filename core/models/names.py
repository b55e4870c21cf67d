"""Names on the wire: labels, annotations, finalizers and fixed object names.

Source: Velero v1.18 (pkg/apis/velero/v1/labels_annotations.go, pkg/exposer, pkg/datapath) as
recorded in tests/recordings/velero-1.18.2, and our own names.
"""

import hashlib
import re
from collections.abc import Mapping
from typing import Any, Final

# On a data mover pod: the name of its custom resource.
DATA_UPLOAD_LABEL: Final = "velero.io/data-upload"
DATA_DOWNLOAD_LABEL: Final = "velero.io/data-download"
POD_VOLUME_BACKUP_LABEL: Final = "velero.io/pod-volume-backup"
POD_VOLUME_RESTORE_LABEL: Final = "velero.io/pod-volume-restore"

# `spec.datamover` of a DataUpload or DataDownload.
BUILT_IN_DATA_MOVERS: Final = frozenset({"", "velero", "velero-fs"})
"""The last one is Velero 1.19's, by a volume policy. Source: Velero main at d2241adba, pkg/util/datamover/datamover.go.
"""
FS_DATA_MOVER: Final = "velero-fs"
BLOCK_DATA_MOVER: Final = "velero-block"
"""The data mover of Velero 1.19 for block devices: `spec.datamover`, the uploader's tag, and a feature of agents."""
UPLOADER_TAG: Final = "snapshot-uploader"
"""A tag of a kopia snapshot: `kopia`, or BLOCK_DATA_MOVER. Source: Velero main at d2241adba, pkg/uploader/types.go."""

# On a custom resource.
EXPOSE_ON_GOING_LABEL: Final = "velero.io/expose-on-going"
ASYNC_OPERATION_ID_LABEL: Final = "velero.io/async-operation-id"
PVC_NAME_ANNOTATION: Final = "velero.io/pvc-name"
PVC_UID_LABEL: Final = "velero.io/pvc-uid"
"""On a backup that a Velero server makes: the UID of its PVC. Source: Velero v1.17, PVCUIDLabel."""
VELERO_BACKUP_LABEL: Final = "velero.io/backup-name"
"""The name of the Velero Backup of a transfer. Source: Velero v1.18, BackupNameLabel."""
VELERO_SCHEDULE_LABEL: Final = "velero.io/schedule-name"
"""On a Backup that a Schedule created: its name. Source: Velero v1.18, pkg/apis/velero/v1/labels_annotations.go."""
RESTORE_UID_LABEL: Final = "velero.io/restore-uid"
POD_UID_LABEL: Final = "velero.io/pod-uid"
"""On a PodVolumeRestore that a Velero server makes: the UID of its pod. Source: Velero v1.18, PodUIDLabel."""
DATA_MOVER_FINALIZER: Final = "velero.io/data-upload-download-finalizer"
POD_VOLUME_FINALIZER: Final = "velero.io/pod-volume-finalizer"

# On a BackupRepository: the labels it is selected by.
VOLUME_NAMESPACE_LABEL: Final = "velero.io/volume-namespace"
STORAGE_LOCATION_LABEL: Final = "velero.io/storage-location"
REPOSITORY_TYPE_LABEL: Final = "velero.io/repository-type"

# On a maintenance Job and its pod: the name of its BackupRepository.
REPO_NAME_LABEL: Final = "velero.io/repo-name"
"""A Velero server waits for Jobs with this label, and counts them."""
MAINTENANCE_CONTAINER: Final = "velero-repo-maintenance-container"
"""Source: Velero v1.18, buildJob in pkg/repository/maintenance/maintenance.go."""

# On the objects of an expose.
EXPOSER_POD_GROUP_LABEL: Final = "velero.io/exposer-pod-group"
MANAGED_BY_LABEL: Final = "snapshot.storage.kubernetes.io/managed-by"
COPY_LABEL: Final = "velero.io/backup-pvc-secret"
"""On a Secret or ConfigMap that was copied for an expose: the UID of its custom resource. Source: Velero main at
d2241adba, pkg/exposer/csi_snapshot.go (BackupPVCSecretLabel)."""
SELECTED_NODE_ANNOTATION: Final = "volume.kubernetes.io/selected-node"
RESTORE_SELECTOR_LABEL: Final = "velero.io/dynamic-pv-restore"
"""A PVC that selects a volume by it gets none from a provisioner, but the restored one. Source: Velero v1.18,
pkg/restore/actions/csi/pvc_action.go."""

# Tags of a kopia snapshot: what made it, and the UID of the Backup of a pod volume.
SNAPSHOT_REQUESTER_TAG: Final = "snapshot-requester"
DATA_UPLOAD_REQUESTER: Final = "snapshot-data-upload-download"
POD_VOLUME_REQUESTER: Final = "snapshot-pod-volume"
SNAPSHOT_REQUESTERS: Final = frozenset({DATA_UPLOAD_REQUESTER, POD_VOLUME_REQUESTER, "pod-volume-backup-restore"})
"""The last one is from pod volumes before Velero 1.17, in pkg/controller/pod_volume_backup_controller.go."""
BACKUP_UID_TAG: Final = "backup-uid"
"""Also a key of `spec.tags` of a PodVolumeBackup. Velero 1.17 and 1.18 do not pass it on to the snapshot."""
TRANSFER_UID_TAG: Final = "nodeagent.io/transfer-uid"
"""Ours: the UID of the custom resource that a snapshot was made for."""
ATTEMPT_TAG: Final = "nodeagent.io/attempt"
"""Ours: the number of the attempt that made it. Of an overtaken attempt nothing refers to it."""
CHANGES_TAG: Final = "nodeagent.io/changes-until"
"""Ours: the time up to which a snapshot has all changes of its volume, by the times of changes (ctime) in it."""
CHECKPOINT_DEVICE_TAG: Final = "nodeagent.io/checkpoint-device"
"""Ours: the device that a checkpoint by block is of: the storage's handles of its volume and snapshot, and its size."""
CLUSTER_TAG: Final = "nodeagent.io/cluster"
"""Ours: the UID of the namespace `kube-system` in the cluster that made a snapshot; it distinguishes clusters."""
CLUSTER_NAMESPACE: Final = "kube-system"
"""The namespace whose UID identifies a cluster: every cluster has one, and it lives as long as the cluster."""
BACKUP_TAG: Final = "nodeagent.io/backup"
"""Ours: the name of the backup, of a snapshot that `nodeagent backup create` asked for."""
BACKUP_VOLUMES_TAG: Final = "nodeagent.io/backup-volumes"
"""Ours: how many volumes that backup has, so that a missing one is noticed where nothing but the bucket is left."""
CLAIM_TAG: Final = "nodeagent.io/claim"
"""Ours: the PVC of such a snapshot as it was (`core.models.backups`)."""

# Secrets that are shared with Velero: credentials of locations that name none, and the repository's password.
CREDENTIALS_SECRET: Final = "cloud-credentials"  # noqa: S105 - the Secret's name
"""Source: Velero v1.18, pkg/install/daemonset.go and resources.go."""
REPO_CREDENTIALS_SECRET: Final = "velero-repo-credentials"  # noqa: S105 - the Secret's name
REPO_CREDENTIALS_KEY: Final = "repository-password"
REPO_DEFAULT_PASSWORD: Final = "static-passw0rd"  # noqa: S105 - Velero's published default

# The agent itself.
AGENT_DAEMONSET: Final = "node-agent"
AGENT_DAEMONSET_WINDOWS: Final = "node-agent-windows"
AGENT_LABELS: Final = {"role": "node-agent"}
AGENT_SELECTOR: Final = ",".join(f"{key}={value}" for key, value in AGENT_LABELS.items())
"""The pods of all node agents."""

PART_OF_LABELS: Final = {"app.kubernetes.io/part-of": "node-agent"}
"""On every object that an installation creates; Velero's objects do not have it."""
SERVICE_ACCOUNT: Final = "node-agent"
MOVER_SERVICE_ACCOUNT: Final = "node-agent-mover"
RESTORE_TEST_ACCOUNT: Final = "node-agent-restore-test"
"""The account of the leader's Jobs that test a restore; only an installation that wants them has it."""

# Ours, not in Velero.
NODE_LABEL: Final = "nodeagent.io/node"
"""On a custom resource of any kind: the node of its owning agent."""
OWNER_UID_LABEL: Final = "nodeagent.io/owner-uid"
"""On every expose object; garbage collection deletes no object without it."""
BASE_SNAPSHOT_LABEL: Final = "nodeagent.io/base-snapshot"
"""On the content of a snapshot that is kept for the next backup by block: the UID of its DataUpload."""
BASE_CLAIM_LABEL: Final = "nodeagent.io/base-claim"
"""On the same: namespace and name of the PVC, with a dot between them, as `label_value` returns them."""
IN_PLACE_LABEL: Final = "nodeagent.io/in-place"
"""On an existing PersistentVolume while a DataDownload restores into it: the UID of that. By OWNER_UID_LABEL, garbage
collection, also of earlier versions, would delete the volume."""
IN_PLACE_CLAIM_ANNOTATION: Final = "nodeagent.io/in-place-claim"
"""On such a volume, or a new one that is being bound: the agents' namespace, and namespace and name of its PVC."""
RECLAIM_POLICY_ANNOTATION: Final = "nodeagent.io/reclaim-policy"
"""On a PersistentVolume that is retained for a restore: the reclaim policy that it gets back."""
RELEASED_CLAIM_ANNOTATION: Final = "nodeagent.io/released-claim"
"""On a PersistentVolume that `nodeagent restore create --in-place` has released: its PVC, as it is recreated."""
COPIES_ANNOTATION: Final = "nodeagent.io/copies"
"""On a custom resource: the Secrets and ConfigMaps that its expose copies, written before the first one is."""
BLOCK_PREFERRED_ANNOTATION: Final = "nodeagent.io/block-preferred"
"""On a DataUpload: `true` if it got BLOCK_DATA_MOVER by the configuration; or why it has FS_DATA_MOVER instead."""
OWNER_KIND_ANNOTATION: Final = "nodeagent.io/owner-kind"
"""On a PVC: the kind of the custom resource that it was created for, and whose name it has."""
OUTCOME_ANNOTATION: Final = "nodeagent.io/outcome"
"""On a custom resource: the mover's result, written before anything that produced it is deleted."""
ACCEPT_FENCE_ANNOTATION: Final = "nodeagent.io/fence"
"""On a New custom resource: rewritten to make a late accept conflict."""
ATTEMPTS_ANNOTATION: Final = "nodeagent.io/attempts"
"""On a custom resource whose backup has begun, or that was interrupted: its attempts (`core.models.phases`)."""
ATTEMPT_LABEL: Final = "nodeagent.io/attempt"
"""On a mover pod: the number of its attempt. Movers without it, of Velero and of older versions, know no attempts."""
BANDWIDTH_ANNOTATION: Final = "nodeagent.io/bandwidth"
"""On a custom resource whose data path may run: what its mover may use (`core.models.transfer_settings`)."""
MOVER_LOST_ANNOTATION: Final = "nodeagent.io/mover-lost"
"""On a custom resource: how often its mover pod was lost before its data path started, and since when."""
NOT_PREPARED_ANNOTATION: Final = "nodeagent.io/not-prepared"
"""On a custom resource that failed before Prepared, for a cause that may be its node's: the cause."""
PENDING_REASON_ANNOTATION: Final = "nodeagent.io/pending-reason"
"""On a custom resource: the pending reason, which `status.message` describes."""
BACKUP_LABEL: Final = "nodeagent.io/backup"
"""On what `nodeagent backup create` makes: the name of the backup, as `label_value` returns it."""
BACKUP_ANNOTATION: Final = "nodeagent.io/backup"
"""On a transfer that `nodeagent backup create` makes: the whole name of the backup."""
BACKUP_VOLUMES_ANNOTATION: Final = "nodeagent.io/backup-volumes"
"""On such a transfer: how many volumes its backup has, so that a missing one is noticed."""
BACKUP_TTL_ANNOTATION: Final = "nodeagent.io/backup-ttl"
"""On such a transfer: how long its backup is kept, a Go duration. Absent: until someone deletes it."""
BACKUP_KEEP_ANNOTATION: Final = "nodeagent.io/backup-keep"
"""On such a transfer of a schedule that keeps by count and calendar: its policy, with the time to live, such as
`daily=7,zone=UTC,ttl=48h0m0s`. It is in place of BACKUP_TTL_ANNOTATION, so that versions that know no policy keep it.
The annotation of a schedule's newest transfer counts for all of them."""
CLAIM_ANNOTATION: Final = "nodeagent.io/claim"
"""On such a transfer: the PVC as it was (`core.models.backups`)."""
RESTORE_LABEL: Final = "nodeagent.io/restore"
"""On what `nodeagent restore create` makes: the name of the restore, as `label_value` returns it."""
RESTORE_ANNOTATION: Final = "nodeagent.io/restore"
"""On a transfer and a PVC that `nodeagent restore create` makes: the whole name of the restore."""
RESTORE_VOLUMES_ANNOTATION: Final = "nodeagent.io/restore-volumes"
"""On such a transfer: how many volumes its restore has, so that a missing one is noticed."""
COMMAND_ANNOTATION: Final = "nodeagent.io/command"
"""On a VolumeSnapshot that `nodeagent restore create` makes: a random word of the run that made it."""
VELERO_RESTORE_LABEL: Final = "velero.io/restore-name"
"""On a transfer and a PVC that a Velero server's restore makes: its name. Source: Velero v1.18, RestoreNameLabel."""
REPOSITORY_INPUTS_ANNOTATION: Final = "nodeagent.io/repository-inputs"
"""On a BackupRepository: a hash of the location and credentials by which it was opened; others need a new check."""
REPOSITORY_ID_ANNOTATION: Final = "nodeagent.io/repository-id"
"""On a BackupRepository: the unique ID of the kopia repository, from the first time that it was opened."""
REPOSITORY_CREATED_ANNOTATION: Final = "nodeagent.io/repository-created"
"""On a BackupRepository: "true" if our init pod created the kopia repository, instead of finding it."""
MAINTENANCE_ANNOTATION: Final = "nodeagent.io/maintenance"
"""On a BackupRepository: what the next maintenance depends on, as JSON (`nodeagent.maintenance.record`)."""
SNAPSHOT_REPORT_LABEL: Final = "nodeagent.io/snapshot-report"
"""On a Job that only reports snapshots: the name of the BackupRepository, as `label_value` returns it."""
SNAPSHOT_DELETION_LABEL: Final = "nodeagent.io/snapshot-deletion"
"""On a Job that deletes snapshots of deleted backups: the name of the location, as `label_value` returns it."""
SNAPSHOT_LIST_LABEL: Final = "nodeagent.io/snapshot-list"
"""On a Job that lists the snapshots of a storage location: the name of the location, as `label_value` returns it."""
SNAPSHOT_VERIFICATION_LABEL: Final = "nodeagent.io/snapshot-verification"
"""On a Job that verifies snapshots: the name of the BackupRepository, as `label_value` returns it."""
VERIFIED_REPOSITORY_LABEL: Final = "nodeagent.io/verified-repository"
"""On a Job by which the leader verifies a repository: the UID of the BackupRepository."""
RESTORE_TEST_ANNOTATION: Final = "nodeagent.io/restore-test"
"""On such a Job that restores a volume instead: the name of the PVC."""
RESTORE_PLAN_LABEL: Final = "nodeagent.io/restore-plan"
"""On a Job that plans a restore into a volume: the name of the location, as `label_value` returns it; on the scratch
objects that it needs: the name of the transfer."""
SNAPSHOT_FILES_LABEL: Final = "nodeagent.io/snapshot-files"
"""On a Job that lists or sends files of a snapshot: the name of its location, as `label_value` returns it."""
CONFIG_ANNOTATION: Final = "nodeagent.io/config"
"""On an agent's own pod: the hash of its active configuration."""
FEATURES_ANNOTATION: Final = "nodeagent.io/features"
"""On an agent's own pod: what it can carry out that agents of earlier versions cannot."""
RESTORE_IN_PLACE: Final = "restore-in-place"
"""A feature: restores into existing PersistentVolumes."""
BACKUP_INTERVAL_ANNOTATION: Final = "nodeagent.io/backup-interval"
"""On a PVC: how often it is to be backed up, as a Go duration, for the metrics and the alert about it."""
VERIFICATION_INTERVAL_ANNOTATION: Final = "nodeagent.io/verification-interval"
"""On a PVC, a Schedule, or a CronJob with SCHEDULE_LABEL: how often its backups are verified, as a Go duration."""
EXCLUDE_LABEL: Final = "velero.io/exclude-from-backup"
"""On any object: "true" keeps it out of backups. Source: Velero v1.18, ExcludeFromBackupLabel."""
ALERT_NOT_PROTECTED_LABEL: Final = "nodeagent.io/alert-not-protected"
"""On a namespace: "true" lets a metric, and so an alert, name its volumes that are not protected."""
EXCLUDE_ANNOTATION: Final = "nodeagent.io/exclude-from-backup"
"""On a namespace or PVC: why it is left out of backups on purpose. It only explains; it excludes nothing."""
VERIFICATION_ANNOTATION: Final = "nodeagent.io/verification"
"""On a completed backup: what its last verification found, as JSON (`core.models.verification`); on a BackupRepository
what the next one depends on (`nodeagent.maintenance.verification`)."""
EXCLUDE_TAG: Final = "nodeagent.io/exclude"
"""Ours: by which rules files were left out of a snapshot, as JSON (`core.models.transfer_settings`)."""
EXCLUDE_DIGEST_TAG: Final = "nodeagent.io/exclude-digest"
"""Ours: the digest of these rules."""
EXCLUSIONS_ANNOTATION: Final = "nodeagent.io/exclude"
"""On a PVC, where the configuration allows it: a pattern on each line, of what its backups leave out."""
LEFT_OUT_ANNOTATION: Final = "nodeagent.io/left-out"
"""On a completed backup of a file system: what exclusions left out, as JSON (`core.models.transfer_settings`)."""
FILES_ANNOTATION: Final = "nodeagent.io/files"
"""On a completed backup of a file system: how many files it has."""
SHRUNK_ANNOTATION: Final = "nodeagent.io/shrunk"
"""On a completed backup that is Shrunk: from what to what, as JSON (`core.models.backups`)."""
SCHEDULE_LABEL: Final = "nodeagent.io/schedule"
"""On a CronJob that creates transfers, and on each of these: the same value."""
DELETIONS_CONFIGMAP: Final = "node-agent-backup-deletions"
"""Of which backups the transfers are being deleted, so that their snapshots are found after an interruption; and what
retention did last (`core.models.backups`)."""
DELETIONS_LEASE: Final = "node-agent-backup-deletions"
"""Held by the command that deletes backups: one at a time in an installation."""
RETENTION_IMAGE_ANNOTATION: Final = "nodeagent.io/retention-image"
"""On a CronJob with SCHEDULE_LABEL that deletes: the image whose rules of retention are known to be today's."""
SCHEDULE_COMMAND: Final = "run-schedule"
"""The command of the pods of a schedule."""
RESTORE_TEST_COMMAND: Final = "run-restore-test"
"""The command of the pods that test a restore."""
DISPATCHER_LEASE: Final = "node-agent-dispatcher"
ADMISSIONS_CONFIGMAP: Final = "node-agent-admissions"
HISTORY_CONFIGMAPS: Final = tuple(f"node-agent-history-{number}" for number in range(4))
"""What backups had new, by volume and day (`nodeagent.coverage.history`)."""

NO_CONFIG: Final = "none"
"""The announced hash where no ConfigMap was named."""

SUBDOMAIN: Final = r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?(?:\.[a-z0-9](?:[-a-z0-9]*[a-z0-9])?)*"
OBJECT_NAME: Final = re.compile(rf"(?!.{{254}}){SUBDOMAIN}")
"""The name of an object, and what it is but for its length: a pattern of `re`. Source: Kubernetes v1.34, apimachinery
pkg/util/validation, IsDNS1123Subdomain."""

_LABEL: Final = r"[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
LABEL_KEY: Final = rf"(?:(?![^/]{{254}}){SUBDOMAIN}/)?{_LABEL}"
LABEL_VALUE: Final = rf"(?:{_LABEL})?"
"""The key of a label or an annotation, and the value of a label: patterns of `re`. Source: Kubernetes v1.34,
apimachinery pkg/util/validation, IsQualifiedName, IsValidLabelValue."""
LABEL: Final = re.compile(f"{LABEL_KEY}={LABEL_VALUE}")
ANNOTATION: Final = re.compile(f"{LABEL_KEY}=.*", re.DOTALL)
"""Both as `key=value`."""
LABEL_VALUE_LIMIT: Final = 63
_HASHED_PREFIX: Final = 57
_HASH_DIGITS: Final = 6


def is_ours(obj: Mapping[str, Any]) -> bool:
    """Return whether an installation of this project created the object."""
    return PART_OF_LABELS.items() <= (obj["metadata"].get("labels") or {}).items()


def helm_release(obj: Mapping[str, Any]) -> str | None:
    """Return the release of Helm that the object belongs to, or None.

    Source: Helm v3, pkg/action/validate.go.
    """
    annotations = obj["metadata"].get("annotations") or {}
    return annotations.get("meta.helm.sh/release-name") or None


def repo_name_label(name: str) -> str:
    """Return the value of REPO_NAME_LABEL: the BackupRepository's name, or its SHA3-224 in hex.

    Source: Velero v1.18, ReturnNameOrHash in pkg/label/label.go.
    """
    return name if len(name) <= LABEL_VALUE_LIMIT else hashlib.sha3_224(name.encode()).hexdigest()


def label_value(name: str) -> str:
    """Return `name` as a label value: itself, or 57 characters and 6 digits of its SHA-256.

    Source: Kubernetes, label values have at most 63 characters.
    """
    if len(name) <= LABEL_VALUE_LIMIT:
        return name
    digest = hashlib.sha256(name.encode(errors="replace")).hexdigest()
    return name[:_HASHED_PREFIX] + digest[:_HASH_DIGITS]
