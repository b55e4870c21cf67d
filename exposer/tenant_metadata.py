"""Annotations and labels of tenants' objects, and which of them an expose copies onto its own.

CSI drivers and operators act on some of them with the permissions of the agent's namespace: they clone
a PVC of the same namespace, or fetch data from an address. Those are left out, by prefix. What shapes a
volume is copied. Does no I/O.
Source: NetApp Trident, "Import volumes" (docs.netapp.com, trident-use/vol-import); the annotations that
Containerized Data Importer documents for PVCs.
"""

import logging
from collections.abc import Iterable
from typing import Final

from core.kube.types import Object
from core.models.names import EXCLUSIONS_ANNOTATION

__all__ = ["DEFAULT_EXCLUDED", "copy_annotations", "copy_labels", "read_exclusions"]

_log = logging.getLogger(__name__)

DEFAULT_EXCLUDED: Final = (
    "trident.netapp.io/cloneFrom",
    "trident.netapp.io/import",
    "trident.netapp.io/notManaged",
    "trident.netapp.io/shareFrom",
    "cdi.kubevirt.io/",
    "k8s.io/Clone",
    "argocd.argoproj.io/",
    "meta.helm.sh/",
    "kubectl.kubernetes.io/",
    "nodeagent.io/",
)
"""How the keys begin that are left out unless the configuration replaces the list.

The last four name who manages the tenant's object, which is not true of a copy.
"""


def read_exclusions(claim: Object | None) -> str:
    """Return what a tenant wants to leave out of the backups of a PVC, which counts only where that is allowed."""
    annotations = (claim["metadata"].get("annotations") or {}) if claim is not None else {}
    return annotations.get(EXCLUSIONS_ANNOTATION, "")


def copy_annotations(obj: Object, excluded: Iterable[str]) -> dict[str, str]:
    """Return the annotations of a tenant's `obj` whose keys begin with none of `excluded`."""
    return _copy(obj, "annotations", obj["metadata"].get("annotations") or {}, excluded=excluded)


def copy_labels(obj: Object, excluded: Iterable[str]) -> dict[str, str]:
    """Return the labels of a tenant's `obj` whose keys begin with none of `excluded`."""
    return _copy(obj, "labels", obj["metadata"].get("labels") or {}, excluded=excluded)


def _copy(obj: Object, field: str, found: dict[str, str], *, excluded: Iterable[str]) -> dict[str, str]:
    prefixes = tuple(excluded)
    copied = {key: value for key, value in found.items() if not key.startswith(prefixes)}
    if left_out := sorted(found.keys() - copied.keys()):
        meta = obj["metadata"]
        place = f"{obj.get('kind', '')} {meta.get('namespace', '')}/{meta['name']}"
        _log.debug("did not copy %s of %s: %s", field, place, ", ".join(left_out))
    return copied
