"""Everything that an API server holds, of every kind that it can list."""

import json
from collections import Counter

from core.kube.client import KubeClient, Selection
from core.kube.resources import Resource
from core.kube.transport import Request
from tests.support.objects import JsonDict

_PASSING = {"events", "leases"}
"""Kinds whose objects come and go in every run."""

Listing = dict[str, Counter[str]]
"""By namespace, each object as `plural name`; what has none is under the namespace that it refers to."""


async def list_everything(client: KubeClient) -> Listing:
    """Return all objects there are; a UID in a volume's name is left out."""
    found: Listing = {}
    for resource in await _resources(client):
        obj: JsonDict
        for obj in await client.list(Selection(resource)):
            metadata, spec = obj["metadata"], obj.get("spec") or {}
            reference = spec.get("claimRef") or spec.get("volumeSnapshotRef") or {}
            namespace = metadata.get("namespace") or reference.get("namespace", "")
            name = "pvc-*" if resource.plural == "persistentvolumes" else metadata["name"]
            found.setdefault(namespace, Counter())[f"{resource.plural} {name}"] += 1
    return found


async def _resources(client: KubeClient) -> list[Resource]:
    """Return every resource that can be listed, once; a group may have some in its older versions only."""
    groups = (await _get(client, "/apis"))["groups"]
    versions = [("", "v1"), *((group["name"], each["version"]) for group in groups for each in group["versions"])]
    found: dict[tuple[str, str], Resource] = {}
    for group, version in versions:
        path = f"/apis/{group}/{version}" if group else f"/api/{version}"
        for each in (await _get(client, path))["resources"]:
            if "list" in each["verbs"] and "/" not in each["name"] and each["name"] not in _PASSING:
                resource = Resource(each["kind"], each["name"], group, version, namespaced=each["namespaced"])
                found.setdefault((group, resource.plural), resource)
    return list(found.values())


async def _get(client: KubeClient, path: str) -> JsonDict:
    answer: JsonDict = json.loads((await client.transport.request(Request("GET", path))).body)
    return answer
