"""Whether the priority class that is configured for mover pods can be used.

Knows how to ask the cluster. Does not know pods; they get the class as a parameter.
"""

import logging

from core.kube.client import KubeClient
from core.kube.errors import KubeError
from core.kube.resources import PRIORITY_CLASSES

__all__ = ["usable_priority_class"]

_log = logging.getLogger(__name__)


async def usable_priority_class(client: KubeClient, name: str) -> str:
    """Return `name` if the cluster has that PriorityClass, else an empty name: default priority.

    A pod with a class that does not exist would be refused, and a backup must not fail for that.
    """
    if not name:
        return ""
    try:
        found = await client.read(PRIORITY_CLASSES, "", name)
    except KubeError as e:
        _log.warning("priority class %s cannot be checked; data movers get the default priority: %s", name, e)
        return ""
    if found is None:
        _log.warning("priority class %s does not exist; data movers get the default priority", name)
        return ""
    _log.info("priority class %s exists; data movers get it (value %s)", name, found.get("value", 0))
    return name
