"""Lists of objects: of all, to find those that a transfer leaves behind, and of an installation with their versions.

Leaves out what carries a name of other tests, which run at the same time. Does not know what
a transfer may leave.
"""

import re

from core.models.names import DELETIONS_CONFIGMAP, HISTORY_CONFIGMAPS
from tests.cluster.bed import Bed
from tests.testbed.api import Json
from tests.testbed.demonstration.manifests import NAMESPACE

_PASSING = {"events", "leases", "componentstatuses", "volumeattachments"}
"""What Kubernetes creates and deletes by itself. A volume that is left behind is listed without its attachment."""

_LASTING = {DELETIONS_CONFIGMAP, *HISTORY_CONFIGMAPS}
"""What the first deletion of a backup creates, and what stays: another test may be that one at any time."""

_NAMES = re.compile(r"\btest-[0-9a-f]{8}\b|\b(?:app|demo|example|first|nodeagent-(?:preflight|verify))\b")
"""Names of tests: namespaces of their own, the names of `examples/` and README.md, the demonstration's, and those of
preflight and verification."""


def everything(bed: Bed, *own: str) -> set[str]:
    """Every object of the agents' namespace, of some others, and of none, as `kind/name`.

    Left out are Events, Leases, VolumeAttachments, the record of deletions, and what belongs to other tests: it
    carries one of their names, be it in its name, in a label, in an argument, or in the name of its claim, its
    snapshot or its group of snapshots.

    Args:
        own: The caller's names, of which its namespace is one.
    """
    found = set()
    for resource in bed.api.served():
        if not _PASSING.isdisjoint({resource.plural, resource.full_name}):
            continue
        kind = resource.full_name.replace(resource.plural, resource.kind.lower())
        for item in bed.api.objects(resource):
            meta = item["metadata"]
            if meta["name"] in _LASTING or not _test_names(item) <= set(own):
                continue
            if not resource.namespaced:
                found.add(f"{kind}/{meta['name']}")
            elif meta["namespace"] in {NAMESPACE, *own}:
                found.add(f"{meta['namespace']} {kind}/{meta['name']}")
    return found


def applied_versions(bed: Bed, space: str) -> list[str]:
    """The resource versions of what an installation in `space` consists of, but its location, whose status changes.

    Of a DaemonSet, whose status changes too, it is the generation. Left out is what has no namespace and is of another
    installation: other tests install at the same time.
    """

    def get(kinds: str, field: str) -> list[str]:
        columns = f"custom-columns=K:.kind,N:.metadata.name,V:.metadata.{field}"
        chosen = ("-l", "app.kubernetes.io/part-of=node-agent", "--no-headers", "-o", columns)
        return bed.user.kubectl("get", kinds, "-n", space, *chosen).splitlines()

    own = get("serviceaccounts,roles,rolebindings,secrets", "resourceVersion") + get("daemonsets", "generation")
    common = get("clusterroles,clusterrolebindings,priorityclasses", "resourceVersion")
    return own + [line for line in common if space in line]


def _test_names(item: Json) -> set[str]:
    """The names of tests that an object carries."""
    meta, spec = item["metadata"], item.get("spec") or {}
    refs = ("claimRef", "volumeSnapshotRef", "volumeGroupSnapshotRef")
    bound_to: Json = next((spec[ref] for ref in refs if ref in spec), {})
    labels = (meta.get("labels") or {}).values()
    # The Job of a command is named after its location, which all tests share.
    pod = (spec.get("template") or {}).get("spec") or spec
    arguments = [one for container in pod.get("containers") or [] for one in container.get("args") or []]
    texts = [meta["name"], bound_to.get("namespace", ""), bound_to.get("name", ""), *labels, *arguments]
    return {name for text in texts for name in _NAMES.findall(text)}
