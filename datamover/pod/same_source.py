"""Whether a backup is the only one of its source: it may then continue from checkpoints of its own.

A checkpoint is known by the time at which its backup began, and another transfer's may have begun at the same time: it
may have ended since.
"""

import logging
from itertools import product

from core.errors import AgentError
from core.kube.client import KubeClient, Selection
from core.models.phases import Phase
from core.models.transfers import Transfer
from datamover.kinds import BackupPlan, MoverKind, plan_of
from datamover.kopia.snapshots import START_TOLERANCE

__all__ = ["backs_up_alone"]

_logger = logging.getLogger(__name__)

_RUNNING = frozenset({Phase.IN_PROGRESS, Phase.CANCELING})


async def backs_up_alone(client: KubeClient, kind: MoverKind, cr: Transfer, source: str) -> bool:
    """Return whether no other transfer of the kind backs up `source`; False if that cannot be found out.

    One counts if it moves data at present, or has ever begun a snapshot when an attempt of `cr` did.
    """
    try:
        async for page in client.pages(Selection(kind.resource, cr.metadata.namespace)):
            others = [other for raw in page.items if (other := kind.model.parse(raw)).uid != cr.uid]
            if page.malformed or any(_may_mix(other, cr, source) for other in others):
                return False
    except AgentError as e:
        _logger.warning("cannot list the transfers of the same source: %s", e)
        return False
    return True


def _may_mix(other: Transfer, cr: Transfer, source: str) -> bool:
    """Return whether checkpoints of `other` may count as those of `cr`, or the other way around."""
    pairs = product(other.attempts.starts, cr.attempts.starts)
    # What has ended may have left a checkpoint. Each of the two starts may differ from that of its checkpoint.
    if other.phase not in _RUNNING and not any(abs(one - own) <= 2 * START_TOLERANCE for one, own in pairs):
        return False
    plan = plan_of(other)
    return isinstance(plan, BackupPlan) and plan.source == source
