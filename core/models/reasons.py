"""Reasons: why a transfer makes no progress, or cannot be admitted.

Decisions depend on the reason, never on the text of the message.
"""

from enum import StrEnum
from typing import Final


class PendingReason(StrEnum):
    """Every pending reason that this project defines.

    Reasons of the kubelet, the scheduler and volume controllers, such as `Unschedulable` or
    `FailedMount`, are passed on unchanged, so a pending reason may also be another string.
    """

    # Before admission.
    AGENT_OUTDATED = "AgentOutdated"
    COPY_IN_USE = "CopyInUse"
    COPY_SOURCE_MISSING = "CopySourceMissing"
    FORBIDDEN = "Forbidden"
    LEFT_TO_VELERO = "LeftToVelero"
    LOCATION_MISSING = "LocationMissing"
    LOCATION_SECRET_MISSING = "LocationSecretMissing"  # noqa: S105 - a name, and no secret
    LOCATION_UNREADABLE = "LocationUnreadable"
    NODE_BUSY = "NodeBusy"
    NO_NODE_AGENT = "NoNodeAgent"
    OBJECT_MALFORMED = "ObjectMalformed"
    QUEUED = "Queued"
    SNAPSHOT_ERROR = "SnapshotError"
    SNAPSHOT_IN_GROUP = "SnapshotInGroup"
    SNAPSHOT_NOT_READY = "SnapshotNotReady"
    TARGET_CLAIM_ABSENT = "TargetClaimAbsent"
    TARGET_CLAIM_MISSING = "TargetClaimMissing"
    TARGET_CLAIM_UNCONSUMED = "TargetClaimUnconsumed"
    TARGET_CLASS_MISSING = "TargetClassMissing"
    VOLUME_IN_USE = "VolumeInUse"
    WORKLOAD_ABSENT = "WorkloadAbsent"
    WORKLOAD_NOT_STARTING = "WorkloadNotStarting"
    WORKLOAD_NOT_WAITING = "WorkloadNotWaiting"

    # From Accepted to InProgress.
    API_SERVER_ERROR = "ApiServerError"
    CLAIM_MISSING = "ClaimMissing"
    CLAIM_UNBOUND = "ClaimUnbound"
    CONTAINER_CREATING = "ContainerCreating"
    IMAGE_PULL_BACK_OFF = "ImagePullBackOff"
    MOVER_LOST = "MoverLost"
    NAME_TAKEN = "NameTaken"
    NOT_TAKEN_OVER = "NotTakenOver"
    QUOTA_EXCEEDED = "QuotaExceeded"
    REJECTED = "Rejected"
    SCHEDULING = "Scheduling"
    SERVICE_ACCOUNT_MISSING = "ServiceAccountMissing"
    SNAPSHOT_HANDOVER = "SnapshotHandover"
    WAITING_FOR_SLOT = "WaitingForSlot"

    # InProgress, between two attempts.
    FENCING = "Fencing"
    INTERRUPTED = "Interrupted"
    RESUMING = "Resuming"

    # In any phase after New.
    AGENT_UNAVAILABLE = "AgentUnavailable"
    BINDING = "Binding"
    CLEANING_UP = "CleaningUp"
    CLEANUP_BLOCKED = "CleanupBlocked"
    DATA_MOVER_WAITING = "DataMoverWaiting"
    DETACHING = "Detaching"
    STEP_FAILED = "StepFailed"


class FailureReason(StrEnum):
    """Every reason for which an admission check fails; the message explains it."""

    RESTORE_TYPE_UNSUPPORTED = "RestoreTypeUnsupported"
    SNAPSHOT_TYPE_UNKNOWN = "SnapshotTypeUnknown"
    SOURCE_MISSING = "SourceMissing"
    TARGET_CLAIM_UNUSABLE = "TargetClaimUnusable"
    UPLOADER_UNKNOWN = "UploaderUnknown"
    VOLUME_REJECTED = "VolumeRejected"
    WRONG_NODE = "WrongNode"


class NotPrepared(StrEnum):
    """Why a transfer failed before Prepared, if that may be a fault of its node."""

    MOVER_LOST = "MoverLost"
    OPERATION_TIMEOUT = "OperationTimeout"
    PREPARE_TIMEOUT = "PrepareTimeout"


LOCATION_UNAVAILABLE: Final = "LocationUnavailable"
"""The reason of the Event on a transfer that starts although its storage location is not Available."""

UNREADABLE: Final = "Unreadable"
"""The reason of the Event on a custom resource that does not have the form of its kind."""
