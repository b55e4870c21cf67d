"""Measures how soon watches notice that every packet of their connection is dropped.

Runs in a network namespace of its own, with its own API server: `unshare --net python -m
tests.integration.dropped_flow`. A proxy would not do in place of dropped packets, as its kernel goes on
answering keepalives. Prints a JSON object: for agent and mover, after how many seconds the watch yielded
a change that was made once the packets were dropped (null: never); `keepalive` says which connections had it.
"""

import asyncio
import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import aclosing
from pathlib import Path
from urllib.parse import urlsplit

from core.clock import SystemClock
from core.kube.client import KubeClient, Selection
from core.kube.resources import CONFIG_MAPS
from core.kube.transport import KEEPALIVE_OPTIONS, Retry, Transport
from core.kube.watch import ChangeKind, watch_objects
from datamover.pod.api_transport import PodTransport, pod_transport
from nodeagent.runtime.transport import load_transport
from tests.support.apiserver import ApiServer, run_apiserver
from tests.support.sockets import connections_to

_LIMIT_SECONDS = 300.0
_BEFORE, _AFTER = "made-before", "made-since"


class _Watcher:
    """Follows the ConfigMaps of a namespace, and remembers when it saw each one."""

    def __init__(self, transport: Transport, namespace: str) -> None:
        self.listed = asyncio.Event()
        self.seen_at: dict[str, float] = {}
        self._transport = transport
        self._selection = Selection(CONFIG_MAPS, namespace)

    async def run(self) -> None:
        """Return once it has seen the change that is made last."""
        clock = SystemClock()
        client = KubeClient(self._transport, Retry(clock))
        async with aclosing(watch_objects(client, self._selection, clock=clock)) as changes:
            async for change in changes:
                if change.kind is ChangeKind.LISTED:
                    self.listed.set()
                elif change.kind is ChangeKind.ADDED:
                    self.seen_at[change.obj["metadata"]["name"]] = time.monotonic()
                    if _AFTER in self.seen_at:
                        return


def _transport_of(server: ApiServer, folder: Path) -> PodTransport:
    """Reach the server as from a pod, with the files that the kubelet mounts."""
    shutil.copy(server.ca, folder / "ca.crt")
    (folder / "token").write_text(server.token)
    address = urlsplit(server.url)
    environment = {"KUBERNETES_SERVICE_HOST": str(address.hostname), "KUBERNETES_SERVICE_PORT": str(address.port)}
    return pod_transport(environment, SystemClock(), folder)


async def _measure(server: ApiServer, folder: Path) -> Mapping[str, object]:
    namespace, port = server.create_namespace(), int(urlsplit(server.url).port or 0)
    agent, _ = await load_transport(str(server.kubeconfig))
    transports: dict[str, Transport] = {"agent": agent, "mover": _transport_of(server, folder)}
    watchers = {name: _Watcher(transport, namespace) for name, transport in transports.items()}
    tasks = [asyncio.create_task(watcher.run(), name=name) for name, watcher in watchers.items()]
    for watcher in watchers.values():
        await watcher.listed.wait()
    await _create(server, namespace, _BEFORE)
    while not all(_BEFORE in watcher.seen_at for watcher in watchers.values()):
        await asyncio.sleep(0.05)
    server.api.close()  # its packets are not to be dropped
    flows = _established(port)
    for local in flows:
        await _drop(("--sport", local, "--dport", port))
        await _drop(("--sport", port, "--dport", local))
    dropped_at = time.monotonic()
    await _create(server, namespace, _AFTER)
    await asyncio.wait(tasks, timeout=_LIMIT_SECONDS)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for transport in transports.values():
        await transport.close()
    seen = {name: watcher.seen_at.get(_AFTER) for name, watcher in watchers.items()}
    seconds = {name: None if at is None else round(at - dropped_at, 1) for name, at in seen.items()}
    return seconds | {"keepalive": list(flows.values())}


async def _create(server: ApiServer, namespace: str, name: str) -> None:
    await asyncio.to_thread(server.api.create, CONFIG_MAPS, {"metadata": {"namespace": namespace, "name": name}})


async def _drop(ports: tuple[str, int, str, int]) -> None:
    rule = ["iptables", "-A", "INPUT", "-p", "tcp", *map(str, ports), "-j", "DROP"]
    await asyncio.to_thread(subprocess.run, rule, check=True)


def _established(port: int) -> Mapping[int, bool]:
    """Return each connection to the server by its local port, and whether it has keepalive."""
    flows = {}
    for connection in connections_to(port):
        with contextlib.closing(connection):
            options = {option: connection.getsockopt(*option) for option in KEEPALIVE_OPTIONS}
            flows[connection.getsockname()[1]] = options == KEEPALIVE_OPTIONS
    return flows


def _main() -> None:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    with run_apiserver() as server, tempfile.TemporaryDirectory() as folder:
        json.dump(asyncio.run(_measure(server, Path(folder))), sys.stdout)


if __name__ == "__main__":
    _main()
