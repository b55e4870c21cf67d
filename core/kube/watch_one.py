"""Follows one object by its name.

Knows how a watch narrowed to a name tells that the object is, changed, or is not there. Does
not know what the object means.
Source: Kubernetes v1.34, API concepts: every resource can be selected by `metadata.name`.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from core.clock import Clock
from core.kube.client import KubeClient, Selection
from core.kube.resources import Resource
from core.kube.watch import ChangeKind, watch_objects
from core.models.base import JsonDict

__all__ = ["watch_one"]


async def watch_one(
    client: KubeClient, resource: Resource, namespace: str, *, name: str, clock: Clock
) -> AsyncGenerator[JsonDict | None, None]:
    """Yield the object as it is now, then after every change; None: it does not exist.

    The same state may come twice, after a watch had to begin anew. Close the generator
    (`contextlib.aclosing`) to end the watch at once.

    Raises:
        KubeError: the first list was refused for good. Later refusals, and a server that
            cannot be reached, are waited out.
    """
    selection = Selection(resource, namespace, field_selector=f"metadata.name={name}")
    listing, latest = False, None
    async with aclosing(watch_objects(client, selection, clock=clock)) as changes:
        async for change in changes:
            match change.kind:
                case ChangeKind.LISTING:
                    listing, latest = True, None
                case ChangeKind.LISTED:
                    listing = False
                case ChangeKind.DELETED:
                    latest = None
                case ChangeKind.ADDED | ChangeKind.MODIFIED:
                    latest = change.obj
            if not listing:
                yield latest
