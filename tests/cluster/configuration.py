"""The agents' ConfigMap, edited as a user does it."""

from __future__ import annotations

import hashlib
import json
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tests.testbed.demonstration.manifests import NAMESPACE
from tests.testbed.demonstration.user import PODS
from tests.testbed.install import AGENT_LABEL
from tests.testbed.processes import BedError
from tests.testbed.storage.objects import CONFIG_MAPS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.conftest import Bed

__all__ = ["ONE_SLOT", "build_concurrency", "configured", "put_in_force"]

ONE_SLOT = "bed-2"
"""The node for tests that let a node carry out one load at a time: loads of others are elsewhere."""

_LOADS_AT_A_TIME = 16
_NAME, _KEY = "node-agent-config", "node-agent-config.json"
_IN_FORCE = "nodeagent.io/config"
"""The annotation on an agent's pod: the hash of what it has in force."""

_SECONDS = 120
_LOOK_SECONDS = 0.1


def build_concurrency(*, one_slot: str = "") -> dict[str, Any]:
    """`loadConcurrency` by which each node carries out many loads at a time, but for one, if that is named."""
    selector = {"matchLabels": {"kubernetes.io/hostname": one_slot}}
    rules = [{"nodeSelector": selector, "number": 1}] if one_slot else []
    return {"globalConfig": _LOADS_AT_A_TIME, "perNodeConfig": rules}


@contextmanager
def configured(bed: Bed, **changes: Any) -> Iterator[None]:
    """Have some keys in force on every node; behind it the configuration is as it was before.

    Raises:
        BedError: An agent does not follow.
    """
    before = (bed.api.get(CONFIG_MAPS, NAMESPACE, _NAME) or {})["data"][_KEY]
    put_in_force(bed, json.dumps(json.loads(before) | changes))
    try:
        yield
    finally:
        put_in_force(bed, before)


def put_in_force(bed: Bed, document: str) -> None:
    """Write the document; returns once every agent says that it has it in force.

    Raises:
        BedError: An agent does not follow.
    """
    metadata = {"namespace": NAMESPACE, "name": _NAME}
    bed.user.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {_KEY: document}})
    wanted = hashlib.sha256(document.encode()).hexdigest()
    deadline = time.monotonic() + _SECONDS
    while not all(told and wanted.startswith(told) for told in _told(bed)):
        if time.monotonic() > deadline:
            raise BedError(f"the agents have {_told(bed)} in force, and not {wanted}")
        time.sleep(_LOOK_SECONDS)


def _told(bed: Bed) -> list[str]:
    agents = bed.api.objects(PODS, NAMESPACE, selector=AGENT_LABEL)
    return [(agent["metadata"].get("annotations") or {}).get(_IN_FORCE, "") for agent in agents]
