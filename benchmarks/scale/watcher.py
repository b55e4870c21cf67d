"""`python -m benchmarks.scale.watcher`: sees every version of every transfer, and of their limits.

A process of its own, with a client of its own: nothing of the product sees for it. Knows how
to miss nothing, or to report it. Does not judge (`benchmarks.scale.judge`).
"""

import argparse
import sys
import threading
import time
from pathlib import Path
from queue import SimpleQueue
from typing import Final

from benchmarks.scale.history import LimitChange, Sight, sight_of_limits, sight_of_transfer, to_line
from core.kube.resources import CONFIG_MAPS, TRANSFERS, Resource
from tests.testbed.api import Api, Json

READY: Final = "ready"
"""What is printed once nothing is missed from then on."""

_WATCH_SECONDS: Final = 7200


class _Watcher:
    """Watches on threads of its own; what they see, and the error that ends one, is put into one queue."""

    def __init__(self, api: Api, namespace: str, config_map: str) -> None:
        self._api = api
        self._namespace = namespace
        self._config_map = config_map
        self.seen: SimpleQueue[Sight | LimitChange | str] = SimpleQueue()

    def start(self) -> None:
        """List, then watch from there on."""
        for resource in (*TRANSFERS, CONFIG_MAPS):
            objects, version = self._api.snapshot(resource)
            for obj in objects:
                self._take(resource, {"type": "ADDED", "object": obj})
            threading.Thread(target=self._watch, args=(resource, version), daemon=True).start()

    def _watch(self, resource: Resource, version: str) -> None:
        try:
            name = self._config_map if resource is CONFIG_MAPS else ""
            while True:
                # The server ends a watch that cannot keep up with it; nothing is missed from its last version on.
                for event in self._api.watch(resource, version, name=name, seconds=_WATCH_SECONDS):
                    if event["type"] == "ERROR":
                        raise OSError(event["object"].get("message", "the watch was rejected"))  # noqa: TRY301 - reported below
                    version = event["object"]["metadata"]["resourceVersion"]
                    self._take(resource, event)
        except Exception as e:  # noqa: BLE001 - the main thread ends with it
            self.seen.put(f"the watch of {resource.plural} broke: {e}")

    def _take(self, resource: Resource, event: Json) -> None:
        meta = event["object"]["metadata"]
        if meta["namespace"] != self._namespace:
            return
        if resource is not CONFIG_MAPS:
            self.seen.put(sight_of_transfer(event, seen_at=time.time()))
        elif meta["name"] == self._config_map and event["type"] != "DELETED":
            self.seen.put(sight_of_limits(event["object"]))


def main() -> int:
    """Write down what is seen until killed; return 1 once something may have been missed."""
    parser = argparse.ArgumentParser(prog="watcher")
    parser.add_argument("--kubeconfig", type=Path, required=True)
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--config-map", required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    watcher = _Watcher(Api(arguments.kubeconfig), arguments.namespace, arguments.config_map)
    with arguments.out.open("a", buffering=1) as out:
        watcher.start()
        sys.stdout.write(f"{READY}\n")
        sys.stdout.flush()
        while True:
            seen = watcher.seen.get()
            if isinstance(seen, str):
                sys.stderr.write(f"{seen}\n")
                return 1
            out.write(to_line(seen))


if __name__ == "__main__":
    sys.exit(main())
