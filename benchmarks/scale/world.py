"""`python -m benchmarks.scale.world`: storage, scheduler, kubelets and movers for one namespace, simulated.

Knows how the objects of a transfer are seen. Does not know what is done about them
(`benchmarks.scale.rules`).
"""

import argparse
import asyncio
import sys
from collections import Counter
from pathlib import Path

from benchmarks.scale.kubelet import KubeletAddress, PodDirectories, serve_logs
from benchmarks.scale.process import build_parser, report_ready, run_process
from benchmarks.scale.rules import Rules, Seen, Shape, volume_name
from benchmarks.scale.stage import open_client
from core.clock import SystemClock
from core.kube.client import KubeClient, Selection
from core.kube.resources import PERSISTENT_VOLUME_CLAIMS, PERSISTENT_VOLUMES, PODS, VOLUME_SNAPSHOTS
from core.models.names import OWNER_UID_LABEL
from nodeagent.runtime.informer import Informer
from nodeagent.runtime.workqueue import WorkQueue
from tests.nodeagent.support.simulation import TRANSFER_RESOURCES
from tests.support.objects import JsonDict

_WORKERS = 48


class World:
    """Sees all objects of the transfers of one namespace, and reconciles a transfer whenever one changed."""

    def __init__(self, client: KubeClient, namespace: str, shape: Shape, directories: PodDirectories) -> None:
        clock = SystemClock()
        self._client = client
        self._clock = clock
        self._namespace = namespace
        self._queue: WorkQueue[str] = WorkQueue(clock, name="world", workers=_WORKERS)
        self._rules = Rules(client, clock, namespace, shape, directories, self._count_pods)
        self._targets: dict[str, JsonDict] = {}
        self._transfers = [self._follow(Selection(resource, namespace)) for resource in TRANSFER_RESOURCES.values()]
        self._pods = self._follow(Selection(PODS, namespace, label_selector=OWNER_UID_LABEL))
        self._snapshots = self._follow(Selection(VOLUME_SNAPSHOTS, namespace))
        self._claims = self._follow(Selection(PERSISTENT_VOLUME_CLAIMS))
        self._volumes = self._follow(Selection(PERSISTENT_VOLUMES))

    async def run(self, ready: asyncio.Event) -> None:
        """Work until canceled; `ready` is set once nothing is missed any more."""
        informers = [*self._transfers, self._pods, self._snapshots, self._claims, self._volumes]
        async with asyncio.TaskGroup() as group:
            for informer in informers:
                group.create_task(informer.run(), name="world")
            for informer in informers:
                await informer.synced.wait()
            ready.set()
            await self._queue.run(lambda name: self._rules.reconcile(name, self._seen(name)))

    def _follow(self, selection: Selection) -> Informer[JsonDict]:
        return Informer(self._client, selection, clock=self._clock, trim=_trim, on_change=self._on_change)

    def _on_change(self, obj: JsonDict) -> None:
        meta = obj["metadata"]
        namespace, name = meta.get("namespace", ""), meta["name"]
        prefix = volume_name(self._namespace, "")
        if namespace == self._namespace:
            self._queue.add(name)
        elif namespace.startswith(self._namespace):
            self._targets[name] = obj
            self._queue.add(name)
        elif not namespace and name.startswith(prefix):
            self._queue.add(name.removeprefix(prefix))

    def _seen(self, name: str) -> Seen:
        own = self._namespace
        transfers = (informer.get(own, name) for informer in self._transfers)
        target = self._targets.get(name)
        return Seen(
            transfer=next((transfer for transfer in transfers if transfer is not None), None),
            pod=self._pods.get(own, name),
            claim=self._claims.get(own, name),
            target=target and self._claims.get(target["metadata"]["namespace"], name),
            volume=self._volumes.get("", volume_name(own, name)),
            snapshot=self._snapshots.get(own, name),
        )

    def _count_pods(self) -> Counter[str]:
        return Counter(pod["spec"].get("nodeName", "") for pod in self._pods.items())


def _trim(obj: JsonDict) -> JsonDict:
    """Return an object without the bookkeeping of its writers."""
    meta = {key: value for key, value in obj["metadata"].items() if key != "managedFields"}
    return obj | {"metadata": meta}


async def _run(arguments: argparse.Namespace) -> None:
    client = await open_client(arguments.kubeconfig)
    ready = asyncio.Event()
    kubelet = KubeletAddress(arguments.kubelet_port, arguments.certificate, arguments.key)
    shape = Shape(arguments.seconds, arguments.reports, tuple(arguments.node))
    try:
        async with serve_logs(kubelet), asyncio.TaskGroup() as group:
            world = World(client, arguments.namespace, shape, PodDirectories(arguments.pods))
            group.create_task(world.run(ready), name="world")
            await ready.wait()
            report_ready()
    finally:
        await client.transport.close()


def main() -> int:
    """Simulate until killed."""
    parser = build_parser("world")
    parser.add_argument("--kubelet-port", type=int, required=True)
    parser.add_argument("--certificate", type=Path, required=True)
    parser.add_argument("--key", type=Path, required=True)
    parser.add_argument("--pods", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--reports", type=int, default=1)
    return run_process(parser, _run)


if __name__ == "__main__":
    sys.exit(main())
