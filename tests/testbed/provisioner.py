"""The test bed's provisioner and snapshotter: a controller of its own over the real API.

`python -m tests.testbed.provisioner --base FOLDER --node NAME`. It checks everything again
whenever anything changes, and once a second for what only time changes. It keeps no state
but the folders, so it may be ended and started again at any time.
"""

from __future__ import annotations

import argparse
import http.client
import logging
import subprocess
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tests.testbed.api import Api, ApiError
from tests.testbed.demonstration.user import PODS
from tests.testbed.layout import Layout
from tests.testbed.storage import objects
from tests.testbed.storage.attachments import Attachments
from tests.testbed.storage.cache import Cache
from tests.testbed.storage.claims import Claims
from tests.testbed.storage.contents import Contents
from tests.testbed.storage.disk import Disk
from tests.testbed.storage.events import Recorder
from tests.testbed.storage.jobs import Jobs
from tests.testbed.storage.snapshots import Snapshots

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.testbed.api import Json, Resource

__all__ = ["main"]

_KINDS = (
    objects.STORAGE_CLASSES,
    objects.SNAPSHOT_CLASSES,
    objects.CONFIG_MAPS,
    objects.CLAIMS,
    objects.VOLUMES,
    objects.CONTENTS,
    objects.SNAPSHOTS,
    objects.ATTACHMENTS,
    PODS,
)
_IDLE_SECONDS = 1.0
_STALE = (404, 409)
"""The cache was behind: the next pass will see something newer."""

_log = logging.getLogger("provisioner")


def main() -> None:
    """Run until the process is ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, required=True, help="folder of the bed")
    parser.add_argument("--node", required=True, help="node of volumes without a selected node")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    layout = Layout(arguments.base)
    api = Api(layout.kubeconfig)
    cache = Cache(api, _KINDS)
    disk, jobs = Disk(layout.volumes, layout.snapshots), Jobs(cache)
    claims = Claims(api, cache, disk, jobs, Recorder(api), arguments.node)
    attachments = Attachments(api, cache)
    snapshots, contents = Snapshots(api, cache), Contents(api, cache, disk, jobs)
    rounds: list[tuple[Resource, Callable[[Json], None]]] = [
        (objects.SNAPSHOTS, snapshots.reconcile),
        (objects.CONTENTS, contents.reconcile),
        (objects.CLAIMS, claims.reconcile_claim),
        (objects.VOLUMES, claims.reconcile_volume),
    ]
    while True:
        for resource, reconcile in rounds:
            for item in cache.all(resource):
                _attempt(partial(reconcile, item), f"{item['kind']} {_name(item)}")
        claims.drop_orphans()
        _attempt(attachments.reconcile, "VolumeAttachments")
        cache.wait(_IDLE_SECONDS)


def _name(item: Json) -> str:
    return f"{item['metadata'].get('namespace', '')}/{item['metadata']['name']}"


def _attempt(reconcile: Callable[[], None], name: str) -> None:
    try:
        reconcile()
    except ApiError as error:
        if error.status not in _STALE:
            _log.warning("%s: %s", name, error)
    except (OSError, http.client.HTTPException, subprocess.SubprocessError) as error:
        _log.warning("%s: %s", name, error)


if __name__ == "__main__":
    main()
