"""The agents' ConfigMap, edited as a user does it."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from core.kube.resources import CONFIG_MAPS, PODS
from tests.cluster.bed import Bed
from tests.support.objects import build_object
from tests.testbed.demonstration.manifests import NAMESPACE
from tests.testbed.install import AGENT_LABEL
from tests.testbed.processes import wait_for

ONE_SLOT = "bed-2"
"""The node for tests that need a node with one slot: transfers of other tests run elsewhere."""

_SLOTS = 16
_NAME, _KEY = "node-agent-config", "node-agent-config.json"
_DIGEST = "nodeagent.io/config"
"""The annotation on an agent's pod: the digest of its active configuration."""

_OWN_KEYS = "nodeagent.io"


def build_concurrency(*, one_slot: str = "") -> dict[str, Any]:
    """`loadConcurrency` with many slots on each node, but one slot on the node that is named."""
    selector = {"matchLabels": {"kubernetes.io/hostname": one_slot}}
    rules = [{"nodeSelector": selector, "number": 1}] if one_slot else []
    return {"globalConfig": _SLOTS, "perNodeConfig": rules}


@contextmanager
def configured(bed: Bed, **changes: Any) -> Iterator[None]:
    """Change some keys on every node while the context lasts."""
    before = change(bed, **changes)
    try:
        yield
    finally:
        activate(bed, before)


def change(bed: Bed, **changes: Any) -> str:
    """Change some keys on every node, and of those of `nodeagent.io` no others; return the document before.

    The other tests that run rely on the rest, as on the time between the attempts at a transfer.
    """
    before: str = (bed.api.get(CONFIG_MAPS, NAMESPACE, _NAME) or {})["data"][_KEY]
    document = json.loads(before)
    own = document.get(_OWN_KEYS, {}) | changes.get(_OWN_KEYS, {})
    activate(bed, json.dumps(document | changes | ({_OWN_KEYS: own} if own else {})))
    return before


def activate(bed: Bed, document: str) -> None:
    """Write the document; return once it is the active configuration of every agent."""
    bed.user.apply(build_object(CONFIG_MAPS, _NAME, NAMESPACE, data={_KEY: document}))
    wanted = hashlib.sha256(document.encode()).hexdigest()
    wait_for(
        lambda: f"the agents to use {wanted}: they use {_active_digests(bed)}",
        lambda: all(digest and wanted.startswith(digest) for digest in _active_digests(bed)),
    )


def _active_digests(bed: Bed) -> list[str]:
    agents = bed.api.objects(PODS, NAMESPACE, selector=AGENT_LABEL)
    return [(agent["metadata"].get("annotations") or {}).get(_DIGEST, "") for agent in agents]
