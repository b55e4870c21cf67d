"""What else a cluster has, over a real API server: storage, scheduler, kubelet and movers.

The rules are those of the fake's cluster (`tests.nodeagent.support.simulation`). Here is how
their reads and writes look to a real API server, and what it leaves to controllers beyond
them: finalizers that protect claims and volumes, pods that a kubelet releases.
"""

import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress

from core.kube.client import KubeClient, Selection
from core.kube.errors import AlreadyExistsError, raise_for_status
from core.kube.resources import PERSISTENT_VOLUME_CLAIMS, PERSISTENT_VOLUMES, PODS, Resource
from core.kube.transport import MERGE_PATCH, Request
from tests.nodeagent.support.simulation import Controllers, Mover
from tests.support.deletion import force_delete
from tests.support.objects import JsonDict

_TICK_SECONDS = 0.2
_MOVE_SECONDS = 0.3


class RealCluster(Controllers):
    """The controllers of all worlds of an API server; `run` them beside the agents.

    In the namespaces `not_starting` no pod starts, in those `not_ending` no data mover ends. The data movers of the
    first `interrupted` attempts are killed.
    """

    def __init__(self, client: KubeClient, *, interrupted: int = 0) -> None:
        super().__init__(client, Mover(seconds=_MOVE_SECONDS, interrupted=interrupted), tick_seconds=_TICK_SECONDS)
        self.not_starting: set[str] = set()
        self.not_ending: set[str] = set()
        self._seen: dict[Resource, list[JsonDict]] = {}

    def _rules(self) -> Iterator[Callable[[], Awaitable[None]]]:
        for rule in (*super()._rules(), self._release):
            self._seen.clear()
            yield rule

    async def _release(self) -> None:
        """Delete what is being deleted and no longer in use."""
        pods = await self._all(PODS)
        for pod in pods:
            if "deletionTimestamp" in pod["metadata"]:
                meta = pod["metadata"]
                await force_delete(self.client, PODS, meta["namespace"], meta["name"], uid=meta["uid"])
        used = {
            (pod["metadata"]["namespace"], volume["persistentVolumeClaim"]["claimName"])
            for pod in pods
            for volume in pod["spec"].get("volumes") or []
            if "persistentVolumeClaim" in volume
        }
        for claim in await self._all(PERSISTENT_VOLUME_CLAIMS):
            if (claim["metadata"]["namespace"], claim["metadata"]["name"]) not in used:
                await self._drop_finalizers(PERSISTENT_VOLUME_CLAIMS, claim)
        for volume in await self._all(PERSISTENT_VOLUMES):
            await self._drop_finalizers(PERSISTENT_VOLUMES, volume)

    async def _drop_finalizers(self, resource: Resource, obj: JsonDict) -> None:
        if "deletionTimestamp" in obj["metadata"]:
            await self._patch(resource, obj, {"metadata": {"finalizers": None}})

    # -- how objects are read and written ------------------------------------------------------

    async def _all(self, resource: Resource) -> list[JsonDict]:
        if resource not in self._seen:
            self._seen[resource] = await self.client.list(Selection(resource))
        return self._seen[resource]

    async def _create(self, resource: Resource, obj: JsonDict, status: JsonDict | None = None) -> None:
        # Something may have been created between the steps of the last pass.
        with suppress(AlreadyExistsError):
            await self.client.create(resource, obj)
        if status:
            await self._set_status(resource, obj, status)

    async def _move_data(self, pod: JsonDict) -> None:
        if pod["metadata"]["namespace"] not in self.not_ending:
            await super()._move_data(pod)

    async def _start(self, pod: JsonDict) -> None:
        meta = pod["metadata"]
        if meta["namespace"] in self.not_starting:
            return
        if not pod["spec"].get("nodeName"):
            target = {"apiVersion": "v1", "kind": "Node", "name": self.node}
            binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": meta["name"]}, "target": target}
            path = PODS.path(meta["namespace"], meta["name"], subresource="binding")
            answer = await self.client.transport.request(Request("POST", path, body=json.dumps(binding).encode()))
            raise_for_status(answer.status, answer.body, attempted=f"binding of pod {meta['name']}")
        await self._set_status(PODS, pod, {"phase": "Running"})

    async def _set_status(self, resource: Resource, obj: JsonDict, status: JsonDict) -> None:
        await set_status(self.client, resource, obj, status)


async def set_status(client: KubeClient, resource: Resource, obj: JsonDict, status: JsonDict) -> None:
    """Write an object's status, as its controller does.

    Raises:
        NotFoundError: It does not exist.
    """
    meta = obj["metadata"]
    path = resource.path(meta.get("namespace", ""), meta["name"], subresource="status")
    body = json.dumps({"status": status}).encode()
    answer = await client.transport.request(Request("PATCH", path, body=body, content_type=MERGE_PATCH))
    raise_for_status(answer.status, answer.body, attempted=f"status of {resource.kind} {meta['name']}")
