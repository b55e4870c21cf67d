"""What is said and counted about a load that comes to its end.

Knows the words and the counts that all endings share. Does not know why a load ends, nor writes
anything on it (`nodeagent.status`).
"""

from core.models.phases import Phase
from core.models.transfers import Load
from nodeagent.kinds.base import Kind
from nodeagent.runtime.metrics import Metrics
from nodeagent.story import Story

__all__ = ["tell_end", "who_stops"]


def who_stops(cr: Load) -> str:
    """Return in words who wants the load to end."""
    return "cancel was asked for by spec.cancel" if cr.spec.cancel else "the custom resource is being deleted"


async def tell_end(kind: Kind, stored: Load, *, metrics: Metrics, story: Story) -> None:
    """Count and tell the end of a load, `stored` as its final status left it."""
    phase = stored.phase
    metrics.load_finished(kind.name, phase)
    kind.count(stored, metrics)
    words = stored.status.message or "the data is where it belongs"
    await story.tell(stored, str(phase), words, warning=phase is Phase.FAILED)
