"""The Job by which the leader tests the restore of a volume, and which copies it may be of.

Its pod runs a command of the client (`client.cli.run_restore_test`) with an account of its own, as the Jobs of
schedules do: the agents need no permission for it.
"""

from datetime import timedelta
from typing import Final

from core.kube.resources import JOBS
from core.kube.types import Manifest
from core.models import names
from core.models.transfers import Transfer
from core.models.verification import Verification, is_damaged
from exposer.pod_manifest import Placement
from exposer.pods import WITHOUT_SIDECAR, AgentImage, MaintenanceRun, build_client_pod, is_reserved_label
from exposer.settings import ExposeSettings
from nodeagent.config.windows import VerificationPlan
from nodeagent.maintenance.restore_tests import NEVER, RestorableCopy, RestoreTestRequest

_CLEANUP: Final = timedelta(minutes=15)
"""More than the removal of a scratch volume takes."""

_KEPT_SECONDS: Final = 3600
"""With the Job of a restore test, Kubernetes deletes what its command has left."""


def restorable(cr: Transfer) -> RestorableCopy | None:
    """Return a completed backup as the copy of a volume that may be restored; None: it may not."""
    if not cr.source_claim or cr.deleting or is_damaged(Verification.from_annotations(cr.metadata.annotations)):
        return None
    return RestorableCopy(cr.source_claim, cr.made_at or NEVER, cr.kind_name, cr.name)


def build_restore_test(
    run: MaintenanceRun, expose: ExposeSettings, copy: RestorableCopy, plan: VerificationPlan
) -> Manifest:
    """Return a Job that tests the restore of a copy; Kubernetes deletes it an hour after its end.

    The API server rejects its pod where its account does not exist.
    """
    owner, settings = run.owner, run.settings
    longest = settings.active_deadline
    test = RestoreTestRequest(copy.kind, copy.name, owner.namespace, longest, plan.restore_test_class)
    pod = build_client_pod(
        names.RESTORE_TEST_ACCOUNT,
        test.argv,
        AgentImage.inherited(expose.template),
        container=names.MAINTENANCE_CONTAINER,
        placement=Placement(alternatives=settings.alternatives),
        tolerations=settings.tolerations,
    )
    # The end of the log is the cause where the command could not write one.
    pod["containers"][0]["terminationMessagePolicy"] = "FallbackToLogsOnError"
    if settings.priority_class_name:
        pod["priorityClassName"] = settings.priority_class_name
    labels = {key: value for key, value in settings.labels.items() if not is_reserved_label(key)}
    inherited = {"labels": labels, "annotations": {**WITHOUT_SIDECAR, **settings.annotations}}
    named = {
        "name": run.name,
        "namespace": owner.namespace,
        "labels": {names.VERIFIED_REPOSITORY_LABEL: owner.uid},
        "annotations": {names.RESTORE_TEST_ANNOTATION: copy.claim},
    }
    spec = {
        "backoffLimit": 0,
        # After a restore that failed, the snapshot is read.
        "activeDeadlineSeconds": int((2 * longest + _CLEANUP).total_seconds()),
        "ttlSecondsAfterFinished": _KEPT_SECONDS,
        "template": {"metadata": inherited, "spec": pod},
    }
    return JOBS.build(named, spec=spec)
