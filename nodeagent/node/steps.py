"""What all steps of a load's life share: their tools, its end, and telling why it waits.

Knows how a final status is written, and when a wait is news. Does not know
the steps (`nodeagent.node.reconciler` names the modules that do), nor when one is due.

What it means when the API server does not want an object of ours.

Knows which refusals heal (quota, a missing ServiceAccount, rights, a webhook that does not
answer) and which never will (validation, admission). Does not know the object.
"""

import logging
import math
import re
from collections.abc import Awaitable
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, TypeVar

from core.clock import Clock
from core.errors import ExposeError
from core.kube.client import KubeClient
from core.kube.errors import ForbiddenError, InvalidError, ServerError, UnreachableError
from core.logs import BoundLogger, bind
from core.models.phases import Phase
from core.models.reasons import PendingReason
from exposer.model import Pending
from nodeagent.node.lifecycle import Case, Site, Timeouts
from nodeagent.node.progress import ProgressFollower
from nodeagent.node.slots import Slots
from nodeagent.runtime.metrics import Metrics
from nodeagent.runtime.workqueue import Requeue
from nodeagent.transfers.events import EventLog, record_end
from nodeagent.transfers.mover_pod import MoverLogs
from nodeagent.transfers.pending import PendingRecords
from nodeagent.transfers.status import Change, StatusWriter

__all__ = ["StepBase", "Tools", "judge_refusal"]


_log = logging.getLogger(__name__)


_ADMISSION: Final = re.compile(
    r"admission webhook|denied (?:the )?request|violates PodSecurity|(?:maximum|minimum) \S+ usage"
)
"""Words of an admission check that judged the object itself.

Source: Kubernetes v1.34, pkg/admission (webhooks, ValidatingAdmissionPolicy, PodSecurity,
LimitRanger).
"""


_QUOTA: Final = "exceeded quota"
"""Source: Kubernetes v1.34, the ResourceQuota admission plugin."""


def judge_refusal(error: ForbiddenError | InvalidError | ServerError) -> Pending:
    """Return what is waited for after `error`.

    Raises:
        ExposeError: the object was judged and refused; trying again changes nothing.
    """
    text = str(error)
    if isinstance(error, ServerError):
        return Pending(PendingReason.API_SERVER_ERROR, text, blocked=True)
    if isinstance(error, InvalidError) or _ADMISSION.search(text):
        raise ExposeError(text) from error
    return Pending(PendingReason.QUOTA_EXCEEDED if _QUOTA in text else PendingReason.FORBIDDEN, text, blocked=True)


_VOLUME_LOOK_SECONDS: Final = 8.0
"""How often a volume that may go away is looked at while its mover waits for a slot."""


_R = TypeVar("_R")


@dataclass(frozen=True)
class Tools:
    """What the steps are carried out with."""

    client: KubeClient
    clock: Clock
    status: StatusWriter
    events: EventLog
    logs: MoverLogs
    progress: ProgressFollower
    slots: Slots
    metrics: Metrics


class StepBase:
    """The common part of the modules that carry out steps."""

    def __init__(self, tools: Tools, site: Site, limits: Timeouts, *, waits: PendingRecords) -> None:
        """Work with `tools` for the agent of `site`; all steps share `waits`."""
        self._tools = tools
        self._site = site
        self._limits = limits
        self._waits = waits

    async def _end(self, case: Case, phase: Phase, message: str) -> Requeue | None:
        """Write the final status in one patch, then tell and count it."""
        tools, kind = self._tools, case.kind
        status: dict[str, object] = {"message": message} if message else {}
        if phase is Phase.COMPLETED and case.outcome is not None:
            status |= kind.final_status(case.outcome)
            tools.progress.finish(kind.name, case.cr.uid, case.outcome.total_bytes)
        stored = await tools.status.move(kind, case.cr, phase, Change(status=status))
        tools.slots.forget(stored.uid)
        self._waits.forget(stored.uid)
        await record_end(kind, stored, metrics=tools.metrics, events=tools.events)
        return None

    def _operation_span(self, case: Case) -> timedelta:
        """Return how long one operation on the cluster may take for this load: it may say so itself.

        Source: Velero v1.18, pkg/exposer (Expose and RebindVolume get `spec.operationTimeout`).
        """
        return case.cr.operation_timeout or self._limits.resource

    async def _judged(self, step: Awaitable[_R]) -> _R | Pending:
        """Return what `step` returns, or what is waited for because the API server did not want something.

        Raises:
            ExposeError: it never will.
            UnreachableError: nobody answered, nor could anybody be told.
        """
        try:
            return await step
        except UnreachableError:
            raise
        except (ForbiddenError, InvalidError, ServerError) as e:
            return judge_refusal(e)

    async def _tell_wait(self, case: Case, waiting: Pending) -> None:
        """Write why the load waits where that is news."""
        tools, cr = self._tools, case.cr
        telling = self._waits.decide_report(cr.uid, waiting)
        if not telling.message:
            return
        # After a restart the status may have it already.
        if cr.status.message != waiting.message:
            await tools.status.report(case.kind, cr, message=waiting.message, reason=waiting.reason)
            if telling.event:
                await tools.events.record(cr, waiting.reason, waiting.message, warning=waiting.blocked)
        self._waits.mark_reported(cr.uid, waiting)

    def _slot_wait(self) -> Pending:
        """Return what a load waits for whose mover is ready and has no slot."""
        message = f"waiting for a free slot on node {self._site.node} (loadConcurrency {self._tools.slots.limit})"
        return Pending(PendingReason.WAITING_FOR_SLOT, message)

    def _rest_until_slot(self, case: Case) -> None:
        """Note that a load which was told to wait for a slot needs no look before it is its turn.

        Freeing a slot wakes the next in line; but a volume that others have may go away.
        """
        self._waits.pause_checks(case.cr.uid, _VOLUME_LOOK_SECONDS if case.kind.bound_to_node else math.inf)

    async def _stop_waiting(self, case: Case) -> None:
        """Take back what was said about a wait that is over."""
        self._waits.forget(case.cr.uid)
        if case.cr.status.message:
            await self._tools.status.report(case.kind, case.cr, message="")

    def _logger(self, case: Case) -> BoundLogger:
        cr = case.cr
        return bind(
            _log,
            kind=case.kind.name,
            namespace=cr.metadata.namespace,
            name=cr.name,
            uid=cr.uid,
            phase=str(cr.phase),
            node=self._site.node,
        )
