"""The check between the steps of an expose: is the load still ours to expose?

Knows what makes a load ours. Does not know what is exposed, nor what is undone.
"""

from collections.abc import Callable

from core.kube.client import KubeClient
from core.models.base import JsonDict
from core.models.names import NODE_LABEL
from core.models.phases import HOLDING_PHASES
from exposer.model import Guard, NotOwnerError
from nodeagent.view import Case, Site

__all__ = ["build_guard"]


def build_guard(client: KubeClient, case: Case, site: Site, *, current: Callable[[], JsonDict | None]) -> Guard:
    """Return the check that the load of `case` has not begun and has the label of `site`.

    `current` returns the load as last seen; None where that is not known, or older than what we wrote.
    """
    kind, cr = case.kind, case.cr
    place = f"{kind.name} {cr.metadata.namespace}/{cr.name}"

    async def guard(*, sure: bool) -> None:
        raw = None if sure else current()
        if raw is None:
            raw = await client.read(kind.resource, cr.metadata.namespace, cr.name)
        now = kind.parse(raw) if raw is not None else None
        if now is None or now.uid != cr.uid or now.phase.final:
            raise NotOwnerError(f"{place} ended meanwhile", ended=True)
        ours = now.metadata.labels.get(NODE_LABEL) == site.label
        if now.phase not in HOLDING_PHASES or not ours:
            raise NotOwnerError(f"{place} is another agent's by now, or further on", ended=False)

    return guard
