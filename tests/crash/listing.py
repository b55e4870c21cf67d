"""Everything that an API server holds, of every kind that it can list."""

import asyncio
from collections import Counter

from tests.testbed.api import Api

_PASSING = {"events", "leases"}
"""Kinds whose objects come and go in every run."""

Listing = dict[str, Counter[str]]
"""By namespace, each object as `plural name`; what has none is under the namespace that it refers to."""


async def list_everything(api: Api) -> Listing:
    """Return all objects there are; a UID in a volume's name is left out."""
    return await asyncio.to_thread(_list, api)


def _list(api: Api) -> Listing:
    found: Listing = {}
    for resource in api.served():
        for obj in api.objects(resource) if resource.plural not in _PASSING else ():
            metadata, spec = obj["metadata"], obj.get("spec") or {}
            reference = spec.get("claimRef") or spec.get("volumeSnapshotRef") or {}
            namespace = metadata.get("namespace") or reference.get("namespace", "")
            name = "pvc-*" if resource.plural == "persistentvolumes" else metadata["name"]
            found.setdefault(namespace, Counter())[f"{resource.plural} {name}"] += 1
    return found
