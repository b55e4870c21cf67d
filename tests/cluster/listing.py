"""A list of all there is, to tell what a load has left behind.

Knows that other tests run beside: what carries a word of theirs is left out. Does not know
what a load may leave.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tests.testbed.api import Resource
from tests.testbed.demonstration.manifests import NAMESPACE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.conftest import Bed
    from tests.testbed.api import Api, Json

__all__ = ["everything"]

_PASSING = {"events", "leases", "componentstatuses"}

_WORDS = re.compile(r"\btest-[0-9a-f]{8}\b|\b(?:app|demo|example)\b")
"""What tests call their things by: namespaces of their own, the names of `examples/`, and the demonstration's."""


def everything(bed: Bed, *own: str) -> set[str]:
    """Every object of the agents' namespace, of some others, and of none, as `kind/name`.

    Left out are Events and Leases, and what other tests have: things of theirs carry a word of
    theirs, be it in their name, in a label, or in the name of the claim or snapshot they are for.

    Args:
        bed: Where to look.
        own: The caller's words, of which its namespace is one.
    """
    found = set()
    for kind, resource in _kinds(bed.api):
        for item in bed.api.objects(resource):
            meta = item["metadata"]
            if not _words(item) <= set(own):
                continue
            if not resource.namespaced:
                found.add(f"{kind}/{meta['name']}")
            elif meta["namespace"] in {NAMESPACE, *own}:
                found.add(f"{meta['namespace']} {kind}/{meta['name']}")
    return found


def _words(item: Json) -> set[str]:
    """The words of tests that an object carries."""
    meta, spec = item["metadata"], item.get("spec") or {}
    stands_for = spec.get("claimRef") or spec.get("volumeSnapshotRef") or {}
    labels = (meta.get("labels") or {}).values()
    said = [meta["name"], stands_for.get("namespace", ""), stands_for.get("name", ""), *labels]
    return {word for text in said for word in _WORDS.findall(text)}


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
