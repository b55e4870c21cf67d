"""Whether a backup is the only one of its source at present: it may then continue from checkpoints of its own.

A checkpoint is known by the time at which its backup began, and another transfer's may have begun at the same time.
"""

import logging

from core.errors import AgentError
from core.kube.client import KubeClient, Selection
from core.models.phases import Phase
from core.models.transfers import Transfer
from datamover.kinds import BackupPlan, TransferKind, plan_of

__all__ = ["backs_up_alone"]

_logger = logging.getLogger(__name__)

_RUNNING = frozenset({Phase.IN_PROGRESS, Phase.CANCELING})


async def backs_up_alone(client: KubeClient, kind: TransferKind, cr: Transfer, source: str) -> bool:
    """Return whether no other transfer of the kind backs up `source` at present; False if that cannot be found out."""
    try:
        async for page in client.pages(Selection(kind.resource, cr.metadata.namespace)):
            others = [other for raw in page.items if (other := kind.model.parse(raw)).uid != cr.uid]
            if page.malformed or any(_backs_up(other, source) for other in others):
                return False
    except AgentError as e:
        _logger.warning("cannot list the transfers of the same source: %s", e)
        return False
    return True


def _backs_up(other: Transfer, source: str) -> bool:
    plan = plan_of(other) if other.phase in _RUNNING else None
    return isinstance(plan, BackupPlan) and plan.source == source
