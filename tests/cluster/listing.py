"""A list of all there is, to tell what a load has left behind.

Knows that other tests run beside: what belongs to their namespaces is left out. Does not know
what a load may leave.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.bed.api import Resource

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.bed.api import Api, Json
    from tests.cluster.conftest import Bed

__all__ = ["everything"]

_PASSING = {"events", "leases", "componentstatuses"}


def everything(bed: Bed, *namespaces: str) -> set[str]:
    """Every object in some namespaces, and every one in none, as `kind/name`.

    Left out are Events and Leases, and of those in none other namespaces and what is bound to one.
    """
    found = set()
    for kind, resource in _kinds(bed.api):
        for item in bed.api.objects(resource):
            meta = item["metadata"]
            if resource.namespaced and meta["namespace"] in namespaces:
                found.add(f"{meta['namespace']} {kind}/{meta['name']}")
            elif not resource.namespaced and _belongs(resource, item) in {"", *namespaces}:
                found.add(f"{kind}/{meta['name']}")
    return found


def _belongs(resource: Resource, item: Json) -> str:
    """The namespace that an object in none belongs to; empty: to none."""
    if resource.plural == "namespaces":
        return str(item["metadata"]["name"])
    spec = item.get("spec", {})
    claimed = spec.get("claimRef") or spec.get("volumeSnapshotRef") or {}
    return str(claimed.get("namespace", ""))


def _kinds(api: Api) -> Iterator[tuple[str, Resource]]:
    """Each kind that can be listed, in one of its versions: as kubectl names it, and where it is found.

    Source: https://kubernetes.io/docs/concepts/overview/kubernetes-api/#discovery-api
    """
    prefixes = [("", "/api/v1")]
    for group in api.request("GET", "/apis")["groups"]:
        prefixes += [(f".{group['name']}", f"/apis/{version['groupVersion']}") for version in group["versions"]]
    seen = set(_PASSING)
    for suffix, prefix in prefixes:
        for each in api.request("GET", prefix)["resources"]:
            name = f"{each['name']}{suffix}"
            if "list" in each["verbs"] and seen.isdisjoint({name, each["name"]}):
                seen.add(name)
                yield f"{each['kind'].lower()}{suffix}", Resource(prefix, each["name"], namespaced=each["namespaced"])
