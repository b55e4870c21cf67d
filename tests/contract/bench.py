"""The fixture of the contract tests: a server, a namespace, a watch read step by step."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from core.clock import SystemClock
from core.kube.client import KubeClient, Selection
from core.kube.resources import CONFIG_MAPS, DATA_UPLOADS, Resource
from core.kube.transport import Request, Retry, Transport
from core.kube.watch import ChangeKind, WatchChange, watch_objects
from tests.support.objects import JsonDict

TIMEOUT_SECONDS = 10.0
HOLD = "test.nodeagent.io/hold"


@dataclass
class Bench:
    """A server behind the project's own client, and a namespace for one test."""

    transport: Transport
    namespace: str

    @property
    def client(self) -> KubeClient:
        """A client without retries."""
        return KubeClient(self.transport, Retry(SystemClock(), attempts=1))

    async def config_map(self, name: str, **metadata: Any) -> JsonDict:
        """Create a ConfigMap."""
        return await self.client.create(CONFIG_MAPS, self.build_config_map(name, **metadata))

    def build_config_map(self, name: str, **metadata: Any) -> JsonDict:
        meta = {"namespace": self.namespace, "name": name} | metadata
        return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": {"key": "value"}}

    def build_pod(self, name: str, *, node: str = "") -> JsonDict:
        """Return a pod without a kubelet."""
        spec: JsonDict = {"containers": [{"name": "c", "image": "none"}]}
        meta = {"namespace": self.namespace, "name": name}
        if node:
            spec["nodeName"] = node
        return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}

    def build_claim(self, name: str) -> JsonDict:
        """Return a PVC without a provisioner."""
        spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Mi"}}}
        meta = {"namespace": self.namespace, "name": name}
        return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": meta, "spec": spec}

    async def upload(self, name: str, **metadata: Any) -> JsonDict:
        """Create a DataUpload."""
        return await self.client.create(DATA_UPLOADS, build_upload(self.namespace, name, **metadata))

    async def patch(self, resource: Resource, name: str, patch: JsonDict) -> JsonDict:
        return await self.client.patch(resource, self.namespace, name, patch)

    def selection(self, resource: Resource = CONFIG_MAPS, **selectors: str) -> Selection:
        """The test's own objects."""
        return Selection(resource, self.namespace, **selectors)

    @asynccontextmanager
    async def watch(self, selection: Selection) -> AsyncIterator["Watching"]:
        """Watch a selection; on entering, the list is complete."""
        async with aclosing(watch_objects(self.client, selection, clock=SystemClock())) as changes:
            watching = Watching(changes)
            while (await watching.next()).kind is not ChangeKind.LISTED:
                pass
            yield watching

    def stream(self, resource: Resource, **query: str) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Open a raw watch."""
        path = resource.path(self.namespace)
        return self.transport.stream(Request("GET", path, {"watch": "true", **query}, timeout_seconds=TIMEOUT_SECONDS))


@dataclass
class Watching:
    """A watch that is read one change at a time."""

    changes: AsyncIterator[WatchChange]

    async def next(self) -> WatchChange:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            return await anext(self.changes)

    async def next_name(self) -> tuple[str, str]:
        change = await self.next()
        return str(change.kind), change.obj["metadata"]["name"]


def build_upload(namespace: str, name: str, **metadata: Any) -> JsonDict:
    spec = {
        "snapshotType": "CSI",
        "sourcePVC": "data",
        "sourceNamespace": "shop",
        "backupStorageLocation": "default",
        "operationTimeout": "10m0s",
    }
    meta = {"namespace": namespace, "name": name} | metadata
    return {"apiVersion": "velero.io/v2alpha1", "kind": "DataUpload", "metadata": meta, "spec": spec}
