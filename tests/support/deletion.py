"""Deletion without a grace period, as a kubelet finishes the deletion of a pod.

The product forces only that of a pod that reads: another may still write on a node that is out of reach.
"""

import json
from contextlib import suppress

from core.clock import SystemClock
from core.kube.client import KubeClient
from core.kube.errors import ConflictError, NotFoundError, raise_for_status
from core.kube.resources import Resource
from core.kube.transport import Request, Retry
from tests.support.objects import JsonDict


async def force_delete(client: KubeClient, resource: Resource, namespace: str, name: str, *, uid: str = "") -> None:
    """Delete the object with a grace period of 0 seconds, if it exists and, where given, has that `uid`."""
    options: JsonDict = {"gracePeriodSeconds": 0, "propagationPolicy": "Background"}
    if uid:
        options["preconditions"] = {"uid": uid}
    request = Request("DELETE", resource.path(namespace, name), body=json.dumps(options).encode())

    async def send() -> None:
        response = await client.transport.request(request)
        raise_for_status(response.status, response.body, attempted=f"delete {resource.kind} {namespace}/{name}")

    with suppress(ConflictError, NotFoundError):
        await Retry(SystemClock()).run(send)
