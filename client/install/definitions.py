"""Custom resource definitions: ours are applied, newer and other ones stay, all are waited for."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from core.clock import Clock, Deadline
from core.errors import AgentError
from core.kube.client import KubeClient
from core.kube.discovery import is_unserved
from core.kube.resources import CUSTOM_RESOURCE_DEFINITIONS, Resource
from core.kube.types import Manifest
from core.models.names import helm_release, is_ours

__all__ = ["DefinitionError", "Definitions", "find_lacking", "sort_definitions", "wait_definitions"]

_TIMEOUT: Final = timedelta(minutes=1)
"""An API server serves a definition within seconds."""

_POLL_SECONDS: Final = 0.2


class DefinitionError(AgentError):
    """A definition is not served: its names clash, or the API server is too slow."""


@dataclass(frozen=True)
class Definitions:
    """Which of our definitions are applied; of those that stay as they are, by their names, why."""

    applied: tuple[Manifest, ...]
    kept: dict[str, str]


async def sort_definitions(client: KubeClient, definitions: Sequence[Manifest]) -> Definitions:
    """Return which definitions do not exist yet or are ours and older, and why the others stay.

    Raises:
        DefinitionError: one is being deleted.
        KubeError: they cannot be read.
    """
    applied, kept = [], {}
    for definition in definitions:
        name = definition["metadata"]["name"]
        found = await client.read(CUSTOM_RESOURCE_DEFINITIONS, "", name)
        if found is not None and found["metadata"].get("deletionTimestamp"):
            raise DefinitionError(f"CustomResourceDefinition {name} is being deleted, with all its objects: try again")
        if found is not None and (why := _explain_kept(definition, found)):
            kept[name] = why
        else:
            applied.append(definition)
    return Definitions(tuple(applied), kept)


def _explain_kept(ours: Manifest, found: Mapping[str, Any]) -> str:
    """Return why the definition that exists stays as it is; empty: ours is applied."""
    lacking = find_lacking(ours, found)
    what = f"it lacks {', '.join(lacking)}" if lacking else "it has all fields of ours"
    if release := helm_release(found):
        return f"belongs to the release {release} of Helm, and stays as it is: {what}"
    if not is_ours(found):
        return f"is not ours, and stays as it is: {what}"
    # An older command would remove them, with their values, for the installations of all namespaces.
    if newer := find_lacking(found, ours):
        return f"is newer, and stays as it is: it also has {', '.join(newer)}; {what}"
    return ""


def find_lacking(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Return the served versions and fields of our definition that theirs lacks, such as `v1 .spec.uploaderType`."""
    lacking = []
    known = {version["name"]: version for version in theirs["spec"]["versions"] if version.get("served")}
    for version in (version for version in ours["spec"]["versions"] if version.get("served")):
        name = version["name"]
        if name in known:
            missing = _missing_fields(_schema(version), _schema(known[name]), "")
            lacking += [f"{name} {path}" for path in missing]
        else:
            lacking.append(name)
    return lacking


def _schema(version: Manifest) -> Manifest:
    schema: Manifest = (version.get("schema") or {}).get("openAPIV3Schema") or {}
    return schema


def _missing_fields(ours: Manifest, theirs: Manifest, path: str) -> Iterator[str]:
    """Yield the fields that `theirs` lacks; of one that it lacks, not those below it."""
    if theirs.get("x-kubernetes-preserve-unknown-fields"):
        return
    others = theirs.get("properties") or {}
    for name, schema in (ours.get("properties") or {}).items():
        if name in others:
            yield from _missing_fields(schema, others[name], f"{path}.{name}")
        else:
            yield f"{path}.{name}"
    if "items" in ours and "items" in theirs:
        yield from _missing_fields(ours["items"], theirs["items"], f"{path}[]")


async def wait_definitions(client: KubeClient, clock: Clock, definitions: Sequence[Manifest]) -> None:
    """Return once the API server serves all definitions, ours and others.

    Raises:
        DefinitionError: one is not served within a minute; the message has the cause.
        KubeError: the API server rejected a request.
    """
    deadline = Deadline.after(clock, _TIMEOUT)
    for definition in definitions:
        name = definition["metadata"]["name"]
        while (cause := await _explain_unserved(client, definition)) and not deadline.expired:
            await clock.sleep(_POLL_SECONDS)
        if cause:
            raise DefinitionError(f"CustomResourceDefinition {name} is not served: {cause}")


async def _explain_unserved(client: KubeClient, definition: Manifest) -> str:
    """Return why the API server does not serve the definition yet; empty: it does."""
    found = await client.read(CUSTOM_RESOURCE_DEFINITIONS, "", definition["metadata"]["name"])
    if found is None:
        return "it does not exist"
    conditions = {one["type"]: one for one in (found.get("status") or {}).get("conditions") or []}
    for kind in ("NamesAccepted", "Established"):
        condition = conditions.get(kind) or {}
        if condition.get("status") != "True":
            return f"it is not {kind}: {condition.get('message') or 'no reason yet'}"
    # Established a moment before the objects are: Kubernetes v1.34, apiextensions-apiserver, customresource_handler.go.
    return "" if await _is_served(client, definition) else "its objects are not served yet"


async def _is_served(client: KubeClient, definition: Manifest) -> bool:
    """Return whether discovery has all versions: every user may read it."""
    spec, names = definition["spec"], definition["spec"]["names"]
    resources = [Resource(names["kind"], names["plural"], spec["group"], one["name"]) for one in spec["versions"]]
    return not any([await is_unserved(client.transport, resource) for resource in resources])
