"""URL paths of objects and collections, from names that may come from a custom resource."""

import re
from typing import Final

from core.kube.errors import NotFoundError
from core.kube.resources import Resource

__all__ = ["collection_path", "object_path"]

_SEGMENT: Final = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._:-]+")
"""Superset of the valid names of objects and namespaces; excludes every special path segment.

Source: Kubernetes v1.34, apimachinery, pkg/api/validation/path and pkg/util/validation.
"""


def object_path(resource: Resource, namespace: str, name: str, *, attempted: str, subresource: str = "") -> str:
    """Return the URL path of one object, or of its subresource.

    A name from a custom resource may be any string: empty it would address the whole collection,
    with a slash a different object.

    Raises:
        NotFoundError: the name is invalid, so no such object can exist.
    """
    parts = (namespace, name) if resource.namespaced else (name,)
    if not all(_SEGMENT.fullmatch(part) for part in parts):
        raise NotFoundError(f"{attempted}: 404 NotFound: invalid name", status=404, reason="NotFound")
    return resource.path(namespace, name, subresource=subresource)


def collection_path(resource: Resource, namespace: str, *, attempted: str) -> str:
    """Return the URL path of a collection.

    Raises:
        NotFoundError: the namespace, which may come from a custom resource, is invalid: there is none of that name.
    """
    if namespace and not _SEGMENT.fullmatch(namespace):
        raise NotFoundError(f"{attempted}: 404 NotFound: invalid namespace", status=404, reason="NotFound")
    return resource.path(namespace)
