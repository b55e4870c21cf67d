"""What to do next about a transfer: the section of the documentation about its reason or its failure.

Pure. Only what a person is shown depends on the words of a message.
"""

from typing import Final

from client.status.health import is_blocked
from client.status.records import TransferRecord
from core.models.attempts import AttemptStage
from core.models.phases import Phase
from core.models.reasons import PendingReason

__all__ = ["FAILURES", "SECTIONS", "advise"]

_PAGE: Final = "docs/troubleshooting.md"

SECTIONS: Final = {
    PendingReason.AGENT_OUTDATED: "agent-outdated",
    PendingReason.AGENT_UNAVAILABLE: "agent-unavailable",
    PendingReason.API_SERVER_ERROR: "webhook-unreachable",
    PendingReason.CLAIM_MISSING: "claim-missing",
    PendingReason.CLAIM_UNBOUND: "provisioner-silent",
    PendingReason.CLEANUP_BLOCKED: "cleanup-blocked",
    PendingReason.CONTAINER_CREATING: "image-being-pulled",
    PendingReason.COPY_IN_USE: "copy-in-use",
    PendingReason.COPY_SOURCE_MISSING: "copy-source-missing",
    PendingReason.DATA_MOVER_WAITING: "repository-not-ready",
    PendingReason.FENCING: "between-two-attempts",
    PendingReason.FORBIDDEN: "permission-missing",
    PendingReason.IMAGE_PULL_BACK_OFF: "image-pull",
    PendingReason.INTERRUPTED: "between-two-attempts",
    PendingReason.LEFT_TO_VELERO: "left-to-velero",
    PendingReason.LOCATION_MISSING: "location-missing",
    PendingReason.LOCATION_SECRET_MISSING: "location-secret-missing",
    PendingReason.LOCATION_UNREADABLE: "location-unreadable",
    PendingReason.MOVER_LOST: "mover-lost-before",
    PendingReason.NAME_TAKEN: "name-shared",
    PendingReason.NODE_BUSY: "node-busy",
    PendingReason.NOT_TAKEN_OVER: "mover-not-taken-over",
    PendingReason.NO_NODE_AGENT: "no-node-agent",
    PendingReason.OBJECT_MALFORMED: "object-malformed",
    PendingReason.QUEUED: "queue-full",
    PendingReason.QUOTA_EXCEEDED: "quota",
    PendingReason.REJECTED: "kubelet-rejection",
    PendingReason.RESUMING: "between-two-attempts",
    PendingReason.SERVICE_ACCOUNT_MISSING: "service-account-missing",
    PendingReason.SNAPSHOT_ERROR: "snapshot-error",
    PendingReason.SNAPSHOT_NOT_READY: "snapshot-unfinished",
    PendingReason.TARGET_CLAIM_MISSING: "target-claim-missing",
    PendingReason.TARGET_CLAIM_UNCONSUMED: "target-claim-unconsumed",
    PendingReason.VOLUME_IN_USE: "volume-in-use",
    PendingReason.WAITING_FOR_SLOT: "waiting-for-slot",
    PendingReason.WORKLOAD_ABSENT: "workload-not-waiting",
    PendingReason.WORKLOAD_NOT_STARTING: "workload-not-starting",
    PendingReason.WORKLOAD_NOT_WAITING: "workload-not-waiting",
    "CreateContainerConfigError": "secret-not-in-environment",
    "FailedAttachVolume": "volume-not-attached",
    "FailedCreatePodSandBox": "pod-network",
    "FailedMount": "secret-not-mounted",
    "ProvisioningFailed": "provisioning-failed",
    "Unschedulable": "the-mover-pod-is-not-scheduled",
}
"""Sections about pending reasons, ours and Kubernetes'; all others have `short-lived-reasons`."""

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
    (" needs volumeMode Block, and PersistentVolumeClaim ", "data-mover-unsupported"),
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
