"""Creates pods, with the priority class they were given or, where that is gone, without.

Knows what the API server says of a class that does not exist. Does not know who chose it: a
class can be deleted between the choice and the creation, and no load may fail for that.
"""

import logging

from core.kube.client import KubeClient
from core.kube.errors import ForbiddenError
from core.kube.resources import PODS
from core.logs import fields
from core.models.base import JsonDict

__all__ = ["create_pod"]

_log = logging.getLogger(__name__)

_CLASS_IS_GONE = "no PriorityClass with name"
"""Source: Kubernetes v1.34, plugin/pkg/admission/priority/admission.go."""


async def create_pod(client: KubeClient, manifest: JsonDict) -> JsonDict:
    """Create the pod and return it as stored; without its priority class if that does not exist.

    Raises:
        AlreadyExistsError: one of that name exists.
        KubeError: any other refusal.
    """
    meta, spec = manifest["metadata"], manifest["spec"]
    priority_class = spec.get("priorityClassName", "")
    extra = fields(kind=PODS.kind, namespace=meta["namespace"], name=meta["name"])
    try:
        made = await client.create(PODS, manifest)
    except ForbiddenError as e:
        if not priority_class or _CLASS_IS_GONE not in str(e):
            raise
        _log.warning("priority class %s is gone, the pod is made without: %s", priority_class, e, extra=extra)
        left = {key: value for key, value in spec.items() if key != "priorityClassName"}
        return await client.create(PODS, manifest | {"spec": left})
    if priority_class:
        _log.debug("the pod has priority class %s", priority_class, extra=extra)
    return made
